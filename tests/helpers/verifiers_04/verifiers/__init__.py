"Stands for the package from version 0.4 on: nothing here but `v1`."

"A folder of the package."

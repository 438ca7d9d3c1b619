"""Settings of a real run without a model, for tests of what surrounds the model:
it starts in seconds and needs no PyTorch."""

WITHOUT_MODEL = {"generator": "scripted", "virtual": {"scripted_pace": 0.2}}
SET_WITHOUT_MODEL = ("--set=generator=scripted", "--set=virtual.scripted_pace=0.2")  # the same for the command line

"""Every notebook runs from top to bottom."""

import json

import pytest
from notebooks import NOTEBOOKS, ROOT
from warm_interpreter import WarmInterpreter

VLLM = ("engines/09_vllm", "engines/14_vllm_adapters")  # they start an engine of vLLM
NAMES = {path.relative_to(ROOT / "nbs").with_suffix("").as_posix(): path for path in NOTEBOOKS}


@pytest.fixture(scope="session")
def interpreter(tmp_path_factory):
    "One for all notebooks that a test process runs."
    warm = WarmInterpreter(tmp_path_factory.mktemp("notebooks"))
    yield warm
    warm.close()


@pytest.mark.parametrize("name", NAMES)
def test_notebook_runs(name, request, interpreter):
    "As a kernel would run it."
    if name in VLLM:
        request.getfixturevalue("cpu_for_vllm")
    ran = interpreter.run(NAMES[name])
    assert ran.status == 0, ran.output[-4000:]


def test_a_cell_that_raises_fails_its_notebook(interpreter):
    "What it raised is told with its line, and nothing that it wrote is left for the next notebook."
    cell = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    broken = {"id": "broken", "source": "open('left', 'w')\n1 / 0"}
    notebook = {"cells": [cell | broken], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (interpreter.folder / "nbs" / "broken.ipynb").write_text(json.dumps(notebook))
    ran = interpreter.run(ROOT / "nbs" / "broken.ipynb")
    assert ran.status == 1 and "1 / 0\n" in ran.output and "ZeroDivisionError" in ran.output
    assert not list(interpreter.folder.rglob("left")) and not list(interpreter.folder.rglob("broken*"))

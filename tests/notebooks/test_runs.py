"""Every notebook runs from top to bottom."""

import pytest
from notebooks import NOTEBOOKS, ROOT, execute

VLLM = ("engines/02_vllm",)  # they start an engine of vLLM
NAMES = {path.relative_to(ROOT / "nbs").with_suffix("").as_posix(): path for path in NOTEBOOKS}


@pytest.mark.parametrize("name", NAMES)
def test_notebook_runs(name, request, tmp_path):
    "In a copy of the folder of notebooks, as a kernel would run it."
    if name in VLLM:
        request.getfixturevalue("avx512f")
    done = execute(NAMES[name], tmp_path)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]

"""The notebooks, their cells, and how one is run."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted(
    path
    for path in ROOT.glob("nbs/**/*.ipynb")
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)

EXECUTE = """
import sys
from execnb.nbio import read_nb
from execnb.shell import CaptureShell
notebook = read_nb(sys.argv[1])
CaptureShell().run_all(notebook, exc_stop=True)
for cell in notebook.cells:
    for output in cell.get("outputs", ()):
        if output.get("output_type") == "error":
            sys.exit(cell["id"] + ": " + "\\n".join(output["traceback"]))
"""


def cells(path: Path, kind: str = "") -> list[dict]:
    "The cells of a notebook, of one kind if one is named, with their text joined."
    found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [
        {**cell, "source": "".join(cell["source"])}
        for cell in found
        if cell["cell_type"] == (kind or cell["cell_type"])
    ]


def is_exported(cell: dict) -> bool:
    "The cell goes into the package."
    return re.match(r"#\|\s*export\s*$", cell["source"].partition("\n")[0]) is not None


def execute(path: Path, folder: Path) -> subprocess.CompletedProcess:
    "Run a notebook from top to bottom, in a process of its own, in a copy so that it leaves nothing here."
    shutil.copytree(ROOT / "nbs", folder / "nbs", ignore=shutil.ignore_patterns(".*"))
    (folder / "data").symlink_to(ROOT / "data")
    copy = folder / path.relative_to(ROOT)
    return subprocess.run(
        [sys.executable, "-c", EXECUTE, copy.name], cwd=copy.parent, capture_output=True, text=True, timeout=600
    )

"""The notebooks, their cells, and how one is run."""

import json
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted(
    path
    for path in ROOT.glob("nbs/**/*.ipynb")
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)


@cache
def cells(path: Path, kind: str = "") -> list[dict]:
    """The cells of a notebook, of one kind if one is named, with their text joined.

    They are read once: nobody changes them."""
    found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [
        {**cell, "source": "".join(cell["source"])}
        for cell in found
        if cell["cell_type"] == (kind or cell["cell_type"])
    ]


def is_exported(cell: dict) -> bool:
    "The cell goes into the package."
    return re.match(r"#\|\s*export\s*$", cell["source"].partition("\n")[0]) is not None

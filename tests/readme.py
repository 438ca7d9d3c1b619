"""README.md is nbs/index.ipynb as Markdown, and nbs/map.ipynb lists the notebooks: `make readme`, or `python tests/readme.py`."""

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "helpers"))
from rooms import ROOT, map_sections


def readme(notebook: Path) -> str:
    "The notebook as Markdown seen from the folder above: hidden cells left out, text outputs kept, links to files adjusted."
    import nbformat
    from nbconvert import MarkdownExporter
    from traitlets.config import Config

    config = Config()
    config.RegexRemovePreprocessor.patterns = [r"#\|\s*(hide|default_exp)"]
    config.MarkdownExporter.preprocessors = ["nbconvert.preprocessors.RegexRemovePreprocessor"]
    config.NbConvertBase.display_data_priority = ["text/markdown", "text/plain"]
    shown = nbformat.read(notebook, as_version=4)
    shown.metadata.language_info = {"name": "python"}
    for cell in shown.cells:  # pictures a page shows are files beside the notebook, not outputs
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if "image/png" not in output.get("data", {})]
    text, _ = MarkdownExporter(config=config).from_notebook_node(shown)
    inside = re.compile(r"(\]\()(?![a-z]+:|#|/)([^)]+)(\))")
    text = inside.sub(
        lambda link: (
            f"{link[1]}{link[2][3:] if link[2].startswith('../') else f'{notebook.parent.name}/{link[2]}'}{link[3]}"
        ),
        text,
    )
    return "\n".join(line.rstrip() for line in re.sub(r"\n{3,}", "\n\n", text).strip().splitlines()) + "\n"


def map_notebook() -> str:
    "The text of the file nbs/map.ipynb."
    cells = [
        {"cell_type": "markdown", "id": id, "metadata": {}, "source": text.splitlines(keepends=True)}
        for id, text in map_sections().items()
    ]
    kernel = {"kernelspec": {"display_name": "python3", "language": "python", "name": "python3"}}
    return (
        json.dumps(
            {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}, indent=1, ensure_ascii=False
        )
        + "\n"
    )


if __name__ == "__main__":
    (ROOT / "nbs" / "map.ipynb").write_text(map_notebook(), encoding="utf-8")
    (ROOT / "README.md").write_text(readme(ROOT / "nbs" / "index.ipynb"), encoding="utf-8")

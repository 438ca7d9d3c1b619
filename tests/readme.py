"""`make readme`: README.md is nbs/index.ipynb as Markdown, data/guide holds the guide for terminals,
nbs/papers.ipynb and nbs/map.ipynb list the claims and the notebooks."""

import json
import re
import sys
from pathlib import Path
from textwrap import indent

sys.path.insert(0, str(Path(__file__).parent / "helpers"))
from notebooks import cells
from papers import papers_notebook
from rooms import GUIDE, ROOT, map_sections

HIDDEN = re.compile(r"#\|\s*(hide|default_exp)")
LINK = re.compile(r"(!?)\[([^\]]+)\]\((?![a-z]+:)([^)]+)\)")


def shown_output(output: dict) -> str:
    "An output as Markdown: what is Markdown as it is, other text indented. Pictures are files beside the notebook."
    data = output.get("data", {})
    if "image/png" in data:
        return ""
    if "text/markdown" in data:
        return "".join(data["text/markdown"])
    return indent("".join(output.get("text") or data.get("text/plain", ())), "    ")


def as_markdown(notebook: Path) -> str:
    "A notebook as Markdown: hidden cells left out, text outputs kept."
    parts = []
    for cell in cells(notebook):
        if HIDDEN.match(cell["source"]):
            continue
        if cell["cell_type"] == "code":
            parts += [f"```python\n{cell['source']}\n```", *map(shown_output, cell["outputs"])]
        else:
            parts.append(cell["source"])
    text = re.sub(r"\n{3,}", "\n\n", "\n\n".join(parts)).strip()
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def readme(notebook: Path) -> str:
    "The notebook as Markdown seen from the folder above: links to files lead there."
    inside = re.compile(r"(\]\()(?![a-z]+:|#|/)([^)]+)(\))")

    def seen_from_above(link: re.Match) -> str:
        target = link[2][3:] if link[2].startswith("../") else f"{notebook.parent.name}/{link[2]}"
        return f"{link[1]}{target}{link[3]}"

    return inside.sub(seen_from_above, as_markdown(notebook))


def guide_page(page: str) -> str:
    """A page of the guide as Markdown for a terminal: a link is its text,
    with the command that prints the page it leads to."""

    def in_terminal(link: re.Match) -> str:
        name = link[3].removesuffix(".ipynb")
        if link[1]:
            return f"(picture: {link[2]})"
        return f"{link[2]} (`rlbench guide {name}`)" if name in GUIDE else link[2]

    return LINK.sub(in_terminal, as_markdown(ROOT / "nbs/guide" / f"{page}.ipynb"))


def guide_pages() -> dict[str, str]:
    "The text of each file of data/guide, by name."
    return {f"{page}.md": guide_page(page) for page in GUIDE}


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
    (ROOT / "nbs" / "papers.ipynb").write_text(papers_notebook(), encoding="utf-8")
    (ROOT / "nbs" / "map.ipynb").write_text(map_notebook(), encoding="utf-8")
    for name, text in guide_pages().items():
        (ROOT / "data" / "guide" / name).write_text(text, encoding="utf-8")
    (ROOT / "README.md").write_text(readme(ROOT / "nbs" / "index.ipynb"), encoding="utf-8")

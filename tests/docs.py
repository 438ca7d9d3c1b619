"""The sources of the documentation site: `make docs` collects them in build/docs-source,
and Sphinx builds build/docs of them.

The notebooks are shown as they are stored, without cells that are hidden and without directives. Around them come the
pages that only a site needs: two per room, with the list of its notebooks and with its API,
CONTRIBUTING.md and the licence.
"""

import json
import re
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "helpers"))
from api_pages import api_page, api_pages
from notebooks import NOTEBOOKS
from rooms import GUIDE, PAGES, ROOMS, ROOT, map_table

NBS = ROOT / "nbs"
HIDDEN = re.compile(r"#\|\s*(hide|default_exp)")
DIRECTIVES = re.compile(r"^#\|.*\n", re.M)
FILES = ("CONTRIBUTING.md", "LICENSE")  # of the top folder, which the pages link to
PICTURES = ("images/workbench.png", "images/run.svg")


def contents(caption: str, pages: list[str]) -> str:
    "A list of pages for the side bar, in MyST; without a caption it hangs below the page that it stands on."
    options = [f":caption: {caption}"] if caption else []
    return "\n".join(["```{toctree}", *options, ":maxdepth: 1", ":hidden:", "", *pages, "```", ""])


def room_pages() -> dict[str, str]:
    "Room -> the name of its page."
    return {room: f"{room}/index" if room else "modules" for room in ROOMS}


def notebooks_of_room(room: str) -> list[Path]:
    "The notebooks of a room; of the top floor, those that export a module."
    return sorted(path for path in (NBS / room).glob("*.ipynb") if room or re.match(r"\d\d_", path.name))


def room_text(room: str, purpose: str) -> str:
    "The page of a room: its purpose and its notebooks."
    notebooks = notebooks_of_room(room)
    table = map_table(notebooks)
    if room:
        table = table.replace(f"]({room}/", "](")
    names = [path.stem for path in notebooks]
    title = f"# {room or 'rlbench'}\n\n{purpose[0].upper()}{purpose[1:]}.\n\n"
    return f"{title}{table}\n\n{contents('', names)}"


def front_contents() -> str:
    "The side bar: the guide, what to read first, the notebooks by room, the API."
    first = [name for name in PAGES if name != "index"]
    return "\n".join(
        [
            contents("Guide", [f"guide/{page}" for page in GUIDE]),
            contents("First", [*first, "CONTRIBUTING"]),
            contents("Notebooks", ["map", *room_pages().values()]),
            contents("API", [api_page(room).removesuffix(".md") for room in ROOMS]),
        ]
    )


def shown_links(text: str) -> str:
    """Markdown with its links as they are on the site: files of the top folder stand beside the front page,
    and headings are in small letters."""
    text = re.sub(r"\]\(\.\./(CONTRIBUTING\.md|LICENSE)\)", r"](\1)", text)
    return re.sub(r"(\]\([^)\s:]*#)([^)\s]+)\)", lambda link: f"{link[1]}{link[2].lower()})", text)


def shown_notebook(path: Path) -> str:
    "A notebook as the site shows it; index.ipynb also carries the side bar."
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and HIDDEN.match(source):
            continue
        source = DIRECTIVES.sub("", source) if cell["cell_type"] == "code" else shown_links(source)
        cells.append(cell | {"source": source})
    if path == NBS / "index.ipynb":
        cells.append({"cell_type": "markdown", "id": "site-contents", "metadata": {}, "source": front_contents()})
    return json.dumps(notebook | {"cells": cells}, ensure_ascii=False)


def site_pages() -> dict[str, str]:
    "Every file of text that the site is built of: its place -> its content."
    pages = {path.relative_to(NBS).as_posix(): shown_notebook(path) for path in NOTEBOOKS}
    pages |= {f"{room_pages()[room]}.md": room_text(room, purpose) for room, purpose in ROOMS.items()}
    for name in FILES:
        pages[name] = (ROOT / name).read_text(encoding="utf-8").replace("](nbs/", "](")
    pages |= api_pages()
    for name in ("conf.py", "site.css"):
        pages[name] = (NBS / "guide" / name).read_text(encoding="utf-8")
    return pages


def write_site(folder: Path) -> None:
    """Put the sources of the site into a folder; a file that has not changed is left alone,
    so that Sphinx need not read it again."""
    pages = site_pages()
    for name, text in pages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    for name in PICTURES:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy2(NBS / name, folder / name)
    kept = {folder / name for name in (*pages, *PICTURES)}
    for path in folder.rglob("*"):
        if path.is_file() and path not in kept:
            path.unlink()


if __name__ == "__main__":
    write_site(Path(sys.argv[1]))

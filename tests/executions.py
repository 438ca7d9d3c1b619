"""Executions of the notebooks: most of them in the background of all other tests, those that look at a clock or start runs when less goes on."""
import json
import re
import shutil
import subprocess
import sys
import threading
from collections import deque
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted(path for path in ROOT.glob("nbs/**/*.ipynb") if not any(part.startswith(".") for part in path.relative_to(ROOT).parts))
ALONE = ("89_bench_overhead", "index", "workbench")  # they start runs in processes of their own
CLOCK = re.compile(r"perf_counter|monotonic|sleep\(|timeout|deadline|\brun\(|\bstrike\(")

EXECUTE = """
import os, sys
from execnb.nbio import read_nb
from execnb.shell import CaptureShell
os.nice(int(sys.argv[2]))
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
    return [{**cell, "source": "".join(cell["source"])} for cell in found if cell["cell_type"] == (kind or cell["cell_type"])]


def is_exported(cell: dict) -> bool:
    "The cell goes into the package."
    return re.match(r"#\|\s*export\s*$", cell["source"].partition("\n")[0]) is not None


def looks_at_a_clock(path: Path) -> bool:
    "What the notebook shows depends on how much time it gets."
    return any(CLOCK.search(cell["source"]) for cell in cells(path, "code") if not is_exported(cell))


def execute(path: Path, folder: Path, nice: int = 0) -> subprocess.CompletedProcess:
    "Run a notebook from top to bottom, in a process of its own, in a copy so that it leaves nothing here."
    shutil.copytree(ROOT / "nbs", folder / "nbs", ignore=shutil.ignore_patterns(".*"))
    (folder / "data").symlink_to(ROOT / "data")
    copy = folder / path.relative_to(ROOT)
    return subprocess.run([sys.executable, "-c", EXECUTE, copy.name, str(nice)], cwd=copy.parent, capture_output=True, text=True, timeout=1200 if nice else 240)


class Executions:
    "The executions of some notebooks, each started once."

    def __init__(self, paths: list[Path], folder: Path):
        long_first = sorted(paths, key=lambda path: path.parent.name != "studies")
        self.folder, self.done = folder, {path: Future() for path in long_first if path.stem not in ALONE}
        self.timed, self.calm = (deque(p for p in self.done if looks_at_a_clock(p) is timed) for timed in (True, False))

    def work(self, nice: int, *lists: deque) -> None:
        "From now on, in a thread of its own: one after the other from the lists, until they are empty."
        threading.Thread(target=self._work, args=(nice, lists), daemon=True).start()

    def _work(self, nice: int, lists: tuple[deque, ...]) -> None:
        for waiting in lists:
            with suppress(IndexError):  # it is empty
                while True:
                    path = waiting.popleft()
                    try:
                        self.done[path].set_result(execute(path, self.folder / path.stem, nice))
                    except Exception as error:
                        self.done[path].set_exception(error)

    def stop(self) -> None:
        "Begin no other."
        self.timed.clear()
        self.calm.clear()

    def of(self, path: Path) -> subprocess.CompletedProcess:
        "The execution of a notebook; one that needs the machine for itself waits for the others."
        if path in self.done:
            return self.done[path].result()
        wait(self.done.values())
        return execute(path, self.folder / path.stem)

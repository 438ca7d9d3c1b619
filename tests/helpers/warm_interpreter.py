"""Runs notebooks in children of one warm interpreter, in one copy of the folder of notebooks."""

import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from notebooks import ROOT

# what most notebooks import beside what the processes of a run do; not polars, which starts threads
PRELOADED = "execnb.shell ipywidgets plotly.graph_objects rlbench.base.charts rlbench.workbench.handle".split()


@dataclass(frozen=True)
class Ran:
    "How a notebook ran: the exit status of its process (-9: it took too long) and what it printed."

    status: int
    output: str


class WarmInterpreter:
    """An interpreter with the usual modules imported.

    Each notebook runs in a fork of it, and finds the folder as it was."""

    def __init__(self, folder: Path):
        self.folder = folder
        shutil.copytree(ROOT / "nbs", folder / "nbs", ignore=shutil.ignore_patterns(".*"))
        (folder / "data").symlink_to(ROOT / "data")
        self.kept = set(folder.rglob("*"))
        self.server = subprocess.Popen(
            [sys.executable, __file__], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, notebook: Path, seconds: float = 600.0) -> Ran:
        "Run a notebook of the project from top to bottom, as a kernel would, and remove what it left."
        output = self.folder / "output"
        copy = self.folder / notebook.relative_to(ROOT)
        self.server.stdin.write(json.dumps([str(copy), str(output), seconds]) + "\n")
        self.server.stdin.flush()
        status = int(self.server.stdout.readline())
        ran = Ran(status, output.read_text(encoding="utf-8", errors="replace"))
        self._remove_leftovers()
        return ran

    def _remove_leftovers(self) -> None:
        for path in set(self.folder.rglob("*")) - self.kept:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        "End the interpreter."
        self.server.stdin.close()
        self.server.wait(400)


def run_cells(notebook: Path) -> None:
    "Run all cells of a notebook in this process, until one raises."
    from execnb.nbio import read_nb
    from execnb.shell import CaptureShell

    CaptureShell().run_all(read_nb(notebook), exc_stop=True)


def run_in_child(notebook: Path, output: Path) -> None:
    "What a fork does: it stands in the notebook's folder, and all it prints goes into a file."
    os.setpgid(0, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(notebook.parent)
    sys.argv = ["-c", notebook.name]
    sys.path[0] = ""
    status = 1
    try:
        run_cells(Path(notebook.name))
        status = 0
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        sys.__stdout__.flush()
        sys.__stderr__.flush()
        os._exit(status)


def wait_for(pid: int, seconds: float) -> int:
    "The exit status of a child; it and its group are killed when the time is up."
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(pid, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    signal.setitimer(signal.ITIMER_REAL, 0)
    return status


def import_and_begin_servers() -> None:
    """Import what notebooks and runs do, a model's classes among it: each fork would import them anew. Then begin the
    servers that the runs of all notebooks come out of, with a model and without, as forks; a notebook finds them in
    its memory."""
    from rlbench.runtime.fork_server import import_ahead, warm_server
    from rlbench.workbench.imports_ahead import run_modules

    modules = run_modules(needs_torch=True)
    reason = import_ahead((*modules, *PRELOADED))
    assert not reason, f"a fork would not be whole: {reason}"
    for each in (modules, run_modules(needs_torch=False)):
        warm_server(each, fork_here=True)


def serve() -> None:
    "Run the notebooks that are asked for, a line each: its path, the file for what it prints, and its time in seconds."
    import_and_begin_servers()
    for line in sys.stdin:
        notebook, output, seconds = json.loads(line)
        pid = os.fork()
        if not pid:
            run_in_child(Path(notebook), Path(output))
        print(wait_for(pid, seconds), flush=True)


if __name__ == "__main__":
    serve()

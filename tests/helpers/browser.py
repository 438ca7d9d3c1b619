"""JupyterLab for the tests: started as a user starts it, by `make lab`, with a home in which nothing may appear."""

import os
import shutil
import sys
from pathlib import Path

from rlbench.bench.browser import Lab

ROOT = Path(__file__).parents[2]


class MadeLab(Lab):
    "A server started by `make lab`, on a copy of the workbench."

    def __init__(self, folder: Path):
        self.home = folder / "home"
        self.home.mkdir()
        (folder / "nbs").mkdir()
        shutil.copy(ROOT / "nbs/workbench.ipynb", folder / "nbs")
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        super().__init__(folder, self.make, {"HOME": str(self.home), "PYTHONPATH": paths})

    def make(self, arguments: list[str]) -> list[str]:
        "The command; the environment of the tests takes the place of .venv, and what keeps toasts away is left to make."
        (self.state / "settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings").unlink()
        return [
            "make",
            "-C",
            str(ROOT),
            "-o",
            ".venv/.dev",
            "lab",
            f"BIN={Path(sys.executable).parent}",
            f"STATE={self.state}",
            f"NOTEBOOKS={self.notebooks}",
            f"ARGS={' '.join(arguments)}",
        ]

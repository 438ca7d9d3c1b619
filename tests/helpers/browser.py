"""JupyterLab for the tests: started as a user starts it, by `make lab`, with a home in which nothing may appear."""

import json
import os
import re
import sys
import urllib.request
from pathlib import Path

from playwright.sync_api import Locator, Page

from rlbench.bench.browser import Lab, await_cell, await_idle, code_cells

ROOT = Path(__file__).parents[2]


class MadeLab(Lab):
    "A server started by `make lab`, on a copy of the workbench whose run has `settings`."

    def __init__(self, folder: Path, settings: dict):
        self.home = folder / "home"
        self.home.mkdir()
        (folder / "nbs").mkdir()
        page = (ROOT / "nbs/workbench.ipynb").read_text(encoding="utf-8")
        start = json.dumps('run = rl.run("tiny", steps=1000)')[1:-1]
        assert start in page, "the workbench starts its run in other words"
        started = json.dumps(f'run = rl.run("tiny", steps=100_000, **{settings!r})')[1:-1]
        (folder / "nbs/workbench.ipynb").write_text(page.replace(start, started), encoding="utf-8")
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        super().__init__(folder, self.make, {"HOME": str(self.home), "PYTHONPATH": paths})

    def make(self, arguments: list[str]) -> list[str]:
        """The command; the environment of the tests takes the place of .venv,
        and what keeps toasts away is left to make."""
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

    def ask(self, path: str, method: str = "GET") -> bytes:
        "What the server answers to a request of its interface."
        address = f"http://127.0.0.1:{self.port}/api/{path}"
        request = urllib.request.Request(address, method=method, headers={"Authorization": f"token {self.token}"})
        with urllib.request.urlopen(request, timeout=400) as answer:
            return answer.read()

    def leave(self, *pages: Page) -> None:
        """Close pages, and end all kernels: a panel that nobody looks at any more follows its run as long as its kernel
        lives."""
        for page in pages:
            page.context.close()
        for session in json.loads(self.ask("sessions")):
            self.ask(f"sessions/{session['id']}", "DELETE")


def click_menu(page: Page, title: str, command: str) -> None:
    "Click an item of the menu bar, found by its command."
    page.locator(".lm-MenuBar-itemLabel", has_text=re.compile(f"^{title}$")).click()
    page.locator(f'li.lm-Menu-item[data-command="{command}"]').click()


def write_cell(page: Page, text: str) -> Locator:
    "Write a new cell at the end, run it, and wait until it is done; the cell."
    before = code_cells(page).count()
    code_cells(page).last.locator(".jp-InputPrompt").click()
    page.keyboard.press("Escape")
    page.keyboard.press("b")
    cell = code_cells(page).nth(before)
    cell.locator(".cm-content").click()
    page.keyboard.insert_text(text)
    page.keyboard.press("Control+Enter")
    return await_cell(page, cell)


def save_notebook(page: Page) -> None:
    "Save the notebook and wait until it is saved."
    click_menu(page, "File", "docmanager:save")
    page.locator(".lm-DockPanel-tabBar .lm-TabBar-tab.jp-mod-dirty").first.wait_for(state="hidden")


def restart_kernel(page: Page) -> None:
    "Restart the kernel and wait for the new one."
    click_menu(page, "Kernel", "kernelmenu:restart")
    page.locator(".jp-Dialog .jp-mod-accept").click()
    page.locator(".jp-Dialog").wait_for(state="hidden")
    await_idle(page)

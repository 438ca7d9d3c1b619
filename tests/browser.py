"""What the browser tests share: JupyterLab as `make lab` starts it, one Chromium, and the few moves of a person in a notebook."""
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Locator, Page, expect, sync_playwright

ROOT = Path(__file__).parent.parent
SLOW = 120.0  # seconds: no machine is slower than this
WIDTH, HEIGHT = 1280, 900


def chromium() -> str:
    "The browser's path."
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert found, "the tests need a browser: make browser"
    return found


def free_port() -> int:
    "A port of the loopback nobody listens on."
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def until(condition: Callable, seconds: float = SLOW, every: float = 0.1, page: Page | None = None):
    "Wait for a condition and return its value; a page given goes on living meanwhile."
    limit = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < limit, f"not within {seconds:g} s: {getattr(condition, '__doc__', None) or condition}"
        page.wait_for_timeout(1000 * every) if page else time.sleep(every)
    return value


def notebook(path: Path, *cells: str) -> Path:
    "Write a notebook of code cells."
    told = [{"cell_type": "code", "id": f"cell-{i}", "metadata": {}, "source": text, "outputs": [], "execution_count": None} for i, text in enumerate(cells)]
    kernel = {"kernelspec": {"name": "python3", "display_name": "python3", "language": "python"}}
    path.write_text(json.dumps({"cells": told, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}))
    return path


class Lab:
    "A JupyterLab server on a folder of notebooks, with a home of its own, and a browser."

    token = "only-for-this-test"

    def __init__(self, folder: Path):
        self.folder, self.home, self.state, self.port = folder, folder / "home", folder / "jupyter", free_port()
        self.notebooks = folder / "nbs"
        for each in (self.home, self.notebooks):
            each.mkdir(parents=True)
        self.log = open(folder / "server.log", "wb")
        arguments = f"--no-browser --ServerApp.ip=127.0.0.1 --port={self.port} --ServerApp.port_retries=0 --IdentityProvider.token={self.token}"
        command = ["make", "-C", ROOT, "-o", ".venv/.dev", "lab", f"BIN={Path(sys.executable).parent}", f"STATE={self.state}", f"NOTEBOOKS={self.notebooks}", f"ARGS={arguments}"]
        environment = {**os.environ, "HOME": str(self.home), "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
        self.server = subprocess.Popen(command, stdout=self.log, stderr=self.log, stdin=subprocess.DEVNULL, start_new_session=True, env=environment)
        self.playwright = sync_playwright().start()
        self.browser = self.playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
        self.follow_theme()
        until(self.answers)

    def answers(self) -> bool:
        "Whether the server listens."
        assert self.server.poll() is None, (self.folder / "server.log").read_text()[-3000:]
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", self.port)) == 0

    def follow_theme(self) -> None:
        "JupyterLab takes light or dark from the browser: `page.emulate_media(color_scheme=...)` switches it while it is open."
        place = self.state / "settings/@jupyterlab/apputils-extension"
        place.mkdir(parents=True, exist_ok=True)
        (place / "themes.jupyterlab-settings").write_text('{"adaptive-theme": true}')

    def page(self, width: int = WIDTH, height: int = HEIGHT) -> Page:
        "An empty page with nothing remembered from earlier ones."
        page = self.browser.new_context(viewport={"width": width, "height": height}).new_page()
        page.set_default_timeout(1000 * SLOW)
        return page

    def open_notebook(self, name: str, width: int = WIDTH, height: int = HEIGHT) -> Page:
        "A page with one notebook, its kernel idle and the file browser out of the way."
        page = self.page(width, height)
        page.goto(f"http://127.0.0.1:{self.port}/lab/workspaces/{re.sub('[^a-z]', '-', name)}{time.monotonic_ns()}/tree/{name}?token={self.token}&reset")
        idle(page)
        if page.locator("#jp-left-stack").is_visible():
            page.keyboard.press("Control+b")
            page.locator("#jp-left-stack").wait_for(state="hidden")
        return page

    def close(self) -> None:
        "End the browser and the server with its kernels."
        self.browser.close()
        self.playwright.stop()
        os.killpg(self.server.pid, signal.SIGTERM)
        try:
            self.server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.server.pid, signal.SIGKILL)
        self.log.close()


def idle(page: Page) -> None:
    "Wait until the kernel is there and has nothing to do: the status bar says so only then."
    page.locator(".jp-Notebook .jp-Cell").first.wait_for()
    expect(page.locator("#jp-main-statusbar")).to_contain_text("| Idle", timeout=1000 * SLOW)


def menu(page: Page, title: str, command: str) -> None:
    "Click an item of the menu bar, found by its command."
    page.locator(".lm-MenuBar-itemLabel", has_text=re.compile(f"^{title}$")).click()
    page.locator(f'li.lm-Menu-item[data-command="{command}"]').click()


def code_cells(page: Page) -> Locator:
    "The code cells of the open notebook."
    return page.locator(".jp-Notebook .jp-CodeCell")


def unrun(page: Page) -> int:
    "Code cells with the prompt of a cell that nobody ran."
    return sum(text.strip() == "[ ]:" for text in page.locator(".jp-Notebook .jp-CodeCell .jp-InputPrompt").all_inner_texts())


def run_all(page: Page) -> None:
    "Run all cells; again if the click came too early. Returns when all have begun."
    idle(page)
    for _ in range(5):
        menu(page, "Run", "runmenu:run-all")
        for _ in range(50):
            if not unrun(page):
                return
            page.wait_for_timeout(200)
    raise AssertionError("the cells were not run")


def run_cell(page: Page, index: int) -> Locator:
    "Run one code cell and wait until it is done; the cell."
    cell = code_cells(page).nth(index)
    cell.locator(".jp-InputPrompt").click()
    page.keyboard.press("Control+Enter")
    page.wait_for_timeout(300)
    return ran(page, cell)


def ran(page: Page, cell: Locator) -> Locator:
    "Wait until a cell is done, and see that it raised nothing."
    expect(cell.locator(".jp-InputPrompt")).to_have_text(re.compile(r"\[\d+\]:"), timeout=1000 * SLOW)
    idle(page)
    assert not cell.locator('[data-mime-type="application/vnd.jupyter.stderr"]').count(), cell.inner_text()
    return cell


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
    return ran(page, cell)


def save(page: Page) -> None:
    "Save the notebook and wait until it is saved."
    menu(page, "File", "docmanager:save")
    page.locator(".lm-DockPanel-tabBar .lm-TabBar-tab.jp-mod-dirty").first.wait_for(state="hidden")


def restart_kernel(page: Page) -> None:
    "Restart the kernel and wait for the new one."
    menu(page, "Kernel", "kernelmenu:restart")
    page.locator(".jp-Dialog .jp-mod-accept").click()
    page.locator(".jp-Dialog").wait_for(state="hidden")
    idle(page)


def drag(page: Page, handle: Locator, to: float) -> float:
    "Drag a slider's handle to a share of its track with the mouse; the moment of release on the system's clock."
    handle.scroll_into_view_if_needed()
    track = handle.locator("xpath=ancestor::*[contains(@class,'noUi-target')]").bounding_box()
    start = handle.bounding_box()
    page.mouse.move(start["x"] + start["width"] / 2, start["y"] + start["height"] / 2)
    page.mouse.down()
    page.mouse.move(track["x"] + to * track["width"], start["y"] + start["height"] / 2, steps=8)
    page.mouse.up()
    return time.time()

"""The live panel in a real JupyterLab, driven as a person drives it:
each move is looked for in the run's journal and in what it did."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import polars as pl
import pytest
from browser import MadeLab, restart_kernel, save_notebook, write_cell
from fake_run import fake_run
from playwright.sync_api import expect

import rlbench as rl
from rlbench.bench.browser import (
    SLOW,
    Lab,
    await_idle,
    await_value,
    code_cells,
    drag_slider,
    free_port,
    run_cell,
    write_notebook,
)
from rlbench.runtime.steer import in_force

expect.set_options(timeout=1000 * SLOW)


# small batches, one or two each second: the run leaves the machine to the browser, and forecasts are made at once
SLOW_RUN = {"generator": "scripted", "batch": 32, "group": 4, "virtual": {"scripted_pace": 4.0}}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    "One server and one browser for all of this file."
    lab = MadeLab(tmp_path_factory.mktemp("lab"), SLOW_RUN)
    yield lab
    for run in rl.runs(lab.notebooks / "runs"):  # a test that fails half-way leaves its own
        if run.state in ("starting", "running", "paused"):
            run.stop()
    lab.close()


@pytest.fixture(scope="module")
def shared(lab):
    "A live run for several tests, the last of which stops it."
    run = rl.run("tiny", runs=lab.notebooks / "runs", name="shared", steps=100_000, **SLOW_RUN)
    yield run
    if run.state not in ("stopped", "failed", "dead"):
        run.stop()


@pytest.fixture
def shot(tmp_path_factory):
    "Keep a picture of a page: in the folder RLBENCH_SHOTS, or among the files of the tests."
    place = Path(os.environ.get("RLBENCH_SHOTS") or tmp_path_factory.mktemp("shots"))
    place.mkdir(parents=True, exist_ok=True)
    return lambda page, name: page.screenshot(path=place / f"{name}.png")


def reload_page(page) -> None:
    """Reload a page until its panel is live. On a busy machine JupyterLab may render a cell before it has loaded its
    widgets, and then shows the cell's picture, which says how to see the run itself."""
    for patience in (20, 40, SLOW):
        page.reload()
        await_idle(page)
        try:
            expect(panel(page)).to_be_visible(timeout=1000 * patience)
            return
        except AssertionError:
            continue
    raise AssertionError("no live panel after three reloads")


def attached(lab: Lab, name: str) -> rl.Run:
    "The run of a notebook, seen from here."
    return await_value(
        lambda: (
            (lab.notebooks / "runs" / name / "status.json").exists() and rl.attach(name, runs=lab.notebooks / "runs")
        )
    )


def journal(run: rl.Run, knob: str, status: str = "applied") -> list[dict]:
    "Commands about a knob with an outcome."
    return run.commands.filter((pl.col("knob") == knob) & (pl.col("status") == status)).to_dicts()


def wait_applied(page, run: rl.Run, knob: str, more_than: int = 0) -> dict:
    "The newest command about a knob, once it is applied."
    await_value(lambda: len(journal(run, knob)) > more_than, page=page)
    return journal(run, knob)[-1]


def versions(page, run: rl.Run, more: int) -> None:
    "Wait for more versions."
    goal = run.status.version + more
    await_value(lambda: run.status.version >= goal, page=page)


def panel(page):
    "The last live panel of a page; the pictures kept in the cells are not meant."
    return page.locator(".jupyter-widgets.rl-panel").last


def knob(page, field: str):
    "The row of a knob on the panel."
    return panel(page).locator(f".rl-knob-{field}")


def handle(page, field: str, number: int = 0):
    "A handle of a knob's slider."
    return knob(page, field).locator(".noUi-handle").nth(number)


def click(page, verb: str) -> None:
    "Click a button of the panel."
    panel(page).locator(f".rl-{verb}").click()


def strip(page) -> str:
    "What the line at the top says, on one line."
    return " ".join(panel(page).locator(".rl-strip").inner_text().split())


def shows(page, field: str, value: int) -> None:
    "A whole number's slider stands there."
    expect(handle(page, field)).to_have_attribute("aria-valuenow", re.compile(rf"^{value}(\.0)?$"))


def lives(page, run: rl.Run) -> None:
    "The panel follows the run."
    version = run.status.version
    await_value(
        lambda: int(panel(page).locator(".rl-numbers b").first.inner_text().replace(",", "")) > version, page=page
    )


def opened(lab: Lab, name: str = "workbench.ipynb", **size):
    "A page with a notebook whose first two cells were run: a run, and its panel."
    page = lab.open_notebook(name, **size)
    run_cell(page, 0)
    run_cell(page, 1)
    panel(page).wait_for()
    return page


REWARD = """@run.reward
def brief(r: rl.Rollout, weight: rl.Knob(0, 1, help="price of 64 tokens") = 0.1):
    "Correct, minus a price for every token."
    return r.correct - weight * r.length / 64
"""


def test_a_run_is_watched_and_steered_from_a_notebook(lab, shot):
    "Opened, watched, steered, reloaded, restarted, attached again, stopped."
    page = opened(lab)
    run = attached(lab, "tiny-1")
    versions(page, run, 3)
    expect(panel(page).locator(".rl-word")).to_have_text(re.compile("generation-bound|balanced|trainer-bound"))
    expect(panel(page).locator(".rl-card-solve svg").first).to_be_visible()

    steer_by_mouse(page, run)
    pause_step_go(page, run)
    swap_reward(page, run)
    shot(page, "workbench")

    save_notebook(page)
    reload_page(page)
    shows(page, "staleness", in_force(run.folder).staleness)
    lives(page, run)

    restart_and_attach(page, run, shot)
    click(page, "stop")
    page.wait_for_timeout(700)
    assert run.state == "running" and not journal(run, "stop")
    click(page, "stop")
    assert run.wait(SLOW) == "stopped" and run.status.books_closed
    assert wait_applied(page, run, "stop")["author"].endswith("(panel)")
    await_value(lambda: "stopped" in strip(page), page=page)
    shot(page, "stopped")
    assert not page.locator(".Toastify__toast").count() and not list(lab.home.rglob("*")), (
        "toasts, or files in the user's home"
    )
    lab.leave(page)


def steer_by_mouse(page, run: rl.Run) -> None:
    "Staleness, one end of the band, and temperature over some versions."
    assert page.evaluate(IN_VIEW), "a curve and every slider are seen at once"
    page.locator(".jp-WindowedPanel-outer").evaluate("e => e.scrollBy(0, 300)")
    assert page.evaluate(IN_VIEW), "and stay so while the cards scroll"
    names = [each.get_attribute("aria-label") for each in panel(page).locator(".rl-main-knobs .noUi-handle").all()]
    assert names == ["staleness", "band, lower end", "band, upper end", "concurrency", "temperature", "learning_rate"]
    expect(handle(page, "learning_rate")).to_have_attribute("aria-valuetext", "0.0005")
    drag_slider(page, handle(page, "staleness"), 0.5)
    asked = json.loads(wait_applied(page, run, "staleness")["value"])
    assert 2 <= asked <= 6
    await_value(lambda: in_force(run.folder).staleness == asked, page=page)
    since = run.status.changed["staleness"][1]
    await_value(
        lambda: f"in force {asked} versions since v{since}" in " ".join(knob(page, "staleness").inner_text().split()),
        page=page,
    )
    await_value(lambda: run.steps.filter(pl.col("version") > since)["lag_max"].max() in range(2, asked + 1), page=page)

    drag_slider(page, handle(page, "band", 1), 0.95)
    low, high = json.loads(wait_applied(page, run, "band")["value"])
    assert low == 0.2 and 0.9 <= high <= 1.0
    await_value(lambda: in_force(run.folder).band == (low, high), page=page)

    click(page, "undo")
    await_value(lambda: in_force(run.folder).band == (0.2, 0.8), page=page)
    open_in_place(page)

    box = panel(page).locator(".rl-over input")
    box.fill("8")
    box.press("Enter")
    drag_slider(page, handle(page, "temperature"), 0.3)  # hotter ones solve too little to fill a batch
    row = wait_applied(page, run, "temperature")
    asked = json.loads(row["value"])
    assert row["over"] == 8 and 1.02 < asked < 1.6

    def sampled():
        "The temperatures of the run, in order: before the change, at least two on the way, and what was asked for."
        return (
            run.rollouts.filter(pl.col("group") >= 0).sort("group")["temperature"].unique(maintain_order=True).to_list()
        )

    await_value(lambda: (seen := sampled())[-1:] == [pytest.approx(asked)] and len(seen) >= 4, page=page)
    assert (seen := sampled()) == sorted(seen), seen
    box.fill("0")
    box.press("Enter")


IN_VIEW = """() => {
    const panel = [...document.querySelectorAll('.jupyter-widgets.rl-panel')].at(-1);
    const seen = e => {
        const {top, bottom} = e.getBoundingClientRect();
        return top >= 60 && bottom <= innerHeight - 20 };
    const curves = [...panel.querySelectorAll('.rl-card svg.rl-chart')];
    const controls = [...panel.querySelectorAll('.rl-main-knobs .noUi-handle, .rl-pause, .rl-go')];
    return controls.every(seen) && curves.some(seen) }"""


def open_in_place(page) -> None:
    "An opened figure begins where its card began, takes the whole width, and goes when it is closed."
    card, figure = panel(page).locator(".rl-card-queue"), panel(page).locator(".rl-detail")
    card.locator(".rl-open").click()
    figure.locator(".js-plotly-plot").first.wait_for()
    top, wide = card.bounding_box()["y"], panel(page).locator(".rl-cards").bounding_box()["width"]
    assert abs(figure.bounding_box()["y"] - top) < 12 and figure.bounding_box()["width"] > 0.98 * wide
    assert "new text" not in figure.inner_text() and "version (versions)" not in figure.inner_text()
    figure.locator(".rl-close").click()
    expect(figure).to_have_count(0)


def pause_step_go(page, run: rl.Run) -> None:
    "Held, the version stands still; a step makes one more; released, it goes on."
    click(page, "pause")
    wait_applied(page, run, "pause")
    await_value(lambda: run.state == "paused" and "paused" in strip(page), page=page)
    page.wait_for_timeout(2000)
    held = run.status.version
    page.wait_for_timeout(2500)
    assert run.status.version == held and run.state == "paused"
    click(page, "step")
    wait_applied(page, run, "step")
    await_value(lambda: run.status.version > held, page=page)
    page.wait_for_timeout(2500)
    assert run.status.version == held + 1 and run.state == "paused" and run.steps["version"][-1] == held + 1
    click(page, "go")
    wait_applied(page, run, "go")
    versions(page, run, 2)


def swap_reward(page, run: rl.Run) -> None:
    "A reward written in a cell comes into force, and its keyword becomes a knob of the panel."
    write_cell(page, REWARD)
    row = wait_applied(page, run, "reward")
    await_value(lambda: in_force(run.folder).reward["name"] == "brief", page=page)

    def correct():
        return run.rollouts.filter(
            (pl.col("fate") == "trained") & (pl.col("dispatched") > row["version"]) & pl.col("correct")
        )

    await_value(lambda: len(correct()), page=page)
    assert correct().select((pl.col("reward") - (1 - 0.1 * pl.col("length") / 64)).abs().max()).item() < 1e-6
    panel(page).locator(".rl-more-knobs").click()
    page.locator(".rl-panel .lm-TabBar-tab, .rl-panel .p-TabBar-tab").filter(has_text="Environment").click()
    expect(knob(page, "reward-weight")).to_be_visible()
    panel(page).locator(".rl-more-knobs").click()
    expect(knob(page, "reward-weight")).to_be_hidden()


def restart_and_attach(page, run: rl.Run, shot) -> None:
    """The run outlives the kernel; the panel of the dead kernel says that it is old;
    attached again, everything is there."""
    restart_kernel(page)
    version = run.status.version
    await_value(lambda: run.status.version > version + 1, page=page)
    expect(panel(page).locator(".rl-late").first).to_have_css("opacity", "1")
    shot(page, "kernel-gone")
    write_cell(page, 'import rlbench as rl\nrl.attach("tiny-1")')
    expect(page.locator(".jupyter-widgets.rl-panel")).to_have_count(2)
    expect(panel(page).locator(".rl-late").first).to_have_css("opacity", "0")
    shows(page, "staleness", in_force(run.folder).staleness)
    assert "→ brief" in panel(page).locator(".rl-log").inner_text()
    lives(page, run)


def test_two_viewers_of_one_run(lab, shared, shot):
    "What one asks is seen by the other, with its author; the knobs of both follow."
    run = shared
    for who in ("ada", "emmy"):
        write_notebook(
            lab.notebooks / f"{who}.ipynb", "import rlbench as rl", f'rl.attach("shared").panel(author="{who}")'
        )
    ada, emmy = (opened(lab, f"{who}.ipynb", height=1300) for who in ("ada", "emmy"))
    versions(ada, run, 3)
    drag_slider(ada, handle(ada, "staleness"), 0.5)
    row = wait_applied(ada, run, "staleness")
    asked = json.loads(row["value"])
    assert row["author"] == "ada"
    for page in (ada, emmy):
        shows(page, "staleness", asked)
        expect(panel(page).locator(".rl-log")).to_contain_text(re.compile(rf"ada\s*staleness → {asked}"))
    click(emmy, "pause")
    assert wait_applied(emmy, run, "pause")["author"] == "emmy"
    await_value(lambda: "paused" in strip(ada), page=ada)
    run.set(concurrency=96, author="a script")
    expect(panel(emmy).locator(".rl-log")).to_contain_text(re.compile("a script\\s*concurrency → 96"))
    click(ada, "go")
    await_value(lambda: "paused" not in strip(emmy), page=emmy)
    shot(emmy, "second-viewer")
    lab.leave(ada, emmy)


def test_a_prediction_is_drawn_and_sliders_answer(lab, shared, shot):
    """What a change would do stands in the charts beside what the run does;
    a slider is answered at once, and by simulation when it rests."""
    versions(None, shared, 14)  # since the test before changed what is fitted
    write_notebook(
        lab.notebooks / "ahead.ipynb",
        'import rlbench as rl\nrun = rl.attach("shared")\nprint(run.predict(concurrency=16))',
        "run",
        "run.what_if()",
    )
    page = opened(lab, "ahead.ipynb", height=2000)
    expect(panel(page)).to_contain_text("predicted (concurrency 16)")
    run_cell(page, 2)
    cell = code_cells(page).nth(2)
    table = cell.locator("table")
    expect(table).to_contain_text("formula")
    expect(table).not_to_contain_text("simulated")
    drag_slider(page, cell.locator(".noUi-handle").first, 0.8)
    expect(table).to_contain_text("simulated")
    assert shared.predictions[-1].prediction.knobs == {"concurrency": 16}, (
        "a slider predicts, and leaves nothing behind"
    )
    shot(page, "prediction")
    lab.leave(page)


WHOLLY_SEEN = """() => {
    const panel = [...document.querySelectorAll('.jupyter-widgets.rl-panel')].at(-1);
    const box = e => e.getBoundingClientRect();
    const view = box(document.querySelector('.jp-WindowedPanel-outer'));
    const inside = e => box(e).top >= view.top - 1 && box(e).bottom <= view.bottom
        && box(e).left >= view.left && box(e).right <= view.right;
    const parts = {
        cards: '.rl-card', sliders: '.rl-main-knobs .rl-knob', handles: '.rl-main-knobs .noUi-handle',
        pause: '.rl-pause', labels: '.rl-label-line'};
    const seen = selector => [...panel.querySelectorAll(selector)].filter(e => e.offsetParent && inside(e)).length;
    return Object.fromEntries(Object.entries(parts).map(([name, selector]) => [name, seen(selector)])) }"""


def test_curves_and_sliders_are_in_view_while_a_slider_is_dragged(lab, shared, shot):
    """On a small and a large screen, with tags and a note:
    six cards, five sliders and Pause lie inside the page at once; the value under the mouse is that of the journal."""
    write_notebook(lab.notebooks / "seen.ipynb", "import rlbench as rl", 'rl.attach("shared")')
    page = opened(lab, "seen.ipynb")
    write_labels_by_hand(page, shared)
    versions(page, shared, max(0, 4 - shared.status.version))
    for (width, height), theme, to in (((1280, 900), "light", 0.35), ((1920, 1080), "dark", 0.3)):
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=theme)
        lives(page, shared)
        panel(page).locator(".rl-strip").evaluate("e => e.scrollIntoView()")
        before, held = len(journal(shared, "temperature")), {}

        def look() -> None:
            held.update(
                page.evaluate(WHOLLY_SEEN), value=float(handle(page, "temperature").get_attribute("aria-valuenow"))
            )  # one decimal
            shot(page, f"dragged-{width}")

        drag_slider(page, handle(page, "temperature"), to, look)
        value = held.pop("value")
        assert held == {"cards": 6, "sliders": 5, "handles": 6, "pause": 1, "labels": 1}, f"{width} x {height}"
        row = wait_applied(page, shared, "temperature", more_than=before)
        assert json.loads(row["value"]) == pytest.approx(value, abs=0.051) and row["author"].endswith("(panel)")
    lab.leave(page)


def write_labels_by_hand(page, run: rl.Run) -> None:
    """Open the fields by the pencil, write tags and a note, save;
    the folder has them, and the line shows them without the fields."""
    pencil, tags = (
        panel(page).get_by_role("button", name="Change the tags and the note"),
        panel(page).get_by_role("textbox", name="tags"),
    )
    pencil.click()
    tags.fill("base, on-policy")
    panel(page).get_by_role("textbox", name="note").fill("the one in the paper, " * 12)
    panel(page).get_by_role("button", name="Save", exact=True).click()
    await_value(lambda: run.tags == ("base", "on-policy"), page=page)
    expect(tags).to_be_hidden()
    expect(panel(page).locator(".rl-tag")).to_have_text(["base", "on-policy"])
    assert panel(page).locator(".rl-note").get_attribute("title") == run.note and run.note.startswith("the one in")
    assert panel(page).locator(".rl-label-line").bounding_box()["height"] < 30, "a long note stays on one line"


def test_two_live_runs_are_told_of_each_other(lab, shared, shot):
    """Each panel names the other run, and says that they slow each other:
    the kernel has one core, so two runs are too many on any machine."""
    one_core = "import os\nimport rlbench as rl\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    second = 'second = rl.run("tiny", name="second", steps=100_000, generator="scripted")\nrl.attach("shared")'
    write_notebook(lab.notebooks / "two.ipynb", one_core, second, "second")
    page = opened(lab, "two.ipynb", height=1300)
    run = attached(lab, "second")
    for other in ("second", "shared"):
        line = panel(page).locator(".rl-neighbours span")
        expect(line).to_have_text(re.compile(rf"^{other}\b.* also runs? here; they slow each other"))
        assert f"({other}" in line.get_attribute("title") and f"rlbench pause {other}" in line.get_attribute("title")
        shot(page, f"beside-{other}")
        run_cell(page, 2)
        expect(page.locator(".jupyter-widgets.rl-panel")).to_have_count(2)
    run.stop()
    assert run.wait(SLOW) == "stopped"
    lab.leave(page)


def test_two_hundred_runs_open_on_one_page(lab, shot):
    "From the key that runs `rl.runs()` in a fresh kernel to fifteen rows with their curves; the seconds are printed."
    first = fake_run(lab.folder / "many", "run-0", batches=60, rollouts=50)
    for number in range(1, 200):
        shutil.copytree(first, first.parent / f"run-{number}")
    write_notebook(lab.notebooks / "many.ipynb", "import rlbench as rl", f"rl.runs({str(first.parent)!r})")
    page = lab.open_notebook("many.ipynb")
    run_cell(page, 0)
    cell = code_cells(page).nth(1)
    cell.locator(".jp-InputPrompt").click()
    began = time.monotonic()
    page.keyboard.press("Control+Enter")
    cell.locator(".rl-runs-row .rl-spark polyline").nth(14).wait_for()
    seconds = time.monotonic() - began
    shot(page, "runs")
    print(json.dumps({"runs": 200, "seconds": round(seconds, 2)}))
    expect(cell).to_contain_text("1 to 15 of 200 runs")
    lab.leave(page)


FITS = """() => {
    const panel = [...document.querySelectorAll('.jupyter-widgets.rl-panel')].at(-1), told = [];
    const seen = e => e.offsetParent !== null || e.ownerSVGElement, box = e => e.getBoundingClientRect();
    const apart = (a, b) => a.right <= b.left + 1 || b.right <= a.left + 1
        || a.bottom <= b.top + 1 || b.bottom <= a.top + 1;
    const all = selector => [...panel.querySelectorAll(selector)].filter(seen), outer = box(panel);
    for (const selector of ['.rl-card', '.rl-knob', '.rl-buttons button, .rl-over']) {
        const found = all(selector);
        found.forEach((a, i) => found.slice(i + 1).forEach(b =>
            apart(box(a), box(b)) || told.push(`${selector} ${i} is overlapped by another`)));
    }
    for (const e of all('*')) if (box(e).right > outer.right + 1 && !e.closest('.rl-detail'))
        told.push(`${e.tagName} ${e.className.baseVal ?? e.className} is wider than the panel`);
    for (const e of all('button, .rl-name, .rl-word')) if (e.scrollWidth > e.clientWidth + 1 && e.clientWidth)
        told.push(`${e.textContent} is cut`);
    for (const e of all('svg text')) if (parseFloat(getComputedStyle(e).fontSize) * e.getScreenCTM().a < 8.5)
        told.push(`${e.textContent} is too small to be read`);
    for (const svg of all('svg')) for (const e of svg.querySelectorAll('text'))
        if (box(e).right > box(svg).right + 2 || box(e).left < box(svg).left - 2)
            told.push(`${e.textContent} leaves its chart`);
    for (const svg of all('svg')) {
        const texts = [...svg.querySelectorAll('text')];
        const glyphs = e => {
            const {left, right, top, bottom, height} = box(e);
            return {left, right, top: top + 0.2 * height, bottom: bottom - 0.2 * height} };
        texts.forEach((a, i) => texts.slice(i + 1).forEach(b =>
            apart(glyphs(a), glyphs(b)) || told.push(`"${a.textContent}" and "${b.textContent}" in one place`)));
    }
    return [...new Set(told)] }"""


def test_another_systems_run_is_shown_and_followed(lab, shot):
    """A run of prime-rl in its own panel: cards that have data, what limits it, no controls;
    it seemed over, and a new step is drawn by itself."""
    theirs = lab.notebooks / "theirs"
    shutil.copytree(Path(__file__).parents[1] / "foreign" / "prime_rl" / "july", theirs)
    code = "import os\nos.environ['RLBENCH_CACHE'] = 'cache'\nimport rlbench as rl\nrl.open('theirs')"
    write_notebook(lab.notebooks / "theirs.ipynb", code)
    page = lab.open_notebook("theirs.ipynb")
    cell = run_cell(page, 0)
    panel = cell.locator(".jupyter-widgets.rl-panel")
    expect(panel.locator(".rl-word")).to_have_text("read-only")
    expect(panel.locator(".rl-opened-run")).to_contain_text("The generator limits this run")
    expect(panel.locator(".rl-card-reward svg").first).to_be_visible()
    assert not panel.locator(".widget-slider").count() and not panel.get_by_role("button", name="Stop").count()
    shot(page, "opened")
    metrics = theirs / "metrics.jsonl"
    last = [json.loads(line) for line in metrics.read_text().splitlines()][-2:]
    with open(metrics, "a") as file:
        file.writelines(json.dumps(row | {"step": 4}) + "\n" for row in last)
    expect(panel.locator(".rl-numbers").first).to_contain_text(re.compile(r"version of \d+\s*4"))
    lab.leave(page)


def test_the_panel_fits_narrow_and_wide_light_and_dark(lab, shared, shot):
    """At 760, 1280 and 1920 pixels, in both themes: nothing cut, nothing over another, text large enough,
    in the frames that are drawn there."""
    write_notebook(lab.notebooks / "wide.ipynb", "import rlbench as rl", 'rl.attach("shared")')
    page = opened(lab, "wide.ipynb", height=2000)
    shared.set(staleness=3)
    await_value(lambda: shared.status.version >= 8, page=page)
    problems = {}
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        expect(page.locator("body")).to_have_attribute("data-jp-theme-light", str(theme == "light").lower())
        for width, height in ((760, 2400), (1280, 1400), (1920, 1200)):
            page.set_viewport_size({"width": width, "height": height})
            lives(page, shared)
            problems |= {f"{theme} {width}": found} if (found := page.evaluate(FITS)) else {}
            shot(page, f"{theme}-{width}")
    assert not problems, problems
    lab.leave(page)
    shared.stop()
    assert shared.wait(SLOW) == "stopped"


def test_a_saved_notebook_shows_the_last_picture(lab, shot):
    "Opened again without its kernel, the cell shows the run as it was."
    small = {"generator": "scripted", "clock": "virtual", "steps": 30, "batch": 32, "group": 4, "preflight": 0}
    run = rl.run("tiny", runs=lab.notebooks / "runs", name="kept", **small)
    assert run.wait(SLOW) == "finished"
    write_notebook(lab.notebooks / "kept.ipynb", "import rlbench as rl", 'rl.attach("kept")')
    page = opened(lab, "kept.ipynb")
    await_value(lambda: "finished" in strip(page), page=page)
    page.wait_for_timeout(2000)
    save_notebook(page)
    assert (
        page.evaluate("document.querySelectorAll('.rl-still').length") == 1
        and not page.locator(".rl-still").is_visible()
    )
    lab.leave(page)
    page = lab.open_notebook("kept.ipynb", height=1300)
    still = page.locator(".rl-still")
    expect(still).to_be_visible()
    assert "finished" in still.inner_text() and still.locator("svg").count() >= 6
    expect(still.locator(".rl-picture")).to_contain_text(
        re.compile(r"A picture, not live: run “kept” at version 30.*rl.attach")
    )
    assert "last heard" not in still.inner_text()
    shot(page, "reopened")
    lab.leave(page)


COLLAPSING = """import rlbench as rl
rl.run("tiny", name="worse", runs="runs", steps=200, batch=64, group=8, learning_rate=2e-2, staleness=8,
       correction="none", preflight=0, eval=[{"every": 5}])"""


def test_a_collapse_is_named_and_left_with_one_click(lab, shot):
    """The strip says that the run collapses, training health comes first,
    and a click forks it from its best checkpoint; the sliders stay where they are in view."""
    write_notebook(lab.notebooks / "worse.ipynb", COLLAPSING)
    page = lab.open_notebook("worse.ipynb", width=1920)
    cell = run_cell(page, 0)
    fork = page.locator(".rl-fork")
    expect(fork).to_be_visible()
    expect(cell.locator(".rl-state").first).to_contain_text("collapsing")
    expect(page.get_by_text("Effective sample size")).to_be_in_viewport()
    expect(cell.locator(".rl-knob", has_text="learning_rate").first).to_be_in_viewport()
    shot(page, "collapse")
    run = attached(lab, "worse")
    best = run.best.version
    fork.click()
    child = attached(lab, "worse-1")
    assert (child.family.how, child.family.at) == ("fork", best) and best < run.status.version
    expect(page.get_by_text("forked as")).to_be_visible()
    await_value(lambda: child.state == "running" and child.status.version > 0, page=page)
    for each in (run, child):
        each.stop()
    await_value(lambda: {run.state, child.state} <= {"stopped", "failed"}, page=page)
    lab.leave(page)


EXECUTE = """async ([kernel, name]) => {
    const socket = new WebSocket(`ws://${location.host}/api/kernels/${kernel}/channels?session_id=other`);
    await new Promise((done, failed) => { socket.onopen = done; socket.onerror = failed });
    const header = {
        msg_id: 'one', username: '', session: 'other', msg_type: 'execute_request', version: '5.3',
        date: new Date().toISOString()};
    const content = {
        code: `open(${JSON.stringify(name)}, 'w')`, silent: false, store_history: false, user_expressions: {},
        allow_stdin: false, stop_on_error: false};
    socket.send(JSON.stringify({header, parent_header: {}, metadata: {}, content, channel: 'shell', buffers: []}));
    await new Promise(done => setTimeout(done, 3000)) }"""


@pytest.fixture
def served(tmp_path):
    "`rlbench serve` of a live run: the run, the address without its token, the token, and the process."
    run = rl.run(
        "tiny",
        runs=tmp_path / "runs",
        name="shown",
        steps=100_000,
        preflight=0,
        eval=[],
        **SLOW_RUN,
    )
    port, home = free_port(), tmp_path / "home"
    home.mkdir()
    command = [sys.executable, "-m", "rlbench.cli.main", "serve", "shown", f"--port={port}"]
    server = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "HOME": str(home)},
    )
    told = server.stdout.readline()
    address, token = re.search(rf"look at (http://127.0.0.1:{port}/)[?]token=(\S+)", told).groups()
    yield run, address, token, server
    if server.poll() is None:
        server.kill()
    if run.state not in ("stopped", "failed", "dead"):
        run.stop()
    assert not list(home.rglob("*")), "serving writes into the user's home"


def test_a_served_panel_can_be_looked_at_and_nothing_else(lab, served, tmp_path, shot):
    """With the token, the live panel without controls; without it, a login page; no code is executed for a visitor;
    Ctrl-C ends it."""
    run, address, token, server = served
    page = lab.page(height=1100)

    def answers():
        try:
            return urllib.request.urlopen(address, timeout=5)
        except OSError:
            return None

    refused = await_value(answers)
    assert "/login" in refused.url and "rl-panel" not in refused.read().decode()
    sockets = []
    page.on("websocket", lambda socket: sockets.append(socket.url))
    page.goto(f"{address}?token={token}")
    panel(page).wait_for()
    versions(page, run, 2)
    lives(page, run)
    assert not page.locator(".rl-knob, .rl-buttons, .rl-over, .widget-slider").count()
    shot(page, "served")
    kernel = re.search(r"kernels/([0-9a-f-]{36})/", " ".join(sockets))[1]
    page.evaluate(EXECUTE, [kernel, str(tmp_path / "written")])
    assert (
        not (tmp_path / "written").exists()
        and not run.commands.height
        and not list((run.folder / "commands").glob("*.json"))
    )
    lives(page, run)
    lab.leave(page)
    server.send_signal(signal.SIGINT)
    assert server.wait(400) == 0 and run.state == "running"

"""The panel of real runs, without a browser: frames, handlers from any thread, what the journal says of them."""

import threading
import time

import pytest
from panel_frames import frame
from patience import stands, until
from scripted import WITHOUT_MODEL

from rlbench.base.commands import read_commands, send_command
from rlbench.views.card_grid import PLOTLY
from rlbench.views.panel import Panel, panel_of
from rlbench.workbench.handle import attach, run

SCRIPTED = {
    "generator": "scripted",
    "clock": "virtual",
    "group": 4,
    "batch": 32,
    "staleness": 2,
    "preflight": 0,
    "eval": [],
    "concurrency": 16,
}


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    "A run in real processes, without a model, that goes on until it is stopped."
    r = run(
        "tiny",
        runs=tmp_path_factory.mktemp("runs"),
        name="live",
        steps=10_000,
        preflight=0,
        eval=[],
        filter="none",
        batch=64,
        group=8,
        **WITHOUT_MODEL,
    )
    until(lambda: r.status and r.status.version >= 2, 120)
    yield r
    if r.state in ("running", "paused", "starting"):
        r.stop()
        r.wait(400)


@pytest.mark.slow
def test_the_panel_shows_a_live_run(live):
    "Strip, default cards, knobs in force; hidden cards are not drawn until they are asked for."
    panel = frame(Panel(live.folder))
    assert (
        panel.parts["state"].value
        and "version" in panel.parts["numbers"].value
        and "<svg" in panel.cards.contents["queue"].value
        and panel.cards.contents["health"].value == ""
    )
    panel.cards.toggles["health"].value = True
    assert "<svg" in panel.cards.contents["health"].value
    assert panel.knobs.rows["staleness"].control.value == live.settings.staleness
    assert "loss.high" not in panel.knobs.rows  # made when they are looked at
    panel.knobs.more.value = True
    assert set(panel.knobs.rows) >= {
        "staleness",
        "band",
        "temperature",
        "loss",
        "loss.high",
        "sampler.unexplored",
        "learning_rate",
    }


def test_a_slider_moves_the_run_from_any_thread(live):
    "The handler writes one command; the journal says who asked; the row shows asked, then in force and since when."
    panel = frame(Panel(live.folder, author="anna"))
    row = panel.knobs.rows["temperature"]
    mover = threading.Thread(target=lambda: setattr(row.control, "value", 0.85))
    mover.start()
    mover.join()
    assert "asked <b>0.85</b>" in row.status_line.value
    journal = until(lambda: live.commands.filter(live.commands["knob"] == "temperature").to_dicts(), 30)
    assert journal[-1]["author"] == "anna" and journal[-1]["value"] == "0.85" and journal[-1]["status"] == "applied"
    until(lambda: live.settings.temperature == 0.85, 30)  # from the status, which is written after the journal
    until(
        lambda: (
            "since v" in frame(panel).knobs.rows["temperature"].status_line.value
            and "asked" not in row.status_line.value
        ),
        30,
    )


def test_two_panels_and_the_command_line_agree(live):
    "What one asks for, the other shows, and neither sends it a second time."
    first, second = frame(Panel(live.folder, author="anna")), frame(Panel(live.folder, author="ben"))
    before = len(live.commands)
    first.knobs.rows["staleness"].control.value = 3
    until(lambda: frame(second).knobs.rows["staleness"].control.value == 3, 30)
    live.set(staleness=2, author="script")
    until(
        lambda: (
            frame(first).knobs.rows["staleness"].control.value == 2
            and frame(second).knobs.rows["staleness"].control.value == 2
        ),
        30,
    )
    assert [(c["author"], c["knob"]) for c in live.commands.to_dicts()[before:]] == [
        ("anna", "staleness"),
        ("script", "staleness"),
    ]
    assert "anna" in frame(second).parts["log"].value and "script" in second.parts["log"].value


def test_a_ramp_is_shown_on_its_way(live):
    "The box beside the buttons spreads the next change over versions."
    panel = frame(Panel(live.folder))
    panel.over = 500
    panel.knobs.rows["learning_rate"].typed.value = 1e-4
    until(lambda: live.status.ramps.get("learning_rate"), 30)
    frame(panel)
    assert "→ <b>0.0001</b> by v" in panel.knobs.rows["learning_rate"].status_line.value
    panel.over = 0
    panel.knobs.rows["learning_rate"].typed.value = 3e-4
    until(lambda: live.settings.learning_rate == 3e-4 and not live.status.ramps, 30)


def test_a_refusal_says_why_and_puts_the_control_back(live):
    "Whoever refuses: the panel before it is sent, or the run."
    panel = frame(Panel(live.folder))
    panel.knobs.more.value = True
    batch = panel.knobs.rows["batch"]
    batch.typed.value = 63
    assert "not a whole number of groups" in batch.status_line.value and batch.typed.value == 64
    ghost = send_command(live.folder, "script", "batch", 63)
    until(lambda: any(c["command"] == ghost and c["status"] == "refused" for c in live.commands.to_dicts()), 30)
    assert "refused" in frame(panel).parts["log"].value


def test_another_function_brings_other_knobs(live):
    "The parameters of the loss in force are rows; those of the old one leave."
    panel = frame(Panel(live.folder))
    panel.knobs.more.value = True
    assert "loss.high" in panel.knobs.rows
    panel.knobs.rows["loss"].control.value = "reinforce"
    until(lambda: "loss.high" not in frame(panel).knobs.rows, 30)
    panel.knobs.rows["loss"].control.value = "ppo"
    until(lambda: "loss.high" in frame(panel).knobs.rows, 30)


def test_guards_and_kept_knobs(live):
    """A guard asked for on the panel is watched by the run; a name that cannot be one is refused in words;
    kept knobs come back."""
    panel = frame(Panel(live.folder, author="anna"))
    watch, kept = panel.knobs.pages["Guards"], panel.knobs.pages["Kept"]
    panel.knobs.more.value = True
    watch.when.value = "entropi < 0.1"
    watch.add.click()
    assert "entropy" in watch.message.value and "rl-refused" in watch.message.value
    watch.when.value, watch.do.value = "entropy < 0.0001", "alert"
    watch.add.click()
    until(lambda: any(g["when"] == "entropy < 0.0001" for g in live.status.guards), 30)
    assert "entropy &lt; 0.0001" in frame(panel).knobs.pages["Guards"].listed.value
    kept.name.value = "before"
    kept.save.click()
    live.set(temperature=1.2)
    until(lambda: live.settings.temperature == 1.2, 30)
    kept.known.value = "before"
    kept.apply.click()
    until(lambda: live.settings.temperature != 1.2, 30)
    assert live.commands.tail(1)["author"].item() == "anna"


def test_a_logarithmic_slider_lands_on_two_digits_and_undo_goes_back(live):
    """The value asked for has two significant digits; undo asks for the one before,
    and once more for the change before that."""
    panel, before = frame(Panel(live.folder)), live.settings
    rate = panel.knobs.rows["learning_rate"]
    rate.control.value = 0.00141254
    until(lambda: live.settings.learning_rate == 0.0014, 30)
    panel.knobs.rows["temperature"].control.value = 0.7
    until(lambda: live.settings.temperature == 0.7, 30)
    panel.buttons.all["undo"].click()
    until(lambda: live.settings.temperature == before.temperature, 30)
    assert live.undo(author="anna").knob == "learning_rate"
    until(lambda: live.settings.learning_rate == before.learning_rate, 30)
    assert live.commands.tail(1)["author"].item() == "anna" and live.commands.tail(1)["knob"].item() == "learning_rate"


@pytest.mark.slow
def test_an_opened_card_stands_in_its_place(live):
    """The figure is part of its card until it is closed; another one takes it over;
    its marks have no words of plotly's own."""
    reached = live.status.version
    panel = frame(Panel(live.folder))
    cards, opened = panel.cards.boxes, panel.cards.detail_box
    panel.cards.open("queue")
    figure = panel.cards.detail.outputs[0]["data"][PLOTLY]
    assert opened in cards["queue"].children and "new text" not in str(figure)
    assert figure["layout"]["xaxis"]["title"]["text"] == "version"
    assert reached - 5 <= figure["layout"]["xaxis"]["range"][1] <= live.status.version
    panel.cards.open("length")
    assert opened not in cards["queue"].children and opened in cards["length"].children
    panel.cards.close()
    assert opened not in cards["length"].children and panel.cards.detail.outputs == ()


@pytest.mark.slow
def test_pause_step_go_and_stop(live):
    "Pause holds the version, a checkpoint is written at once, step makes one more, go releases, stop asks twice."
    panel = frame(Panel(live.folder))

    def click(verb):
        return frame(panel).buttons.all[verb].click()

    click("pause")
    until(lambda: live.state == "paused", 30)
    held = live.status.version
    version = stands(lambda: live.status.version)  # a batch in training is finished
    assert version <= held + 1
    assert panel.buttons.all["pause"].disabled is False
    assert frame(panel).light.word == "paused" and panel.buttons.all["pause"].disabled
    saved = set(live.checkpoints)
    click("checkpoint")
    until(lambda: set(live.checkpoints) - saved, 30)
    click("step")
    until(lambda: live.status.version == version + 1, 30)
    time.sleep(1.0)
    assert live.status.version == version + 1
    click("go")
    until(lambda: live.status.version > version + 2, 30)
    click("stop")
    assert live.state == "running"
    panel.buttons.all["stop"].click()
    assert live.wait(400) == "stopped"
    assert frame(panel).light.word == "stopped" and all(button.disabled for button in panel.buttons.all.values())


@pytest.mark.slow
def test_who_only_looks_has_no_controls(live):
    "A read-only panel holds no widget that could ask for anything."
    import ipywidgets as w

    panel = frame(Panel(live.folder, readonly=True))
    found, queue = [], [panel.widget]
    while queue:
        found.append(queue.pop())
        queue += getattr(found[-1], "children", ())
    assert not [
        x
        for x in found
        if isinstance(x, (w.IntSlider, w.FloatSlider, w.FloatRangeSlider, w.Dropdown, w.BoundedIntText, w.Text))
    ]
    assert "no tags, no note" in panel.labels.shown.value and panel.labels.edit not in found
    for button in (x for x in found if isinstance(x, w.Button)):
        button.click()
    assert read_commands(live.folder) == []


@pytest.mark.slow
def test_the_panel_of_a_run_that_has_not_started_or_is_gone(tmp_path):
    "Empty folders, ended runs and removed folders make a frame, not a traceback."
    r = run(SCRIPTED, runs=tmp_path, name="short", steps=4)
    panel = frame(Panel(r.folder, period=0.05))
    assert r.wait(400) == "finished"
    panel.start()
    panel.thread.join(20)
    assert not panel.thread.is_alive() and panel.light.word == "finished"  # the thread leaves with the run
    for path in sorted(r.folder.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    r.folder.rmdir()
    panel.frame()
    assert panel.parts["message"].value


def test_shown_twice_it_is_one_panel(live):
    "A cell that is run again does not add a second reader."
    assert panel_of(live.folder) is panel_of(attach(live.folder).folder)


@pytest.mark.slow
def test_a_name_used_again_is_another_run(tmp_path):
    "The panel of a folder that was removed and made again shows the new run from its beginning."
    import shutil

    first = run(SCRIPTED, runs=tmp_path, name="again", steps=6)
    assert first.wait(400) == "finished"
    panel = frame(Panel(first.folder))
    shutil.rmtree(first.folder)
    panel.frame()
    assert "is gone" in panel.parts["message"].value
    assert run(SCRIPTED, runs=tmp_path, name="again", steps=2).wait(400) == "finished"
    frame_of = frame(panel)
    assert (
        frame_of.snapshot.version == 2
        and frame_of.snapshot.seen["steps"] == 2
        and frame_of.parts["message"].value == ""
    )

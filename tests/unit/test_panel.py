"""The panel without a browser: frames of made-up runs, tags and notes, and a control for every knob."""

from dataclasses import asdict, replace

import numpy as np
import pytest
from fake_run import eval_rows, fake_run, step_row
from panel_frames import frame

from rlbench.base.commands import read_commands
from rlbench.base.labels import Labels, read_labels, write_labels
from rlbench.base.ledger import Ledger
from rlbench.base.neighbours import Neighbours
from rlbench.base.run_files import write_json
from rlbench.loop.config_files import load_config, to_toml
from rlbench.runtime.checkpoint import CHECKPOINTS, MANIFEST, Manifest
from rlbench.views.panel import Panel
from rlbench.workbench.handle import attach


def finished_run(root, name: str):
    "The folder of a made-up run that is over, with a configuration that can be read."
    folder = fake_run(root, name, batches=4)
    (folder / "config.toml").write_text(to_toml(load_config({})))
    return folder


def test_tags_and_note_are_shown_and_changed(tmp_path):
    """The line under the strip shows them; the fields write the file that `rlbench tag` and `run.write_note` write,
    and no command."""
    folder = finished_run(tmp_path, "labelled")
    run = attach(folder)
    run.tag("base", "b")
    run.write_note("the one in\nthe <paper>")
    panel = frame(Panel(folder))
    line = panel.labels
    assert line.shown.value.count('class="rl-tag"') == 2 and "the &lt;paper&gt;" in line.shown.value
    assert line.fields.layout.display == "none" and line.edit.tooltip and not line.edit.description
    line.edit.value = True
    assert (line.fields.layout.display, line.tags.value, line.note.value) == ("", "base, b", run.note)
    line.tags.value, line.note.value = " good,paper ,, good", "chosen"
    line.save.click()
    assert (run.tags, run.note) == (("good", "paper"), "chosen") and not read_commands(folder)
    assert line.edit.value is False and line.fields.layout.display == "none" and "chosen" in line.shown.value
    run.tag("late", drop=["paper"])
    assert ">late<" in frame(panel).labels.shown.value and ">paper<" not in line.shown.value


def test_labels_that_cannot_be_are_refused_in_words(tmp_path):
    "The fields stay open with what was written, the file stays as it was, and a corrected word is accepted."
    folder = finished_run(tmp_path, "refused")
    write_labels(folder, Labels(("base",), "first"))
    line = frame(Panel(folder)).labels
    line.edit.value = True
    for tags, note, words in (("two words", "first", "cannot be a tag"), ("base", "x" * 2001, "2001 characters")):
        line.tags.value, line.note.value = tags, note
        line.save.click()
        assert words in line.message.value and "rl-refused" in line.message.value and line.edit.value is True
        assert read_labels(folder) == Labels(("base",), "first")
    line.tags.value, line.note.value = "", ""
    line.save.click()
    assert read_labels(folder) == Labels() and "no tags, no note" in line.shown.value and line.message.value == ""


def test_a_field_that_nobody_touched_keeps_what_another_process_wrote(tmp_path):
    "Tags written elsewhere while the fields are open survive a new note, and frames do not overwrite the fields."
    folder = finished_run(tmp_path, "both")
    panel = frame(Panel(folder))
    line = panel.labels
    line.edit.value = True
    line.note.value = "mine"
    attach(folder).tag("theirs")
    assert frame(panel).labels.note.value == "mine" and line.tags.value == ""
    line.save.click()
    assert read_labels(folder) == Labels(("theirs",), "mine")


def test_the_panel_names_the_other_live_runs(tmp_path):
    "What `run.why` says of the machine stands under the strip, and nothing where there is nothing to say."
    folder = finished_run(tmp_path, "mine")
    panel = frame(Panel(folder))
    assert panel.parts["neighbours"].value == ""
    poll = panel.view.poll
    panel.view.poll = lambda: replace(poll(), neighbours=Neighbours(("<other>",), 5.0, 2))
    line = frame(panel).parts["neighbours"].value
    assert "&lt;other&gt; also runs here; they slow each other" in line and "the load is 5.0 on 2 cores" in line


@pytest.mark.slow
def test_all_live_knobs_have_a_control():
    "Every knob of every function that can be named gets a control that can show its value."
    from rlbench.loop.config import live_knobs
    from rlbench.loop.config_tables import FUNCTIONS
    from rlbench.views.knob_rows import KnobRow

    reference = {"reference": "start"}
    needed = {
        "gae": {"critic": True},
        "distill": {"teacher": "tiny"},
        "scored": {"reward_model": "tiny"},
        "k1": {**reference, "kl_in": "reward"},
        "k2": reference,
        "k3": reference,
        "weighted_k3": reference,
        "tests": {"verifier": "code", "tasks": "expressions"},
        "code": {"verifier": "code", "tasks": "expressions"},
        "verifiers": {"environment": {"name": "verifiers", "id": "a_module"}, "tasks": "verifiers"},
    }
    shown = set()
    for field, functions in FUNCTIONS.items():
        for name in functions:
            if field == "tasks":
                continue
            for k in live_knobs(load_config({field: name, **needed.get(name, {})})):
                if repr(k) in shown:
                    continue
                shown.add(repr(k))
                row = KnobRow(k, lambda *_: pytest.fail("nobody has moved anything"))
                row.put(k.value)
    assert len(shown) > 100


def test_a_collapsed_run_shows_its_health_and_offers_a_fork(tmp_path):
    """When learning collapses the card of training health comes first;
    a fork is offered only where there is a checkpoint to fork from."""
    asked, folder = [], fake_run(tmp_path, "worse", batches=0, state="running", closed=False, evals=False)
    (folder / "config.toml").write_text(to_toml(load_config({})))
    rng, ledger = np.random.default_rng(0), Ledger(folder, 0)
    for v in range(1, 13):
        falls = {"solve_rate": 0.6 if v < 6 else 0.02, "entropy": 0.8, "grad_norm": 0.5 if v < 6 else 9.0}
        ledger.append(
            "steps",
            **step_row(v, 0.5, rng, 1.5)
            | falls
            | {"kl_sampler": 0.001 if v < 6 else 1.3, "ess": 0.9 if v < 6 else 0.2},
        )
    ledger.extend("evals", [row | {"avg": 0.5 if row["version"] < 6 else 0.01} for row in eval_rows(12, 3, 1.5)])
    ledger.close()
    assert frame(Panel(folder, fork=lambda at: None)).fork_offer.button.layout.display == "none"
    for version in (3, 9):
        place = folder / CHECKPOINTS / f"v{version:06d}"
        place.mkdir(parents=True)
        write_json(place / MANIFEST, asdict(Manifest(version, 1.5, "", "every", 0, {}, {}, "tiny", 1.5)))
    panel = frame(Panel(folder, fork=lambda at: asked.append(at) or attach(folder)))
    assert panel.collapsing and panel.cards.toggles["health"].value and "<svg" in panel.cards.contents["health"].value
    assert panel.fork_offer.button.layout.display == "" and "v3" in panel.fork_offer.button.description
    panel.fork_offer.button.click()
    assert asked == ["best"] and "rl.attach" in panel.parts["message"].value

"""What verbs of the command line refuse, and what they say of settings that are lost."""

import pytest
import typer
from command_line import run_verb, verb_facts
from steered_runs import asked

from rlbench.cli.policy import ask_for_evaluation
from rlbench.cli.terminal import parse_seconds, parse_settings
from rlbench.loop.config import ConfigError, apply_point
from rlbench.loop.config_files import load_config
from rlbench.runtime.checkpoint import load_checkpoint
from rlbench.workbench.handle import Run, example_run
from rlbench.workbench.starting import notes_on_lost_commands


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    "A run without a model and without an evaluation set, which has ended."
    return example_run(tmp_path_factory.mktemp("runs"))


def test_a_setting_is_given_once():
    "The last one would win otherwise."
    assert parse_settings(["temperature=0.8", "loss.low=0.1"]) == {"temperature": 0.8, "loss.low": 0.1}
    with pytest.raises(ConfigError, match=r"temperature: it is given twice, as 0\.8 and 0\.9"):
        parse_settings(["temperature=0.8", "temperature=0.9"])
    with pytest.raises(ConfigError, match="settings: 'temperature' is not FIELD=VALUE"):
        parse_settings(["temperature"])


@pytest.mark.parametrize("text", ["nan", "-1", "soon", ""])
def test_a_time_to_wait_is_a_number_of_at_least_zero(text):
    "Infinity is one: wait until there is an answer."
    assert parse_seconds("0") == 0.0 and parse_seconds("inf") == float("inf")
    with pytest.raises(typer.BadParameter, match="no number of seconds"):
        parse_seconds(text)


def test_a_field_of_several_tables_is_fixed_and_not_unknown():
    "The evaluation sets, for one."
    with pytest.raises(ValueError, match="eval: fixed for the whole run"):
        apply_point("eval", None)


def test_no_lines_are_no_number_of_lines(example):
    "A negative number would leave the first ones out."
    told = run_verb(example.folder.parent, "log", example.name, "-n", "-5", code=2)
    assert "should be greater" in told.stderr


def test_a_run_without_an_evaluation_set_is_not_evaluated(example):
    "The reason is told at once, and nothing is sent."
    with pytest.raises(ValueError, match="eval: 'example' has no evaluation set"):
        ask_for_evaluation(example, 1.0)
    assert example.commands.is_empty()


def test_the_drills_of_a_run_that_does_not_run_are_listed(example):
    "Each with the reason against it; an unknown name is refused."
    rows = verb_facts(example.folder.parent, "drill", example.name, "--list", "--runs", example.folder.parent)["drills"]
    assert len(rows) > 5 and all("is finished, and only a run that is running" in row["refused"] for row in rows)
    told = run_verb(example.folder.parent, "drill", example.name, "nothing", "--list", code=2)
    assert "nothing" in told.stderr


def test_settings_that_a_resume_loses_are_told(tmp_path):
    "Those that took effect after the checkpoint, unless they are asked for anew."
    told = {2: [("temperature", 0.5)], 7: [("top_p", 0.9)]}
    driver = asked(tmp_path, "steered", told, checkpoint_every=4, checkpoints_kept=9)
    found = Run(driver.folder).checkpoints
    saved = {manifest.version: driver.folder / "checkpoints" / name for name, manifest in found.items()}
    start = load_checkpoint(saved[4])
    (note,) = notes_on_lost_commands(driver.folder, start, {})
    assert note.startswith("top_p = 0.9 took effect after the checkpoint of version 4 and is lost; ask for it again")
    assert notes_on_lost_commands(driver.folder, start, {"top_p": 0.8}) == []
    assert notes_on_lost_commands(driver.folder, load_checkpoint(saved[12]), {}) == []


def test_a_band_that_is_one_number_is_told_what_a_band_looks_like():
    "The form, not the name of a type alone."
    wanted = r"band: 0\.5: input should be a valid tuple; write its values as in \[0\.2, 0\.8\]"
    with pytest.raises(ConfigError, match=wanted):
        load_config("tiny", {"band": 0.5})

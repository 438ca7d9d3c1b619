"Runs of verl: what is a part of the reward, which groups were written, and lengths of failures."

import json
from pathlib import Path

import polars as pl
import pytest
from opened_runs import Tables, copy_made_up, rewrite_lines

import rlbench as rl
from rlbench.runtime.live_view import LiveView
from rlbench.views.card_html import run_card_html
from rlbench.views.foreign_advice import foreign_findings


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    "A copy of a made-up run of the classic trainer."
    monkeypatch.setenv("RLBENCH_CACHE", str(tmp_path / "cache"))
    return copy_made_up("verl", tmp_path) / "v0"


def test_a_prediction_is_no_part_of_the_reward(run: Path) -> None:
    for path in (run / "rollout_data").glob("*.jsonl"):
        rewrite_lines(path, lambda record: record | {"pred": 42, "extracted": "17", "format": 0.5})
    names = rl.open(run).rollouts["part_names"].explode().unique().to_list()
    assert "format" in names and not {"pred", "extracted"} & set(names)


def test_groups_that_were_dropped_before_writing_are_said(run: Path) -> None:
    opened = rl.open(run)
    assert "`algorithm.filter_groups.enable`" in opened.source.notes["groups.no_signal"]
    assert "note: verl writes groups after its filter: where `algorithm.filter_groups.enable` is on" in repr(opened)


def test_the_cards_of_groups_say_what_the_files_leave_out(run: Path) -> None:
    opened = rl.open(run)
    snapshot = LiveView(opened.folder).poll()
    for key in ("solve", "reward"):
        assert "verl writes groups after its filter" in str(run_card_html(key, snapshot))
    assert "after its filter" not in str(run_card_html("length", snapshot))
    (finding,) = (each for each in foreign_findings(opened.source, all_same(opened.steps)) if each.limit == "filter")
    assert "verl writes groups after its filter" in finding.text


def all_same(steps: pl.DataFrame) -> pl.DataFrame:
    "Steps in which no group has a signal."
    return steps.with_columns(pl.lit(1.0).alias("no_signal"))


def test_a_filter_that_is_off_needs_no_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLBENCH_CACHE", str(tmp_path / "cache"))
    place = copy_made_up("tinker_cookbook", tmp_path)
    (config,) = place.rglob("config.json")
    settings = json.loads(config.read_text())
    notes = {}
    for value in (False, True):
        config.write_text(json.dumps(settings | {"remove_constant_reward_groups": value}))
        notes[value] = Tables(config.parent).source.notes
    assert not notes[False] and "`remove_constant_reward_groups` is on" in notes[True]["groups.no_signal"]


def test_steps_without_uids_get_guessed_groups_beside_those_that_have_them(tmp_path: Path, monkeypatch) -> None:
    "A run that was resumed under another trainer: its last step has no uid, so its groups are guessed, and said."
    monkeypatch.setenv("RLBENCH_CACHE", str(tmp_path / "cache"))
    place = copy_made_up("verl", tmp_path) / "v1"
    assert not any(guess.startswith("groups") for guess in Tables(place).source.guesses)
    rewrite_lines(place / "rollout_data" / "3.jsonl", without_uid)
    tables = Tables(place)
    assert tables.column("groups", "size") == [4] * 6
    assert any(guess.startswith("groups: responses with the same prompt") for guess in tables.source.guesses)


def without_uid(record: dict) -> dict:
    return {name: value for name, value in record.items() if name != "uid"}


def test_a_damaged_line_names_its_file(run: Path) -> None:
    path = run / "rollout_data" / "2.jsonl"
    with open(path, "a") as file:
        file.write("no JSON\n[1, 2]\n")
    assert Tables(run).source.damaged == {str(path): 2}

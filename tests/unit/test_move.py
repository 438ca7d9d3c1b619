"""A live run moves from one placement to another: nothing is lost, and a synchronous one does not notice."""

import json

import polars as pl
import pytest
from inline import check_books, inline_run

from rlbench.base.ledger_reading import read_table
from rlbench.base.status import read_status
from rlbench.runtime import placement as placement_module

SCRIPTED = {
    "group": 4,
    "batch": 32,
    "steps": 8,
    "concurrency": 16,
    "preflight": 8,
    "preflight_k": 4,
    "eval": [{"count": 20, "every": 5}],
    "checkpoints_kept": 1,
}
TINY = {
    "generator": "torch",
    "model": "tiny",
    "group": 4,
    "batch": 16,
    "steps": 4,
    "concurrency": 8,
    "max_tokens": 24,
    "preflight": 8,
    "preflight_k": 2,
    "learning_rate": 5e-4,
    "eval": [],
    "filter": "none",
}
THERE_AND_BACK = [
    (200, "placement", "split", 0),
    (201, "generators", 2, 0),
    (420, "generators", 1, 0),
    (421, "placement", "colocated", 0),
]


def journal(driver, knobs=("placement", "generators")) -> list[tuple]:
    rows = read_table(driver.folder, "commands").filter(pl.col("knob").is_in(knobs))
    return rows.select("knob", "value", "status").rows()


@pytest.mark.slow
@pytest.mark.parametrize("table", [SCRIPTED, TINY], ids=["scripted", "tiny"])
def test_a_synchronous_run_does_not_notice(tmp_path, table):
    "To split, to two generators, and back: the digest of a run that stayed where it was, and the same rollouts."
    told = [(event if table is SCRIPTED else event // 4, *rest) for event, *rest in THERE_AND_BACK]
    moved, stayed = (
        inline_run(tmp_path, name, table | {"placement": "colocated", "staleness": 0}, commands)
        for name, commands in {"moved": told, "stayed": []}.items()
    )
    check_books(moved)
    assert journal(moved) == [(knob, json.dumps(value), "applied") for _, knob, value, _ in told]
    assert moved.state.digest == stayed.state.digest and moved.state.version == table["steps"]
    assert moved.workers.layout == stayed.workers.layout and set(moved.workers.handles) == {"environment", "worker"}


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 3])
def test_an_asynchronous_run_keeps_what_was_written(tmp_path, staleness):
    """What is in flight is stopped and goes on with its tokens:
    nothing ends as aborted, the books close, nothing is over the bound."""
    moved = inline_run(
        tmp_path,
        "moved",
        SCRIPTED | {"placement": "colocated", "staleness": staleness, "virtual": {"scripted_length": 60.0}},
        THERE_AND_BACK,
    )
    check_books(moved)
    rows = read_table(moved.folder, "rollouts")
    assert {"aborted", "lost_generator"} & set(rows["fate"]) == set() and all(
        status == "applied" for *_, status in journal(moved)
    )
    trained = rows.filter(pl.col("fate") == "trained")
    assert (trained["trained_at"] - 1 - trained["oldest"]).max() <= staleness
    events = read_table(moved.folder, "events")
    assert (events["kind"] == "Move").sum() == 4 == (events["kind"] == "Moved").sum() and (
        events["kind"] == "Abort"
    ).sum() >= 2
    again = inline_run(
        tmp_path,
        "again",
        SCRIPTED | {"placement": "colocated", "staleness": staleness, "virtual": {"scripted_length": 60.0}},
        THERE_AND_BACK,
    )
    assert again.state.digest == moved.state.digest


def test_the_seconds_are_overhead(tmp_path):
    moved = inline_run(
        tmp_path,
        "moved",
        SCRIPTED | {"placement": "colocated", "staleness": 0, "virtual": {"start": 30.0}},
        THERE_AND_BACK[:1],
    )
    steps = read_table(moved.folder, "steps")
    assert [steps[f"{part}_overhead"].max() for part in ("trainer", "generator")] == pytest.approx([30, 30]) and (
        steps["trainer_overhead"] > 0
    ).sum() == 1
    assert read_table(moved.folder, "commands")["reason"].to_list() == ["took 30.0 s"]


@pytest.mark.slow
def test_back_to_the_old_placement_if_the_new_one_does_not_start(tmp_path, monkeypatch):
    "The command is refused with the reason, and the run goes on to the same digest."
    start = placement_module.start_inline

    def failing(placement, name):
        if name == "generator":
            raise ValueError("device: no room for a second model")
        return start(placement, name)

    monkeypatch.setattr(placement_module, "start_inline", failing)
    moved, stayed = (
        inline_run(tmp_path, name, SCRIPTED | {"placement": "colocated", "staleness": 0}, told)
        for name, told in {"moved": THERE_AND_BACK[:1], "stayed": []}.items()
    )
    check_books(moved)
    (row,) = read_table(moved.folder, "commands").to_dicts()
    assert (
        row["status"] == "refused"
        and "no room for a second model" in row["reason"]
        and moved.state.config.placement == "colocated"
    )
    assert moved.state.digest == stayed.state.digest and read_status(moved.folder).state == "finished"


def test_what_cannot_be_is_refused(tmp_path):
    moved = inline_run(
        tmp_path,
        "moved",
        SCRIPTED | {"placement": "colocated", "staleness": 0},
        [(100, "generators", 2, 0), (150, "placement", "split", 3), (160, "placement", "colocated", 0)],
    )
    rows = read_table(moved.folder, "commands")
    assert (
        rows["status"].to_list() == ["refused", "refused", "applied"]
        and (read_table(moved.folder, "events")["kind"] == "Move").sum() == 0
    )

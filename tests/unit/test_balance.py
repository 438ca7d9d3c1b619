"""Runs that match generator and trainer by themselves, whole, on the virtual clock."""

import json
import subprocess
import sys
import time
from dataclasses import replace

import polars as pl
import pytest
from inline import check_books, inline_run

import rlbench as rl
from rlbench.base.ledger_reading import read_table
from rlbench.base.status import read_status, write_status
from rlbench.loop.balance import Balance
from rlbench.loop.config import make_config, value_of, with_knob
from rlbench.loop.config_files import load_config, read_config, to_toml
from rlbench.loop.config_tables import ConfigError
from rlbench.loop.packing import PackedArrays, pack_record, unpack_record
from rlbench.runtime.driver import Driver, drive
from rlbench.runtime.prompts import make_pools
from rlbench.workbench.replay import prepare_replay

MACHINE = dict(
    decode=0.01, sequence=0.0001, train=0.0001, prefill=0.0, publish=0.05, score=0.0005, scripted_length=40.0
)
SMALL = dict(
    steps=60,
    group=4,
    batch=32,
    preflight=0,
    eval=[],
    staleness=1,
    concurrency=4,
    correction="tis",
    max_tokens=256,
    virtual=MACHINE,
)


def moves(driver) -> list[dict]:
    "What the balance asked for."
    rows = read_table(driver.folder, "commands").to_dicts()
    return [row for row in rows if row["author"] == "balance"]


def later(driver) -> tuple[float, float]:
    "(trainer's share of waiting, mean lag) in the second half of a run."
    steps = read_table(driver.folder, "steps").tail(driver.state.version // 2)
    return steps["trainer_wait"].sum() / steps["seconds"].sum(), (steps["lag_in_flight"] + steps["lag_in_queue"]).mean()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    "A run from a bad start that nobody helps."
    return inline_run(tmp_path_factory.mktemp("plain"), "off", SMALL)


@pytest.mark.slow
def test_a_bad_start_is_left_behind(tmp_path, plain):
    driver = inline_run(tmp_path, "act", {**SMALL, "balance": "act"})
    check_books(driver)
    rows = moves(driver)
    assert [row["status"] for row in rows] == ["applied"] * len(rows) and rows[0]["knob"] == "concurrency"
    assert (
        rows[0]["reason"].startswith("trainer waited ")
        and rows[0]["reason"].endswith(f"concurrency 4 to {rows[0]['value']}")
        and "lag 0." in rows[0]["reason"]
    )
    (wait, lag), (wait_before, _) = later(driver), later(plain)
    assert wait < wait_before - 0.2 and lag < 2.1
    assert driver.clock.now() < 0.6 * plain.clock.now()  # the same batches in less time
    for knob in {row["knob"] for row in rows}:
        values = [
            getattr(read_config(driver.folder), knob),
            *(float(row["value"]) for row in rows if row["knob"] == knob),
        ]
        ups = [b > a for a, b in zip(values, values[1:])]
        assert sum(a != b for a, b in zip(ups, ups[1:])) <= 2, values
    again = inline_run(tmp_path, "again", {**SMALL, "balance": "act"})
    assert again.state.digest == driver.state.digest and moves(again) == rows


@pytest.mark.slow
def test_advice_changes_nothing(tmp_path, plain):
    driver = inline_run(tmp_path, "advise", {**SMALL, "balance": "advise"})
    assert driver.state.digest == plain.state.digest and driver.clock.now() == plain.clock.now()
    rows = moves(driver)
    assert {row["status"] for row in rows} == {"advised"} and [row["knob"] for row in rows] == ["concurrency"] * len(
        rows
    )
    gaps = [b["version"] - a["version"] for a, b in zip(rows, rows[1:])]
    assert 1 < len(rows) <= 4 and all(gap >= 20 for gap in gaps)


@pytest.mark.slow
def test_a_person_comes_first(tmp_path):
    """Switched on in a live run; then somebody sets a knob, puts another on a ramp, holds the run,
    and switches balancing off."""
    told = [
        (600, "balance", "act", 0),
        (2500, "concurrency", 8, 0),
        (2500, "staleness", 3, 10),
        (4000, "pause", None, 0),
        (4200, "go", None, 0),
        (6500, "balance.mode", "off", 0),
    ]
    driver = inline_run(tmp_path, "hands", {**SMALL, "steps": 80}, told)
    check_books(driver)
    rows = read_table(driver.folder, "commands").filter(pl.col("status") == "applied").to_dicts()
    at = {row["knob"]: row for row in rows if row["author"] == "test"}
    own, hand = [row for row in rows if row["author"] == "balance"], at["concurrency"]
    assert (
        all(at["balance"]["seq"] < row["seq"] < at["balance.mode"]["seq"] for row in own)
        and value_of(driver.state.config, "balance.mode") == "off"
    )
    after = [row for row in own if row["seq"] > hand["seq"]]
    assert after and len(after) < len(own) and hand["version"] < at["pause"]["version"]
    assert all(
        row["version"] >= hand["version"] + {"concurrency": 20, "staleness": 29}.get(row["knob"], 0) for row in after
    )  # a ramp ends after ten


@pytest.mark.slow
def test_waves_keep_their_bound(tmp_path):
    "A synchronous run stays synchronous; what makes its waves shorter is moved."
    driver = inline_run(
        tmp_path, "waves", {**SMALL, "staleness": 0, "placement": "colocated", "balance": "act", "steps": 40}
    )
    rows = moves(driver)
    assert (
        rows
        and {row["knob"] for row in rows} <= {"concurrency", "oversample", "decode_steps"}
        and all(row["status"] == "applied" for row in rows)
    )
    assert driver.state.config.staleness == 0 and driver.state.config.concurrency > 4
    check_books(driver)


@pytest.mark.slow
def test_turns_of_one_worker(tmp_path):
    "Colocated: the wait holds the other's turn, and what is gained is a faster generator, not a longer queue."
    driver = inline_run(tmp_path, "turns", {**SMALL, "placement": "colocated", "staleness": 2, "balance": "act"})
    assert driver.state.config.concurrency >= 16 and later(driver)[1] < 2.1
    check_books(driver)


@pytest.mark.slow
def test_the_limits_are_the_users(tmp_path):
    driver = inline_run(
        tmp_path,
        "narrow",
        {**SMALL, "steps": 40, "correction": "none", "balance": {"mode": "act", "concurrency": [4, 12]}},
    )
    assert driver.state.config.concurrency == 12 and driver.state.config.staleness == 1


def test_what_is_refused():
    config = make_config({**SMALL, "clock": "virtual", "generator": "scripted", "balance": "advise"})
    assert config.balance.mode == "advise" and value_of(with_knob(config, "balance", "act"), "balance.mode") == "act"
    narrow = load_config(config, {"balance.concurrency": [8, 64]})
    assert (
        narrow.balance.mode == "advise"
        and with_knob(narrow, "balance", "act").balance.concurrency == (8, 64)
        and "concurrency = [" in to_toml(narrow)
    )
    for table, word in (
        ({"balance": "on"}, "not one of"),
        ({"balance": {"lag": 0}}, "outside"),
        ({"balance": {"concurrency": [64, 8]}}, "give the lower end first"),
        ({"balance": {"stalenes": [1, 2]}}, "did you mean 'staleness'"),
        ({"balance": {"staleness": [0, 2]}}, "within [1, 1024]"),
    ):
        with pytest.raises(ConfigError, match=word.replace("[", r"\[")):
            make_config(table)
    for knob, value, word in (
        ("balance.concurrency", [1, 2], "fixed for the whole run"),
        ("balance.mod", "act", "did you mean 'mode'"),
        ("balance.mode", "of", "not one of"),
    ):
        with pytest.raises(ValueError, match=word):
            with_knob(config, knob, value)


@pytest.mark.slow
def test_why_says_what_the_balance_did(tmp_path):
    "The paragraph of a run that ended, from Python and from the command line."
    driver = inline_run(tmp_path, "told", {**SMALL, "steps": 8, "balance": "advise"})
    found = rl.attach(driver.folder).why()
    assert found.limit == "finished" and str(found).startswith("told has finished")
    said = subprocess.run(
        [sys.executable, "-m", "rlbench.cli.main", "why", str(driver.folder), "--json"],
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
    )
    assert json.loads(said.stdout) == json.loads(json.dumps(found.plain()))
    status = read_status(driver.folder)
    write_status(
        driver.folder, replace(status, state="running", host="elsewhere", updated=time.time())
    )  # as it was a moment ago
    live = rl.attach(driver.folder).why()
    assert (
        live.limit == "generator"
        and live.knobs[0] == "concurrency"
        and "Balancing advises, at version 4: trainer waited" in str(live)
        and live.versions[1] == 8
    )


def test_a_checkpoint_keeps_what_was_learned(tmp_path):
    driver = inline_run(tmp_path, "kept", {**SMALL, "steps": 12, "balance": "act"})
    arrays, learned = PackedArrays(), driver.state.watch.balance
    assert learned.rows and (learned.trial or learned.asked)
    data = json.loads(json.dumps(pack_record(learned, arrays)))
    assert unpack_record(Balance, data, arrays.joined()) == learned


@pytest.mark.slow
@pytest.mark.parametrize(
    "start", [dict(staleness=1), dict(staleness=0, placement="colocated")], ids=["by event", "waves"]
)
def test_a_balanced_run_replays(tmp_path, start):
    first = inline_run(tmp_path, "first", {**SMALL, **start, "steps": 16, "balance": "act"})
    assert any(row["status"] == "applied" for row in moves(first))
    folder = prepare_replay(first.folder, "second")
    config = read_config(folder)
    second = Driver(folder, config, make_pools(config))
    assert drive(second).digest == first.state.digest

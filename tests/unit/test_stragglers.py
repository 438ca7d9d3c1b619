"""Straggler strategies in real processes: partial rollouts go on from their tokens,
strategies change while the run lives."""

import json

import polars as pl
import pytest
from inline import check_books, inline_run
from real_runs import fork_workers_of
from straggler_runs import REAL

from rlbench.base.commands import send_command
from rlbench.base.ledger_reading import read_table
from rlbench.base.run_files import create_run_folder
from rlbench.loop.config import make_config
from rlbench.loop.config_files import to_toml
from rlbench.runtime.driver import Driver, drive
from rlbench.runtime.prompts import make_pools


def a_run(root, told=(), **changes) -> Driver:
    "The finished driver of a run whose actors are processes; `told` are commands that wait when it starts."
    config = make_config(REAL | changes)
    folder = create_run_folder(root, "run")
    (folder / "config.toml").write_text(to_toml(config))
    for knob, value in told:
        send_command(folder, "test", knob, value)
    driver = Driver(folder, config, make_pools(config))
    fork_workers_of(driver)
    assert drive(driver).phase == "done"
    return driver


def sent(driver: Driver) -> list[tuple[int, int]]:
    "(rollout, try) of everything that generators were asked to write, in order."
    asked = read_table(driver.folder, "events").filter(pl.col("kind") == "Generate")["fields"]
    return [(rollout, attempt) for fields in asked for rollout, attempt, _ in json.loads(fields)["rollouts"]]


@pytest.mark.slow
def test_partial_rollouts_go_on_in_real_processes(tmp_path):
    """Stopped when weights come, taken up with their tokens, each of its version;
    what is old weighs what was asked for, and nothing is paid for in vain."""
    driver = a_run(
        tmp_path, stragglers="partial", staleness=2, old_tokens="correct", steps=12
    )  # weights often come between
    tokens, rollouts = read_table(driver.folder, "tokens"), read_table(driver.folder, "rollouts")
    mixed = tokens.filter(pl.col("versions").list.n_unique() > 1)
    assert len(mixed) and "aborted" not in rollouts["fate"].unique()
    newest = set()
    for row in mixed.iter_rows(named=True):
        weights = {
            version: {m for v, m in zip(row["versions"], row["mask"]) if v == version} for version in row["versions"]
        }
        newest |= (last := weights.pop(max(weights)))
        assert set().union(*weights.values()) == {2} and len(last) == 1, (
            "2 in a finished one's last version: its group went on under a newer one"
        )
        assert len(row["tokens"]) == len(row["logprobs"]) <= REAL["max_tokens"] and all(p <= 0 for p in row["logprobs"])
    assert 1 in newest
    assert len(sent(driver)) > len(set(sent(driver))) == len(rollouts), "some are sent twice under one attempt"


@pytest.mark.slow
def test_a_masked_partial_trains_what_the_new_policy_wrote(tmp_path):
    "Bound 0, the tiny policy: a wave ends when its batch is full, and nothing that carries weight is old."
    virtual = {
        "generator": "torch",
        "steps": 3,
        "concurrency": 32,
        "staleness": 0,
        "stragglers": "partial",
        "old_tokens": "mask",
        "oversample": 1.0,
    }
    driver = inline_run(tmp_path, "run", REAL | virtual)
    check_books(driver)
    steps, tokens = read_table(driver.folder, "steps"), read_table(driver.folder, "tokens")
    assert steps["lag_max"].max() == 0 and (steps["unfinished_at_fill"] > 0).any()
    mixed = tokens.filter(pl.col("versions").list.n_unique() > 1)
    assert len(mixed) and all(
        [version == max(row["versions"]) for version in row["versions"]] == [bool(m) for m in row["mask"]]
        for row in mixed.iter_rows(named=True)
    )


@pytest.mark.slow
def test_strategies_change_while_the_run_lives(tmp_path):
    "A command for each; every one is applied, the books close."
    driver = a_run(
        tmp_path,
        [("stragglers", "requeue"), ("straggler_unit", "rollout"), ("stragglers", "wait")],
        staleness=2,
        stragglers="in_flight",
    )
    assert (driver.state.config.stragglers, driver.state.config.straggler_unit) == ("wait", "rollout")
    assert set(read_table(driver.folder, "commands")["status"]) == {"applied"}

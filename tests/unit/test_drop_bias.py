"""Whether a run trains on a fair sample of what it generates:
discarding stragglers starves hard tasks and the meter says so, pacing does not."""

import polars as pl
import pytest
from inline import check_books, inline_run

from rlbench.base.ledger_reading import read_table
from rlbench.runtime.drop_bias import EndedAttempt, bias_of, describe_bias, lost_by_level
from rlbench.views.report import write_report

# Three levels, each three times as long as the one before, and a trainer that is done with a batch before a response of
# level 2 is.
HARD_IS_LONG = {
    "steps": 40,
    "group": 4,
    "batch": 32,
    "staleness": 2,
    "concurrency": 256,
    "max_tokens": 2000,
    "preflight": 0,
    "eval": [],
    "filter": "none",
    "sampler": "uniform",
    "placement": "split",
    "virtual": {"scripted_length": 24.0, "scripted_hardship": 3.0, "train": 0.0001},
}


def told(driver) -> tuple[pl.DataFrame, pl.DataFrame, list[str]]:
    "Step rows after the first ten, rollouts, and the alerts of the meter."
    check_books(driver)
    commands = read_table(driver.folder, "commands")
    return (
        read_table(driver.folder, "steps").filter(pl.col("version") > 10),
        read_table(driver.folder, "rollouts"),
        commands.filter(pl.col("author").str.starts_with("guard: drop_bias"))["reason"].to_list(),
    )


@pytest.mark.slow
@pytest.mark.parametrize("unit", ("group", "rollout"))
def test_discarding_starves_hard_tasks_and_the_meter_says_so(unit, tmp_path):
    steps, rollouts, alerts = told(
        inline_run(tmp_path, "requeue", HARD_IS_LONG | {"stragglers": "requeue", "straggler_unit": unit})
    )
    last = steps.tail(1).to_dicts()[0]
    assert (
        (steps["drop_bias"] > 0.25).all()
        and last["bias_length"] < -0.2
        and last["bias_level"] < -0.2
        and last["bias_turns"] == 0
    )
    assert (
        "shorter" in (said := describe_bias(last["bias_length"], last["bias_level"], last["bias_turns"]))
        and "easier" in said
    )
    assert len(alerts) == 1 and "drop_bias" in alerts[0]
    lost = rollouts.filter((pl.col("length") > 0) & (pl.col("fate") != "left_at_stop"))
    paid = lost_by_level(lost["level"].to_list(), (lost["fate"] != "trained").to_list())
    assert paid[1][1] < 0.05 < paid[2][1] < paid[3][1] and paid[3][1] > 0.6, paid
    early = rollouts.filter((pl.col("fate") == "trained") & (pl.col("trained_at") <= 8))
    assert (early["level"] == 3).mean() < 0.25  # a third was asked for; sent again and again, they come later


@pytest.mark.slow
@pytest.mark.parametrize(
    "pacing",
    (
        {"stragglers": "in_flight", "overdue": "wait"},
        {"stragglers": "wait"},
        {"backlog": "hold", "queue_batches": 1, "staleness": 64},
    ),
)
def test_pacing_does_not(pacing, tmp_path):
    steps, rollouts, alerts = told(inline_run(tmp_path, "paced", HARD_IS_LONG | pacing))
    assert steps["drop_bias"].max() < 0.05 and not alerts
    assert abs((rollouts.filter(pl.col("fate") == "trained")["level"] == 3).mean() - 1 / 3) < 0.06


@pytest.mark.slow
def test_a_bound_that_drops_is_a_discard_too(tmp_path):
    "Weights in flight abort nothing, but what is over the bound when it is done is dropped, and that is the long ones."
    steps, _, alerts = told(
        inline_run(tmp_path, "bound", HARD_IS_LONG | {"stragglers": "in_flight", "overdue": "drop"})
    )
    assert steps["drop_bias"][-1] > 0.1 and steps["bias_level"][-1] < 0 and alerts


@pytest.mark.slow
def test_the_columns_are_those_of_the_rollouts(tmp_path):
    "What the meter says of the whole run, computed again from the table."
    driver = inline_run(
        tmp_path, "again", HARD_IS_LONG | {"stragglers": "requeue", "steps": 15, "filter": "zero_advantage"}
    )
    rows = read_table(driver.folder, "rollouts").filter(
        (pl.col("length") > 0) & ~pl.col("fate").is_in(["left_at_stop"]) & (pl.col("seq") >= 0)
    )
    last = read_table(driver.folder, "steps").tail(1).to_dicts()[0]
    trained_at_end = rows.filter(pl.col("trained_at") == 15)["seq"].max()
    seen = rows.filter(pl.col("seq") <= trained_at_end)
    kept = seen["fate"].is_in(["trained", "filtered"])
    again = bias_of(
        [
            EndedAttempt(*row)
            for row in zip(
                seen["length"],
                seen["level"],
                seen["turns"] - (seen["reason"] == "aborted"),
                kept,
                seen["reason"] != "aborted",
            )
        ]
    )
    assert (again.length, again.level, again.turns) == pytest.approx(
        (last["bias_length"], last["bias_level"], last["bias_turns"])
    )
    page = write_report(driver.folder).read_text()
    assert "At the end, what is trained is" in page and "Who pays" in page and "level 3" in page

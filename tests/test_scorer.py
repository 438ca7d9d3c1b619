"""Other models are asked about finished rollouts: in order, in the books, through losses, refreshes and resumes."""
import polars as pl
import pytest
from inline import check_books, inline_run

from rlbench.ledger import read_table

SMALL = dict(steps=6, batch=32, group=4, preflight=4, preflight_k=2, staleness=0, eval=[{"name": "held_out", "count": 8, "every": 3}])
ASKED = {**SMALL, "reference": "start", "reward_model": "scripted"}


@pytest.mark.parametrize("bound", [0, 2])
def test_a_scripted_run_asks_about_every_rollout(tmp_path, bound):
    driver = inline_run(tmp_path, "asked", {**ASKED, "staleness": bound})
    check_books(driver)
    rows, tokens = read_table(driver.folder, "rollouts"), read_table(driver.folder, "tokens")
    judged = rows.filter(pl.col("reward").is_not_null())
    assert len(judged) > 150 and (judged["score_names"].list.len() == 1).all() and judged["score_values"].explode().is_between(0, 1).all()
    trained = tokens.join(rows.filter(pl.col("fate") == "trained"), on=["rollout", "try"], how="semi")
    assert (trained["reference"] == trained["logprobs"]).all()  # the scripted reference is the policy
    evaluated = tokens.join(rows.filter(pl.col("fate") == "evaluated"), on=["rollout", "try"], how="semi")
    assert len(evaluated) and evaluated["reference"].list.len().fill_null(0).sum() == 0
    steps = read_table(driver.folder, "steps")
    parts = [f"scorer_{part}" for part in ("compute", "wait", "publish", "overhead")]
    assert (steps["scorer_compute"] > 0).all() and ((steps.select(pl.sum_horizontal(parts)).to_series() - steps["seconds"]).abs() < 1e-6).all()


def test_a_run_without_a_scorer_has_none(tmp_path):
    driver = inline_run(tmp_path, "plain", SMALL)
    assert "scorer" not in driver.layout and read_table(driver.folder, "steps")["scorer_compute"].null_count() == 6
    asked = inline_run(tmp_path, "asked", ASKED)
    assert asked.state.digest == driver.state.digest  # the scripted environment pays for verdicts alone

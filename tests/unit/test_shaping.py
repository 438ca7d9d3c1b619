"""Shapings: what holds for all of them, and what they do to whole runs; rewards of steps on their way."""

import json

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from inline import check_books, inline_run
from properties import RANDOMS, examples
from steered_runs import asked, journal

import rlbench as rl
from rlbench.base.ledger_reading import read_table
from rlbench.base.safe_call import FunctionFailed
from rlbench.environments.environment import score_one
from rlbench.environments.judging import judge_rollout
from rlbench.environments.scoring_messages import ScoreRequest
from rlbench.environments.step_verifier import STEP_REWARDS, place_steps
from rlbench.loop.config import live_knobs, make_config
from rlbench.loop.config_tables import ConfigError
from rlbench.objective.shaping import SHAPINGS, GroupFacts, make_group_facts, shape_rewards
from rlbench.records import Rollout, Task, response_segment
from rlbench.reward import exact
from rlbench.runtime.steer import in_force
from rlbench.views.rescore import give_function, rescore

SEEDS = range(60)  # of groups


def a_group(seed: int, count: int | None = None) -> tuple[np.ndarray, GroupFacts]:
    "Rewards, some of them missing, and what else is known of a group."
    r = np.random.default_rng(seed)
    n = int(r.integers(1, 9)) if count is None else count
    right = r.random(n) < 0.5
    rewards = np.where(r.random(n) < 0.2, np.nan, right + r.choice([0.0, -0.1, 0.25], n))
    return rewards, make_group_facts(
        r.integers(1, 80, n), right, r.random(n) < 0.3, r.integers(1, 5, n), [(("a", float(x)),) for x in r.random(n)]
    )


def some(known: GroupFacts, order) -> GroupFacts:
    "The facts of these members."
    return GroupFacts(*(x[order] if isinstance(x, np.ndarray) else x for x in vars(known).values()))


@pytest.mark.parametrize("name", SHAPINGS)
@examples(100)
@given(r=RANDOMS)
def test_order_and_missing_rewards_do_not_matter(name, r):
    """Members in another order get the same rewards; one without a reward gets none,
    and takes no part in anybody else's."""
    shaping, (rewards_R, known) = SHAPINGS[name], a_group(r.randrange(10**9))
    shaped_R = shape_rewards(shaping, rewards_R, known)
    order = r.sample(range(len(rewards_R)), len(rewards_R))
    assert np.allclose(shape_rewards(shaping, rewards_R[order], some(known, order)), shaped_R[order], equal_nan=True)
    judged = ~np.isnan(rewards_R)
    assert np.isnan(shaped_R[~judged]).all()
    assert np.allclose(shape_rewards(shaping, rewards_R[judged], some(known, judged)), shaped_R[judged], equal_nan=True)


@pytest.mark.parametrize("name", SHAPINGS)
def test_edges(name):
    """A group of one, nobody judged, everybody alike: finite numbers or NaN,
    and the rewards that came in are not touched."""
    shaping = SHAPINGS[name]
    for seed in range(10):
        rewards_R, known = a_group(seed, 1)
        assert shape_rewards(shaping, rewards_R, known).shape == (1,)
    rewards_R, known = a_group(3, 4)
    kept = rewards_R.copy()
    shape_rewards(shaping, rewards_R, known)
    assert np.array_equal(rewards_R, kept, equal_nan=True)
    assert np.isnan(shape_rewards(shaping, np.full(4, np.nan), known)).all()
    alike = make_group_facts([5] * 4, [True] * 4, [False] * 4, [1] * 4, [()] * 4)
    assert len(set(shape_rewards(shaping, np.ones(4), alike))) == 1


def test_a_price_on_length_never_pays_for_it():
    "Of two members that differ in length alone, the longer one is never worth more."
    for seed in SEEDS:
        rewards_R, known = a_group(seed, 6)
        rewards_R[:2], known.correct_R[:2], known.truncated_R[:2], known.turns_R[:2] = (
            1.0 * (seed % 2),
            bool(seed % 2),
            False,
            1,
        )
        known.lengths_R[:2] = 10, 30
        for name in ("kimi_length", "length_share", "efficiency", "soft_overlong"):
            short, long = shape_rewards(SHAPINGS[name], rewards_R, known)[:2]
            assert short >= long, name


SCRIPTED = {"group": 4, "batch": 16, "steps": 8, "staleness": 1, "preflight": 0, "eval": [], "advantage": "dr_grpo"}


def tables(driver) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    return tuple(read_table(driver.folder, name) for name in ("groups", "rollouts", "steps"))


@pytest.mark.slow
def test_groups_that_are_all_right_are_trained_for_their_lengths(tmp_path):
    "The filter sees shaped rewards: Kimi's length reward keeps what the verdicts alone would throw away."
    plain, kimi = (inline_run(tmp_path, name, SCRIPTED | {"shaping": name}) for name in ("none", "kimi_length"))
    fates = {}
    for name, driver in (("none", plain), ("kimi_length", kimi)):
        check_books(driver)
        groups, *_ = tables(driver)
        fates[name] = set(
            groups.filter((pl.col("solved") == pl.col("size")) & (pl.col("fate") != "left_at_stop"))["fate"]
        )
    assert fates == {"none": {"filtered"}, "kimi_length": {"trained"}} and plain.state.digest != kimi.state.digest
    groups, *_ = tables(kimi)
    assert "trained" in set(groups.filter(pl.col("solved") == 0)["fate"])  # wrong ones pay for length, too


@pytest.mark.slow
def test_truncated_responses_are_masked_and_their_groups_dropped(tmp_path):
    """A response that was cut off ends as masked though its group is trained;
    a group with fewer than two others is filtered."""
    for staleness in (0, 1):
        driver = inline_run(
            tmp_path,
            f"cut-{staleness}",
            SCRIPTED | {"shaping": "mask_truncated", "max_tokens": 24, "staleness": staleness},
        )
        check_books(driver)
        groups, rollouts, steps = tables(driver)
        trained = rollouts.filter(pl.col("group").is_in(groups.filter(pl.col("fate") == "trained")["group"].implode()))
        assert set(trained.filter(pl.col("reason") == "length")["fate"]) == {"masked"} and set(
            trained.filter(pl.col("reason") != "length")["fate"]
        ) == {"trained"}
        left = rollouts.filter(pl.col("reason") != "length").group_by("group").len()
        few = groups.join(left, on="group", how="left").filter(pl.col("len").fill_null(0) < 2)
        assert (
            len(few)
            and set(few["fate"]) <= {"filtered", "left_at_stop", "stale", "surplus"}
            and "filtered" in set(few["fate"])
        )
        assert (
            (steps["trained_rollouts"] <= 16).all()
            and steps["trained_rollouts"].min() < 16
            and driver.state.phase == "done"
        )


@pytest.mark.slow
@pytest.mark.parametrize("filter", ["zero_advantage", "band", "none"])
def test_a_run_in_which_everything_is_cut_off_does_not_train_on_nothing(tmp_path, filter):
    """Nobody has a reward: with the filter the run ends and says so, without it the groups are masked until the budget
    of tokens is spent."""
    driver = inline_run(
        tmp_path, filter, SCRIPTED | {"shaping": "mask_truncated", "max_tokens": 1, "filter": filter, "tokens": 3000}
    )
    check_books(driver)
    groups, _, steps = tables(driver)
    assert not len(steps) and "trained" not in set(groups["fate"])
    assert ("masked" if filter == "none" else "filtered") in set(groups["fate"])
    assert filter == "none" or driver.state.phase == "failed" and "left no reward" in driver.state.reason


@pytest.mark.slow
def test_another_shaping_takes_effect_at_a_version_and_is_journalled(tmp_path):
    """Swapped twice in one run; groups that waited under the old one are judged under the new one;
    a run told the same is the same."""
    told = [
        (150, "shaping", {"name": "kimi_length", "weight": 0.5}, 0),
        (300, "shaping.weight", 1.0, 3),
        (600, "shaping", "mask_truncated", 0),
    ]
    one, two = (inline_run(tmp_path, name, SCRIPTED | {"max_tokens": 30, "steps": 30}, told) for name in ("one", "two"))
    check_books(one)
    rows = [row for row in journal(one) if row["knob"].startswith("shaping")]
    assert (
        [row["status"] for row in rows] == ["applied"] * 3
        and {row["apply"] for row in rows} == {"version"}
        and one.state.phase == "done"
    )
    assert one.state.digest == two.state.digest and in_force(one.folder).shaping == {"name": "mask_truncated"}
    swapped = rows[-1]["version"]
    groups, rollouts, _ = tables(one)
    cut = rollouts.filter((pl.col("reason") == "length") & (pl.col("fate") == "trained"))
    assert len(cut) and cut["trained_at"].max() <= swapped + 1


def test_a_batch_left_without_any_reward_by_a_new_shaping_is_filtered(tmp_path):
    "Everything that waits is cut off when the shaping comes that leaves it nothing: no batch is trained on nobody."
    driver = inline_run(
        tmp_path,
        "swap",
        SCRIPTED | {"max_tokens": 2, "steps": 30, "shaping": "none"},
        [(200, "shaping", "mask_truncated", 0)],
    )
    check_books(driver)
    (row,) = journal(driver, author="test")
    *_, steps = tables(driver)
    assert row["status"] == "applied" and len(steps) == row["version"] < 30 and driver.state.phase == "failed"


def cubed(rewards_R, lengths_R, *, by: rl.Knob(0, 1) = 0.5):
    return np.asarray(rewards_R) - by * (lengths_R / 64) ** 3


def uneven(rewards_R, correct_R):
    return [1 / (len(set(rewards_R)) - 1)] * len(rewards_R)


def too_short(rewards_R, turns_R):
    return rewards_R[1:]


def curious(rewards_R, tokens_RT):
    return rewards_R


@pytest.mark.parametrize(
    "bad, said", [(uneven, "shaping uneven: raised ZeroDivisionError"), (too_short, "shaping too_short: returned")]
)
def test_a_shaping_that_fails_is_replaced_at_once(tmp_path, bad, said):
    "As an advantage is: the group is judged again by the one before, and the journal says why."
    driver = asked(tmp_path, "a", {2: [("shaping", cubed)], 3: [("shaping.by", 0.25)], 5: [("shaping", bad)]})
    (row,) = journal(driver, author="rlbench")
    assert (
        json.loads(row["value"]) == {"name": "cubed", "by": 0.25} | {"source": json.loads(row["value"])["source"]}
        and said in row["reason"]
        and driver.state.phase == "done"
    )


def test_a_run_with_a_shaping_of_its_own_that_fails_ends_and_names_it(tmp_path):
    "There is none to put back."
    driver = inline_run(tmp_path, "a", SCRIPTED | {"shaping": too_short})
    assert driver.state.phase == "failed" and "too_short: returned" in driver.state.reason
    check_books(driver)


def test_bad_input_is_refused(tmp_path):
    "Field, value, remedy; and before work starts."
    for table, text in (
        ({"shaping": "kimi"}, "did you mean 'kimi_length'"),
        ({"shaping": {"name": "kimi_length", "weight": -1.0}}, "shaping.weight"),
        ({"shaping": {"name": "kimi_length", "price": 1}}, "unknown name 'price'"),
        ({"reward": {"name": "with_format", "pattern": "(a"}}, "no regular expression"),
    ):
        with pytest.raises(ConfigError, match=text):
            make_config(table)
    with pytest.raises(ValueError, match="asks for 'tokens_RT', which it is not given"):
        inline_run(tmp_path, "c", SCRIPTED | {"shaping": curious})
    driver = inline_run(tmp_path, "a", SCRIPTED)
    for bad in (too_short, curious):
        with pytest.raises(ValueError):
            give_function(driver.folder, "shaping", bad)
    assert give_function(driver.folder, "shaping", cubed)["by"] == 0.5
    with pytest.raises(FunctionFailed, match="return one number for each"):
        shape_rewards(too_short, np.ones(3), a_group(1, 3)[1])


def test_a_shaping_is_tried_on_what_is_stored(tmp_path):
    """Parts, lengths and stop reasons come from the tables;
    an advantage is tried on rewards as the shaping in force leaves them."""
    driver = inline_run(tmp_path, "a", SCRIPTED | {"max_tokens": 24, "shaping": "kimi_length"})
    masked = rescore(driver.folder, cut_off, field="shaping")
    assert masked["new"].list.eval(pl.element().is_nan()).list.any().any() and set(masked["message"]) == {""}
    assert masked["old"].to_list() != masked["rewards"].to_list()
    plain = rescore(driver.folder, centred, field="advantage")
    assert (
        plain["rewards"].to_list() == masked["old"].to_list()
        and set(plain["message"]) == {""}
        and plain["difference"].max() < 1e-12
    )  # dr_grpo is in force


def cut_off(rewards_R, truncated_R, parts_RK, names_K):
    assert parts_RK.shape == (len(rewards_R), len(names_K))
    return np.where(truncated_R, np.nan, rewards_R)


def centred(rewards_R):
    return np.asarray(rewards_R) - np.mean(rewards_R)


def test_a_shaping_and_its_knobs_can_be_turned():
    "In the list of what can be turned, with what it acts on."
    knobs = {k.field: k for k in live_knobs(make_config({"shaping": "length_share"}))}
    assert (
        knobs["shaping"].group == "trainer"
        and set(knobs["shaping"].knob.choices) == set(SHAPINGS)
        and knobs["shaping.tokens"].value == 0.1
        and knobs["shaping.turns"].knob.apply == "version"
    )


def answered(text: str) -> Rollout:
    return Rollout(
        3,
        0,
        1,
        0,
        Task("addition/17+25", "17+25=", "42"),
        (response_segment([0] * len(text), [0.0] * len(text), [0] * len(text)),),
        text,
    )


def test_rewards_of_steps_travel_with_the_judgement():
    "From a reward through the environment; in order, in range, and together what the part says."
    r = answered("7+5=2c1;1+2=4c0:42")
    found = score_one(ScoreRequest(r), exact, STEP_REWARDS["mixed"]).judged
    assert found.steps == ((7, 0.25), (15, 0.25)) and found.reward == 1.5
    assert place_steps(found.steps, list(r.text)).nonzero()[0].tolist() == [6, 14]
    for bad in (((99, 1.0),), ((0, 1.0),), ((3, float("nan")),), (("3", 1.0),)):
        told = judge_rollout(r, exact, lambda r: (1.0, {}, bad))
        assert told.reward is None and told.steps == () and "so far, a finite number" in told.message
    assert judge_rollout(answered(":42"), exact, STEP_REWARDS["steps"]).steps == ()


@pytest.mark.slow
def test_rewards_of_steps_reach_the_table(tmp_path):
    """A real policy with a reward of steps: every stored value is the sum of its parts,
    and steps lie inside the response."""
    table = {"generator": "torch", "model": "tiny", "reward": "mixed", "filter": "none"}
    driver = inline_run(tmp_path, "a", SCRIPTED | table | {"steps": 1, "staleness": 0, "concurrency": 16})
    rows = read_table(driver.folder, "rollouts").filter(pl.col("reward").is_not_null())
    with_steps = rows.filter(pl.col("step_ends").list.len() > 0)
    assert len(with_steps) and (with_steps["step_ends"].list.max() <= with_steps["text"].str.len_chars()).all()
    process = [dict(zip(names, values))["process"] for names, values in zip(rows["part_names"], rows["part_values"])]
    assert np.allclose(process, [sum(values) for values in rows["step_rewards"]])


def test_facts_of_loop_and_trainer_agree():
    "What the loop knows of a member is what the rollout says."
    from rlbench.loop.grouping import facts_from_states
    from rlbench.loop.state import FinishedTurn, RolloutState
    from rlbench.objective.shaping import facts_of
    from rlbench.records import StopReason

    r = answered("7+5=2c1")
    rollouts = [
        r,
        Rollout(
            4, 0, 1, 1, r.task, (*r.segments, *r.segments), r.text, StopReason.LENGTH, correct=True, parts=(("a", 1.0),)
        ),
    ]
    members = [
        RolloutState(3, 1, 0, tokens=7),
        RolloutState(
            4,
            1,
            1,
            tokens=14,
            turns=[FinishedTurn(tokens=7)],
            reason=StopReason.LENGTH,
            correct=True,
            parts=(("a", 1.0),),
        ),
    ]
    for name, value in vars(facts_of(rollouts)).items():
        assert (
            np.array_equal(value, getattr(facts_from_states(members), name), equal_nan=True)
            if isinstance(value, np.ndarray)
            else value == getattr(facts_from_states(members), name)
        )
    assert facts_from_states(
        [RolloutState(5, 1, 2, tokens=7, turns=[FinishedTurn(tokens=7)], reason=StopReason.LENGTH)]
    ).turns_R.tolist() == [1]  # no room for another response


def test_the_filter_band_trains_on_nothing_beside_it(tmp_path):
    """The online difficulty filter: every group solved less or more often than the band says is filtered and booked;
    the others are trained. The band may move while the run goes on."""
    table = SCRIPTED | {
        "filter": "band",
        "band": [0.3, 0.7],
        "sampler": "uniform",
        "group": 8,
        "batch": 32,
        "steps": 12,
    }
    driver = inline_run(tmp_path, "band", table, [(500, "band", [0.0, 1.0], 0)])
    check_books(driver)
    groups, rollouts, steps = tables(driver)
    rates = (
        rollouts.filter(pl.col("reward").is_not_null())
        .group_by("group")
        .agg(pl.col("correct").mean().alias("rate"))
        .join(groups.select("group", "fate", "at"), on="group")
    )
    mixed = rates.filter((pl.col("fate") == "filtered") & (pl.col("rate") > 0) & (pl.col("rate") < 1))
    assert len(mixed) > 3 and mixed["rate"].is_between(0.3, 0.7).sum() == 0 and (rates["fate"] == "trained").sum() > 3
    moved = journal(driver)[0]
    later = rates.filter(pl.col("at") > moved["at"])
    assert (
        moved["status"] == "applied"
        and mixed["at"].max() <= moved["at"]
        and len(later.filter((pl.col("fate") == "trained") & ~pl.col("rate").is_between(0.3, 0.7)))
    )

"""Several environments: who scores what, what a lost one costs, and that the figures of a run stay those of a run."""

from dataclasses import replace

import pytest
from inline import check_books, inline_run
from resumed_runs import SYNC, a_run, check_resumed, taken_up
from world import World

from rlbench.base.ledger_reading import read_table
from rlbench.loop.actions import Abort, Score, Start
from rlbench.loop.config import make_config
from rlbench.loop.config_tables import ConfigError
from rlbench.loop.events import Generated, Lost, Scored, Started, TurnEnded
from rlbench.loop.fates import discard_groups
from rlbench.loop.loop import step
from rlbench.loop.state import GroupState, LoopState, RolloutState, start_state
from rlbench.loop.world import Spread
from rlbench.loop.world import World as Costs
from rlbench.planning.fit import fit_run
from rlbench.planning.predict import predict_run
from rlbench.planning.simulator import simulate
from rlbench.records import Fate, Outcome, Sampling, StopReason
from rlbench.runtime.actors import layout_of
from rlbench.runtime.driver import drive
from rlbench.runtime.live_view import LiveView
from rlbench.views.bottleneck import advice_in_words, judge_balance, window_facts

NAMES = ["environment-1", "environment-2", "environment-3"]
SHORT = {
    "group": 4,
    "batch": 16,
    "steps": 6,
    "concurrency": 16,
    "max_tokens": 120,
    "preflight": 0,
    "eval": [],
    "checkpoint_every": 0,
    "staleness": 1,
    "placement": "split",
    "filter": "none",
    "virtual": {"train": 1e-6, "scripted_length": 12.0, "score": 0.05, "decode": 0.001},
}
EPISODES = {"environment": {"name": "scripted", "low": 2, "high": 4}, "max_turns": 4}


def a_state(rollouts: int = 6, turns: int = 4, **knobs) -> LoopState:
    "Three environments are up, and one group is being generated."
    table = {"group": 2, "batch": 4, "max_turns": turns, "environments": 3, "preflight": 0, "eval": [], **knobs}
    state = start_state(make_config(table), [1] * 8, {})
    state.commands.is_paused = True  # nothing else is made
    step(state, Started("generator", "generator", 64))
    for name in NAMES:
        step(state, Started(name, "environment"))
    state.groups[0] = GroupState(0, "train", 0, "", 0, Sampling(max_tokens=100), list(range(rollouts)))
    state.dispatch.attempts = state.dispatch.next_rollout = rollouts
    state.dispatch.groups = 1
    for i in range(rollouts):
        state.rollouts[i] = RolloutState(i, 0, i, status="generating", actor="generator")
    state.actors["generator"].load = rollouts
    return state


def respond(state: LoopState, rollout: int, tokens: int = 10) -> list:
    "The actions after a response."
    member = state.rollouts[rollout]
    member.status, member.actor = "generating", "generator"
    state.dispatch.to_send = [i for i in state.dispatch.to_send if i != rollout]
    total = member.tokens + tokens
    return step(state, Generated("generator", rollout, member.attempt, StopReason.STOP, total, 0, 0, 0.1))


def asked_of(actions: list) -> list[tuple[str, int]]:
    "(environment, rollout) of the scorings among some actions."
    return [(action.actor, action.rollout) for action in actions if isinstance(action, Score)]


# Who scores what


def test_first_turns_go_to_the_environment_with_the_least_to_do():
    state = a_state()
    asked = [pair for i in range(5) for pair in asked_of(respond(state, i))]
    assert asked == [(NAMES[0], 0), (NAMES[1], 1), (NAMES[2], 2), (NAMES[0], 3), (NAMES[1], 4)]
    step(state, Scored(0, 0, 1.0, True, Outcome.OK, 0.1))
    step(state, Scored(3, 0, 1.0, True, Outcome.OK, 0.1))
    assert asked_of(respond(state, 5)) == [(NAMES[0], 5)], "it has nothing to do any more"


def test_later_turns_stay_with_their_environment_even_if_it_has_more_to_do():
    state = a_state()
    for i in range(3):
        respond(state, i)
    step(state, TurnEnded(2, 0, 1, "after the tool"))
    step(state, Scored(0, 0, 1.0, True, Outcome.OK, 0.1))
    assert asked_of(respond(state, 3)) == [(NAMES[0], 3)], "an episode between two turns counts"
    step(state, Scored(3, 0, 1.0, True, Outcome.OK, 0.1))
    assert asked_of(respond(state, 2)) == [(NAMES[2], 2)]


def test_a_failed_scoring_may_be_tried_by_another_one():
    state = a_state(score_retries=1)
    respond(state, 0)
    assert state.rollouts[0].environment == NAMES[0]
    respond(state, 1)
    actions = step(state, Scored(1, 0, None, None, Outcome.TIMEOUT, 0.1, "late"))
    assert asked_of(actions) == [(NAMES[1], 1)] and state.rollouts[1].tried == 2


def test_an_abort_goes_to_the_environments_that_have_the_rollouts():
    state = a_state()
    for i in range(4):
        respond(state, i)
    actions = []
    discard_groups(state, [state.groups[0]], Fate.ABORTED, actions)
    stopped = {action.actor: action.keys for action in actions if isinstance(action, Abort)}
    assert stopped[NAMES[0]] == ((0, 0), (3, 0)) and stopped[NAMES[1]] == ((1, 0),) and stopped[NAMES[2]] == ((2, 0),)


# What a lost one costs


def test_a_lost_environment_costs_its_own_rollouts_a_try_and_others_score_them_at_once():
    state = a_state(score_retries=1)
    for i in range(6):
        respond(state, i)
    actions = step(state, Lost(NAMES[1], "killed", at_work=((1, 0),)))
    assert asked_of(actions) == [(NAMES[0], 1), (NAMES[2], 4)] and Start(NAMES[1]) in actions
    tried = {i: rollout.tried for i, rollout in state.rollouts.items()}
    assert tried == {0: 1, 1: 2, 2: 1, 3: 1, 4: 1, 5: 1}, "only what it was working on is charged"
    respond_again = step(state, Lost(NAMES[0], "killed", at_work=((1, 0),)))
    assert state.rollouts[1].status == "done" and state.rollouts[1].lost is Fate.LOST_ENVIRONMENT
    assert {rollout for _, rollout in asked_of(respond_again)} == {0, 3}
    assert "environment-1 lost: killed" in state.scoring.last_failure


def test_an_episode_whose_environment_is_gone_goes_on_elsewhere_and_stays_there():
    state = a_state()
    respond(state, 0)
    step(state, TurnEnded(0, 0, 1, "a"))
    assert asked_of(step(state, Lost(NAMES[0], "killed"))) == [] and state.rollouts[0].attempt == 0
    assert asked_of(respond(state, 0)) == [(NAMES[1], 0)]
    step(state, Started(NAMES[0], "environment"))
    step(state, TurnEnded(0, 0, 2, "b"))
    assert asked_of(respond(state, 0)) == [(NAMES[1], 0)]


def test_what_a_scorer_has_belongs_to_no_environment_once_its_own_is_lost():
    "Its reward may be computed by any of them; it is not scored a second time meanwhile."
    state = a_state()
    for i in range(2):
        respond(state, i)
    assert asked_of(step(state, Lost(NAMES[0], "killed", elsewhere=((0, 0), (1, 0))))) == []
    assert state.rollouts[0].environment == "" and state.rollouts[1].environment == NAMES[1]
    # its reward is with the third one, which is lost; the second one still has rollout 1
    assert asked_of(step(state, Lost(NAMES[2], "killed", elsewhere=((1, 0),)))) == [(NAMES[1], 0)]


def test_a_run_goes_on_without_one_that_is_given_up_and_ends_without_any():
    state = a_state()
    for name in NAMES:
        assert state.phase == "running"
        for _ in range(4):
            step(state, Lost(name, "killed"))
            step(state, Started(name, "environment")) if not state.actors[name].given_up else None
        assert state.actors[name].given_up
    assert state.phase in ("failing", "failed") and state.reason == "environment-3 lost: killed"


@pytest.mark.parametrize("turns", [1, 4])
def test_losses_in_a_whole_run_on_modelled_actors(turns):
    """The watch of `World` looks at each scoring: it is with one environment, which is up,
    with the least to do or with the episode."""
    config = make_config(
        {**SHORT, "clock": "virtual", "generator": "scripted", "environments": 3, "steps": 12, "max_turns": turns}
    )
    faults = {60 * i: "environment" for i in range(1, 9)}
    world = World(config, 5, faults=faults, turns=turns).run()
    assert world.state.phase == "done" and sum(world.env_lives.values()) >= 6
    assert len({world.watch.homes[i] for i in world.watch.homes}) == 3


# Whole runs on the virtual clock


def test_names_and_layout():
    assert list(layout_of("colocated", environments=2)) == ["worker", "environment-1", "environment-2"]
    assert layout_of("split", 2, True, 3)["environment-3"] == ("environment-3",)
    assert layout_of("split", 2, True) == layout_of("split", 2, True, 1) and "environment" in layout_of("split")
    with pytest.raises(ConfigError, match="environments"):
        make_config({"environments": 0})


@pytest.mark.parametrize("more", [{}, EPISODES])
def test_a_synchronous_run_does_the_same_with_three_environments(tmp_path, more):
    table = {**SHORT, **more, "staleness": 0, "placement": "colocated"}
    one, three = (inline_run(tmp_path, f"{n}", {**table, "environments": n}) for n in (1, 3))
    check_books(three)
    assert one.state.digest == three.state.digest and set(three.workers.layout) == {"worker", *NAMES}
    assert three.clock.now() < one.clock.now()


def test_three_environments_give_a_run_limited_by_scoring_three_times_the_rollouts(tmp_path):
    "The columns are of the mean environment, so they add up to the time of the batch."
    seconds, busy = {}, {}
    for n in (1, 3):
        driver = inline_run(tmp_path, f"{n}", {**SHORT, "environments": n})
        check_books(driver)
        steps = read_table(driver.folder, "steps")
        seconds[n] = steps["seconds"].sum()
        busy[n] = steps["environment_compute"].sum() / seconds[n]
        assert steps["environment_compute"].sum() * n == pytest.approx(0.05 * steps["verdicts"].sum())
        whole = sum(steps[f"environment_{part}"] for part in ("compute", "wait", "publish", "overhead"))
        assert (whole - steps["seconds"]).abs().max() < 1e-4
    assert 2.4 < seconds[1] / seconds[3] < 3.3 and min(busy.values()) > 0.75


def test_a_run_of_episodes_with_three_environments_is_resumed(tmp_path):
    table = SYNC | EPISODES | {"staleness": 2, "placement": "split", "environments": 3, "checkpoint_every": 1}
    drive(a_run(tmp_path / "run", table, {150: tmp_path / "killed"}))
    driver = taken_up(tmp_path / "killed")
    drive(driver)
    check_resumed(driver)
    assert {actor for actor in driver.state.actors if actor.startswith("environment")} == set(NAMES)


# The model of a run


def test_simulated_environments_share_the_scoring():
    costs = Costs(latency=Spread(0.1), train_s=0.1, score_s=Spread(0.05), scores_one_at_a_time=True)
    table = {"placement": "split", "batch": 16, "group": 4, "steps": 20, "staleness": 2}
    table |= {"preflight": 0, "eval": [], "checkpoint_every": 0}
    spent = {n: simulate(make_config({**table, "environments": n}), costs).seconds for n in (1, 2, 4)}
    assert 1.7 < spent[1] / spent[2] < 2.3 and 3.0 < spent[1] / spent[4] < 4.6


def test_the_fit_finds_the_seconds_of_a_verdict_with_three_environments(tmp_path):
    driver = inline_run(tmp_path, "run", {**SHORT, "steps": 20, "environments": 3})
    assert fit_run(driver.folder).world.score_s.mean == pytest.approx(0.05, rel=0.02)


def test_a_prediction_knows_how_many_environments_score(tmp_path):
    "By simulation and by formula: a run limited by its scoring makes three times the rollouts with three."
    fitted = fit_run(inline_run(tmp_path, "run", {**SHORT, "steps": 20}).folder)
    one, three = (predict_run(fitted, environments=n) for n in (1, 3))
    for figures in ("formula", "simulated"):
        assert getattr(three, figures).rate == pytest.approx(3 * getattr(one, figures).rate, rel=0.05)
    assert not three.words
    waiting = replace(fitted, world=replace(fitted.world, scores_one_at_a_time=False))
    assert "environments: whether verdicts waited" in predict_run(waiting, environments=3).words[0]


def test_advice_for_a_run_limited_by_scoring_names_the_environments(tmp_path):
    driver = inline_run(tmp_path, "run", {**SHORT, "steps": 20, "environments": 2})
    advice = advice_of(LiveView(driver.folder).poll())
    assert advice == "no knob: a faster reward, or a run with environments = 4"


def advice_of(snapshot) -> str:
    "What is to be turned, in words."
    facts = window_facts(snapshot)
    return advice_in_words(judge_balance(facts), facts, snapshot)

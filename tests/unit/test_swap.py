"""The objective of a live run, swapped: at a version, in the journal, and so again after a resume and in a replay."""

import json

import polars as pl
import pytest
from inline import check_books, drive, inline_run
from resumed_runs import a_run, check_resumed, taken_up
from twin_runs import TINY, twice

import rlbench as rl
from rlbench.base.ledger_reading import read_table
from rlbench.loop.config_files import load_config
from rlbench.objective.loss import LossTerms
from rlbench.workbench.prepare import check_places

SHORT = TINY | {
    "staleness": 0,
    "steps": 6,
    "eval": [],
    "preflight": 0,
    "checkpoint_every": 1,
    "checkpoints_kept": 9,
    "learning_rate": 5e-4,
    "optimizer_steps": 2,
    "batch": 32,
}
SWAPS = [
    (40, "loss", {"name": "gspo", "low": 0.05, "high": 0.05}, 0),
    (41, "aggregation", "sequence_mean", 0),
    (42, "advantage", "rloo", 0),
    (43, "correction", "icepop", 0),
    (120, "loss", "cispo", 0),
    (121, "entropy_weight", 0.01, 3),
    (122, "shaping", "kimi_length", 0),
]


def journal(driver, status: str = "applied") -> list[tuple]:
    "What was asked for, with the version it took effect at, or the reason why not."
    rows = read_table(driver.folder, "commands").filter(pl.col("status") == status)
    return rows.select("knob", "version" if status == "applied" else "reason").rows()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    "A folder for the runs with all swaps, and for what is left of one that is killed after them."
    return tmp_path_factory.mktemp("swapped")


@pytest.fixture(scope="module")
def swapped(folders):
    "A run with all swaps, which was the same when it was run twice; of the second run, `killed` is kept."
    return twice(folders, SHORT, SWAPS, copies=lambda first: {int(0.8 * first.state.seq): folders / "killed"})


@pytest.mark.slow
def test_swaps_take_effect_at_a_version_and_are_part_of_the_run(tmp_path, swapped):
    "Twice the same, with the same commands at the same events; without them another run."
    plain = inline_run(tmp_path, "plain", SHORT)
    told = journal(swapped)
    assert (
        [knob for knob, _ in told[:3]] == ["loss", "aggregation", "advantage"]
        and len({knob for knob, _ in told}) == 6
        and 0 < told[0][1] < 6
    )
    before = (
        read_table(plain.folder, "steps", ("version", "loss")),
        read_table(swapped.folder, "steps", ("version", "loss")),
    )
    same = [a == b for a, b in zip(before[0]["loss"], before[1]["loss"])]
    first = (
        told[0][1] + read_table(swapped.folder, "commands")["training"][0]
    )  # the next batch, and not the one under way
    assert all(same[:first]) and not any(same[first:])
    assert (
        swapped.state.config.loss["name"] == "cispo"
        and swapped.state.config.shaping["name"] == "kimi_length"
        and swapped.state.digest != plain.state.digest
    )


@pytest.mark.slow
def test_a_swap_survives_a_resume(folders, swapped):
    "Killed after the swaps and taken up again: the run that nobody touched, its objective among it."
    resumed = taken_up(folders / "killed")
    drive(resumed)
    check_resumed(resumed)
    assert resumed.state.digest == swapped.state.digest and resumed.state.config.loss == swapped.state.config.loss
    columns = ["version", "loss", "entropy_weight", "ess"]
    assert read_table(resumed.folder, "steps", columns).equals(read_table(swapped.folder, "steps", columns))


REFUSED = {
    "advantage": ("gae", "critic = true"),
    "kl": ("k3", 'reference = "start"'),
    "loss": ("cipso", "did you mean 'cispo'"),
    "loss.high": (-1.0, "outside"),
    "old": ("nobody", "is not one of"),
    "correction": ({"name": "tis", "cup": 2}, "unknown name 'cup'"),
    "kl_schedule": ({"name": "linear", "to": -1.0}, "outside"),
    "critic": (True, "fixed for the whole run"),
}


SCRIPTED = SHORT | {"generator": "scripted", "steps": 3}


@pytest.fixture(scope="module")
def unasked(tmp_path_factory):
    "A scripted run of which nothing is asked."
    return inline_run(tmp_path_factory.mktemp("unasked"), "plain", SCRIPTED)


@pytest.mark.slow
@pytest.mark.parametrize("knob", REFUSED)
def test_a_refused_swap_leaves_the_run_as_it_was(tmp_path, knob, unasked):
    "With field, reason and remedy in the journal."
    value, said = REFUSED[knob]
    asked = inline_run(tmp_path, "asked", SCRIPTED, [(30, knob, value, 0)])
    (found,) = journal(asked, "refused")
    assert found[0] == knob and said in found[1], found
    assert (
        asked.state.version == 3
        and asked.state.config == unasked.state.config.model_copy()
        and asked.state.books == unasked.state.books
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"advantage": "gae"}, "set critic = true"),
        ({"kl": "k1"}, 'set reference = "start"'),
        ({"advantage": "distill"}, "set teacher"),
        ({"group": 1, "batch": 8}, "use group >= 2"),
        ({"old": "sampler"}, "weigh it once more"),
        ({"loss": "dppo_tv"}, "weigh it once more"),
        ({"correction": "m2po", "trainers": 2, "placement": "split"}, "looks at a whole batch"),
        ({"advantage": "gae", "critic": True, "trainers": 2, "placement": "split"}, "one trainer process"),
        ({"demonstrations": "nowhere.jsonl"}, "rlbench demonstrations"),
        ({"critic_epochs": 0}, "critic_epochs: 0 is outside"),
        ({"kl_in": "los"}, "did you mean 'loss'"),
        ({"kl": "k1", "reference": "start"}, 'no penalty; set kl_in = "reward"'),
        ({"kl": "k3", "kl_in": "reward", "reference": "start"}, 'set kl = "k1", or kl_in = "loss"'),
        ({"loss": "cispo:high=4,low=1"}, "write loss=cispo loss.high=4 loss.low=1"),
        ({"loss.name": "reinforce", "loss.high": 0.3}, "takes no parameters"),
    ],
)
def test_what_lacks_an_ingredient_is_refused_before_work_starts(settings, said):
    "Of the preset."
    with pytest.raises(ValueError, match="(?s).*" + said.replace("(", "\\(")):
        check_places(load_config("tiny", settings))


def flat(logprobs_RT, old_RT, advantages_RT):
    "The sum in place of a number per token."
    never_RT = logprobs_RT > 0
    return LossTerms(-(logprobs_RT * advantages_RT).sum(), never_RT, never_RT)


def cut_off(logprobs_RT, old_RT, advantages_RT):
    "A graph that is broken."
    never_RT = logprobs_RT > 0
    return LossTerms(-(logprobs_RT.detach() * advantages_RT), never_RT, never_RT)


def endless(logprobs_RT, old_RT, advantages_RT):
    "Not finite."
    never_RT = logprobs_RT > 0
    return LossTerms(-logprobs_RT * advantages_RT / 0.0, never_RT, never_RT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "said"),
    [(flat, "one number per token"), (cut_off, "does not depend on the log-probabilities"), (endless, "not finite")],
)
def test_a_loss_that_cannot_be_trained_is_named(tmp_path, function, said):
    "Of a run that begins with it: it fails with field and reason, and its books close."
    driver = inline_run(tmp_path, "a", SHORT | {"steps": 2, "loss": function, "correction": "none"})
    assert driver.state.phase == "failed" and said in driver.state.reason and driver.state.reason.startswith("loss"), (
        driver.state.reason
    )
    check_books(driver)


def nothing(old_RT, sampler_RT):
    "All tokens without weight."
    return old_RT * 0


@pytest.mark.slow
def test_a_batch_that_keeps_no_weight_is_said(tmp_path):
    "And not trained as if it were something."
    driver = inline_run(tmp_path, "a", SHORT | {"steps": 2, "correction": nothing})
    assert driver.state.phase == "failed" and "leaves none of the" in driver.state.reason


def leaning(
    logprobs_RT, old_RT, advantages_RT, mask_RT, *, tilt: rl.Knob(0, 2, help="how much longer responses count") = 0.5
):
    "A loss of one's own that asks for an ingredient."
    never_RT = logprobs_RT > 0
    return LossTerms(
        -logprobs_RT * advantages_RT * (1 + tilt * mask_RT.sum(1, keepdim=True) / mask_RT.shape[1]), never_RT, never_RT
    )


def halved(rewards_R, lengths_R):
    "An advantage that asks for lengths."
    return (rewards_R - rewards_R.mean()) / (1 + lengths_R / 64)


@pytest.mark.slow
def test_functions_of_a_cell_ask_for_ingredients(tmp_path):
    "By name, as the built-in ones do."
    driver = inline_run(tmp_path, "a", SHORT | {"steps": 2, "loss": leaning, "advantage": halved, "correction": "none"})
    assert driver.state.version == 2 and driver.state.config.loss["tilt"] == 0.5, driver.state.reason
    check_books(driver)


LINES = [
    {"prompt": f"{a}+{b}=", "response": f"{a}+{b}={(a + b) % 10}c{(a + b) // 10}:{a + b}"}
    for a in range(1, 10)
    for b in range(1, 10)
]
WHOLE = {
    "replay": ({"replay_share": 0.5, "replay_size": 8}, lambda s: s["replayed_rollouts"].to_list() == [0, 16, 16]),
    "demonstrations": (
        {"demonstrations": "lines.jsonl", "supervised_share": 0.25},
        lambda s: (s["supervised_loss"] > 0).all(),
    ),
    "log-linear": (
        {"old": "log_linear", "correction": "decoupled", "staleness": 1},
        lambda s: s["grad_norm"].min() > 0,
    ),
    "m2po": ({"correction": "m2po", "staleness": 1}, lambda s: s["grad_norm"].min() > 0),
    "kl in the loss": (
        {
            "kl": "k3",
            "reference": "start",
            "kl_weight": 0.1,
            "kl_schedule": {"name": "linear", "to": 0.0, "versions": 2},
        },
        lambda s: s["kl_weight"].to_list() == [0.05, 0.0, 0.0] and 0 <= s["kl_reference"][0] < s["kl_reference"][2],
    ),
    "kl in the reward": (
        {"kl": "k1", "kl_in": "reward", "reference": "start", "kl_weight": 0.1},
        lambda s: (s["kl_weight"] == 0.1).all(),
    ),
    "kl, adaptive": (
        {"kl": "k2", "reference": "start", "kl_schedule": {"name": "adaptive", "target": 1e-6, "horizon": 32.0}},
        lambda s: s["kl_weight"][2] > s["kl_weight"][0],
    ),
    "critic": (
        {"advantage": "gae", "critic": True, "critic_warmup": 1},
        lambda s: s["update_norm"][0] == 0 < s["update_norm"][1] and (s["value_loss"] >= 0).all(),
    ),
    "one rollout a task": (
        {"advantage": "gae", "critic": True, "group": 1},
        lambda s: s["trained_rollouts"].to_list() == [32] * 3,
    ),
    "steps": ({"advantage": "steps", "reward": "mixed"}, lambda s: s["grad_norm"].min() > 0),
    "baseline by role": ({"advantage": "rae"}, lambda s: s["grad_norm"].min() > 0),
    "distillation": (
        {"advantage": "distill", "teacher": "tiny"},
        lambda s: s["grad_norm"][0] < 0.05,
    ),  # a teacher that is the policy has little to teach
    "entropy": (
        {
            "entropy_weight": 0.1,
            "entropy_schedule": {"name": "adaptive", "target": 9.0, "horizon": 32.0, "hold": "above"},
        },
        lambda s: s["entropy_weight"][2] > s["entropy_weight"][0],
    ),
    "several rewards": (
        {"advantage": {"name": "gdpo", "weights": "correct=1"}, "reward": "brief"},
        lambda s: s["grad_norm"].max() > 0,
    ),
    "sequences": (
        {"loss": "gmpo", "aggregation": "sequence_sum", "correction": "sequence_tis"},
        lambda s: s["grad_norm"].min() > 0,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_whole_runs(tmp_path, name, monkeypatch):
    "Every way to train, from dispatch to closed books."
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, LINES)))
    settings, holds = WHOLE[name]
    driver = inline_run(tmp_path, "a", SHORT | {"steps": 3, "checkpoint_every": 0} | settings)
    assert driver.state.phase == "done" and driver.state.version == 3, driver.state.reason
    check_books(driver)
    steps = read_table(driver.folder, "steps")
    assert holds(steps), steps.select(
        "kl_weight",
        "kl_reference",
        "entropy_weight",
        "grad_norm",
        "replayed_rollouts",
        "supervised_loss",
        "value_loss",
        "update_norm",
    )


@pytest.mark.slow
def test_a_resumed_run_replays_and_adapts_as_the_one_that_nobody_touched(tmp_path):
    "What stands beside the model is in its checkpoint: earlier groups, the critic, the adapted weight."
    table = SHORT | {
        "steps": 5,
        "replay_share": 0.5,
        "replay_size": 8,
        "entropy_weight": 0.1,
        "entropy_schedule": {"name": "adaptive", "target": 9.0, "horizon": 32.0, "hold": "above"},
        "advantage": "gae",
        "critic": True,
    }
    whole = a_run(tmp_path / "whole", table)
    drive(whole)
    killed = tmp_path / "killed"
    drive(a_run(tmp_path / "first", table, {int(0.7 * whole.state.seq): killed}))
    resumed = taken_up(killed)
    drive(resumed)
    check_resumed(resumed)
    columns = ["version", "loss", "entropy_weight", "replayed_rollouts", "value_loss"]
    assert resumed.state.digest == whole.state.digest and read_table(resumed.folder, "steps", columns).equals(
        read_table(whole.folder, "steps", columns)
    )

"""The verdict on learning: courses as real runs of the embedded policy have taken them,
and what is said at each version."""

import json
from dataclasses import replace
from importlib.resources import files

import numpy as np
import pytest
from fake_run import fake_run, step_row

from rlbench.base.ledger import Ledger
from rlbench.base.run_files import read_json
from rlbench.base.status import read_status
from rlbench.bench.diagnosis import FAULTY, HEALTHY, bench_diagnosis, judge_arms, plain_arm, read_arm, run_arm
from rlbench.loop.guards import ALERTS, first_guards, remove_guard, short_names
from rlbench.runtime.diagnosis import diagnose
from rlbench.runtime.live_view import LiveView
from rlbench.runtime.signs import Change, Exams, RunHistory, Unused
from rlbench.views.bottleneck import describe_turn
from rlbench.views.light import run_light
from rlbench.views.report import write_report
from rlbench.views.report_tables import preflight_in_words
from rlbench.views.run_summary import read_summary
from rlbench.views.why import why
from rlbench.workbench.supervisor import note_diagnosis

SETTINGS = {
    "learning_rate": 5e-4,
    "staleness": 1,
    "correction": {"name": "tis"},
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "kl": {"name": "none"},
    "kl_weight": 0.01,
    "entropy_weight": 0.0,
    "batch": 256,
    "group": 16,
}


def course(exams: dict, settings: dict | None = None, changes=(), **figures) -> RunHistory:
    """A course of 20 versions: figures are lists of corners, between which they are straight;
    exams by version, of 512 tasks."""
    versions = np.arange(1, 21)
    healthy = {
        "entropy": [0.4, 0.05],
        "grad_norm": [0.5, 0.4],
        "kl_sampler": [0.001],
        "ess": [0.99],
        "logprob_diff_mean": [1e-6],
        "lag_max": [1],
        "solve_rate": [0.3, 0.6],
        "reward_mean": [0.3, 0.6],
        "length_mean": [10, 25],
        "truncated": [0.0],
        "all_pass": [0.0, 0.3],
        "all_fail": [0.05],
    }

    def column(corners):
        return np.interp(
            np.linspace(0, 1, 20),
            np.linspace(0, 1, max(2, len(corners))),
            corners * 2 if len(corners) == 1 else corners,
        )

    mean, when = np.array(list(exams.values())), np.array(list(exams))
    half = 2 * np.sqrt(np.maximum(mean * (1 - mean), 0.002) / 512)
    return RunHistory(
        versions,
        {name: column(corners) for name, corners in {**healthy, **figures}.items()},
        Exams(when, mean, mean - half, mean + half),
        {**SETTINGS, **(settings or {})},
        changes,
    )


def until(whole: RunHistory, version: int) -> RunHistory:
    "What was known of a course at a version."
    seen = whole.exams.versions <= version
    exams = Exams(
        *(values[seen] for values in (whole.exams.versions, whole.exams.mean, whole.exams.low, whole.exams.high))
    )
    return replace(
        whole,
        versions=whole.versions[:version],
        figures={name: values[:version] for name, values in whole.figures.items()},
        exams=exams,
    )


LEARNS, FALLS = {0: 0.26, 5: 0.5, 10: 0.66, 15: 0.8, 20: 0.9}, {0: 0.26, 5: 0.5, 10: 0.3, 15: 0.1, 20: 0.02}
STANDS = {0: 0.26, 5: 0.27, 10: 0.25, 15: 0.26, 20: 0.27}
NAMED = {
    "learning rate": course(
        {0: 0.26, 5: 0.0, 10: 0.0},
        {"learning_rate": 2e-2, "correction": {"name": "none"}},
        kl_sampler=[0.0, 1.5, 1.0],
        grad_norm=[0.5, 6.0],
        solve_rate=[0.3, 0.0],
        reward_mean=[0.3, 0.0],
    ),
    "staleness": course(
        FALLS,
        {"staleness": 8, "correction": {"name": "none"}},
        kl_sampler=[0.0, 0.25, 0.35, 0.3],
        lag_max=[2, 3, 4, 5],
        ess=[1.0, 0.7, 0.3],
        solve_rate=[0.3, 0.7, 0.1],
        reward_mean=[0.3, 0.7, 0.1],
    ),
    "entropy": course(
        FALLS,
        {"learning_rate": 3e-3},
        entropy=[0.3, 0.02, 0.02, 0.03, 0.03],
        solve_rate=[0.3, 0.8, 0.2],
        reward_mean=[0.3, 0.8, 0.2],
        lag_max=[0],
    ),
    "length": course(
        FALLS,
        length_mean=[10, 20, 40, 64],
        truncated=[0, 0.0, 0.4, 0.9],
        reward_mean=[0.16, 0.31, 0.625, 1.0],
        solve_rate=[0.3, 0.5, 0.0],
    ),
    "reward hacking": course(
        FALLS, reward_mean=[0.1, 0.15, 0.5, 0.9], solve_rate=[0.3, 0.6, 0.0], length_mean=[10, 30, 28, 30]
    ),
    "inverted reward": course({0: 0.26, 5: 0.08, 10: 0.01}, reward_mean=[0.7, 0.86, 1.0], solve_rate=[0.3, 0.14, 0.0]),
    "mismatch": course(
        FALLS,
        {"staleness": 0},
        lag_max=[0],
        logprob_diff_mean=[0.2],
        solve_rate=[0.3, 0.5, 0.1],
        reward_mean=[0.3, 0.5, 0.1],
    ),
    "sampling": course(STANDS, {"top_p": 0.2}, all_pass=[0.2], all_fail=[0.75], solve_rate=[0.2]),
    "temperature": course(STANDS, {"temperature": 3.0}, all_fail=[0.8], solve_rate=[0.02], all_pass=[0.0]),
    "too hard": course({0: 0.0, 10: 0.0, 20: 0.0}, all_fail=[0.95], solve_rate=[0.01], all_pass=[0.0]),
    "KL penalty": course(
        STANDS,
        {"kl": {"name": "k3"}, "kl_weight": 20.0},
        solve_rate=[0.35],
        reward_mean=[0.35],
        entropy=[0.4],
        length_mean=[11],
    ),
    "saturated": course({0: 0.97, 10: 0.98, 20: 0.98}, all_pass=[0.9], all_fail=[0.0], solve_rate=[0.97]),
}
VERDICT = {
    "sampling": "stalled",
    "temperature": "stalled",
    "too hard": "stalled",
    "KL penalty": "stalled",
    "saturated": "saturated",
}


@pytest.mark.parametrize("cause", NAMED)
def test_a_cause_is_named_with_what_to_do(cause):
    found = diagnose(NAMED[cause])
    assert (found.verdict, found.cause) == (VERDICT.get(cause, "collapsing"), cause), found.text
    assert found.remedy and found.text.endswith(".") and found.reason


@pytest.mark.parametrize(
    "figures",
    [
        {},
        {"entropy": [0.4, 0.02]},
        {"length_mean": [10, 40]},
        {"all_pass": [0.0, 0.6]},
        {"kl_sampler": [0.0, 0.03], "lag_max": [4], "ess": [1.0, 0.9]},
        {"grad_norm": [0.5, 1.2]},
    ],
    ids=["plain", "entropy falls", "longer", "solved groups", "stale", "gradient"],
)
def test_a_run_that_learns_raises_no_alarm_at_any_version(figures):
    "Entropy that falls, responses that grow and groups that are solved belong to learning."
    whole = course(LEARNS, **figures)
    said = {diagnose(until(whole, version)).verdict for version in range(1, 21)}
    assert said == {"early", "learning"}


def test_the_first_sign_comes_with_its_version_and_the_change_before_it():
    changes = (Change(2, "temperature", "0.9"), Change(4, "learning_rate", "0.02"), Change(15, "band", "[0.1, 0.9]"))
    found = diagnose(replace(NAMED["staleness"], changes=changes))
    assert found.signs[0].figure == "kl_sampler" and found.since == found.signs[0].version < 10
    assert found.change == changes[1] and "learning_rate = 0.02 at version 4" in found.text
    assert found.best == 0 or found.best == 5
    assert (
        "fork at version" in found.text and diagnose(until(NAMED["staleness"], found.since + 3)).verdict == "collapsing"
    )


def test_a_fall_that_was_made_good_is_forgotten():
    again = {**FALLS, 20: 0.55}
    assert (
        diagnose(course(again, solve_rate=[0.3, 0.5, 0.1, 0.5], reward_mean=[0.3, 0.5, 0.1, 0.5])).verdict == "learning"
    )


def test_the_light_and_why_say_it_first_and_a_healthy_run_keeps_its_rate(tmp_path):
    healthy = fake_run(tmp_path, "healthy")
    assert why(healthy).limit == "finished"
    snapshot = LiveView(fake_run(tmp_path, "live", batches=31, state="running", closed=False)).poll()
    snapshot = replace(snapshot, alive_at=snapshot.now)
    broken = replace(snapshot, steps={**snapshot.steps, "kl_sampler": np.full(len(snapshot.steps["version"]), 0.8)})
    assert (
        run_light(snapshot).word in ("generation-bound", "balanced", "trainer-bound")
        and run_light(broken).word == "collapsing"
    )
    assert "nats" in run_light(broken).reason and run_light(broken).helps.startswith("Pause, and fork at version")


def test_a_run_that_trains_nothing_is_diagnosed_from_the_groups_that_were_filtered():
    empty = course({0: 0.0})
    figures = {name: values[:0] for name, values in empty.figures.items()}
    empty = replace(empty, versions=empty.versions[:0], figures=figures)
    assert diagnose(empty).verdict == "early"
    found = diagnose(replace(empty, unused=Unused(20.0, 0.0, 1.0)))
    assert (found.verdict, found.cause) == ("stalled", "too hard") and "SFT first" in found.remedy
    assert diagnose(replace(empty, unused=Unused(20.0, 1.0, 0.0))).verdict == "saturated"
    assert diagnose(replace(empty, unused=Unused(1.0, 0.0, 1.0))).verdict == "early"


def test_a_cause_that_only_slows_a_run_is_said_beside_learning():
    narrow = course(LEARNS, {"top_p": 0.2}, all_pass=[0.2], all_fail=[0.6])
    half = course(LEARNS, {"correction": {"name": "none"}}, lag_max=[0], logprob_diff_mean=[0.002])
    assert [(d.verdict, d.cause) for d in map(diagnose, (narrow, half))] == [
        ("learning", "sampling"),
        ("learning", "mismatch"),
    ]
    assert diagnose(replace(half, settings=SETTINGS)).cause == ""  # it is corrected for


def test_a_reward_turned_around_is_named_before_the_policy_gets_worse():
    shaken = np.linspace(0, 1, 20) % 0.3
    wrong = course({0: 0.26}, solve_rate=[0.3])
    figures = {**wrong.figures, "solve_rate": 0.3 + 0.1 * shaken, "reward_mean": 0.7 - 0.1 * shaken}
    found = diagnose(until(replace(wrong, figures=figures), 4))
    assert (found.verdict, found.cause) == ("collapsing", "inverted reward") and "version 0" in found.remedy


def test_a_run_that_is_over_is_not_to_be_paused():
    live = NAMED["staleness"]
    assert diagnose(live).remedy.startswith("Pause, and fork at version")
    assert diagnose(replace(live, ended=True)).remedy.startswith("Fork at version")


def add_collapse(folder):
    "Six more versions of a made-up run, in which the policy moves far and solves nothing any more."
    ledger = Ledger(folder, attempt=1)
    rows = [{**step_row(v, 0.9, np.random.default_rng(v), 1.5), "kl_sampler": 0.8, "lag_max": 1} for v in range(61, 67)]
    ledger.extend("steps", rows)
    rate = {"avg": 0.01, "avg_se": 0.01, "avg_low": 0.0, "avg_high": 0.03}
    ledger.extend(
        "evals", [{"at": 99.0, "eval": "held_out", "version": 66, "tasks": 512, "k": 1, "temperature": 1.0, **rate}]
    )
    ledger.close()


def test_the_end_of_a_failed_run_repeats_the_diagnosis(tmp_path, capfd):
    """In the reason of its end, in run.log, in what `why` and the report say: once each.

    A run that learned until it failed says nothing."""
    folder = fake_run(tmp_path, "collapsed", state="failed", reason="320 groups in a row were left no reward")
    note_diagnosis(folder)
    assert read_status(folder).reason == "320 groups in a row were left no reward" and not capfd.readouterr().err
    add_collapse(folder)
    assert run_light(LiveView(folder).poll()).word == "failed" and run_light(LiveView(folder).poll()).reason.startswith(
        "collapsing: held-out"
    )
    note_diagnosis(folder)
    reason = read_status(folder).reason
    assert (
        reason.startswith("320 groups in a row were left no reward. This run collapses: held-out")
        and "learning_rate from 0.0005" in reason
    )
    assert "diagnosis: This run collapses" in capfd.readouterr().err
    assert str(why(folder)).count("This run collapses") == 1 and ".." not in str(why(folder))
    assert read_summary(folder).diagnosis in reason and "This run collapses" in write_report(folder).read_text(
        encoding="utf-8"
    )


def test_a_run_that_solves_nothing_is_told_so_from_the_preflight():
    row = {"avg": 0.0, "tasks": 48, "levels": [], "level_rates": [], "zero_advantage": 1.0}
    assert "SFT first" in preflight_in_words(row, (0.2, 0.8), 16)
    assert "SFT" not in preflight_in_words({**row, "avg": 0.1}, (0.2, 0.8), 16)


def test_what_helps_names_the_end_and_the_value():
    assert describe_turn("lower", "band", (0.2, 0.8)) == "lower the band's low end from 0.2 to 0.1"
    assert describe_turn("raise", "band", (0.2, 0.25)) == "raise the band's low end from 0.2 to 0.23"
    assert describe_turn("lower", "band", (0.0, 0.8)) == "lower the band's high end from 0.8 to 0.4"
    assert describe_turn("raise", "staleness", 0) == "raise staleness from 0 to 1"
    assert describe_turn("lower", "oversample", 0.5) == "lower oversample from 0.5 to 0.25"


def test_guards_have_short_names():
    watched = first_guards(ALERTS, [("grad_norm > 100", "stop")])
    names = short_names(watched)
    assert list(names.values())[:4] == ["loss", "grad_norm", "ess", "kl_sampler"] and names["guard-1"] == "grad_norm-3"
    kept = remove_guard(watched, "grad_norm-3")
    assert [guard.id for guard in watched if guard not in kept] == ["guard-1"]


def test_the_recorded_runs_are_diagnosed_as_measured():
    """Twelve faulty runs and twelve healthy ones, as `rlbench bench diagnosis` recorded them:
    judged again, without a run."""
    told = read_json(files("rlbench.data") / "measured" / "diagnosis_courses.json")
    arms = [read_arm(arm) for arm in told]
    again = judge_arms(arms, {})
    assert {arm.name for arm in arms} == {*FAULTY, *HEALTHY}
    assert again.named >= 11 and again.late_versions <= 3 and again.false_alarms == 0
    assert read_arm(json.loads(json.dumps(plain_arm(arms[0])))).course.figures.keys() == arms[0].course.figures.keys()


def test_a_finished_arm_of_the_bench_is_read_and_an_unknown_one_is_refused(tmp_path):
    told = read_json(files("rlbench.data") / "measured" / "diagnosis_courses.json")
    (tmp_path / "preset-1.json").write_text(json.dumps(next(arm for arm in told if arm["name"] == "preset")))
    assert len(run_arm("preset", 1, tmp_path).course.versions) == 15 and not (tmp_path / "runs").exists()
    assert bench_diagnosis(tmp_path, 0, ("preset",)).healthy == 1
    with pytest.raises(ValueError, match="not an arm"):
        bench_diagnosis(tmp_path, only=("presett",))

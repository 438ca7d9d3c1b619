"""The verdict on learning: courses as real runs of the embedded policy have taken them, and what is said at each version."""

from dataclasses import replace

import numpy as np
import pytest
from fake_run import fake_run

from rlbench.cards import light
from rlbench.diagnosis import Change, Course, Exams, diagnose
from rlbench.view import View
from rlbench.why import why

SETTINGS = {"learning_rate": 5e-4, "staleness": 1, "correction": {"name": "tis"}, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "kl": {"name": "none"}, "kl_weight": 0.01, "batch": 256, "group": 16}


def course(exams: dict, settings: dict | None = None, changes=(), **figures) -> Course:
    "A course of 20 versions: figures are lists of corners, between which they are straight; exams by version, of 512 tasks."
    versions = np.arange(1, 21)
    healthy = {"entropy": [0.4, 0.05], "grad_norm": [0.5, 0.4], "kl_sampler": [0.001], "ess": [0.99], "logprob_diff_mean": [1e-6], "lag_max": [1], "solve_rate": [0.3, 0.6],
               "reward_mean": [0.3, 0.6], "length_mean": [10, 25], "truncated": [0.0], "all_pass": [0.0, 0.3], "all_fail": [0.05]}
    column = lambda corners: np.interp(np.linspace(0, 1, 20), np.linspace(0, 1, max(2, len(corners))), corners * 2 if len(corners) == 1 else corners)
    mean, when = np.array(list(exams.values())), np.array(list(exams))
    half = 2 * np.sqrt(np.maximum(mean * (1 - mean), 0.002) / 512)
    return Course(versions, {name: column(corners) for name, corners in {**healthy, **figures}.items()}, Exams(when, mean, mean - half, mean + half), {**SETTINGS, **(settings or {})}, changes)


def until(whole: Course, version: int) -> Course:
    "What was known of a course at a version."
    seen = whole.exams.versions <= version
    exams = Exams(*(values[seen] for values in (whole.exams.versions, whole.exams.mean, whole.exams.low, whole.exams.high)))
    return replace(whole, versions=whole.versions[:version], figures={name: values[:version] for name, values in whole.figures.items()}, exams=exams)


LEARNS, FALLS = {0: 0.26, 5: 0.5, 10: 0.66, 15: 0.8, 20: 0.9}, {0: 0.26, 5: 0.5, 10: 0.3, 15: 0.1, 20: 0.02}
STANDS = {0: 0.26, 5: 0.27, 10: 0.25, 15: 0.26, 20: 0.27}
NAMED = {
    "learning rate": course({0: 0.26, 5: 0.0, 10: 0.0}, {"learning_rate": 2e-2, "correction": {"name": "none"}}, kl_sampler=[0.0, 1.5, 1.0], grad_norm=[0.5, 6.0], solve_rate=[0.3, 0.0], reward_mean=[0.3, 0.0]),
    "staleness": course(FALLS, {"staleness": 8, "correction": {"name": "none"}}, kl_sampler=[0.0, 0.25, 0.35, 0.3], lag_max=[2, 3, 4, 5], ess=[1.0, 0.7, 0.3], solve_rate=[0.3, 0.7, 0.1], reward_mean=[0.3, 0.7, 0.1]),
    "entropy": course(FALLS, {"learning_rate": 3e-3}, entropy=[0.3, 0.02, 0.02, 0.03, 0.03], solve_rate=[0.3, 0.8, 0.2], reward_mean=[0.3, 0.8, 0.2], lag_max=[0]),
    "length": course(FALLS, length_mean=[10, 20, 40, 64], truncated=[0, 0.0, 0.4, 0.9], reward_mean=[0.16, 0.31, 0.625, 1.0], solve_rate=[0.3, 0.5, 0.0]),
    "reward hacking": course(FALLS, reward_mean=[0.1, 0.15, 0.5, 0.9], solve_rate=[0.3, 0.6, 0.0], length_mean=[10, 30, 28, 30]),
    "inverted reward": course({0: 0.26, 5: 0.08, 10: 0.01}, reward_mean=[0.7, 0.86, 1.0], solve_rate=[0.3, 0.14, 0.0]),
    "mismatch": course(FALLS, {"staleness": 0}, lag_max=[0], logprob_diff_mean=[0.2], solve_rate=[0.3, 0.5, 0.1], reward_mean=[0.3, 0.5, 0.1]),
    "sampling": course(STANDS, {"top_p": 0.2}, all_pass=[0.2], all_fail=[0.75], solve_rate=[0.2]),
    "temperature": course(STANDS, {"temperature": 3.0}, all_fail=[0.8], solve_rate=[0.02], all_pass=[0.0]),
    "too hard": course({0: 0.0, 10: 0.0, 20: 0.0}, all_fail=[0.95], solve_rate=[0.01], all_pass=[0.0]),
    "KL penalty": course(STANDS, {"kl": {"name": "k3"}, "kl_weight": 20.0}, solve_rate=[0.35], reward_mean=[0.35], entropy=[0.4], length_mean=[11]),
    "saturated": course({0: 0.97, 10: 0.98, 20: 0.98}, all_pass=[0.9], all_fail=[0.0], solve_rate=[0.97]),
}
VERDICT = {"sampling": "stalled", "temperature": "stalled", "too hard": "stalled", "KL penalty": "stalled", "saturated": "saturated"}


@pytest.mark.parametrize("cause", NAMED)
def test_a_cause_is_named_with_what_to_do(cause):
    found = diagnose(NAMED[cause])
    assert (found.verdict, found.cause) == (VERDICT.get(cause, "collapsing"), cause), found.text
    assert found.remedy and found.text.endswith(".") and found.reason


@pytest.mark.parametrize("figures", [{}, {"entropy": [0.4, 0.02]}, {"length_mean": [10, 40]}, {"all_pass": [0.0, 0.6]}, {"kl_sampler": [0.0, 0.03], "lag_max": [4], "ess": [1.0, 0.9]}, {"grad_norm": [0.5, 1.2]}],
                         ids=["plain", "entropy falls", "longer", "solved groups", "stale", "gradient"])
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
    assert "fork at version" in found.text and diagnose(until(NAMED["staleness"], found.since + 3)).verdict == "collapsing"


def test_a_fall_that_was_made_good_is_forgotten():
    again = {**FALLS, 20: 0.55}
    assert diagnose(course(again, solve_rate=[0.3, 0.5, 0.1, 0.5], reward_mean=[0.3, 0.5, 0.1, 0.5])).verdict == "learning"


def test_the_light_and_why_say_it_first_and_a_healthy_run_keeps_its_rate(tmp_path):
    healthy = fake_run(tmp_path, "healthy")
    assert why(healthy).limit == "finished"
    snapshot = View(fake_run(tmp_path, "live", batches=31, state="running", closed=False)).poll()
    snapshot = replace(snapshot, alive_at=snapshot.now)
    broken = replace(snapshot, steps={**snapshot.steps, "kl_sampler": np.full(len(snapshot.steps["version"]), 0.8)})
    assert light(snapshot).word in ("generation-bound", "balanced", "trainer-bound") and light(broken).word == "collapsing"
    assert "nats" in light(broken).reason and light(broken).helps.startswith("Pause, and fork at version")

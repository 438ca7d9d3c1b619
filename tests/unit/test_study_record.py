"""The form of a study: its verdict comes out each way, by the numbers alone; runs are kept; records and pages agree."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from rlbench.studies.study_recipe import StudyRecipe, StudyRun, StudyRuns, agreements, find_recipe, make_study
from rlbench.studies.study_record import (
    EXPECTED,
    VERDICTS,
    ClaimSource,
    ClaimTest,
    StudyRecord,
    check_stored,
    claim_test,
    deciding_test,
    exact_test,
    is_null,
    keep_study,
    part_states,
    stored_study,
    study_row,
    study_verdict,
)

UP, DOWN, AROUND = (0.10, 0.12, 0.09, 0.11, 0.13), (-0.10, -0.12, -0.09, -0.11, -0.13), (0.01, -0.02, 0.0, 0.02, -0.01)
WIDE = (0.3, -0.2, 0.1, 0.25, -0.15)


def part(
    points=(), expected: str = "more", margin: float = 0.0, exact: float | None = None, error: float = 0.0
) -> ClaimTest:
    "A made-up comparison."
    return ClaimTest("A", "B", expected, "solve rate", tuple(points), exact, margin, error)


def record_of(*tests: ClaimTest, null: tuple[ClaimTest, ...] = ()) -> StudyRecord:
    "A made-up record."
    return StudyRecord("made_up", "?", "A claim.", ClaimSource("None", 2026), "", "", tests, null, "", "")


CASES = {
    "more and it is": ((part(UP),), "holds"),
    "more and it is less": ((part(DOWN),), "holds not"),
    "more and nobody knows": ((part(AROUND),), "cannot be told"),
    "more by a tenth, which would have been seen": ((part(AROUND, margin=0.1),), "holds not"),
    "more by a tenth, but seeds scatter": ((part(WIDE, margin=0.1),), "cannot be told"),
    "less and it is": ((part(DOWN, "less"),), "holds"),
    "less and it is more": ((part(UP, "less"),), "holds not"),
    "less by a tenth, which would have been seen": ((part(AROUND, "less", 0.1),), "holds not"),
    "equal within the margin": ((part(AROUND, "equal", 0.05),), "holds"),
    "equal, but beyond the margin": ((part(UP, "equal", 0.05),), "holds not"),
    "equal, but beyond it below": ((part(DOWN, "equal", 0.05),), "holds not"),
    "equal and nobody knows": ((part(WIDE, "equal", 0.05),), "cannot be told"),
    "one seed": ((part((0.4,)),), "cannot be told"),
    "exact, as claimed": ((part(exact=0.1),), "holds"),
    "exact, the other sign": ((part(exact=-0.1),), "holds not"),
    "exact, no difference": ((part(exact=0.0),), "holds not"),
    "exact, less than counts": ((part(exact=0.01, margin=0.1),), "holds not"),
    "exact and less": ((part(exact=-0.1, expected="less"),), "holds"),
    "exact and equal": ((part(exact=0.0, expected="equal"),), "holds"),
    "exact and not equal": ((part(exact=0.2, expected="equal", margin=0.1),), "holds not"),
    "one policy on many tasks, and it is": ((part(exact=0.1, error=0.02),), "holds"),
    "one policy on many tasks, the other sign": ((part(exact=-0.1, error=0.02),), "holds not"),
    "one policy on too few tasks": ((part(exact=0.1, error=0.1),), "cannot be told"),
    "one policy, equal": ((part(exact=0.001, error=0.01, expected="equal", margin=0.05),), "holds"),
    "all parts": ((part(UP), part(exact=0.1)), "holds"),
    "one part refuted": ((part(UP), part(DOWN)), "holds not"),
    "one part open": ((part(UP), part(AROUND)), "cannot be told"),
    "nothing compared": ((), "cannot be told"),
}


@pytest.mark.parametrize("case", CASES)
def test_verdicts_of_made_up_records(case):
    "Each way, for each expectation, sampled and exact."
    tests, word = CASES[case]
    assert study_verdict(record_of(*tests)).word == word


def test_made_up_records_come_out_each_way():
    "The table above has every verdict with every expectation."
    found = {(tests[0].expected, word) for tests, word in CASES.values() if len(tests) == 1}
    assert {word for _, word in found} == set(VERDICTS) and {expected for expected, _ in found} == set(EXPECTED)


@pytest.mark.parametrize("null", [part(UP, "equal"), part(exact=0.2, expected="equal", margin=0.1)])
def test_a_failed_null_arm_tells_nothing(null):
    "Whatever the other arms show."
    for tests in ((part(UP),), (part(DOWN),), (part(exact=1.0),)):
        verdict = study_verdict(record_of(*tests, null=(null,)))
        assert verdict.word == "cannot be told" and "null arm" in verdict.reason and not is_null(null)


def test_a_null_arm_that_holds_changes_nothing():
    "Noise around 0, exact equality, and equal pairs."
    nulls = (part(AROUND, "equal"), part((0.0, 0.0), "equal"), part(exact=0.0, expected="equal"))
    assert study_verdict(record_of(part(UP), null=nulls)).word == "holds"


def test_a_reason_names_the_measure_where_two_comparisons_have_the_same_arms():
    "And only there."
    other = replace(part(DOWN), measure="pass@16")
    assert study_verdict(record_of(part(UP), other)).reason == "refuted: A against B in pass@16"
    assert study_verdict(record_of(part(DOWN))).reason == "refuted: A against B"


def test_holm_counts_the_parts():
    "A difference that would be told alone is not told among twenty."
    weak = part((0.10, 0.02, 0.09, 0.03, 0.12))
    assert part_states([weak]) == ("shown",)
    assert "open" in part_states([weak] * 20)


def test_the_deciding_comparison_is_refuted_or_open_before_it_is_the_headline():
    up, down, unclear = part(UP), part(DOWN), part(WIDE)
    assert deciding_test(record_of(up, unclear, down)) is down
    assert deciding_test(record_of(up, unclear)) is unclear
    assert deciding_test(record_of(up, part(UP))) is up
    row = study_row(record_of(up, down))
    assert row["result"] == down.mean and row["interval"] == list(down.interval)


@pytest.mark.parametrize("expected,truth", [("more", 0.0), ("less", 0.0), ("equal", 0.1)])
def test_a_false_claim_is_rarely_called_true(expected, truth):
    "Where the truth is at the edge of the claim, at most one in twenty made-up studies shows it."
    generator = np.random.default_rng(7)
    margin = 0.1 if expected == "equal" else 0.0
    shown = 0
    for _ in range(2000):
        skewed = generator.lognormal(0, 0.5, 6) - np.exp(0.125)
        points = 0.3 * skewed + truth
        shown += part_states([part(points, expected, margin)]) == ("shown",)
    assert shown / 2000 < 0.065  # an interval promises 94 of 100


@pytest.mark.parametrize("truth", [0.0, 0.1])
def test_a_true_claim_is_rarely_refuted(truth):
    "Where the truth is the smallest difference that counts, few made-up studies refute it."
    generator = np.random.default_rng(8)
    refuted = 0
    for _ in range(2000):
        points = generator.normal(truth, 0.2, 6)
        refuted += part_states([part(points, margin=truth)]) == ("refuted",)
    assert refuted / 2000 < 0.05


@pytest.mark.parametrize(
    "wrong,says",
    [
        (dict(expected="better", points=UP), "expected"),
        (dict(points=()), "points"),
        (dict(points=UP, exact=0.1), "points"),
        (dict(points=(0.1, float("nan"))), "finite"),
        (dict(exact=float("inf")), "finite"),
        (dict(points=UP, margin=-0.1), "margin"),
        (dict(points=UP, error=0.1), "error"),
    ],
)
def test_what_a_comparison_refuses(wrong, says):
    "Each by the name of the field."
    with pytest.raises(ValueError, match=says):
        part(**wrong)


def test_pairs_are_of_seeds_that_both_arms_have():
    "Seeds without a number on either side make no pair; a number in place of an arm is compared with all seeds."
    found = claim_test("A", "B", {0: 0.5, 1: 0.75, 2: float("nan")}, {0: 0.25, 1: 0.25, 3: 1.0}, "more", "rate")
    assert found.points == (0.25, 0.5)
    assert claim_test("A", "0.5", {0: 0.5, 1: 0.75}, 0.5, "more", "rate").points == (0.0, 0.25)


def test_records_survive_their_file(tmp_path):
    "Written, read, compared; and a page that says something else is told which field."
    record = record_of(part(UP), part(exact=0.1), null=(part(AROUND, "equal"),))
    keep_study(record, tmp_path)
    assert stored_study("made_up", tmp_path) == record and check_stored(record, tmp_path) == record
    nearly = replace(record, tests=(part([point * (1 + 1e-6) for point in UP]), part(exact=0.1)))
    assert check_stored(nearly, tmp_path) == nearly
    with pytest.raises(ValueError, match="tests"):
        check_stored(replace(record, tests=(part(DOWN), part(exact=0.1))), tmp_path)
    with pytest.raises(ValueError, match="no record"):
        stored_study("nothing", tmp_path)


def test_a_row_says_what_the_record_says():
    "Its result and interval are those of the comparison that decides; the verdict is derived."
    record = record_of(part(UP), part(DOWN, "less"), null=(part(AROUND, "equal"),))
    row = study_row(record)
    assert row["seeds"] == 5 and row["verdict"] == "holds" and row["interval"][0] < row["result"] < row["interval"][1]
    assert study_row(record_of(exact_test("A", "B", 0.1, "more", "x")))["seeds"] == 0
    json.dumps(row)


def recipe(calls: list, fails: int = 0, **settings) -> StudyRecipe:
    "A recipe of made-up numbers, whose run number `fails` raises."

    def run(arm: str, seed: int) -> StudyRun:
        calls.append((arm, seed))
        if len(calls) == fails:
            raise KeyboardInterrupt
        return StudyRun(arm, seed, {"after": 0.1 * seed + (arm == "A"), "none": None}, {"served": (None, 0.5, 1.0)})

    def follow(runs: StudyRuns) -> StudyRecord:
        after = {arm: runs.by_seed(arm, "after") for arm in "AB"}
        return record_of(claim_test("A", "B", after["A"], after["B"], "more", "rate"))

    return StudyRecipe("made_up", ("A", "B"), run, follow, settings, 3)


def test_an_interrupted_study_goes_on(tmp_path):
    "Finished runs are kept, other settings are other runs, and progress tells the time left."
    calls, lines = [], []
    with pytest.raises(KeyboardInterrupt):
        make_study(recipe(calls, fails=4), tmp_path)
    again = []
    runs = make_study(recipe(again), tmp_path, say=lines.append)
    assert len(again) == 3 and len(runs.runs) == 6 and runs.arms == ("A", "B")
    assert (
        lines[0].startswith("made_up: 1 of 6, A, seed 0") and "left" in lines[4] and "left" not in lines[0] + lines[5]
    )
    other = []
    assert len(make_study(recipe(other, steps=2), tmp_path).runs) == 6 and len(other) == 6
    assert len(make_study(recipe([]), tmp_path, seeds=2).runs) == 4
    with pytest.raises(ValueError, match="seeds"):
        make_study(recipe([]), tmp_path, seeds=-1)


def test_numbers_of_runs(tmp_path):
    "By seed, by name or function; an arm that is not there is named."
    runs = make_study(recipe([]), tmp_path)
    assert runs.by_seed("A", "after") == pytest.approx({0: 1.0, 1: 1.1, 2: 1.2})
    assert runs.by_seed("A", lambda run: run.last_mean("served", 2)) == {0: 0.75, 1: 0.75, 2: 0.75}
    assert all(np.isnan(value) for value in runs.by_seed("B", "none").values())
    with pytest.raises(ValueError, match="'C'"):
        runs.by_seed("C", "after")


def test_a_study_made_again_is_held_against_the_stored_one():
    "Inside the stored interval it agrees; outside it does not; other arms are refused."
    stored = record_of(part(UP))
    assert agreements(record_of(part((0.11, 0.12))), stored)[0].agrees
    assert not agreements(record_of(part(DOWN)), stored)[0].agrees
    assert not agreements(record_of(part(exact=0.2)), record_of(part(exact=0.1)))[0].agrees
    with pytest.raises(ValueError, match="other arms"):
        agreements(record_of(replace(part(UP), arm="C")), stored)
    with pytest.raises(ValueError, match="no recipe"):
        find_recipe("no_such_study")


def test_plain_data():
    "A record is data all the way down."
    json.dumps(asdict(record_of(part(UP), null=(part(exact=0.0, expected="equal"),))))

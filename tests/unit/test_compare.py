"""What a comparison of runs must not conclude: other exams, and which parts of the digests differ."""

from dataclasses import replace

import polars as pl
import pytest
from inline import inline_run

from rlbench.views.comparison import compare, end_rows
from rlbench.views.exam import config_at, exam_differences, exam_of
from rlbench.views.run_data import read_run_data
from rlbench.workbench.ablation import check_arm, note_exam, with_base_exam
from rlbench.workbench.ablation_result import Ablation, Arm

PLAIN = {"group": 4, "batch": 16, "steps": 2, "concurrency": 16, "preflight": 0, "eval": [{"count": 8, "every": 1}]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_tokens": 48}, "up to 48 tokens"),
        ({"verifier": "math"}, "verifier math"),
        ({"max_turns": 4}, "up to 4 turns"),
        ({"observation_tokens": 32}, ""),
        ({"environment": {"name": "scripted", "low": 1, "high": 1}}, "environment scripted"),
        ({"eval": [{"count": 8, "every": 1, "temperature": 0.5}]}, "temperature 0.5"),
        ({"eval": [{"count": 8, "every": 1, "k": 2}]}, "2 responses each"),
        ({"tasks": "sums"}, "tasks of sums"),
    ],
)
def test_rates_of_two_exams_are_not_subtracted(tmp_path, change, said):
    "Whatever makes the exam another one: it is said, and no difference is given."
    base = PLAIN | (
        {"environment": {"name": "scripted", "low": 2, "high": 2}, "tasks": "chains"}
        if {"max_turns", "observation_tokens", "environment"} & set(change)
        else {}
    )
    inline_run(tmp_path, "base", base)
    inline_run(tmp_path, "other", base | change)
    told = compare("base", "other", runs=tmp_path)
    assert "The exams differ" in told.cautions[0] and said in told.cautions[0] and told.endings[1].difference is None


def test_rates_of_one_exam_are_subtracted(tmp_path):
    "What does not make the exam may differ."
    inline_run(tmp_path, "base", PLAIN)
    inline_run(tmp_path, "other", PLAIN | {"staleness": 1, "loss": "reinforce", "top_p": 0.9})
    told = compare("base", "other", runs=tmp_path)
    assert not told.cautions and told.endings[1].difference is not None


def test_an_exam_that_changes_on_the_way_is_said(tmp_path):
    "A command that changes what the exam is made of counts from its version on."
    driver = inline_run(tmp_path, "steered", PLAIN | {"steps": 4}, [(60, "max_tokens", 40, 0)])
    data = read_run_data(driver.folder)
    assert (exam_of(data, first=True).max_tokens, exam_of(data).max_tokens) == (64, 40)
    assert exam_differences(exam_of(data), exam_of(data, first=True)) == "max tokens 40 (not 64)"
    assert any(
        "The exam of steered changed while it ran: max tokens 40 (not 64)" in line
        for line in compare("steered", runs=tmp_path).cautions
    )


def test_an_exam_on_a_ramp_is_where_the_ramp_was(tmp_path):
    "Over four versions from 64 to 32 tokens: each evaluation has what was in force, and another command ends the ramp."
    driver = inline_run(tmp_path, "ramped", PLAIN | {"steps": 8, "alerts": False}, [(30, "max_tokens", 32, 4)])
    data = read_run_data(driver.folder)
    (since,) = data.commands["version"].to_list()
    known = [config_at(data, version)["max_tokens"] for version in range(9)]
    assert known[: since + 6] == ([64] * since + [64, 56, 48, 40, 32, 32])[:9]
    later = data.commands.with_columns(version=pl.lit(since + 2), over=pl.lit(0), value=pl.lit("20"))
    twice = replace(data, commands=pl.concat([data.commands, later], how="vertical_relaxed"))
    assert [config_at(twice, since + n)["max_tokens"] for n in range(4)] == [64, 56, 20, 20]


def test_every_exam_of_an_arm_is_compared():
    "A second exam that differs, one that is missing, and one that the base has not."
    held_out, probe = {"name": "held_out", "count": 8}, {"name": "probe", "count": 8}
    _, base = check_arm("tiny", Arm("base", {}), {"eval": [held_out, probe]})
    changes = {
        "same": [held_out, probe],
        "other": [held_out, probe | {"temperature": 0.5}],
        "fewer": [held_out],
        "more": [held_out, probe, {"name": "third", "count": 8}],
    }
    told = {
        name: note_exam(*check_arm("tiny", Arm(name, {"eval": tables}), {}), base).exam
        for name, tables in changes.items()
    }
    assert told == {
        "same": "",
        "other": "probe: temperature 0.5 (not 1)",
        "fewer": "probe: none",
        "more": "third: an exam that the base has not",
    }
    assert (
        note_exam(*check_arm("tiny", Arm("tokens", {"max_tokens": 96}), {"eval": [held_out, probe]}), base).exam
        == "max tokens 96 (not 64)"
    )


@pytest.mark.slow
def test_a_comparison_says_which_part_of_the_digest_differs(tmp_path):
    "Scripted runs have no weights; an evaluation at another temperature changes nothing else."
    for name, change in {
        "one": {},
        "two": {},
        "cold": {"eval": [{"count": 8, "every": 1, "temperature": 0.5}]},
        "seed": {"seed": 1},
    }.items():
        inline_run(tmp_path, name, PLAIN | change)
    rows = dict(end_rows(compare("one", "two", "cold", "seed", runs=tmp_path).endings))
    assert rows["digest beside one"] == [
        "–",
        "events and evaluations equal",
        "evaluations differ",
        "events and evaluations differ",
    ]


def test_an_arm_sits_the_exam_of_the_base():
    "Trained on other tasks it is examined on the base's; another verifier or more tokens is said."
    first, config = check_arm("tiny", Arm("base", {}), {})
    made = {}
    for name, knobs in {
        "tasks": {"tasks": "sums"},
        "own": {"tasks": "sums", "eval": [{"count": 8}]},
        "tokens": {"max_tokens": 96},
        "verifier": {"verifier": "math"},
        "loss": {"loss": "gspo"},
    }.items():
        arm, theirs = check_arm("tiny", with_base_exam(Arm(name, knobs), config, {}), {})
        made[name] = note_exam(arm, theirs, config), theirs
    assert (
        made["tasks"][1].tasks["name"] == "sums"
        and [e.tasks for e in made["tasks"][1].eval] == [config.tasks]
        and made["tasks"][1].eval[0].count == config.eval[0].count
    )
    assert {name: arm.exam for name, (arm, _) in made.items() if name not in ("own",)} == {
        "tasks": "",
        "tokens": "max tokens 96 (not 64)",
        "verifier": "verifier math (not exact)",
        "loss": "",
    }
    assert made["own"][0].exam.startswith("tasks sums") and "count 8 (not 512)" in made["own"][0].exam
    told = Ablation((first, made["tokens"][0], made["loss"][0]), (), {"name": "held_out"}, True).cautions
    assert (
        "tokens sits another exam than the base: max tokens 96 (not 64). Its difference is one of exams, too." in told
    )

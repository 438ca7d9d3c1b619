"""The bench of slow tools, whole, at its smallest size."""

import json
from dataclasses import asdict

import pytest
from command_line import verb_facts

from rlbench.bench.environment import SETTING, TURNS, bench_environment
from rlbench.workbench.runs_table import runs

SMALL = {"concurrency": 16, "batch": 16}


def test_the_bench_and_its_figures_on_the_command_line(tmp_path, monkeypatch):
    """Three runs of real processes: slow tools, tools that answer at once, and slow ones at a bound of 2.

    The command line tells what is finished and does not run it again."""
    for knob, value in SMALL.items():
        monkeypatch.setitem(SETTING, knob, value)
    done = bench_environment(tmp_path / "b", steps=7)
    told = verb_facts(tmp_path, "bench", "environment", "--steps", 7, "--folder", "b")
    assert told == json.loads(json.dumps(asdict(done)))
    assert sorted(each.name for each in runs(tmp_path / "b" / "runs")) == ["late-1", "narrow-1", "prompt-1"]
    late, prompt, narrow = (told[side] for side in ("late", "prompt", "narrow"))
    assert [each["batches"] for each in (late, prompt, narrow)] == [1, 1, 3], (
        "the first batch is left out, and as many of the last as the bound and one"
    )
    for share, side in (("stall_share", late), ("stall_share_at_2", narrow)):
        assert (
            told[share] == side["stalled"] / side["seconds"] and 0 <= side["stalled"] <= side["seconds"]
        )  # not the idle time: a stretch that crosses the end of a batch is told when it ends, and here is one batch
    assert all(
        each["turns"] == TURNS and each["tool_calls"] == TURNS - 1 and each["tokens"] > 0
        for each in (late, prompt, narrow)
    )
    assert late["tool_seconds"] > 0.5 < narrow["tool_seconds"] and prompt["tool_seconds"] < late["tool_seconds"]
    assert told["throughput_kept"] > 0 < told["throughput_kept_at_2"]


def test_too_few_batches_are_refused_before_any_run(tmp_path):
    with pytest.raises(ValueError, match="steps: 6 is too few, .* give 7 or more"):
        bench_environment(tmp_path / "b", steps=6)
    assert not (tmp_path / "b").exists()

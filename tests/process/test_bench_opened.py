"""The bench of opening: a small run is made, opened in fresh processes, and made once."""

import pytest
from command_line import verb_facts

from rlbench.bench.harness import read_record
from rlbench.bench.opened import OpenedBench, bench_opened, made_run


def test_a_small_run_opens_within_the_bounds(tmp_path):
    "Through the command, as JSON; every rollout is in the index, and the cache is gone."
    facts = verb_facts(tmp_path, "bench", "open", "--steps", 3, "--rollouts", 16, "--folder", tmp_path / "b")
    result = read_record(OpenedBench, facts)
    assert result.rows == 48 and result.steps == 3 and result.first_cards_s > 0 < result.reopen_s
    assert 0 < result.peak_mb < 1000 and "first cards" in str(result)
    assert not (tmp_path / "b/cache").exists()


def test_a_made_run_is_used_again_if_it_has_the_size(tmp_path):
    run = made_run(tmp_path, 2, 8)
    stream = next(run.rglob("stream/*.jsonl"))
    before = stream.stat().st_mtime_ns
    assert made_run(tmp_path, 2, 8) == run and stream.stat().st_mtime_ns == before
    made_run(tmp_path, 1, 8)
    assert stream.stat().st_mtime_ns != before and len(stream.read_text().splitlines()) == 8


def test_counts_below_one_are_refused(tmp_path):
    with pytest.raises(ValueError, match="steps"):
        bench_opened(tmp_path / "b", steps=0)
    assert not (tmp_path / "b").exists()

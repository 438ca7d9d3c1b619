"""Processes of a live run are killed, or stopped for ever, at random moments."""

import random

import pytest
from scripted import WITHOUT_MODEL

from rlbench.bench.faults import MOMENTS, bench_faults, strike_run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "signal", "first", "settings"),
    [
        ("run process", "SIGSTOP", (("generator", "SIGKILL"),), {}),
        ("trainer", "SIGSTOP", (), WITHOUT_MODEL),
        ("supervisor", "SIGKILL", (), WITHOUT_MODEL),
    ],
    ids=str,
)
def test_books_close_and_nothing_is_left(tmp_path, target, signal, first, settings):
    "A generator that is killed first is outlived; the others end the run. One run has a model, whose policy is saved."
    blow = strike_run(0, target, signal, tmp_path, after=random.uniform(0, MOMENTS / 2), first=first, **settings)
    assert blow.problems == (), blow


def test_no_blows_are_refused():
    with pytest.raises(ValueError, match="times"):
        bench_faults(0)

"""Processes of a live run are killed, or stopped for ever, at random moments."""
import random

import pytest

from rlbench.faults import MOMENTS, bench_faults, strike


@pytest.mark.parametrize(("target", "signal"), [("generator", "SIGKILL"), ("trainer", "SIGSTOP"), ("run process", "SIGSTOP"), ("supervisor", "SIGKILL")])
def test_books_close_and_nothing_is_left(tmp_path, target, signal):
    blow = strike(0, target, signal, tmp_path, after=random.uniform(0, MOMENTS))
    assert blow.problems == (), blow


def test_no_blows_are_refused():
    with pytest.raises(ValueError, match="times"):
        bench_faults(0)

"""A real run whose processes are killed, and which is resumed each time."""

import pytest

from rlbench.bench.crashes import PHASES, SETTINGS, crash_run, untouched_digest


@pytest.mark.slow
def test_kill_9_in_three_phases(tmp_path):
    """A real synchronous run, its run process or all of its processes killed while it generates, trains,
    and publishes or saves, and resumed each time: nothing twice, nothing skipped, books closed,
    the digest of the run that nobody touched."""
    settings = SETTINGS | {"steps": 16, "batch": 16, "preflight": 0, "eval": []}
    done = crash_run(2, PHASES, tmp_path, untouched_digest(tmp_path, settings), settings, seed=25)
    assert (
        [(kill.meant, kill.victim) for kill in done.kills]
        == list(zip(PHASES, ("everything", "run process", "everything")))
        and done.state == "finished"
        and done.exact == done.books == ()
        and done.equal
    ), done

"""The same run twice."""

from collections.abc import Callable
from pathlib import Path

from inline import Told, check_books, drive, inline_run
from resumed_runs import a_run

from rlbench.base.ledger_reading import read_table

TINY = {
    "generator": "torch",
    "model": "tiny",
    "group": 4,
    "batch": 16,
    "steps": 4,
    "concurrency": 8,
    "max_tokens": 32,
    "preflight": 8,
    "preflight_k": 2,
    "learning_rate": 5e-4,
    "eval": [{"count": 8, "every": 2}],
    "filter": "none",
}


MEASURED = ("score_seconds",)  # the environment's own time is measured, whatever the clock


def twice(root: Path, table: dict, told: list = (), copies: Callable[[Told], dict] = lambda first: {}) -> Told:
    """Runs twice, in different folders, and compares all that was written. Returns the first driver. `copies`: at which
    events the second run's folder is copied where to, told from the first run."""
    first = inline_run(root, "a", table, told)
    second = a_run(root / "b", table, copies(first), told)
    drive(second)
    check_books(first)
    assert first.state.version == table["steps"] and first.state.digest and first.state.digest == second.state.digest
    for name in ("steps", "groups", "rollouts", "tokens", "evals"):
        one, two = (read_table(d.folder, name) for d in (first, second))
        assert one.drop(MEASURED, strict=False).equals(two.drop(MEASURED, strict=False)), name
    return first

"""The same run twice."""

from inline import Told, check_books, inline_run

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


def twice(root, table: dict, told: list = ()) -> Told:
    "Runs twice, in different folders, and compares all that was written. Returns the first driver."
    first, second = (inline_run(root, name, table, told) for name in ("a", "b"))
    check_books(first)
    assert first.state.version == table["steps"] and first.state.digest and first.state.digest == second.state.digest
    for name in ("steps", "groups", "rollouts", "tokens", "evals"):
        one, two = (read_table(d.folder, name) for d in (first, second))
        assert one.drop(MEASURED, strict=False).equals(two.drop(MEASURED, strict=False)), name
    return first

"""What the loop and its driver decide stays as it is written down, whatever they are rewritten into."""

import pytest
from stored_runs import stored_runs, told_of

STORED = stored_runs()


@pytest.mark.slow
@pytest.mark.parametrize(("run", "did"), STORED, ids=[run.name for run, _ in STORED])
def test_a_stored_run_does_what_it_did(run, did, tmp_path):
    "The same digest, the same number of events, the same rows of rollouts, batches and commands."
    assert told_of(run.driver(tmp_path)) == did


def test_all_kinds_of_runs_are_stored():
    assert len(STORED) >= 40 and {run.how for run, _ in STORED} == {"whole", "resumed", "forked", "replayed"}
    assert {run.table["stragglers"] for run, _ in STORED if "stragglers" in run.table} == {
        "in_flight",
        "wait",
        "oversample",
        "requeue",
        "partial",
    }

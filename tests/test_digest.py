"""The same run twice: equal digests, equal tables."""
import pytest
from inline import check_books, inline_run

from rlbench.ledger import read_table

SCRIPTED = {"group": 4, "batch": 32, "steps": 8, "concurrency": 16, "preflight": 8, "preflight_k": 4, "eval": [{"count": 20, "every": 5}]}
TINY = {"generator": "torch", "model": "tiny", "group": 4, "batch": 16, "steps": 4, "concurrency": 8, "max_tokens": 32, "preflight": 8, "preflight_k": 2, "learning_rate": 5e-4,
        "eval": [{"count": 8, "every": 2}], "filter": "none"}
MEASURED = ("score_seconds",)  # the environment's own time is measured, whatever the clock


def twice(root, table: dict, told: list = ()) -> None:
    "Runs twice, in different folders, and compares all that was written."
    first, second = (inline_run(root, name, table, told) for name in ("a", "b"))
    check_books(first)
    assert first.state.version == table["steps"] and first.state.digest and first.state.digest == second.state.digest
    for name in ("steps", "groups", "rollouts", "tokens", "evals"):
        one, two = (read_table(d.folder, name) for d in (first, second))
        assert one.drop(MEASURED, strict=False).equals(two.drop(MEASURED, strict=False)), name


PLACES = {"colocated": {"placement": "colocated"}, "split": {"placement": "split"}, "two": {"placement": "split", "generators": 2}, "every": {"placement": "split", "publish_every": 3},
          "two, every": {"placement": "split", "generators": 2, "publish_every": 3}}


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize(("table", "place"), [*((SCRIPTED, place) for place in PLACES), *((TINY, place) for place in ("colocated", "split", "two, every"))],
                         ids=lambda value: value if isinstance(value, str) else value.get("generator", "scripted"))
def test_two_runs_are_one(tmp_path, table, place, staleness):
    "Synchronous, and asynchronous on the virtual clock; scripted actors, and the tiny policy with its tokens, weights and log-probabilities; in one worker and in several."
    where = PLACES[place]
    every = min(where.get("publish_every", 1), staleness + 1)
    twice(tmp_path, table | where | {"staleness": staleness, "publish_every": every})


def test_where_the_actors_live_does_not_change_a_synchronous_run(tmp_path):
    "The same tokens, rewards and weights, moved in memory or through the mapped file."
    digests = {inline_run(tmp_path, where, TINY | {"placement": where, "staleness": 0}).state.digest for where in ("colocated", "split")}
    assert len(digests) == 1


def test_commands_at_the_same_events_give_the_same_run(tmp_path):
    "Commands are part of the digest, at the place where they took effect."
    table, told = SCRIPTED | {"staleness": 2}, [(100, "temperature", 0.5, 3), (200, "staleness", 0, 0), (300, "group", 8, 0), (400, "pause", None, 0), (401, "go", None, 0)]
    (tmp_path / "same").mkdir()
    twice(tmp_path / "same", table, told)
    digests = {inline_run(tmp_path, name, table, commands).state.digest for name, commands in {"none": [], "early": told[:1], "late": [(500, *told[0][1:])]}.items()}
    assert len(digests) == 3


@pytest.mark.parametrize("table", [SCRIPTED, TINY], ids=["scripted", "tiny"])
def test_another_seed_is_another_run(tmp_path, table):
    "The digest sees tasks, rewards and tokens."
    digests = {inline_run(tmp_path, f"seed{seed}", table | {"seed": seed, "steps": 2}).state.digest for seed in range(3)}
    assert len(digests) == 3


def test_the_policy_that_a_loss_compares_with_changes_at_a_version(tmp_path):
    "`old` is live: once it is the sampler, the same rollouts of an older policy make other weights."
    table = TINY | {"staleness": 2, "optimizer_steps": 2, "learning_rate": 5e-3, "steps": 5, "eval": [], "preflight": 0}
    drivers = [inline_run(tmp_path, name, table, told) for name, told in {"recomputed": (), "told": [(1, "old", "sampler", 0)]}.items()]
    rows = [read_table(d.folder, "commands") for d in drivers]
    assert len(rows[0]) == 0 and rows[1].select("knob", "value", "status", "apply").rows() == [("old", '"sampler"', "applied", "version")]
    assert drivers[1].state.config.old == "sampler" and len({d.state.digest for d in drivers}) == 2
    assert read_table(drivers[0].folder, "steps")["ess"].to_list() != read_table(drivers[1].folder, "steps")["ess"].to_list()

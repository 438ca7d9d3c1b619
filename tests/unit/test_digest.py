"""The same run twice: equal digests, equal tables."""

import json

import pytest
from inline import inline_run
from twin_runs import TINY, twice

from rlbench.base.ledger_reading import read_table
from rlbench.base.status import read_status, write_status
from rlbench.loop.digest import compare_traces, equality_in_words, is_same_run, read_trace
from rlbench.runtime.checkpoint import load_checkpoint
from rlbench.workbench.replay import ReplayVerdict

SCRIPTED = {
    "group": 4,
    "batch": 32,
    "steps": 8,
    "concurrency": 16,
    "preflight": 8,
    "preflight_k": 4,
    "eval": [{"count": 20, "every": 5}],
}


PLACES = {
    "colocated": {"placement": "colocated"},
    "split": {"placement": "split"},
    "two": {"placement": "split", "generators": 2},
    "every": {"placement": "split", "publish_every": 3},
    "two, every": {"placement": "split", "generators": 2, "publish_every": 3},
}


@pytest.fixture(scope="module")
def synchronous():
    "Digests of synchronous runs of the tiny policy that tests of this file have made, by where the actors live."
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize(
    ("table", "place"),
    [*((SCRIPTED, place) for place in PLACES), *((TINY, place) for place in ("colocated", "split", "two, every"))],
    ids=lambda value: value if isinstance(value, str) else value.get("generator", "scripted"),
)
def test_two_runs_are_one(tmp_path, table, place, staleness, synchronous):
    """Synchronous, and asynchronous on the virtual clock;
    scripted actors, and the tiny policy with its tokens, weights and log-probabilities;
    in one worker and in several."""
    where = PLACES[place]
    every = min(where.get("publish_every", 1), staleness + 1)
    run = twice(tmp_path, table | where | {"staleness": staleness, "publish_every": every})
    if table is TINY and staleness == 0 and place in ("colocated", "split"):
        synchronous[place] = run.state.digest


@pytest.mark.slow
def test_where_the_actors_live_does_not_change_a_synchronous_run(tmp_path, synchronous):
    "The same tokens, rewards and weights, moved in memory or through the mapped file."
    digests = {
        synchronous.get(where) or inline_run(tmp_path, where, TINY | PLACES[where] | {"staleness": 0}).state.digest
        for where in ("colocated", "split")
    }
    assert len(digests) == 1


@pytest.mark.slow
def test_commands_at_the_same_events_give_the_same_run(tmp_path):
    "Commands are part of the digest, at the place where they took effect."
    table, told = (
        SCRIPTED | {"staleness": 2},
        [
            (100, "temperature", 0.5, 3),
            (200, "staleness", 0, 0),
            (300, "group", 8, 0),
            (400, "pause", None, 0),
            (401, "go", None, 0),
        ],
    )
    (tmp_path / "same").mkdir()
    twice(tmp_path / "same", table, told)
    digests = {
        inline_run(tmp_path, name, table, commands).state.digest
        for name, commands in {"none": [], "early": told[:1], "late": [(500, *told[0][1:])]}.items()
    }
    assert len(digests) == 3


@pytest.mark.slow
@pytest.mark.parametrize("table", [SCRIPTED, TINY], ids=["scripted", "tiny"])
def test_another_seed_is_another_run(tmp_path, table):
    "The digest sees tasks, rewards and tokens."
    digests = {
        inline_run(tmp_path, f"seed{seed}", table | {"seed": seed, "steps": 2}).state.digest for seed in range(3)
    }
    assert len(digests) == 3


@pytest.mark.slow
def test_the_policy_that_a_loss_compares_with_changes_at_a_version(tmp_path):
    "`old` is live: once it is the sampler, the same rollouts of an older policy make other weights."
    table = TINY | {
        "staleness": 2,
        "optimizer_steps": 2,
        "learning_rate": 5e-3,
        "steps": 5,
        "eval": [],
        "preflight": 0,
        "alerts": False,
    }
    drivers = [
        inline_run(tmp_path, name, table, told)
        for name, told in {"recomputed": (), "told": [(1, "old", "sampler", 0)]}.items()
    ]
    rows = [read_table(d.folder, "commands") for d in drivers]
    assert len(rows[0]) == 0 and rows[1].select("knob", "value", "status", "apply").rows() == [
        ("old", '"sampler"', "applied", "version")
    ]
    assert drivers[1].state.config.old == "sampler" and len({d.state.digest for d in drivers}) == 2
    assert (
        read_table(drivers[0].folder, "steps")["ess"].to_list()
        != read_table(drivers[1].folder, "steps")["ess"].to_list()
    )


@pytest.mark.slow
def test_the_last_update_and_the_evaluations_count(tmp_path):
    """One step each: what differs in nothing but the learning rate, the loss or the temperature of the evaluation
    shares batches and commands, and is told apart."""
    table = TINY | {"steps": 1, "staleness": 0, "optimizer_steps": 2, "clock": "virtual"}
    changes = {
        "base": {},
        "again": {},
        "rate": {"learning_rate": 0.0},
        "loss": {"loss": "reinforce"},
        "exam": {"eval": [{"count": 8, "every": 2, "temperature": 0.3}]},
    }
    drivers = {name: inline_run(tmp_path, name, table | change) for name, change in changes.items()}
    assert drivers["base"].state.digest == drivers["again"].state.digest
    assert len({driver.state.digest for driver in drivers.values()}) == 4
    assert len({driver.state.traced.events for driver in drivers.values()}) == 1
    traces = {name: read_trace(driver.folder) for name, driver in drivers.items()}
    assert {name: trace.whole for name, trace in traces.items()} == {
        name: driver.state.digest for name, driver in drivers.items()
    }
    checks = {name: [check.equal for check in compare_traces(traces["base"], trace)] for name, trace in traces.items()}
    assert checks["again"] == [True, True, True] and checks["exam"] == [True, False, True]
    assert [checks[name][2] for name in ("rate", "loss")] == [False, False]


@pytest.mark.slow
def test_weights_are_hashed_where_they_are_saved(tmp_path):
    "At every checkpoint and at the end; the hash of a checkpoint is that of the weights that are in it."
    table = TINY | {"staleness": 0, "checkpoint_every": 2, "checkpoints_kept": 9}
    saved, plain = inline_run(tmp_path, "saved", table), inline_run(tmp_path, "plain", table | {"checkpoint_every": 0})
    trace = read_trace(saved.folder)
    assert (
        sorted(trace.weights) == [0, 1, 2, 4]
        and len(set(trace.weights.values())) == 4
        and trace.weights[4] == trace.parts["weights"]
    )
    told = {
        path.name: json.loads((path / "manifest.json").read_text())["weights"]
        for path in sorted((saved.folder / "checkpoints").glob("v*"))
    }
    assert told == {f"v{version:06d}": trace.weights[version] for version in (0, 1, 2, 4)}
    assert saved.state.digest == plain.state.digest and sorted(read_trace(plain.folder).weights) == [4]


@pytest.mark.slow
def test_an_older_folder_lacks_parts_and_is_read(tmp_path):
    "Its digest is the first part of today's; the other two are said to be lacking. So it is with its checkpoints."
    table = TINY | {"staleness": 0, "steps": 2, "checkpoint_every": 2}
    new, old = inline_run(tmp_path, "new", table), inline_run(tmp_path, "old", table)
    status = read_status(old.folder)
    events = status.parts["events"]
    write_status(old.folder, status.__class__(**{**vars(status), "digest": events, "parts": {}}))
    checks = compare_traces(read_trace(new.folder), read_trace(old.folder))
    assert [str(check) for check in checks] == [
        "events equal",
        "evaluations not known of old",
        "weights not known of old",
    ] and is_same_run(checks)
    assert equality_in_words(checks) == "equal in events; not compared: evaluations and weights"
    told = ReplayVerdict("old", "new", events, events, 2, is_same_run(checks), checks=checks)
    assert str(told).splitlines()[2] == "equal in events; not compared: evaluations and weights"
    again = compare_traces(read_trace(new.folder), read_trace(new.folder))
    assert equality_in_words(again) == "equal in events and evaluations and weights"
    place = old.folder / "checkpoints" / "v000002"
    state = json.loads((place / "state.json").read_text())
    del state["state"]["traced"]
    (place / "state.json").write_text(json.dumps(state | {"state": state["state"] | {"digest": events}}))
    manifest = json.loads((place / "manifest.json").read_text())
    manifest.pop("weights"), manifest["files"].update({"state.json": (place / "state.json").stat().st_size})
    (place / "manifest.json").write_text(json.dumps(manifest))
    kept = load_checkpoint(place)
    assert kept.state.traced.events == events and kept.manifest.weights == ""

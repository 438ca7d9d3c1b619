"""Runs whose weights are broadcast: the digest of a run that hands them over by file,
and a generator that is stopped in the middle."""

import os
import signal
from types import SimpleNamespace

from patience import until
from real_runs import SMALL, assert_books, ended

import rlbench as rl
from rlbench.loop.config import make_config
from rlbench.loop.events import Lost
from rlbench.runtime.messages import BroadcastRequest, BroadcastResult, MeetResult, PublishResult
from rlbench.runtime.publishing import Publishing

SPLIT = {**SMALL, "placement": "split", "generators": 2, "max_tokens": 32, "eval": [], "steps": 4}


def test_a_broadcast_run_has_the_digest_of_a_run_by_file(tmp_path):
    "One generator: with two, the first wave may find one of them not ready yet, and last bits depend on that."
    knobs = SPLIT | {"generators": 1}
    by_file, by_broadcast = (
        ended(rl.run("tiny", runs=tmp_path, name=way, transport=way, **knobs)) for way in ("file", "nccl")
    )
    assert by_broadcast.status.digest == by_file.status.digest
    assert_books(by_broadcast)
    parts = ["publish_store_seconds", "publish_travel_seconds", "publish_load_seconds"]
    measured = by_broadcast.steps.select(parts)[1:]  # nothing is published before the first batch
    assert measured.null_count().row(0) == (0, 0, 0) and (measured.min_horizontal() > 0).all()
    assert by_file.steps["publish_travel_seconds"].null_count() == len(by_file.steps)
    assert not (by_broadcast.folder / "weights.mapped").exists()


def test_a_generator_that_stops_answering_costs_the_others_no_version(tmp_path):
    "A stopped process keeps its connections, so only the silence of its beats tells."
    knobs = SPLIT | {"staleness": 2, "steps": 1000, "deadlines": {"silence": 4.0}}
    run = rl.run("tiny", runs=tmp_path, name="stopped", transport="nccl", **knobs)
    until(lambda: run.status is not None and run.status.version >= 3, 60)
    stopped = run.status.workers["generator-2"]
    os.kill(stopped, signal.SIGSTOP)
    until(lambda: run.status.workers["generator-2"] != stopped, 60)
    version = run.status.version
    until(lambda: run.status.version >= version + 8, 90)
    run.stop(author="the test")
    ended(run, "stopped")
    assert_books(run)
    assert "the weights did not arrive" not in (run.folder / "run.log").read_text()


def test_weights_that_nobody_receives_end_the_run_with_the_remedy():
    sent, hung_up = [], []
    trainer = SimpleNamespace(lost=False, hang_up=lambda: hung_up.append("trainer"))
    workers = SimpleNamespace(
        handles={"trainer": trainer, "generator": SimpleNamespace(lost=False)},
        send=lambda worker, message: sent.append((worker, message)),
        submit=lambda worker, message: sent.append((worker, message)),
        has_generator=lambda worker: worker == "generator",
        worker_of=lambda actor: actor,
    )
    config = make_config({"placement": "split", "transport": "nccl"})
    run = SimpleNamespace(config=config, workers=workers, is_up=lambda worker: True)
    meters, hosts = SimpleNamespace(publish_parts=None), SimpleNamespace(address_of=lambda worker: "127.0.0.1")
    publishing = Publishing(run, meters, None, hosts)
    publishing.hear_meeting("trainer", MeetResult("127.0.0.1", 29400))
    publishing.write_weights(1)
    publishing.hear_published("trainer", PublishResult(1, 0.01))
    found = []
    for number in (1, 2, 3):
        assert {message.place.number for _, message in sent[-2:] if isinstance(message, BroadcastRequest)} == {number}
        found += publishing.hear_broadcast("trainer", BroadcastResult(number, -1, 0.1, "RuntimeError: no route"))
    (lost,) = found
    assert isinstance(lost, Lost) and lost.actor == "trainer" and hung_up == ["trainer"]
    assert "trainer: RuntimeError: no route" in lost.cause and 'use transport = "file"' in lost.cause

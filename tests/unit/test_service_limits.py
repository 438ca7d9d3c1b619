"""What bounds the training service: workers that hang, disks that fill, and what it is started with."""

from types import SimpleNamespace

import numpy as np
import pytest
from service_world import ServiceWorld, make_model, step_body, train_body, weights_of

from rlbench.base.ledger_reading import read_table
from rlbench.base.status import read_status
from rlbench.models.hardware import TokenPrices
from rlbench.runtime.actors import WorkerPipe
from rlbench.service import service_records as records
from rlbench.service.service_state import Quota, ServiceRules
from rlbench.service.service_worker import ServiceWorker, WorkerSettings
from rlbench.service.tenant_books import TenantBooks, TenantRun, tenant_folder
from rlbench.service.tinker_service import serve_tinker


def test_a_trainer_that_hangs_over_an_order_is_killed_and_the_order_is_done_by_the_next_one(tmp_path):
    "Beats alone do not save it; the repeated request is applied once."
    world = ServiceWorld(tmp_path, rules=ServiceRules(stall_s=100.0))
    model = make_model(world)
    hung = world.driver.workers.handles["trainer"]
    hung.hangs = True
    first = world.call("a", "forward_backward", train_body(model, 1, [1, 2]))
    world.call("a", "optim_step", step_body(model, 2))
    world.pass_time(99.0)
    assert not hung.lost
    world.pass_time(2.0)
    assert hung.lost and world.driver.workers.handles["trainer"] is not hung
    world.settle()
    assert world.fetch("a", first.json["request_id"]).status == 200
    assert weights_of(world, model)["steps"] == 1


def test_a_long_order_that_moves_and_a_worker_without_orders_are_left_alone(tmp_path):
    "A worker is judged by what it does, not by how long its order takes."
    world = ServiceWorld(tmp_path, rules=ServiceRules(stall_s=100.0))
    model = make_model(world)
    trainer = world.driver.workers.handles["trainer"]
    world.call("a", "forward_backward", train_body(model, 1, [1, 2]))
    for _ in range(5):
        world.pass_time(90.0)  # it moves each time
    trainer.hangs = True
    world.work()
    assert not trainer.lost and trainer.orders
    trainer.hangs = False
    world.settle()
    trainer.hangs = True  # from here on it has nothing to do, so it owes no move
    world.pass_time(1000.0)
    assert not trainer.lost


def test_a_request_over_which_workers_hang_three_times_fails_in_words(tmp_path):
    "The service goes on without it."
    world = ServiceWorld(tmp_path, rules=ServiceRules(stall_s=100.0))
    model = make_model(world)
    call = world.call("a", "forward_backward", train_body(model, 1, [1, 2]))
    for _ in range(3):
        trainer = world.driver.workers.handles["trainer"]
        while not (trainer.orders and isinstance(trainer.orders[0], records.ForwardBackward)):
            world.work()  # the model is made again first
        trainer.hangs = True
        world.pass_time(101.0)
        assert trainer.lost
        while world.driver.workers.starts:
            world.pass_time(1.0)
    world.settle()
    error = world.fetch("a", call.json["request_id"]).json
    assert error["category"] == "server" and error["error"].startswith("the trainer was lost 3 times over this request")
    after = world.call("a", "optim_step", step_body(model, 2))
    world.settle()
    assert world.fetch("a", after.json["request_id"]).json["metrics"] == {"steps:max": 1.0}


def test_the_moves_of_a_worker_count_micro_batches_and_decode_steps():
    "So a long order shows that it goes on."
    worker = ServiceWorker(WorkerSettings(slots=2))
    worker.work()
    before = worker.moves
    list(worker.trainer.count_parts([[0], [1], [2]]))
    assert worker.moves == before + 3
    worker.receive(records.LoadAdapter(1, "base", None, 0))
    worker.receive(records.Sample(2, "base", np.array([3, 4], np.int32), 1, records.SampleParams(4, seed=0)))
    while not worker.idle:
        worker.work()
    assert worker.moves > before + 3


def test_the_journal_counts_against_the_disk_quota(tmp_path):
    "A tenant that fills its quota is refused in words, its neighbour is served, and a restart changes nothing."
    world = ServiceWorld(tmp_path, {"a": Quota(disk_mb=1), "b": Quota()})
    model, other = make_model(world), make_model(world, "b")
    for seq in range(1, 7):
        call = world.call("a", "forward_backward", train_body(model, seq, [1, 2] * 16))
        assert call.status == 200
    world.driver.state.tenants["a"].journal_bytes = 0
    world.driver.journals["a"].append(entry_of_nobody(), 0.0, bytes(1_000_000))
    world.pass_time(1.0)
    refused = world.call("a", "forward_backward", train_body(model, 7, [1, 2]))
    assert refused.status == 400 and "(weights 0.0, journal 1.0)" in refused.json["detail"]
    assert world.call("b", "forward_backward", train_body(other, 1, [1, 2])).status == 200
    world.kill_server()
    world.pass_time(1.0)
    assert world.call("a", "forward_backward", train_body(model, 8, [1, 2])).status == 400
    step = world.call("a", "optim_step", step_body(model, 9))  # the refused ones have taken their places
    world.settle()
    assert world.fetch("a", step.json["request_id"]).json["metrics"] == {"steps:max": 1.0}


def entry_of_nobody():
    "An entry of a journal that changes nothing when it is read again."
    from rlbench.service.service_events import EndKept

    return EndKept("nobody")


def test_a_flood_within_one_beat_is_counted_at_once(tmp_path):
    "What is accepted counts when it is accepted, not when the next beat comes."
    world = ServiceWorld(tmp_path, {"a": Quota(), "b": Quota()})
    model = make_model(world)
    before = world.driver.state.tenants["a"].journal_bytes
    body = train_body(model, 1, [1, 2])
    world.call("a", "forward_backward", body)
    assert world.driver.state.tenants["a"].journal_bytes == before + len(body)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"name": "../elsewhere"}, "name: '../elsewhere' is not a name"),
        ({"port": 99_999}, "port: 99999 is not one; use 1 to 65535"),
        ({"slots": 0}, "slots: 0"),
        ({"device": "tpu"}, "device: 'tpu' is not known; use cpu or cuda"),
        ({"engine": "other"}, "engine: 'other' is not known"),
        ({"train_price": -1.0}, "train_price: -1.0 is not a price"),
        ({"name": "taken"}, "name: 'taken' is the name of a run"),
    ],
)
def test_what_would_be_refused_leaves_no_folder_and_starts_nothing(tmp_path, wrong, words):
    "Names, ports, sizes, devices and prices are checked before anything is made."
    (tmp_path / "taken").mkdir()
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        serve_tinker("tiny", runs=tmp_path, **wrong)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_beat_carries_the_moves_inside_of_a_unit_of_work():
    "Before the actor is built, and for one that counts nothing, a beat has the units alone."
    pipe = WorkerPipe(None)
    pipe.units = 2
    assert pipe.moves == 2
    pipe.actor = SimpleNamespace()
    assert pipe.moves == 2
    pipe.actor = SimpleNamespace(moves=5)
    assert pipe.moves == 7


def test_books_wait_in_memory_while_the_disk_is_full_and_are_written_when_there_is_room(tmp_path):
    "A tenant's rows and status survive a full disk; a failure of another kind ends its books alone."
    folder = tenant_folder(tmp_path, "lab", "ann", "tiny")
    run = TenantRun(folder, lambda tokens: "", TokenPrices(), lambda: 100.0)
    said = []
    books = TenantBooks(lambda tenant: run, (), said.append)
    books.close()
    runs = {"ann": run}
    fault = folder / "faults" / "full-disk"
    fault.parent.mkdir()
    fault.write_text("1e12")
    run.ledger.write("events", 101.0, kind="Generated", fields="{}")
    books.guard("ann", runs, run.write_rows)
    for _ in range(2):
        books.guard("ann", runs, lambda: run.write_status(102.0))
    assert "ann" in runs and said == ["the disk is full: the books of ann wait in memory"]
    assert not len(read_table(folder, "events"))
    fault.unlink()
    books.guard("ann", runs, lambda: run.write_status(103.0))
    assert len(read_table(folder, "events")) == 1 and read_status(folder).updated == 103.0
    books.guard("ann", runs, lambda: 1 / 0)
    assert not runs and "are not kept any more" in said[-1]

"""A trainer whose two processes live on two hosts: the update of one process;
a run that goes from one process to two and back.
The hosts are network namespaces; only the first one sees the folder of the run."""

from pathlib import Path

import psutil
import pytest
import torch
from host_driver import HostDriver
from patience import until
from ranks_on_hosts import made_batches
from real_runs import assert_books
from two_ranks import build, trained

import rlbench as rl
from rlbench.base.ledger_reading import read_table
from rlbench.training.data_parallel import whole_weights
from rlbench.training.trainer import ALONE

pytestmark = pytest.mark.slow
HELPERS = str(Path(__file__).parents[1] / "helpers")
BEGIN = f"""
import os, sys
sys.path.insert(0, {HELPERS!r})
from rlbench.base.rendezvous import Rendezvous
from rlbench.runtime.far_process import FarProcess, message_of_bytes
process = FarProcess()
"""
SETTINGS = dict(
    batch=16,
    group=4,
    max_tokens=16,
    preflight=0,
    staleness=1,
    eval=[],
    checkpoint_every=1,
    placement="split",
    filter="none",
)


@pytest.fixture(scope="module")
def drivers(cluster):
    "A driver on each of two hosts."
    started = [HostDriver(host) for host in cluster.hosts[:2]]
    yield started
    for driver in started:
        driver.close()


def test_two_ranks_on_two_hosts_train_what_one_process_trains(cluster, drivers, runs):
    first, second = drivers
    address = cluster.host(1).address
    port = first.ask(BEGIN, f"process.listen({address!r})")
    meeting = f"Rendezvous({address!r}, {port})"
    file = str(runs / "weights.pt")
    first.ask(f"process.begin('rank-0', 'ranks_on_hosts', 'lead', ({file!r}, 2, {meeting}), None, {{}})")
    second.ask(f"{BEGIN}\nprocess.begin('rank-1', 'ranks_on_hosts', 'follow', (2, {meeting}), None, {{}})")
    one, _ = build(ALONE, "")
    expected = trained(one, made_batches())
    (metrics,) = first.ask("", "[message_of_bytes(each) for each in process.take()]")
    first.ask("process.end()")
    assert second.ask("", "[message_of_bytes(gone).cause for gone in process.take()]") in (
        ["its process ended (exit status 71)"],
        ["its process ended (exit status 0)"],
    )
    weights = torch.load(file)
    for name, tensor in whole_weights(one).items():
        assert float((weights[name] - tensor).norm() / tensor.norm()) < 1e-6, name
    assert [each["optimizer_steps"] for each in metrics] == [3, 1, 3]
    for name in ("loss", "grad_norm", "entropy"):
        assert [each[name] for each in metrics] == pytest.approx([each[name] for each in expected], rel=1e-4, abs=1e-5)


def trainer_on(host) -> psutil.Process:
    "The process of the trainer on a host; there is none for a while after one was lost."
    return until(lambda: [each for each in host.processes() if each.name() == "rlbench-trainer"], 20)[0]


def test_a_run_goes_on_with_two_ranks_on_two_hosts_and_after_a_kill_with_one_process(cluster, drivers, runs):
    "From one machine to a cluster, where both ranks read the checkpoint on their own hosts; and back."
    table = {
        "address": cluster.address,
        "trainers": {"cpus": 2},
        "generators": {"cpus": 0.1},
    }  # no host holds both ranks
    settings = SETTINGS | {"cluster": table | {"environments": {"cpus": 0.1}}}
    driver = drivers[0]
    driver.ask(f"import rlbench as rl; run = rl.run('tiny', runs={str(runs)!r}, trainers=2, steps=1, **{settings!r})")
    assert driver.ask("", "run.wait(400)", timeout_s=410) == "finished"
    driver.ask("run.resume(steps=60, placement='ray')")
    run = rl.attach(next(path.parent for path in runs.glob("*/config.toml")))
    until(lambda: run.status.version > 1 or run.status.state == "failed", 180)
    homes = {actor.name: int(host.name[-1]) for host in run.status.hosts for actor in host.workers}
    assert homes["trainer-rank-1"] != homes["trainer"], run.status
    first, second = (trainer_on(cluster.host(homes[name])) for name in ("trainer", "trainer-rank-1"))
    second.kill()
    assert driver.ask("", "run.wait(400)", timeout_s=410) == "failed"
    cause = f"trainer-rank-1 on host-{homes['trainer-rank-1']}: its process ended (killed by SIGKILL)"
    assert run.status.reason.startswith(f"trainer lost: {cause}")
    assert_books(run)
    until(lambda: not any(psutil.pid_exists(process.pid) for process in (first, second)), 10)
    version = run.status.version
    driver.ask(f"run.resume(steps={version + 1}, placement='split', trainers=1)")
    assert driver.ask("", "run.wait(400)", timeout_s=410) == "finished", run.status
    assert_books(run)
    journal = read_table(run.folder, "commands").select("knob", "value", "status").rows()
    assert ("trainers", "1", "applied") in journal
    assert run.status.version == version + 1 and not run.status.hosts
    assert (run.folder / "policy/model.safetensors").is_file()

"""Two processes never write one run's folder, also on a file system that hosts share.
Hosts are made up by their identity; processes, races and runs are real."""

import json
import multiprocessing
import os
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
from patience import until
from real_runs import assert_books, ended, gone, processes_of

import rlbench as rl
from rlbench.base.lease import (
    LEASE_FILE,
    STALE_S,
    HostIdentity,
    LeaseHeld,
    RunLease,
    adopt_lease,
    lease_of,
    read_lease,
    run_state,
    take_lease,
    this_host,
)
from rlbench.base.status import Status, read_status, write_status

ELSEWHERE = HostIdentity("host-b", "its boot")


def age_lease(folder: Path, seconds: float) -> None:
    "The lease was touched so long ago."
    then = time.time() - seconds
    os.utime(folder / LEASE_FILE, (then, then))


def give_lease(folder: Path, lease: RunLease, age: float = 0.0) -> None:
    "Write a lease as somebody else would have."
    (folder / LEASE_FILE).write_text(json.dumps(asdict(lease)))
    age_lease(folder, age)


def race_for_lease(folder: str, names: list, gates: list, answers) -> None:
    "Take the lease again and again, as another host each time, when all others do."
    for round, gate in enumerate(gates):
        here = HostIdentity(names[round], "boot")
        gate.wait()
        try:
            take_lease(Path(folder) / str(round), here=here)
            answers.put((round, here.host))
        except LeaseHeld as error:
            assert "stop" in str(error), error
            answers.put((round, ""))


def test_one_of_several_that_race_gets_the_lease(tmp_path):
    "A free one and, in every second round, a stale one."
    rounds, racers = 80, 4
    for round in range(rounds):
        folder = tmp_path / str(round)
        folder.mkdir()
        if round % 2:
            give_lease(folder, RunLease("host-gone", "boot", 4711, mark=f"mark-{round}"), STALE_S + 1)
    context = multiprocessing.get_context("spawn")
    gates = [context.Barrier(racers) for _ in range(rounds)]
    answers = context.Queue()
    started = []
    for racer in range(racers):
        names = [f"host-{racer}" for _ in range(rounds)]
        started.append(context.Process(target=race_for_lease, args=(str(tmp_path), names, gates, answers)))
        started[-1].start()
    found = [answers.get(timeout=400) for _ in range(rounds * racers)]
    for process in started:
        process.join()
    for round in range(rounds):
        winners = [host for number, host in found if number == round and host]
        assert len(winners) == 1, (round, winners)
        assert read_lease(tmp_path / str(round)).host == winners[0]
        assert [path.name for path in (tmp_path / str(round)).iterdir()] == [LEASE_FILE]


def test_a_fresh_lease_of_another_host_is_refused_with_its_holder_and_the_remedy(tmp_path):
    give_lease(tmp_path, RunLease("host-b", "boot", 4711, mark="m"), 20)
    with pytest.raises(LeaseHeld, match=r"process 4711 on host host-b \(a sign of life 2\d s ago\).*rlbench stop"):
        take_lease(tmp_path)
    age_lease(tmp_path, STALE_S + 1)
    assert take_lease(tmp_path).pid == os.getpid()


def test_on_its_own_host_the_process_decides(tmp_path):
    "Not the age of the file: a suspended run is alive, and a killed one is not."
    holder = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    holder.start()
    here = this_host()
    give_lease(tmp_path, RunLease(here.host, here.boot, holder.pid, mark="m", is_kept=True))
    psutil.Process(holder.pid).suspend()
    with pytest.raises(LeaseHeld, match=f"process {holder.pid}"):
        take_lease(tmp_path)
    holder.kill()
    holder.join()
    assert take_lease(tmp_path).mark != "m"
    give_lease(tmp_path, RunLease(here.host, "an earlier boot", os.getppid(), mark="m", is_kept=True))
    assert take_lease(tmp_path).mark != "m", "numbers of processes before a reboot mean nothing"


def test_a_start_that_never_came_holds_the_lease_for_a_while_only(tmp_path):
    here = this_host()
    give_lease(tmp_path, RunLease(here.host, here.boot, os.getppid(), mark="m"))
    with pytest.raises(LeaseHeld):
        take_lease(tmp_path)
    assert adopt_lease(tmp_path, "m").is_kept  # the process that was started
    give_lease(tmp_path, RunLease(here.host, here.boot, os.getppid(), mark="m"), STALE_S + 1)
    assert take_lease(tmp_path)


def test_a_damaged_lease_counts_until_it_is_stale(tmp_path):
    (tmp_path / LEASE_FILE).write_text("{")
    with pytest.raises(LeaseHeld, match="not known"):
        take_lease(tmp_path)
    age_lease(tmp_path, STALE_S + 1)
    assert take_lease(tmp_path)


def test_a_taker_that_crashed_half_way_does_not_lock_the_folder_for_ever(tmp_path):
    give_lease(tmp_path, RunLease("host-gone", "boot", 4711, mark="old"), STALE_S + 1)
    right = tmp_path / f".{LEASE_FILE}.after.old"
    right.write_text(json.dumps(asdict(RunLease("host-c", "boot", 1, mark="new"))))
    with pytest.raises(LeaseHeld, match="host-c"):
        take_lease(tmp_path)
    os.utime(right, (time.time() - STALE_S - 1,) * 2)
    assert take_lease(tmp_path) and not right.exists()


def test_a_run_elsewhere_is_alive_as_its_lease_says(tmp_path):
    write_status(tmp_path, Status("running", host="host-b", pid=4711))
    status = read_status(tmp_path)
    assert run_state(tmp_path, status) == "running"  # of an older rlbench: it has no lease
    give_lease(tmp_path, RunLease("host-b", "boot", 4711, mark="m", is_kept=True))
    assert run_state(tmp_path, status) == "running"
    age_lease(tmp_path, STALE_S + 1)
    assert run_state(tmp_path, status) == "dead"
    assert run_state(tmp_path, replace(status, state="finished")) == "finished"


# ---- real runs


def slow_run(tmp_path: Path, **changes) -> rl.Run:
    "A run of real processes that has made a version and would go on for long."
    settings = {"steps": 100_000, "batch": 32, "group": 8, "preflight": 0, "eval": [], "placement": "split"}
    virtual = {"decode": 0.002, "train": 0.0003}
    run = rl.run("tiny", runs=tmp_path, generator="scripted", virtual=virtual, **{**settings, **changes})
    until(lambda: run.status and run.status.version >= 1, 120)
    return run


def test_a_live_run_holds_the_lease_and_an_ended_one_does_not(tmp_path):
    run = slow_run(tmp_path)
    lease = read_lease(run.folder)
    assert (lease.pid, lease.is_kept) == (run.status.supervisor, True)
    with pytest.raises(LeaseHeld, match=f"process {lease.pid}"):
        take_lease(run.folder, here=ELSEWHERE)
    age_lease(run.folder, 3600)
    until(lambda: time.time() - read_lease(run.folder).renewed < STALE_S, 30)  # the holder touches it
    run.stop()
    ended(run, "stopped")
    until(lambda: gone([psutil.Process(lease.pid)]) if psutil.pid_exists(lease.pid) else True, 60)
    assert read_lease(run.folder) is None and not list(run.folder.glob(".lease*"))


def test_a_run_whose_lease_another_host_has_taken_ends_and_writes_no_more(tmp_path):
    run = slow_run(tmp_path)
    processes = processes_of(run)
    give_lease(run.folder, RunLease("host-b", "boot", 4711, mark="theirs", is_kept=True))
    until(lambda: gone(processes), 30)
    before = {path: path.read_bytes() for path in sorted((run.folder / "ledger").rglob("*")) if path.is_file()}
    assert run.status.state == "running" and not run.status.books_closed, "the end is not this host's to write"
    assert read_lease(run.folder).mark == "theirs"
    assert "another process has taken" in (run.folder / "run.log").read_text()
    time.sleep(2.0)
    assert before == {path: path.read_bytes() for path in sorted((run.folder / "ledger").rglob("*")) if path.is_file()}


def test_a_run_of_a_lost_host_is_resumed_elsewhere_once_its_lease_is_stale(tmp_path):
    "The whole first host is gone: its processes are killed, and its status still says that it runs there."
    run = slow_run(tmp_path, checkpoint_every=1)
    until(lambda: list((run.folder / "checkpoints").glob("v*")), 60)
    for process in processes_of(run):
        process.kill()
    lease = read_lease(run.folder)
    until(lambda: not psutil.pid_exists(lease.pid) or gone([psutil.Process(lease.pid)]), 30)
    write_status(run.folder, replace(run.status, host="host-b", state="running"))
    give_lease(run.folder, replace(lease, host="host-b", boot="boot"))
    assert run.state == "running"
    with pytest.raises(ValueError, match="is running"):
        run.resume(steps=run.status.version + 3)
    age_lease(run.folder, STALE_S + 1)
    assert run.state == "dead"
    run.resume(steps=run.status.version + 3)
    ended(run)
    assert_books(run)
    assert run.status.host == this_host().host


def resume_run_once(folder: str, gate, answers) -> None:
    "Resume a run when others do."
    run = rl.attach(folder)
    gate.wait()
    try:
        run.resume()
        answers.put("resumed")
    except ValueError as error:
        answers.put(str(error))


def test_of_two_that_resume_a_run_at_once_one_does(tmp_path):
    run = slow_run(tmp_path, checkpoint_every=1)
    until(lambda: list((run.folder / "checkpoints").glob("v*")), 60)
    supervisor = run.status.supervisor
    for process in processes_of(run):
        process.send_signal(signal.SIGKILL)
    until(lambda: run.state == "dead" and (not psutil.pid_exists(supervisor) or gone([psutil.Process(supervisor)])), 30)
    context = multiprocessing.get_context("spawn")
    gate, answers = context.Barrier(2), context.Queue()
    racers = [context.Process(target=resume_run_once, args=(str(run.folder), gate, answers)) for _ in range(2)]
    for racer in racers:
        racer.start()
    found = [answers.get(timeout=400) for _ in racers]
    for racer in racers:
        racer.join()
    assert found.count("resumed") == 1, found
    refused = next(answer for answer in found if answer != "resumed")
    assert "one writer" in refused or "only a run that has ended" in refused, refused
    until(lambda: run.state == "running" and run.status.version >= 2, 120)
    run.stop()
    ended(run, "stopped")
    assert_books(run)


def test_books_of_a_dead_run_are_closed_under_the_lease(tmp_path):
    run = slow_run(tmp_path)
    supervisor = run.status.supervisor
    for process in processes_of(run):
        process.kill()
    until(lambda: run.state == "dead" and (not psutil.pid_exists(supervisor) or gone([psutil.Process(supervisor)])), 30)
    with lease_of(run.folder):
        give_lease(run.folder, RunLease("host-b", "boot", 4711, mark="theirs"))
        with pytest.raises(LeaseHeld):
            run.stop()
    (run.folder / LEASE_FILE).unlink()
    run.stop()
    assert run.status.books_closed and read_lease(run.folder) is None


def test_a_run_without_its_supervisor_gives_the_lease_up_at_its_end(tmp_path):
    "The run process keeps it until then, though the process that it names is gone."
    run = slow_run(tmp_path)
    os.kill(run.status.supervisor, signal.SIGKILL)
    with pytest.raises(LeaseHeld):
        take_lease(run.folder, here=ELSEWHERE)
    pid = run.status.pid
    until(lambda: run.state == "stopped", 60)
    until(lambda: not psutil.pid_exists(pid) or gone([psutil.Process(pid)]), 60)
    assert read_lease(run.folder) is None
    assert_books(run)

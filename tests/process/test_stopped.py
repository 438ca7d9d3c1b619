"""A run whose processes are stopped for longer than any deadline allows, and continued, goes on as if nothing had been:
a suspended machine, a paused job."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from patience import until

import rlbench as rl
from rlbench.base.ledger_reading import read_table
from rlbench.base.status import living_processes
from rlbench.bench.faults import book_problems
from rlbench.workbench.supervisor import MORE_SILENCE, is_suspended

SILENCE = 3.0  # the least that a configuration may ask for
SHORT = 6.0  # for every piece of work that a worker is asked for
STOPPED = SILENCE + MORE_SILENCE + 3.0  # longer than the supervisor's patience, and than that of the run process
DEADLINES = {"silence": SILENCE, **dict.fromkeys(("generate", "train", "publish", "save"), SHORT)}


def busy_run(tmp_path, placement: str) -> rl.Run:
    "A run of real processes, whose workers take real time, that has made two versions."
    run = rl.run(
        "tiny",
        runs=tmp_path,
        generator="scripted",
        virtual={"decode": 0.002, "train": 0.0003},
        steps=100_000,
        batch=64,
        group=8,
        preflight=0,
        eval=[],
        staleness=2,
        placement=placement,
        deadlines=DEADLINES,
    )
    until(lambda: run.status and run.status.version >= 2, 120)
    return run


def suspend_for_long(run, processes: list[psutil.Process]) -> None:
    "Stop these processes for longer than anybody's patience; then the run goes on with all of them."
    workers, pid = run.status.workers, run.status.pid
    for process in processes:
        process.suspend()
    version = run.status.version
    time.sleep(STOPPED)
    assert all(process.status() == psutil.STATUS_STOPPED for process in processes) and run.status.version == version
    for process in processes:
        process.resume()
    until(lambda: run.status.version >= version + 3, 60)
    assert (run.status.workers, run.status.pid, run.status.attempt) == (workers, pid, 0), (
        run.folder / "run.log"
    ).read_text()


@pytest.mark.parametrize("placement", ["split", "colocated"])
def test_a_run_that_was_stopped_as_a_whole_goes_on(tmp_path, placement):
    """No worker and no run process counts as hung for the time in which it could not run; nor does it where the
    supervisor alone went on."""
    run = busy_run(tmp_path, placement)
    supervisor = psutil.Process(run.status.supervisor)
    below = supervisor.children(recursive=True)
    suspend_for_long(run, [supervisor, *below])
    if placement == "split":
        suspend_for_long(run, below)
    run.stop(author="the test")
    assert run.wait(400) == "stopped" and book_problems(run) == []
    events = read_table(run.folder, "events", ["kind"])["kind"].to_list()
    assert "Lost" not in events and "lost" not in (run.folder / "run.log").read_text()
    until(lambda: not living_processes([supervisor, *below]), 10)


def test_a_suspended_run_ends_when_it_is_told_to(tmp_path):
    """Who asks the supervisor to end does not wait for processes that never continue:
    they are killed, and the books are closed."""
    run = busy_run(tmp_path, "split")
    supervisor, run_process = psutil.Process(run.status.supervisor), psutil.Process(run.status.pid)
    below = [run_process, *run_process.children(recursive=True)]
    for process in below:
        process.suspend()
    supervisor.terminate()
    assert run.wait(400) == "failed" and "run process lost: it hangs" in run.status.reason and book_problems(run) == []
    until(lambda: not living_processes([supervisor, *below]), 10)


PARENT = (
    "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    "print('up', flush=True); time.sleep(60)"
)


def test_a_process_is_suspended_only_with_all_that_it_has_started():
    "A run process that hangs alone is no suspended run."
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout.readline() == "up\n"
        (child,) = until(psutil.Process(process.pid).children, 5)
        assert not is_suspended(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, 5)
        assert not is_suspended(process.pid)
        child.suspend()
        until(lambda: is_suspended(process.pid), 5)
        os.kill(process.pid, signal.SIGCONT)
        until(lambda: not is_suspended(process.pid), 5)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not is_suspended(process.pid)


def test_a_stopped_leader_is_not_suspended_while_its_group_runs():
    "A forked worker is no child of the run process but in its group: while it runs, the run process hangs alone."
    code = "print('up', flush=True); import time; time.sleep(60)"
    leader = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, process_group=0)
    joined = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, process_group=leader.pid)
    try:
        assert leader.stdout.readline() == joined.stdout.readline() == "up\n"
        leader.send_signal(signal.SIGSTOP)
        until(lambda: psutil.Process(leader.pid).status() == psutil.STATUS_STOPPED, 5)
        assert not is_suspended(leader.pid)
        joined.send_signal(signal.SIGSTOP)
        until(lambda: is_suspended(leader.pid), 5)
    finally:
        os.killpg(leader.pid, signal.SIGKILL)
        leader.wait()
        joined.wait()

"""The pool of sandboxes under what notebooks cannot show:
processes that are killed or stopped, clients that vanish, a full disk, and a thousand at once."""

import json
import os
import signal
import threading
import time
from collections import Counter
from concurrent.futures import CancelledError, wait
from pathlib import Path

import psutil
import pytest
from patience import until

from rlbench.base.ledger_reading import count_rows, read_table
from rlbench.base.status import is_alive, living_processes
from rlbench.sandbox import controller as controller_module
from rlbench.sandbox.controller import Controller, flush_rows
from rlbench.sandbox.pool import PoolClient, stop_pool
from rlbench.sandbox.pool_folder import LOCK, connect_to_controller, marked_processes, remembered_processes, sweep_pool
from rlbench.sandbox.pool_rules import PoolRules, PoolSpec
from rlbench.sandbox.types import End, Fault, Program, SandboxLimits

PROCESSES = PoolSpec("fake", workers=2, processes=True)


@pytest.fixture
def pool_at(tmp_path):
    "Connects to a pool in a folder of the test; ends every pool and whatever is left of it afterwards."
    made = []

    def at(spec: PoolSpec | None = None, name: str = "pool") -> PoolClient:
        made.append(PoolClient.connect(tmp_path / name, spec))
        return made[-1]

    yield at
    for pool in made:
        pool.close()
    for folder in {pool.folder for pool in made}:
        stop_pool(folder)


def workers_of(pool: PoolClient) -> list[psutil.Process]:
    "The processes of a pool's workers, once they are written down."
    return until(lambda: len(found := remembered_processes(pool.folder)[1]) == 2 and found, 20)


def gone(processes: list[psutil.Process], seconds: float = 20.0) -> None:
    "Wait until processes are no more."
    until(lambda: not living_processes(processes), seconds)


def kill_at_once(pool: PoolClient, workers: list[psutil.Process]) -> None:
    "Kill workers while the controller stands still, so that nothing goes from the first to the second in between."
    controller = psutil.Process(pool.status().pid)
    controller.suspend()
    for worker in workers:
        worker.kill()
    gone(workers)
    controller.resume()


def killed(pid: int) -> None:
    "Kill a process and wait until it is no more."
    process = psutil.Process(pid)
    process.kill()
    gone([process])


CLIENT = """
import sys, time
from rlbench.sandbox.pool import PoolClient
from rlbench.sandbox.types import Program
pool = PoolClient.connect(sys.argv[1])
boxes = [pool.open(owner=f"dead/{i}") for i in range(20)]
running = [pool.submit(Program("# fake: wall=9"), owner="dead") for _ in range(2)]
running += [boxes[0].submit(Program("# fake: wall=9"))]
print(pool.status().pid, flush=True)
time.sleep(600)
"""


def test_a_client_that_is_killed_leaves_nothing(pool_at, script):
    "Its sandboxes are closed and its programs ended; the controller and other clients go on."
    pool = pool_at(PROCESSES)
    client = script(CLIENT, pool.folder)
    pid = int(client.stdout.readline())
    until(lambda: pool.status().sessions == 20 and pool.status().busy == 3, 20)
    client.kill()
    now = until(lambda: not (found := pool.status()).sessions and not found.busy and found, 20)
    assert now.pid == pid and now.clients == 1 and pool.run(Program("# fake: say=on")).stdout == b"on"
    until(lambda: count_rows(pool.folder, "executions") >= 4, 20)
    rows = read_table(pool.folder, "executions", ["fate", "owner"])
    assert Counter(rows["fate"].to_list()) == {"cancelled": 3, "answered": 1}
    assert {
        row[2]
        for row in read_table(pool.folder, "sandboxes", ["kind", "owner", "state"]).iter_rows()
        if row[0] == "session" and row[1].startswith("dead")
    } >= {"closed"}


def test_a_controller_outlives_who_started_it(tmp_path, script, pool_at):
    "The one that a killed process has started is found by its folder, with what it knows."
    client = script(CLIENT, tmp_path / "pool")
    pid = int(client.stdout.readline())
    os.kill(client.pid, signal.SIGINT)  # a terminal's interrupt reaches the client alone
    client.kill()
    client.wait()
    pool = pool_at()
    assert pool.status().pid == pid and psutil.Process(pid).ppid() != client.pid


@pytest.fixture(autouse=True)
def fake_by_default(tmp_path):
    "Pools of this module that nobody has described have fake workers with processes."
    from rlbench.sandbox.pool import load_or_write_spec

    load_or_write_spec(tmp_path / "pool", PROCESSES)


def test_a_controller_that_is_killed(pool_at):
    "Its workers end with it; programs are asked for again of the next one, sandboxes are lost, and nothing is left."
    pool = pool_at()
    workers, pid = workers_of(pool), pool.status().pid
    box = pool.open()
    running, inside = pool.submit(Program("# fake: wall=0.5 say=kept")), box.submit(Program("# fake: wall=9"))
    until(lambda: pool.status().busy == 2, 20)
    killed(pid)
    gone(workers)
    assert running.result(400).stdout == b"kept" and inside.result(400).end is End.BACKEND_LOST
    with pytest.raises(Fault, match="backend_lost"):
        box.read("a")
    now = pool.status()
    assert now.pid != pid and now.sessions == 0
    again = workers_of(pool)
    pool.close()
    killed(now.pid)
    gone(again)
    assert stop_pool(pool.folder) == 0 and not marked_processes(pool.folder) and not (pool.folder / "socket").exists()


def kill_both(pid: int) -> None:
    "Kill a controller and its guardian, which could otherwise clear away."
    guardian, controller = psutil.Process(pid).parent(), psutil.Process(pid)
    assert "rlbench.sandbox.controller" in guardian.cmdline()
    for process in (guardian, controller):
        process.kill()
    gone([guardian, controller])


def test_what_does_not_end_with_its_controller_is_ended_by_its_guardian(pool_at):
    "A worker that is stopped notices nothing, and neither client nor run may be left to clear away."
    pool = pool_at()
    workers, pid = workers_of(pool), pool.status().pid
    guardian = psutil.Process(pid).parent()
    pool.close()
    for worker in workers:
        worker.suspend()
    killed(pid)
    gone([*workers, guardian])
    assert not marked_processes(pool.folder) and not (pool.folder / "socket").exists()
    assert "2 processes were left" in (pool.folder / "controller.log").read_text()


def test_what_a_guardian_did_not_live_to_end_is_swept(pool_at):
    "The next controller ends it, and so does the end of a run."
    pool = pool_at()
    workers, pid = workers_of(pool), pool.status().pid
    for worker in workers:
        worker.suspend()
    kill_both(pid)
    assert pool.status().swept == 2  # of the controller that this client has started meanwhile
    gone(workers)
    workers, pid = workers_of(pool), pool.status().pid
    pool.close()
    for worker in workers:
        worker.suspend()
    kill_both(pid)
    time.sleep(1)
    assert all(worker.is_running() for worker in workers) and stop_pool(pool.folder) == 2
    gone(workers)
    assert sweep_pool(pool.folder) == 0 and not marked_processes(pool.folder)


def test_a_guardian_that_is_killed(pool_at):
    "The controller goes on without it, and ends its workers itself."
    pool = pool_at()
    workers, pid = workers_of(pool), pool.status().pid
    killed(psutil.Process(pid).ppid())
    assert pool.run(Program("# fake: say=on")).stdout == b"on" and pool.status().pid == pid
    pool.close()
    stop_pool(pool.folder)
    until(lambda: not is_alive(pid), 20)
    gone(workers)


def test_a_worker_that_is_killed(pool_at):
    """What ran there is run elsewhere; a sandbox with changes is lost, one that was kept is had again;
    another worker comes."""
    pool = pool_at()
    workers = workers_of(pool)
    boxes = [pool.open() for _ in range(4)]
    for number, box in enumerate(boxes):
        box.write("a", str(number).encode())
    layers = [box.snapshot() for box in boxes[:2]]
    running = [pool.submit(Program("# fake: wall=1")) for _ in range(4)]
    until(lambda: pool.status().busy == 4, 20)
    kill_at_once(pool, workers)
    ends = [future.result(400) for future in running]
    assert all(e.end is End.EXITED and e.tries == 2 for e in ends)
    assert [box.read("a") for box in boxes[:2]] == [b"0", b"1"] and len({layer.digest for layer in layers}) == 2
    for box in boxes[2:]:
        with pytest.raises(Fault, match="its process is gone"):
            box.read("a")
        assert box.exec(Program("pass")).end is End.BACKEND_LOST
    now = until(lambda: (found := pool.status()).workers == 2 and found, 20)
    assert now.lost == 4 and now.again == 4 and not {p.pid for p in workers} & {p.pid for p in workers_of(pool)}


def test_a_pool_that_nobody_needs_ends(pool_at):
    "Without clients for a while the controller goes by itself, and its workers with it."
    pool = pool_at(PoolSpec("fake", workers=2, processes=True, policy=PoolRules(idle_s=1)), "short")
    processes = [*workers_of(pool), psutil.Process(pool.status().pid)]
    pool.close()
    gone(processes)
    assert (
        not (pool.folder / "socket").exists()
        and not marked_processes(pool.folder)
        and connect_to_controller(pool.folder) is None
    )
    assert "nobody was connected" in (pool.folder / "controller.log").read_text()


def test_two_who_come_at_once_find_one(tmp_path):
    "Eight clients of a pool that is not there yet: one controller."
    folder, pools = tmp_path / "pool", []
    threads = [threading.Thread(target=lambda: pools.append(PoolClient.connect(folder))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    try:
        assert len(pools) == 8 and len({pool.status().pid for pool in pools}) == 1
        there = [
            p
            for p in psutil.process_iter(["cmdline"])
            if "rlbench.sandbox.controller" in (p.info["cmdline"] or []) and str(folder) in p.info["cmdline"]
        ]
        assert len(there) == 2 and pools[0].status().pid in {p.pid for p in there}, "one controller and its guardian"
    finally:
        for pool in pools:
            pool.close()
        stop_pool(folder)


def test_a_stranger_who_talks_nonsense(pool_at):
    "Is dropped; nothing that was said is run, and others are served."
    pool = pool_at()
    for nonsense in (
        b"\x80\x04\x95not a pickle we read\n",
        b"[" * 200_000 + b"\n",
        b'{"id": 1, "do": "exec", "program": 3}\n',
        b'{"id": {}, "do": "open"}\n',
        b'{"do": "cancel"}\n',
        b'{"do": "extend", "seconds": "x", "session": []}\n',
    ):
        with connect_to_controller(pool.folder) as stranger:
            stranger.sendall(nonsense)
            stranger.settimeout(10)
            said = stranger.recv(1 << 16)
            assert not said or b"protocol_error" in said, nonsense
    with connect_to_controller(pool.folder) as endless:
        with pytest.raises(OSError):
            for _ in range(200):
                endless.sendall(b"x" * (1 << 20))
    assert pool.run(Program("pass")).ok


def test_taking_a_program_back(pool_at):
    "A future that is cancelled ends its program."
    pool = pool_at()
    future = pool.submit(Program("# fake: wall=9"))
    until(lambda: pool.status().busy == 1, 20)
    assert future.cancel()
    until(lambda: pool.status().busy == 0, 5)
    with pytest.raises(CancelledError):
        future.result()
    opened = pool.submit_open()
    opened.cancel()
    until(lambda: pool.status().sessions == 0, 20)


def test_a_controller_that_is_stopped_for_a_while(pool_at):
    "Time in which it does not run is nobody's: no lease ends and no worker counts as hung."
    pool = pool_at(PoolSpec("fake", workers=2, policy=PoolRules(lease_s=2, operation_s=2, grace_s=1)), "stopped")
    box, controller = pool.open(), psutil.Process(pool.status().pid)
    box.write("a", b"1")
    controller.suspend()
    time.sleep(5)
    controller.resume()
    assert box.read("a") == b"1" and pool.status().expired == pool.status().lost == 0


def test_a_controller_that_hangs(pool_at, monkeypatch):
    "A client that is owed something and hears nothing ends it and finds another one."
    from rlbench.sandbox import pool as module

    monkeypatch.setattr(module, "SILENCE_SECONDS", 2.0)
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.5)
    pool = pool_at()
    controller = psutil.Process(pool.status().pid)
    controller.suspend()
    assert pool.run(Program("# fake: say=well")).stdout == b"well" and pool.status().pid != controller.pid
    gone([controller])


def test_a_bad_day_of_960(pool_at):
    """960 sandboxes and 960 programs at once while workers die and orders fail:
    everything is answered once, no fault is told as the model's, every attempt has a row."""
    faults = {
        "ends": {"quota": 0.02, "host_oom": 0.02, "protocol_error": 0.02, "start_failed": 0.02, "host_disk_full": 0.02},
        "lost": 0.002,
        "late": 0.002,
        "late_s": 2.0,
        "dead": 0.1,
        "slow": 0.1,
        "slow_s": 1.0,
    }
    pool = pool_at(
        PoolSpec(
            "fake",
            workers=4,
            seed=5,
            faults=faults,
            policy=PoolRules(hedge_floor_s=0.5, start_s=5, quota_s=0.05, grace_s=3),
        ),
        "bad",
    )
    began = time.monotonic()
    boxes = [pool.submit_open(owner=f"day/{i}") for i in range(960)]
    programs = [
        pool.submit(
            Program(f"# fake: wall=0.002 status={i % 3} say={i}"), SandboxLimits(cpu_s=0.5, wall_s=1), owner=f"day/{i}"
        )
        for i in range(960)
    ]
    wait([*boxes, *programs], timeout=400)
    assert all(future.done() for future in (*boxes, *programs)) and time.monotonic() - began < 100
    for number, future in enumerate(programs):
        e = future.result()
        assert not e.end.of_model or (e.end, e.status, e.stdout) == (End.EXITED, number % 3, str(number).encode())
    assert sum(future.result().end.of_model for future in programs) > 940
    assert (
        all(isinstance(future.exception(), Fault | None) for future in boxes)
        and sum(future.exception() is None for future in boxes) > 900
    )
    told = pool.status()
    assert told.executions == 960 and told.again > 50 and told.lost > 0
    time.sleep(1.5)  # rows are written twice a second
    rows = read_table(pool.folder, "executions", ["job", "fate", "end"])
    answered = [row for row in rows.iter_rows() if row[1] == "answered"]
    assert len(rows) > 1000 and len(answered) == 960 == len({row[0] for row in answered})
    assert Counter(row[2] for row in answered) == told.outcomes


def test_a_full_disk_stops_nobody(pool_at):
    "Rows wait while there is no room. A limit on the size of files is how the disk of one process is full."
    pool = pool_at()
    controller = psutil.Process(pool.status().pid)
    until(lambda: count_rows(pool.folder, "sandboxes") == 4, 20)
    before = controller.rlimit(psutil.RLIMIT_FSIZE)
    controller.rlimit(psutil.RLIMIT_FSIZE, (0, before[1]))
    assert [pool.run(Program("pass")).ok for _ in range(20)] == [True] * 20
    time.sleep(1)
    assert count_rows(pool.folder, "executions") == 0
    controller.rlimit(psutil.RLIMIT_FSIZE, before)
    until(lambda: count_rows(pool.folder, "executions") == 20, 20)
    assert pool.status().pid == controller.pid


class FullDisk:
    "A ledger whose disk has no room until it is told."

    def __init__(self):
        self.waiting, self.has_room = 0, False

    def append(self, table, **cells) -> None:
        self.waiting += 1

    def flush(self) -> None:
        if not self.has_room:
            raise OSError("no space left on device")


def test_rows_beyond_what_waits_are_dropped_and_counted(tmp_path, monkeypatch, capsys):
    "While the disk is full, and once it has room again."
    monkeypatch.setattr(controller_module, "MOST_ROWS", 3)
    disk = FullDisk()
    controller = Controller(tmp_path, PROCESSES, desk=None, server=None, ledger=disk, generation=0)
    controller.note("executions")
    flush_rows(controller)
    for _ in range(5):
        controller.note("executions")
    assert (disk.waiting, controller.dropped) == (3, 3)
    disk.has_room = True
    flush_rows(controller)
    assert "3 rows were dropped" in capsys.readouterr().err and not (controller.dropped or controller.disk_full)
    controller.note("executions")
    assert disk.waiting == 4


def test_refused_at_the_start(tmp_path):
    "A pool that cannot be made says why where it was asked for."
    folder = tmp_path / "other"
    with pytest.raises(Fault, match="the environment has no NO_SUCH_TOKEN"):
        PoolClient.connect(folder, PoolSpec("remote", url="http://127.0.0.1:1", token="$NO_SUCH_TOKEN"))
    (folder / "pool.json").write_text(json.dumps({"tires": 4}))
    with pytest.raises(ValueError, match="tires: a pool has no such field"):
        PoolClient.connect(folder)
    (folder / "pool.json").write_text("{")
    with pytest.raises(ValueError, match="not a JSON file"):
        PoolClient.connect(folder)
    assert (folder / LOCK).exists() is False or sweep_pool(folder) == 0


SPREAD = """
import os, subprocess, sys, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
time.sleep(600)
"""
REAL = {"bwrap-zygote": SPREAD, "landlock": "import time; time.sleep(600)", "rlimits": SPREAD}


def below(pid: int) -> list[psutil.Process]:
    "All processes below one."
    return psutil.Process(pid).children(recursive=True)


@pytest.mark.parametrize("tier", REAL)
def test_programs_do_not_outlive_a_controller_that_is_killed(pool_at, tier):
    """Real programs with daemons of their own, in every tier:
    a minute after `kill -9` of the controller nothing is left, and nothing on the disk."""
    pool = pool_at(PoolSpec(tier, workers=2, allow_unsafe=True), tier)
    box = pool.open()
    box.write("a", b"1")
    running = [
        pool.submit(Program(REAL[tier]), SandboxLimits(wall_s=300, processes=64)),
        box.submit(Program(REAL[tier]), SandboxLimits(wall_s=300, processes=64)),
    ]
    until(lambda: pool.status().busy == 2, 20)
    time.sleep(1)
    pid, scratch = (
        pool.status().pid,
        [Path(place) for place in json.loads((pool.folder / "processes.json").read_text())["places"]],
    )
    family = until(lambda: len(found := below(pid)) >= 4 and found, 20)
    assert (tier == "bwrap-zygote") == (not scratch) and all(place.is_dir() for place in scratch)
    pool.close()
    killed(pid)
    ends = [future.result(400) for future in running]
    assert [e.end for e in ends] == [End.BACKEND_LOST] * 2, ends
    gone(family, 60)
    until(lambda: not (pool.folder / "socket").exists(), 20)  # the guardian has come to the end
    assert (
        not marked_processes(pool.folder)
        and not any(place.exists() for place in scratch)
        and not (pool.folder / "socket").exists()
    )


def test_a_zygote_that_is_killed(pool_at):
    "A program is run again elsewhere, and a sandbox that was kept is had again with its files."
    pool = pool_at(PoolSpec(workers=2), "jails")
    workers = workers_of(pool)
    base = pool.keep({"src/a.py": b"A = 1\n"})
    box, lost = pool.open(base), pool.open(base)
    assert (
        box.exec(Program("open('b', 'w').write(open('src/a.py').read())")).ok
        and lost.exec(Program("open('c', 'w')")).ok
    )
    layer = box.snapshot(turn=1, version=4)
    running = pool.submit(Program("import time; time.sleep(1); print('done')"))
    until(lambda: pool.status().busy == 1, 20)
    kill_at_once(pool, workers)
    e = running.result(400)
    assert (e.stdout, e.tries) == (b"done\n", 2) and box.read("b") == b"A = 1\n" and box.read("src/a.py") == b"A = 1\n"
    with pytest.raises(Fault, match="backend_lost"):
        lost.read("c")
    with pool.open(layer=layer) as branch:
        assert branch.read("b") == b"A = 1\n" and branch.snapshot().below == (layer.digest,)
    assert pool.status().workers == 2

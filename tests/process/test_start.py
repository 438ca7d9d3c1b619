"""Workers come out of a fork server: what it holds, when it ends, what a worker finds,
and what happens where nothing can be forked."""

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from patience import until

import rlbench as rl
from rlbench.base.neighbours import live_runs
from rlbench.base.status import living_processes
from rlbench.bench.start import writes_again
from rlbench.loop.config_files import load_config, to_toml
from rlbench.runtime.actors import ProcessHandle
from rlbench.runtime.fork_server import ForkServer, ServerDesk, borrow_server, is_read_at_import, warm_server
from rlbench.runtime.worker_imports import may_be_forked, worker_modules
from rlbench.workbench import supervisor
from rlbench.workbench.imports_ahead import modules_of_run

SCRIPTED = dict(generator="scripted", clock="virtual", steps=2, batch=32, group=4, preflight=0, eval=[])
ENDLESS = dict(steps=100_000, batch=16, group=4, preflight=8, preflight_k=2, staleness=2, eval=[], placement="split")
WITHOUT_MODEL = {**ENDLESS, "generator": "scripted"}
SERVER = "rlbench-forks"  # the name of its process

OWNER = """
import sys, time
from rlbench.runtime.fork_server import ForkServer
if __name__ == "__main__":
    server = ForkServer()
    assert server.why_unfit() == ""
    worker = server.start({}, target=time.sleep, args=(600,), name="rlbench-sleeper", daemon=True)
    print(server.pid, worker.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def server():
    "A server without modules, ready."
    made = ForkServer()
    assert made.why_unfit() == ""
    yield made
    made.close()


def server_of(run: rl.Run) -> psutil.Process:
    "The fork server of a live run."
    (found,) = [p for p in psutil.Process(run.status.supervisor).children() if p.name() == SERVER]
    return found


def open_files(process: psutil.Process) -> set[str]:
    "What a process has open, by the names that the kernel gives."
    folder = Path(f"/proc/{process.pid}/fd")
    return {os.readlink(each) for each in folder.iterdir()}


def write_place(path: str) -> None:
    "In a worker: write down what it finds."
    print("a line for the log", flush=True)
    torch = sys.modules.get("torch")
    found = {
        "devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "given": os.environ.get("GIVEN_LATER"),
        "threads": torch.get_num_threads() if torch else 0,
        "touched": torch.cuda.is_initialized() if torch else False,
        "group": os.getpgrp(),
        "folder": os.getcwd(),
        "stdin": os.readlink("/proc/self/fd/0"),
        "ignores_interrupt": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
        "name": Path("/proc/self/comm").read_text().strip(),
        "draws": [random.random(), float(np.random.random())],
    }
    Path(path).write_text(json.dumps(found))


def wait_to_be_told(connection) -> None:
    "In a worker: end with the pipe."
    try:
        connection.recv()
    except EOFError:
        return


def test_server_ends_with_an_owner_that_is_killed(script):
    """Nobody can clean up after a SIGKILL; the server notices by itself, even while a worker that does not heed its
    pipe lives on."""
    owner = script(OWNER)
    pid, worker = map(int, owner.stdout.readline().split())
    server, child = psutil.Process(pid), psutil.Process(worker)
    owner.kill()
    until(lambda: not living_processes([server]), 5)
    assert living_processes([child])
    child.kill()


def test_worker_takes_the_place_of_a_spawned_one(tmp_path, monkeypatch, capfd):
    """Variables of the moment it is asked for, its own devices, threads, folder, group, name, input,
    output and random numbers."""
    server = ForkServer(["torch"])
    assert server.why_unfit() == ""
    monkeypatch.setenv("GIVEN_LATER", "yes")
    monkeypatch.chdir(tmp_path)
    told = []
    for number in range(2):
        place = tmp_path / f"{number}.json"
        variables = {"CUDA_VISIBLE_DEVICES": f"{number},7", "OMP_NUM_THREADS": str(number + 1)}
        worker = server.start(variables, target=write_place, args=(str(place),), name="rlbench-trainer", daemon=True)
        worker.join(30)
        assert worker.exitcode == 0
        told.append(json.loads(place.read_text()))
    server.close()
    first, second = told
    assert (first["devices"], second["devices"]) == ("0,7", "1,7")
    assert (first["threads"], second["threads"]) == (1, 2)
    assert first["given"] == "yes" and not first["touched"] and not first["ignores_interrupt"]
    assert first["group"] == os.getpgrp() and first["folder"] == str(tmp_path) and first["stdin"] == "/dev/null"
    assert first["name"] == "rlbench-trainer"[:15]
    assert first["draws"][0] != second["draws"][0] and first["draws"][1] != second["draws"][1]
    assert capfd.readouterr().out.count("a line for the log") == 2
    assert os.environ.get("CUDA_VISIBLE_DEVICES") != "0,7"


def test_several_workers_fork_at_once_and_say_how_they_ended(server):
    "Sixteen threads ask at the same moment; each gets a worker of its own and its exit status."
    found = {}

    def start(number: int) -> None:
        worker = server.start({}, target=sys.exit, args=(number,), name=f"rlbench-{number}", daemon=True)
        worker.join(30)
        found[number] = worker.exitcode

    threads = [threading.Thread(target=start, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {number: number for number in range(16)}


def test_worker_does_not_hold_the_pipes_of_another(server):
    "A worker ends when its own pipe is closed, although workers that were forked later live."
    first, second = (ProcessHandle(name, wait_to_be_told, server=server) for name in ("first", "second"))
    first.hang_up()
    first.process.join(10)
    assert first.process.exitcode == 0 and second.process.is_alive()
    second.close(5)


def test_dead_server_is_replaced(server, capfd):
    "The worker that meets it dead is spawned, and says so; the next one is forked by another server."
    psutil.Process(server.pid).kill()
    dead = server.pid
    until(lambda: not living_processes([psutil.Process(dead)]), 5)
    handles = [ProcessHandle(name, wait_to_be_told, server=server) for name in ("first", "second")]
    parents = [psutil.Process(handle.process.pid).ppid() for handle in handles]
    assert server.pid != dead and parents == [os.getpid(), server.pid]
    assert "rlbench-first is spawned, not forked" in capfd.readouterr().err
    for handle in handles:
        handle.close(5)


def test_server_with_more_than_one_thread_refuses(tmp_path, monkeypatch):
    "A module that starts a thread makes it unfit, and the reason names the threads."
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    server = ForkServer(["starts_a_thread"])
    assert "started 1 more threads" in server.why_unfit()
    with pytest.raises(OSError, match="more threads"):
        server.start({}, target=os.getpid, name="rlbench-x", daemon=True)
    server.close()


BORROWER = """
import sys, time
from rlbench.runtime.fork_server import borrow_server
if __name__ == "__main__":
    server = borrow_server(sys.argv[1], ("colorsys",))
    worker = server.start({}, target=time.sleep, args=(600,), name="rlbench-sleeper", daemon=True)
    print(server.pid, worker.pid, flush=True)
    time.sleep(600)
"""


def test_processes_of_a_host_share_a_server(tmp_path, script):
    """Two that ask at the same moment get one server, and so does this process;
    another list of modules is another server."""
    desk = ServerDesk(tmp_path)
    borrowers = [script(BORROWER, tmp_path) for _ in range(2)]
    found = [tuple(map(int, borrower.stdout.readline().split())) for borrower in borrowers]
    here = borrow_server(tmp_path, ("colorsys",))
    other = borrow_server(tmp_path, ("colorsys", "calendar"))
    assert {pid for pid, _ in found} == {here.pid} and other.pid != here.pid
    assert {psutil.Process(worker).ppid() for _, worker in found} == {here.pid}
    assert psutil.Process(here.pid).ppid() == os.getpid()
    for _, worker in found:
        os.kill(worker, signal.SIGKILL)
    for server in (here, other):
        server.close()
    desk.close()


def test_lent_server_ends_with_its_last_borrower(tmp_path, script):
    """The desk is closed, which leaves the server alive; a borrower that is killed ends it.

    Another desk takes its place."""
    desk = ServerDesk(tmp_path)
    borrower = script(BORROWER, tmp_path)
    server, worker = (psutil.Process(int(number)) for number in borrower.stdout.readline().split())
    desk.close()
    here = borrow_server(tmp_path, ("colorsys",))
    assert here.pid != server.pid, "nobody lends it any more"
    here.close()
    again = ServerDesk(tmp_path)
    lent = borrow_server(tmp_path, ("colorsys",))
    assert lent.pid in {each.pid for each in again.servers.values()}
    lent.close()
    again.close()
    assert living_processes([server])
    borrower.kill()
    until(lambda: not living_processes([server]), 10)
    worker.kill()


def test_dead_server_of_a_desk_is_replaced(tmp_path):
    "Whoever asks next gets another one. One that cannot import its modules says why, to all who ask."
    desk = ServerDesk(tmp_path)
    first = borrow_server(tmp_path, ())
    assert first.why_unfit() == ""
    dead = psutil.Process(first.pid)
    dead.kill()
    until(lambda: not living_processes([dead]), 5)
    second = borrow_server(tmp_path, ())
    assert second.pid != dead.pid and second.why_unfit() == ""
    unfit = [borrow_server(tmp_path, ("no_such_module",)) for _ in range(2)]
    assert all("no_such_module cannot be imported" in server.why_unfit() for server in unfit)
    for server in (first, second, *unfit):
        server.close()
    desk.close()


def test_workers_of_vllm_are_spawned():
    "Only those that hold its engine."
    config = rl.load_config("tiny").model_copy(update={"generator": "vllm"})
    assert not may_be_forked(config, ("trainer", "generator")) and not may_be_forked(config, ("generator-2",))
    assert may_be_forked(config, ("trainer",)) and may_be_forked(config, ("environment",))
    assert may_be_forked(rl.load_config("tiny"), ("generator",))


def test_killed_generator_is_forked_again_and_the_server_holds_nothing(tmp_path):
    """All workers of a run are the server's children; a killed one is replaced from it within seconds;
    the run's files are not its own; it ends with the run."""
    run = rl.run("tiny", runs=tmp_path, **ENDLESS)
    until(lambda: run.status and run.status.version >= 1, 120)
    server, before = server_of(run), run.status.workers
    assert {psutil.Process(pid).ppid() for pid in before.values()} == {server.pid}
    assert {os.getpgid(pid) for pid in before.values()} == {run.status.pid}
    assert not [name for name in open_files(server) if name.startswith(str(tmp_path))]
    assert str(run.folder / "run.log") in open_files(psutil.Process(before["generator"]))
    assert server.num_threads() == 1
    began = time.monotonic()
    os.kill(before["generator"], signal.SIGKILL)
    until(lambda: writes_again(run.table("events", ["kind"])["kind"].to_list()), 30)
    seconds = time.monotonic() - began
    after = run.status.workers
    assert after["generator"] != before["generator"] and psutil.Process(after["generator"]).ppid() == server.pid
    assert seconds < 10, f"{seconds:.1f} s; a spawned one imports torch for longer"
    workers = [psutil.Process(pid) for pid in after.values()]
    run.stop()
    assert run.wait(400) == "stopped"
    until(lambda: not living_processes([server, *workers]), 10)


def test_killed_run_process_takes_server_and_workers_with_it(tmp_path):
    "Even a worker that is stopped, and hears nothing."
    run = rl.run("tiny", runs=tmp_path, **WITHOUT_MODEL, restarts=0)
    until(lambda: run.status and run.status.version >= 1, 120)
    family = [server_of(run), *map(psutil.Process, run.status.workers.values())]
    os.kill(run.status.workers["trainer"], signal.SIGSTOP)
    os.kill(run.status.pid, signal.SIGKILL)
    until(lambda: not living_processes(family), 20)
    assert run.wait(400) == "failed" and run.status.books_closed


def test_workers_of_a_run_process_that_is_started_again_come_out_of_the_same_server(tmp_path):
    "The server outlives a run process that is killed, so that nothing is imported anew."
    run = rl.run("tiny", runs=tmp_path, **WITHOUT_MODEL, restarts=1)
    until(lambda: run.status and run.status.version >= 1, 120)
    server, lost = server_of(run), run.status.pid
    os.kill(lost, signal.SIGKILL)
    until(lambda: run.status.attempt == 1 and run.status.state == "running" and run.status.workers, 120)
    parents = {psutil.Process(worker).ppid() for worker in run.status.workers.values()}
    assert parents == {server.pid} and run.status.pid != lost
    run.stop()
    assert run.wait(400) == "stopped" and not living_processes([server])


def test_workers_without_a_model_need_no_torch():
    "The server of a scripted run imports what its workers import."
    assert not {"torch", "peft"} & set(worker_modules(scripted=True, lora=True))
    assert {"torch", "peft"} <= set(worker_modules(scripted=False, lora=True))


@pytest.mark.parametrize(
    ("settings", "has_torch"),
    [
        ({}, True),
        ({"clock": "virtual"}, True),
        ({"clock": "virtual", "generator": "vllm"}, False),
        (WITHOUT_MODEL, False),
    ],
    ids=["real clock", "virtual clock", "vLLM in the run process", "scripted"],
)
def test_the_run_process_finds_torch_imported_if_it_bears_it(tmp_path, settings, has_torch):
    "On the virtual clock the run process generates and trains itself; one with vLLM in it must not be such a fork."
    (tmp_path / "config.toml").write_text(to_toml(load_config("tiny", settings)))
    assert ("torch" in modules_of_run(tmp_path)) == has_torch


LOADS_WHAT_A_RUN_IMPORTS = """
import ast, inspect, sys
from rlbench.runtime.fork_server import import_ahead
from rlbench.workbench import supervisor
from rlbench.workbench.imports_ahead import run_modules
assert import_ahead(run_modules(needs_torch=False)) == ""
for function in (supervisor.run_main, supervisor.drive_run, supervisor.sweep_pool, supervisor.note_diagnosis):
    for node in ast.walk(ast.parse(inspect.getsource(function))):
        if isinstance(node, ast.ImportFrom) and node.module not in sys.modules:
            print(node.module)
print("polars" in sys.modules)
"""


def test_what_a_run_process_and_its_end_import_is_imported_ahead(script):
    "Else each run would import it anew. Polars, which starts threads, is not."
    out, err = script(LOADS_WHAT_A_RUN_IMPORTS).communicate(timeout=400)
    assert out.split() == ["False"], err


def test_only_what_imports_read_asks_for_another_server():
    "Loading a policy sets a variable of torch's; the next run of that process comes out of the same server."
    assert is_read_at_import("OMP_NUM_THREADS") and is_read_at_import("TORCH_LOGS")
    assert not is_read_at_import("TORCHINDUCTOR_CACHE_DIR") and not is_read_at_import("EDITOR")


STARTS_A_RUN = """
import sys, time
import rlbench as rl
if __name__ == "__main__":
    started = rl.run("tiny", runs=sys.argv[1], name="a", generator="scripted", steps=100_000, eval=[])
    print(started.status.pid, flush=True)
    time.sleep(float(sys.argv[2]))
"""


def test_next_run_of_a_process_is_forked_and_a_killed_server_is_replaced(tmp_path):
    """Two runs of one process come out of one server; each leads a session of its own,
    and is found as a live run by its folder.
    When the server is killed, they go on, and the next run comes out of another one."""
    runs = [rl.run("tiny", runs=tmp_path, name=name, **WITHOUT_MODEL) for name in ("a", "b")]
    for run in runs:
        until(lambda run=run: run.status.version >= 1, 60)
    keepers = [psutil.Process(run.status.supervisor) for run in runs]
    server = warm_server(modules_of_run(runs[0].folder))
    assert {keeper.ppid() for keeper in keepers} == {server.pid}
    assert [os.getsid(keeper.pid) for keeper in keepers] == [keeper.pid for keeper in keepers]
    assert os.getsid(server.pid) == server.pid
    assert {(run.folder, keeper.pid) for run, keeper in zip(runs, keepers)} <= set(live_runs())
    assert not [name for name in open_files(psutil.Process(server.pid)) if name.startswith(str(tmp_path))]
    dead = psutil.Process(server.pid)
    dead.kill()
    until(lambda: not living_processes([dead]), 5)
    later = rl.run("tiny", runs=tmp_path, name="c", **WITHOUT_MODEL)
    until(lambda: later.status.version >= 1, 60)
    assert psutil.Process(later.status.supervisor).ppid() not in (dead.pid, 1)
    before = [run.status.version for run in runs]
    until(lambda: all(run.status.version > version for run, version in zip(runs, before)), 60)
    for run in (*runs, later):
        run.stop()
        assert run.wait(400) == "stopped"


@pytest.mark.parametrize("seconds", [0, 600])
def test_run_outlives_the_process_that_started_it(tmp_path, script, seconds):
    """One that leaves at once, before the server's imports are done, and one that is killed later;
    the server ends with it, the run goes on."""
    owner = script(STARTS_A_RUN, tmp_path, seconds)
    server = psutil.Process(int(owner.stdout.readline()))
    if seconds == 0:
        assert owner.wait(400) == 0
    run = rl.attach("a", runs=tmp_path)
    until(lambda: run.status.version >= 1, 60)
    owner.kill()
    until(lambda: not living_processes([server]), 10)
    before = run.status.version
    until(lambda: run.status.version > before, 60)
    run.stop()
    assert run.wait(400) == "stopped"


def test_interrupt_during_the_start_comes_after_it(tmp_path, monkeypatch):
    "Ctrl-C between the note that a run is brought up and the order to do so: the order is given first."
    note_start = supervisor.note_start

    def note_and_interrupt(*arguments) -> None:
        note_start(*arguments)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(supervisor, "note_start", note_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        rl.run("tiny", **SCRIPTED, name="pressed", runs=tmp_path)
    run = rl.attach(tmp_path / "pressed")
    run.wait(400)
    assert run.state == "finished"


def test_runs_without_a_model_need_no_torch(tmp_path):
    """Neither the server that they come from, nor any process of theirs.

    The run process begins without polars, too: its import would be waited for."""
    run = rl.run("tiny", runs=tmp_path, **WITHOUT_MODEL, virtual={"scripted_pace": 0.3})
    assert not [name for name in modules_of_run(run.folder) if name.split(".")[0] in ("torch", "transformers")]
    until(lambda: run.status.version >= 1, 60)
    mapped = Path(f"/proc/{run.status.pid}/maps").read_text()
    assert "libtorch" not in mapped and "_polars_runtime" not in mapped and run.checkpoints
    run.stop()
    assert run.wait(400) == "stopped"

"""`kill -9` of whatever belongs to a run, while its programs run and sandboxes are open: soon nothing of it is left."""

import json
import os
from pathlib import Path

import psutil
import pytest
from patience import until
from real_runs import processes_of
from scripted import WITHOUT_MODEL

import rlbench as rl
from rlbench.base.ledger_reading import read_table
from rlbench.base.run_files import read_json
from rlbench.base.status import is_alive, living_processes
from rlbench.sandbox.pool import PoolClient
from rlbench.sandbox.pool_folder import PROCESSES, kill_all, marked_processes, sweep_pool
from rlbench.sandbox.types import End, Program

# A program with two daemons in sessions of their own, of which one spins;
# without namespaces it may start none and sleeps.
WRAP = """
import os, time
for spins in (True, False):
    try:
        if os.fork() == 0:
            os.setsid()
            while spins:
                pass
            time.sleep(600)
    except OSError:
        pass
time.sleep(600)
# {answer}
"""
TABLE = json.dumps({"kind": "function", "function": "solve", "wrap": WRAP, "tests": [{"expected": 1}]})
CODED = {
    **WITHOUT_MODEL,
    "steps": 100,
    "batch": 32,
    "group": 8,
    "preflight": 0,
    "eval": [],
    "reward": "tests",
    "score_deadline": 300.0,
    "verifier": {"name": "code", "cpu_s": 200.0, "wall_s": 250.0},
}
MOUNTS = Path("/proc/mounts")


def endless(*, split="train", seed=0, count=64):
    from rlbench.records import Task

    return [Task(f"endless/{split}/{i}", f"{i}+{i}=", os.environ["ENDLESS"], 1, "endless") for i in range(count)]


def kill(*processes: psutil.Process) -> None:
    "Stop them all, so that none can do anything about the others, then kill them."
    for process in processes:
        process.suspend()
    for process in processes:
        process.kill()


class Scene:
    "A run whose programs are under way, and everything that belongs to its pool."

    def __init__(self, folder: Path, tier: str, run: Path):
        self.folder, self.run = folder / "pool", rl.attach(run)
        self.mounts = MOUNTS.read_text().count("\n")
        until((self.folder / "socket").exists, 90)
        with PoolClient.connect(self.folder) as client:
            until(lambda: client.status().busy >= 4, 90)
            self.controller = psutil.Process(client.status().pid)
        least = 12 if tier == "bwrap-zygote" else 5
        until(lambda: len(self.guardian.children(recursive=True)) >= least, 30)  # each program starts two more
        self.family = self.guardian.children(recursive=True)
        self.places = [Path(place) for place in read_json(self.folder / PROCESSES)["places"]]
        assert (tier == "bwrap-zygote") != bool(self.places) and all(place.is_dir() for place in self.places)
        supervisor = psutil.Process(self.run.status.supervisor)
        self.processes = [supervisor, *supervisor.children(recursive=True)]

    @property
    def guardian(self) -> psutil.Process:
        return self.controller.parent()

    def left(self) -> list:
        "What is still there of the pool: processes, marks, folders, mounts, cgroups."
        groups = list(Path("/sys/fs/cgroup").glob("**/*rlbench*"))
        return [
            *living_processes(self.family),
            *marked_processes(self.folder),
            *(p for p in self.places if p.exists()),
            *groups,
            *(["socket"] if (self.folder / "socket").exists() else []),
            *(["mounts"] if MOUNTS.read_text().count("\n") > self.mounts else []),
        ]


@pytest.fixture
def begin(tmp_path, monkeypatch):
    "Starts a run of programs that never end; whatever of it is there when the test ends is killed."
    made, runs = [], []
    monkeypatch.setenv("ENDLESS", TABLE)

    def at(tier: str = "", **more) -> Scene:
        pool = {"folder": str(tmp_path / "pool"), "canaries": 0, "workers": 2, "idle_s": 5.0, "tier": tier}
        run = rl.run("tiny", runs=tmp_path, name="endless", tasks=endless, sandbox=pool, **{**CODED, **more})
        runs.append(run)
        made.append(Scene(tmp_path, tier or "bwrap-zygote", run.folder))
        return made[-1]

    yield at
    for run in runs:
        if is_alive(run.status.supervisor):
            kill_all(processes_of(run))
    for scene in made:
        kill_all(living_processes([*scene.processes, *scene.family]))
    sweep_pool(tmp_path / "pool")


def test_a_run_process_that_is_killed(begin):
    "Its supervisor closes the books, its programs end, and the pool that nobody uses any more ends as well."
    scene = begin()
    kill(psutil.Process(scene.run.status.pid))
    until(lambda: not living_processes(scene.processes), 30)
    until(lambda: not scene.left(), 20)
    assert scene.run.state == "failed" and scene.run.status.books_closed
    rows = read_table(scene.folder, "executions", ["fate"])
    assert len(rows) >= 4 and set(rows["fate"]) == {"cancelled"}


def test_a_whole_run_that_is_killed(begin):
    "Run process, workers and supervisor at once: the pool hears of it by itself."
    scene = begin()
    kill(*scene.processes)
    until(lambda: not scene.left(), 20)
    assert scene.run.state == "dead"


def test_a_run_that_is_killed_with_its_pool(begin):
    "Everything at once, but for the supervisor and the guardian: between them nothing stays, not even on the disk."
    scene = begin("landlock")
    for worker in scene.controller.children():
        worker.suspend()  # and notices nothing
    kill(scene.controller, psutil.Process(scene.run.status.pid))
    until(lambda: not scene.left() and not living_processes(scene.processes), 20)


def test_a_pool_that_is_killed_to_the_last_process_is_swept_at_the_runs_end(begin):
    "Controller and guardian are dead, a worker hangs, and the run process dies: the supervisor is the last who knows."
    scene = begin("landlock")
    for worker in scene.controller.children():
        worker.suspend()
    environment = psutil.Process(scene.run.status.workers["environment"])
    kill(environment, psutil.Process(scene.run.status.pid), scene.guardian, scene.controller)
    until(lambda: not scene.left() and not living_processes(scene.processes), 20)
    assert "processes of a pool without a controller have been ended" in (scene.run.folder / "run.log").read_text()


KERNEL = """
import json, sys, time
import rlbench as rl
from rlbench.sandbox.pool import PoolClient
from rlbench.sandbox.types import Program, SandboxLimits
from rlbench.runtime.environment_worker import open_pool

run = rl.run("tiny", runs=sys.argv[1], name="endless", **json.loads(sys.argv[2]))
pool = open_pool(run.config)
boxes = [pool.open(owner=f"kernel/{i}") for i in range(8)]
running = [boxes[0].submit(Program("while True: pass"), SandboxLimits(cpu_s=500, wall_s=500))]
print(pool.status().sessions, flush=True)
time.sleep(600)
"""


def test_a_kernel_that_is_killed(script, tmp_path):
    """What it had open itself is closed.

    The run that it has started goes on, which is what it is for, and takes the pool with it when it ends."""
    pool = {"folder": str(tmp_path / "pool"), "canaries": 1, "workers": 2, "idle_s": 3.0}
    told = {**CODED, "steps": 100_000, "tasks": "expressions", "verifier": "code", "sandbox": pool}
    kernel = script(KERNEL, tmp_path, json.dumps(told))
    assert kernel.stdout.readline() == "8\n", kernel.communicate()
    kernel.kill()
    run = rl.attach("endless", runs=tmp_path)
    with PoolClient.connect(tmp_path / "pool") as mine:
        until(lambda: mine.status().sessions == 0, 30)
        controller = psutil.Process(mine.status().pid)
        until(lambda: run.status.version >= 1, 90)
    family, run_processes = (
        controller.parent().children(recursive=True),
        psutil.Process(run.status.supervisor).children(recursive=True),
    )
    version = run.status.version
    until(lambda: run.status.version > version, 30)
    run.stop()
    until(
        lambda: not living_processes([controller, *family, *run_processes]) and not marked_processes(tmp_path / "pool"),
        20,
    )
    assert run.state == "stopped"


@pytest.mark.parametrize("tier", ["bwrap-zygote", "landlock"])
def test_a_controller_that_is_killed_under_a_run(begin, tmp_path, tier):
    """Nothing of the old pool is left, sandboxes are lost, and the run goes on with the next one:
    what was asked is asked again."""
    scene = begin(tier)
    with PoolClient.connect(tmp_path / "pool") as mine:
        boxes = [mine.open() for _ in range(5)]
        boxes[0].write("a", b"1")
        kill(scene.controller)
        until(lambda: not living_processes(scene.family) and not any(place.exists() for place in scene.places), 20)
        assert mine.status().pid != scene.controller.pid and boxes[0].exec(Program("pass")).end is End.BACKEND_LOST
        until(lambda: mine.status().busy >= 4, 30)  # the run's programs, once more
    assert scene.run.status.supervisor and len(living_processes(scene.processes)) == len(scene.processes)
    again = psutil.Process(read_json(scene.folder / PROCESSES)["controller"]).parent()
    scene.family = [again, *again.children(recursive=True)]
    kill(*scene.processes)
    until(lambda: not living_processes(scene.family) and not marked_processes(scene.folder), 20)

"""Real runs in tests: wait for their end, find their processes, check their books."""

import polars as pl
import psutil

import rlbench as rl
from rlbench.base.status import living_processes
from rlbench.runtime.driver import Driver
from rlbench.runtime.fork_server import warm_server
from rlbench.runtime.worker_imports import worker_modules

SMALL = dict(
    steps=4,
    batch=32,
    group=4,
    preflight=8,
    preflight_k=2,
    staleness=0,
    eval=[{"name": "held_out", "count": 16, "every": 2}],
)


def ended(run: rl.Run, state: str = "finished", seconds: float = 400) -> rl.Run:
    "The run, once it has ended as expected; its log in the message otherwise."
    found = run.wait(seconds)
    assert found == state, f"{found}: {run.status}\n{(run.folder / 'run.log').read_text()[-3000:]}"
    return run


def fork_workers_of(driver: Driver) -> None:
    """Have a driver's workers forked from a server of this test process, as those of a run are. A driver alone spawns
    them, and each imports PyTorch and transformers anew."""
    driver.workers.server = warm_server(worker_modules(scripted=False, lora=False))


def assert_books(run: rl.Run) -> None:
    "The books are closed, and the rollouts table says the same."
    status, rows = run.status, run.rollouts
    assert status.books_closed
    counted = {fate: (n, t) for fate, n, t in rows.group_by("fate").agg(pl.len(), pl.col("length").sum()).iter_rows()}
    assert counted == {fate: (e["count"], e["tokens"]) for fate, e in status.books.items()}
    assert sum(n for n, _ in counted.values()) == status.dispatched


def processes_of(run: rl.Run) -> list[psutil.Process]:
    "Supervisor, run process and workers."
    supervisor = psutil.Process(run.status.supervisor)
    return [supervisor, *supervisor.children(recursive=True)]


def worker_of(run: rl.Run, name: str) -> psutil.Process:
    "The process of a worker: the one whose open pipe the run process wrote down under its name."
    return psutil.Process(run.status.workers[name])


def gone(processes: list[psutil.Process]) -> bool:
    "Whether none of them is alive."
    return not living_processes(processes)


def run_policy_differs(run: rl.Run) -> bool:
    "Whether the saved policy can be loaded and is not the one the run started with."
    from rlbench.models.model import load_policy

    start, end = (load_policy(name).model.state_dict() for name in ("tiny", str(run.folder / "policy")))
    return any(not start[name].equal(end[name]) for name in start)

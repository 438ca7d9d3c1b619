"""What all tests share: one compute thread, a place to work, and child processes that never outlive a test."""

import gc
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

gc.disable()  # until all tests are collected: it would look at all that is imported again and again
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "helpers")]

from rlbench.base.neighbours import live_runs
from rlbench.models.hardware import VLLM_CPU_FLAGS, cpu_flags
from rlbench.sandbox.pool_folder import kill_all

os.environ.setdefault("OMP_NUM_THREADS", "1")
MEMORY = Path("/dev/shm")
ROOM = 4 * 10**9  # bytes that must be free there for all workers of a session
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM:
    # pytest makes its folders there: a run's tables are forced to the disk at every flush
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
ROOT = Path(__file__).parent.parent
NOTEBOOK = "::test_notebook_runs["
# notebooks that take longest come before the others, so that all workers end at about the same time
LONGEST = (
    "sandbox/33_hacks studies/solved_groups studies/tool_drift studies/sandbox_quota which_mode workbench "
    "workbench/10_drill "
    "workbench/16_ablation bench/24_acceptance bench/29_ray_hosts engines/09_vllm planning/08_simulator "
    "planning/18_predict"
).split()
ON_HOSTS = tuple(f"process/test_{name}_hosts.py" for name in ("doctor_on", "ranks_on", "ray", "runs_over"))
STARTED = pytest.StashKey[tuple[float, float]]()  # the clock and the processors' busy seconds as the session starts
COSTLY_FILES = 25  # that the summary names
NO_VLLM = "vLLM's CPU build needs the CPU flag avx512f or avx2, and this CPU has neither"


@pytest.fixture
def root() -> Path:
    "The project's folder."
    return ROOT


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_session(tmp_path_factory) -> None:
    "What is remembered of other systems' runs stays among the files of the tests, not in the user's cache."
    os.environ.setdefault("RLBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    "A cache of a test's own for what is remembered of other systems' runs."
    monkeypatch.setenv("RLBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def busy_s() -> float:
    "Seconds in which this machine's processors were at work since it started."
    times = psutil.cpu_times()
    return times.user + times.nice + times.system


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes a second or more; `make check` leaves it out")
    config.stash[STARTED] = time.monotonic(), busy_s()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """With several workers: what the session cost in processor seconds, which depends less on the machine's hour than
    its length does, and the files that took longest."""
    if not config.getoption("numprocesses", None):
        return
    began, busy = config.stash[STARTED]
    elapsed_s = time.monotonic() - began
    files: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                files[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section("cost")
    costly = ", ".join(f"{file} {seconds:.0f}" for file, seconds in files.most_common(COSTLY_FILES))
    terminalreporter.write_line(f"seconds by file, longest first: {costly}")
    cores = psutil.cpu_count()
    terminalreporter.write_line(
        f"{cores} processors were busy for {busy_s() - busy:.0f} s of {cores} x {elapsed_s:.0f} s"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The notebooks come last: they are many and fill what is left of each worker.

    A name with an address in it would be another one in each worker."""
    if adrift := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"tests whose names change from process to process, name their parameters: {adrift[0]}")
    longest = [f"{NOTEBOOK}{name}]" for name in LONGEST]
    items.sort(key=lambda item: (NOTEBOOK in item.nodeid, not item.nodeid.endswith(tuple(longest))))


def pytest_collection_finish() -> None:
    "What is imported by now stays: no later garbage collection looks at it, and no fork copies it."
    gc.freeze()
    gc.enable()


def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """With several workers: the tests of a file stay together, since they share what they start;
    those of all files that need simulated hosts do, too; and each notebook is run where there is room."""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if NOTEBOOK in nodeid:
                return nodeid
            file = nodeid.partition("::")[0]
            return "hosts" if file.endswith(ON_HOSTS) else file

    return Together(config, log)


@pytest.fixture(scope="session")
def cpu_for_vllm() -> None:
    "For tests that start vLLM's CPU build."
    if not VLLM_CPU_FLAGS & (cpu_flags() or frozenset()):
        pytest.skip(NO_VLLM)


@pytest.fixture
def one_thread():
    "PyTorch computes with one thread, so that sums come out to the same bits."
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tenant_trainer():
    "The training service's trainer of the policy `tiny`, in this process and with one thread."
    import torch

    from rlbench.service.tenant_trainer import TenantTrainer

    torch.set_num_threads(1)
    return TenantTrainer("tiny")


@pytest.fixture
def script(tmp_path):
    "Starts `python -c TEXT ARGS` in a folder of its own; whatever still runs when the test ends is killed."
    children = []

    def start(text: str, *args, prefix=(), **options) -> subprocess.Popen:
        options = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
        children.append(subprocess.Popen([*prefix, sys.executable, "-c", text, *map(str, args)], **options))
        return children[-1]

    yield start
    for child in children:
        if child.poll() is None:
            child.kill()
        child.communicate()


@pytest.fixture(scope="session", autouse=True)
def no_run_outlives_the_tests(request, tmp_path_factory):
    """A test that fails half-way leaves its run alive; it is ended with the session. Folders are kept for whoever looks
    for what failed, and else leave the memory."""
    yield
    base = str(tmp_path_factory.getbasetemp())
    kill_all([psutil.Process(pid) for folder, pid in live_runs() if str(folder).startswith(base)])
    for process in psutil.process_iter(["cmdline", "cwd"]):
        told = process.info
        line = told["cmdline"] or []
        if {"rlbench.views.sinks", "rlbench.sandbox.controller"} & set(line) and any(
            (place or "").startswith(base) for place in (told["cwd"], *line)
        ):
            kill_all([process])
    if not request.session.testsfailed:
        shutil.rmtree(base, ignore_errors=True)

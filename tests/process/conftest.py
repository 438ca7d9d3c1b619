"""Ray on simulated hosts, which the tests of several files share: its start takes longer than most of them."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rlbench.bench.ray_hosts import RayHosts
from rlbench.bench.several_hosts import watched_hosts

PREFIX = "test-on-hosts-"  # not "rlbench-": by that, processes are known that a run has left on a host
NEXT = pytest.StashKey[pytest.Item | None]()  # the test after the one that ends


class SharedHosts:
    "Three hosts of three cores, made when they are first asked for. Only the first one sees the folder `runs`."

    def __init__(self) -> None:
        self.made = ExitStack()
        self.hosts: RayHosts | None = None
        self.runs = Path()

    def get(self) -> RayHosts:
        "The hosts, with Ray on them."
        if self.hosts is None:
            # on the disk: each host has a /dev/shm of its own
            self.runs = Path(self.made.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX)))
            self.hosts = self.made.enter_context(watched_hosts(self.runs))
        return self.hosts

    def close(self) -> None:
        "End the hosts, if they were made."
        self.hosts = None
        self.made.close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    "Note what comes next, for fixtures that end."
    item.session.stash[NEXT] = nextitem


@pytest.fixture(scope="module")
def disk_folder() -> Iterator[Path]:
    "A folder on the disk, for tests of simulated hosts: each of those has a /dev/shm of its own."
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def shared_hosts():
    "What `cluster` takes its hosts from."
    shared = SharedHosts()
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def cluster(request, shared_hosts):
    """Three hosts with Ray on them. They end after the last file that uses them, since they take time even when they
    are idle, and after a file in which a test failed, since that may leave them broken."""
    failed = request.session.testsfailed
    yield shared_hosts.get()
    next_needs = getattr(request.session.stash[NEXT], "fixturenames", ())
    if "cluster" not in next_needs or request.session.testsfailed > failed:
        shared_hosts.close()


@pytest.fixture(scope="module")
def runs(request, cluster, shared_hosts) -> Path:
    "A folder for the runs of a file, which only the first host sees."
    folder = shared_hosts.runs / request.module.__name__
    folder.mkdir(exist_ok=True)
    return folder

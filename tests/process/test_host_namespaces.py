"""Simulated hosts: each has its own network, name, processes and private folders, and nothing is left of them."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rlbench.bench.host_namespaces import HostsUnavailable, check_hosts_possible, make_hosts

pytestmark = pytest.mark.slow
SERVE = """
import socket
server = socket.create_server(("", 5000))
print("ready", flush=True)
while True:
    connection, _ = server.accept()
    wanted = int(connection.recv(20))
    connection.sendall(b"x" * wanted)
    connection.close()
"""
FETCH = """
import socket, sys, time
began = time.perf_counter()
connection = socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[3]))
connection.sendall(sys.argv[2].encode())
received = 0
while part := connection.recv(65536):
    received += len(part)
print(received, time.perf_counter() - began)
"""


@pytest.fixture(scope="module")
def shared(disk_folder) -> Path:
    "A folder that only the first host sees."
    (disk_folder / "status.json").write_text("{}")
    return disk_folder


@pytest.fixture(scope="module")
def hosts(shared):
    "Two hosts; the first serves as many bytes as it is asked for."
    with make_hosts(2, hidden=[shared], environment={"RLBENCH_TEST": "yes"}) as cluster:
        server = cluster.head.popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True)
        assert server.stdout.readline() == "ready\n"
        yield cluster


def fetch(cluster, size: int = 5, timeout_s: float = 1) -> tuple[int, float]:
    """Bytes that the second host gets from the first, and the seconds it took.

    RuntimeError after `timeout_s` of silence."""
    command = [sys.executable, "-c", FETCH, "host-1", str(size), str(timeout_s)]
    received, seconds = cluster.host(2).run(command).split()
    return int(received), float(seconds)


def test_hosts_have_names_addresses_and_processes_of_their_own(hosts):
    first, second = hosts.hosts
    assert [host.run(["hostname"]).strip() for host in hosts.hosts] == ["host-1", "host-2"]
    assert f"{second.address}/24" in second.run(["ip", "-4", "-o", "address"]) and second.address != first.address
    assert "RLBENCH_TEST=yes" in second.run(["env"])
    own = second.run([sys.executable, "-c", "import os; print(*[n for n in os.listdir('/proc') if n.isdigit()])"])
    assert "1" in own.split() and len(own.split()) == 2  # the keeper and the command itself
    assert {process.pid for process in first.processes()}.isdisjoint(psutil.Process().children())
    assert hosts.switch.process in psutil.pids() and psutil.pid_exists(first.keeper.process)


def test_only_the_first_host_sees_a_hidden_folder(hosts, shared):
    assert hosts.head.run(["ls", str(shared)]).split() == ["status.json"]
    assert hosts.host(2).run(["ls", str(shared)]) == ""
    hosts.host(2).run(["touch", str(shared / "stray")])
    assert [path.name for path in shared.iterdir()] == ["status.json"]
    place = "import tempfile; print(tempfile.gettempdir())"
    assert hosts.host(2).run([sys.executable, "-c", place]).strip() == "/dev/shm"
    hosts.host(2).run(["touch", "/dev/shm/mine"])
    assert "mine" not in hosts.head.run(["ls", "/dev/shm"]) and not Path("/dev/shm/mine").exists()


def test_a_cut_link_is_silent_until_it_is_restored(hosts):
    assert fetch(hosts)[0] == 5
    hosts.cut(2)
    with pytest.raises(RuntimeError, match="TimeoutError"):
        fetch(hosts)
    hosts.restore(2)
    assert fetch(hosts, timeout_s=5)[0] == 5


def test_a_slow_link_takes_the_time_that_its_rate_says(hosts):
    size = 500_000
    _, quick_s = fetch(hosts, size)
    hosts.slow(2, 2000)
    received, slow_s = fetch(hosts, size, timeout_s=5)
    hosts.slow(2, None)
    assert received == size and slow_s > 1.2 > quick_s  # 500 kB at 250 kB/s take 2 s, less a full bucket
    assert fetch(hosts, size)[1] < 1.2


def sleeps(host) -> bool:
    "Is one of a host's processes the program `sleep`? A process may end while it is looked at."
    for process in host.processes():
        with suppress(psutil.NoSuchProcess):
            if process.name() == "sleep":
                return True
    return False


def test_signals_and_statuses_pass(hosts):
    with pytest.raises(RuntimeError, match="status 7"):
        hosts.host(2).run(["sh", "-c", "exit 7"])
    catching = "import signal, time\nsignal.signal(2, lambda *_: exit(5))\nprint('ready', flush=True)\ntime.sleep(60)"
    started = hosts.host(2).popen([sys.executable, "-c", catching], stdout=subprocess.PIPE, text=True)
    assert started.stdout.readline() == "ready\n"
    started.send_signal(signal.SIGINT)
    assert started.wait(10) == 5
    started = hosts.host(2).popen(["sleep", "60"])
    while not sleeps(hosts.host(2)):
        time.sleep(0.01)
    started.kill()
    started.wait(10)
    deadline = time.monotonic() + 5
    while sleeps(hosts.host(2)):
        assert time.monotonic() < deadline, "the command outlives the process that stands for it"
        time.sleep(0.01)


def test_a_killed_host_comes_back_empty_with_its_address(hosts):
    second = hosts.host(2)
    second.run(["touch", "/dev/shm/mine"])
    left = second.processes()
    hosts.kill_host(2, silent=True)
    assert not any(process.is_running() for process in left)
    with pytest.raises(ValueError, match="host-2 is down"):
        second.run(["true"])
    hosts.start_host(2)
    assert fetch(hosts, timeout_s=5)[0] == 5 and "mine" not in second.run(["ls", "/dev/shm"])


OWNER = """
import sys, time
from rlbench.bench.host_namespaces import make_hosts
with make_hosts(1) as cluster:
    cluster.head.popen(["sh", "-c", "setsid sleep 600 & sleep 600"])
    while sum(process.name() == "sleep" for process in cluster.head.processes()) < 2:
        time.sleep(0.01)
    print(*[process.pid for process in cluster.head.processes()], cluster.switch.process, flush=True)
    time.sleep(600)
"""


def test_nothing_is_left_when_the_owner_is_killed():
    devices = sorted(os.listdir("/sys/class/net"))
    mounts = Path("/proc/self/mountinfo").read_text()
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    processes = [psutil.Process(int(number)) for number in owner.stdout.readline().split()]
    assert len(processes) >= 4 and sorted(os.listdir("/sys/class/net")) == devices
    owner.kill()
    owner.wait()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive
    assert sorted(os.listdir("/sys/class/net")) == devices and Path("/proc/self/mountinfo").read_text() == mounts


def test_what_cannot_be_is_refused_with_the_remedy(tmp_path, monkeypatch):
    for hidden, words in ((tmp_path / "none", "is no folder; make it"), (sys.prefix, "which every host needs")):
        with pytest.raises(ValueError, match=words), make_hosts(1, hidden=[hidden]):
            pass
    with pytest.raises(ValueError, match="count is 0"), make_hosts(0):
        pass
    with make_hosts(1) as one:
        with pytest.raises(ValueError, match="there is no host 2"):
            one.cut(2)
        with pytest.raises(ValueError, match="at least 8 kbit/s"):
            one.slow(1, 1)
    monkeypatch.setattr("rlbench.bench.host_namespaces.search_path", lambda: str(tmp_path))
    with pytest.raises(HostsUnavailable, match="install Debian's package iproute2"):
        check_hosts_possible()


def test_a_user_without_rights_hears_the_remedy_or_makes_hosts():
    "As another user: either user namespaces are allowed, and hosts work, or the error names what to allow."
    code = (
        "from rlbench.bench.host_namespaces import HostsUnavailable, make_hosts\n"
        "try:\n    with make_hosts(2) as cluster: print(cluster.host(2).run(['hostname'], folder='/').strip())\n"
        "except HostsUnavailable as error: print(error)"
    )
    other_user = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]  # no longer root, and without its rights
    done = subprocess.run([*other_user, sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "host-2" or "user.max_user_namespaces" in done.stdout, done

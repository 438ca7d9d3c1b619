"""`rlbench doctor --cluster` and dry runs on a Ray cluster over three simulated hosts."""

import json
import sys

import pytest

pytestmark = pytest.mark.slow
RLBENCH = [sys.executable, "-W", "ignore", "-m", "rlbench.cli.main"]


def ask(cluster, *words: str, **environment: str) -> tuple[int, str]:
    "Exit status and output of the command line on the first host."
    started = cluster.head.popen([*RLBENCH, *words], environment=environment, stdout=-1, stderr=-2, text=True)
    printed, _ = started.communicate(timeout=200)
    return started.returncode, printed


def test_all_hosts_are_seen_and_pass(cluster):
    status, printed = ask(cluster, "doctor", "--cluster", cluster.address, "--json")
    found = json.loads(printed.splitlines()[-1])
    assert [check for check in found["checks"] if check["needed"] and not check["ok"]] == []
    assert status == 0
    ports = next(check for check in found["checks"] if check["name"] == "ports")
    assert ports["found"] == "each of 3 hosts reaches all others"
    assert [host["address"] for host in found["hosts"]] == [host.address for host in cluster.hosts]
    assert all(host["versions"]["ray"] != "none" and host["memory_free"] > 0 for host in found["hosts"])
    assert all(abs(host["clock_ahead"]) <= host["clock_doubt"] + 0.05 for host in found["hosts"])


def test_another_token_is_no_way_in(cluster):
    status, printed = ask(cluster, "doctor", "--cluster", cluster.address, RAY_AUTH_TOKEN="b" * 64)
    assert status == 1
    assert "NO  cluster" in printed and "give this host the token of the cluster" in printed


def test_a_dry_run_shows_the_host_of_each_worker(cluster):
    knobs = ["--set", "placement=ray", "--set", f"cluster={cluster.address}"]
    status, printed = ask(cluster, "run", "tiny", "--dry-run", *knobs, "--set", "generators=2", "--json")
    found = json.loads(printed.splitlines()[-1])
    assert status == 0 and found["fits"]
    hosts = {each["worker"]: each["host"] for each in found["workers"]}
    assert set(hosts) == {"trainer", "generator-1", "generator-2", "environment"}
    assert len(set(hosts.values())) == 2


def test_a_run_that_does_not_fit_is_refused_before_it_has_a_folder(cluster, runs):
    knobs = ["--set", "placement=ray", "--set", f"cluster={cluster.address}", "--set", "generators=9"]
    status, printed = ask(cluster, "run", "tiny", *knobs, "--runs", str(runs))
    assert status == 2 and "take 11 of CPU, and all hosts together have 9" in printed.replace("\n", " ")
    assert list(runs.iterdir()) == []

"""Runs over three simulated hosts: the same digest as on one machine, hosts that are lost and come back,
links that are cut, and what is refused."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from scripted import WITHOUT_MODEL

import rlbench
from rlbench.bench.harness import happens_within
from rlbench.bench.host_faults import PlannedBlow, end_struck_run, events_since, start_struck_run, strike_live_run
from rlbench.bench.several_hosts import cluster_table, start_on_head, take_accesses
from rlbench.loop.config_files import load_config, to_toml
from rlbench.loop.config_tables import ClusterConfig
from rlbench.runtime.cluster import ClusterRefused, connect_ray
from rlbench.workbench.handle import attach

pytestmark = pytest.mark.slow
SCRIPTED = {**WITHOUT_MODEL, "clock": "real", "batch": 32, "group": 4, "max_tokens": 32}
PATIENT = {"deadlines": {"silence": 60.0, "start": 300.0}}  # where nobody is to fall silent, on a busy machine
QUICK = {**SCRIPTED, **PATIENT, "steps": 6, "staleness": 0, "preflight": 8, "preflight_k": 2, "generators": 2}
EVALUATED = {"eval": [{"name": "held_out", "count": 16, "every": 3}]}
WORKERS = {"trainer", "generator-1", "generator-2", "environment"}


def ended_run(hosts, runs, name, **knobs):
    "A run that was started on the first host, at its end."
    with start_on_head(hosts, runs, name, {**QUICK, **EVALUATED, **knobs}) as started:
        started.communicate(timeout=400)
    return attach(name, runs=runs)


def test_a_run_over_hosts_has_the_digest_of_one_machine_and_closes_its_books(cluster, runs):
    take_accesses(cluster)
    near = ended_run(cluster, runs, "near", placement="split")
    far = ended_run(cluster, runs, "far", placement="ray", cluster=cluster_table(cluster.address))
    assert far.state == near.state == "finished", far.status.reason
    assert far.status.digest == near.status.digest and far.status.books_closed
    hosts = {worker.name: host.name for host in far.status.hosts for worker in host.workers}
    assert set(hosts) == WORKERS and hosts["trainer"] == "host-1"
    assert set(hosts.values()) == {"host-1", "host-2", "host-3"}
    assert take_accesses(cluster) == []


def test_hosts_that_are_lost_and_come_back_cost_one_event_and_no_promise(cluster, runs):
    """A host is killed, and another one cut off for as long as it takes to give it up. Among the promises: what a life
    sends after it was given up is not heard, and a generator that was lost works again."""
    run, problems = start_struck_run(cluster, runs, 1, SCRIPTED)
    killed = strike_live_run(cluster, run, PlannedBlow("host", "generation", 3, ""))
    cut = strike_live_run(cluster, run, PlannedBlow("half-open link", "generation", 2, ""))
    problems += [*killed.problems, *cut.problems, *end_struck_run(cluster, run)]
    assert problems == []
    assert killed.noticed_s < 10 and cut.noticed_s < 30
    lost = [event.fields["host"] for event in events_since(run) if event.kind == "HostLost"]
    assert lost == ["host-3", "host-2"]


SMALL = {"batch": 32, "group": 4, "max_tokens": 32, "steps": 3, "staleness": 0, "preflight": 8, "preflight_k": 2}
WITH_MODEL = {**SMALL, "generators": 2, "eval": [], "checkpoint_every": 0}


def test_weights_that_are_broadcast_over_hosts_are_those_of_one_machine(cluster, runs):
    near = ended_run(cluster, runs, "near-file", **WITH_MODEL, generator="torch", placement="split")
    table = cluster_table(cluster.address)
    over_hosts = {"generator": "torch", "placement": "ray", "transport": "nccl", "cluster": table}
    far = ended_run(cluster, runs, "far-nccl", **WITH_MODEL, **over_hosts)
    assert far.state == "finished", far.status.reason
    assert far.status.parts["events"] == near.status.parts["events"] and far.status.books_closed
    assert far.steps["publish_travel_seconds"].null_count() <= 1  # nothing travels before the first batch


def test_drills_of_hosts_pass_and_a_lost_trainer_leaves_the_weights_that_a_host_has(cluster, runs):
    """Weights come late to one host and nobody waits for it; a host is lost and its actors are used again. Then the
    trainer is killed in a run without checkpoints, and the newest published weights become its policy."""
    knobs = {**WITH_MODEL, "generator": "torch", "steps": 100_000, "staleness": 3, "learning_rate": 1e-6, "restarts": 0}
    run, problems = start_struck_run(cluster, runs, 2, {**SCRIPTED, **knobs, **PATIENT})
    assert happens_within(240, lambda: run.status.version >= 3) and not problems
    words = ["drill", run.name, "slow-link", "lost-host", "--runs", str(runs), "--json"]
    printed = cluster.head.run([sys.executable, "-W", "ignore", "-m", "rlbench.cli.main", *words], timeout_s=400)
    held = {each["name"]: each for each in json.loads(printed.splitlines()[-1])["drills"]}
    assert {name: each["state"] for name, each in held.items()} == {"slow-link": "passed", "lost-host": "passed"}, held
    version = run.status.version
    cluster.head.run(["kill", "-9", str(run.status.workers["trainer"])], folder="/")
    assert happens_within(120, lambda: "is saved" in run.status.reason), run.status  # by the supervisor, afterwards
    assert run.state == "failed" and "trainer lost" in run.status.reason and run.status.books_closed
    saved = int(run.status.reason.partition("the policy of version ")[2].partition(" is saved")[0])
    assert saved >= version - 1 and (run.folder / "policy" / "config.json").exists()


def words_of_refusal(hosts, runs, name, table, **options):
    "What a run over hosts says that does not start."
    config = load_config("tiny", {**QUICK, "eval": [], "placement": "ray", "cluster": table})
    path = runs / f"{name}.toml"
    path.write_text(to_toml(config))
    command = [sys.executable, "-W", "ignore", "-m", "rlbench.cli.main", "run", str(path), "--name", name, "--quiet"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with hosts.head.popen([*command, "--runs", str(runs)], **pipes, **options) as started:
        printed, _ = started.communicate(timeout=400)
    assert started.returncode
    return printed


def test_a_run_that_fits_nowhere_is_refused_with_what_each_host_lacks(cluster, runs):
    table = cluster_table(cluster.address)
    table["generators"] = {"cpus": 64}
    words = words_of_refusal(cluster, runs, "large", table)
    assert "cluster.generators: no host can hold generator-1" in words and "host-2 lacks CPU 3 of 64" in words


def test_an_address_that_nobody_answers_is_refused_with_the_way_to_check_it(cluster, runs):
    words = words_of_refusal(cluster, runs, "nobody", cluster_table("10.77.0.9:6379"))
    assert "cluster.address: 10.77.0.9:6379 cannot be reached" in words and "rlbench doctor --cluster" in words


def test_a_host_with_another_package_is_refused_with_both_versions(cluster, runs):
    "The package of the run process lies in the hidden folder: Ray's workers look where their driver does."
    package = Path(rlbench.__file__).parent
    other = runs / "elsewhere"
    shutil.copytree(package, other / "rlbench", ignore=shutil.ignore_patterns("__pycache__"))
    (other / "rlbench" / "changed.py").write_text("")
    path = os.pathsep.join([str(other), cluster.head.environment["PYTHONPATH"]])
    table = cluster_table(cluster.address)
    words = words_of_refusal(cluster, runs, "changed", table, folder=other, environment={"PYTHONPATH": path})
    assert "has other versions: rlbench" in words and "install the same" in words


def test_without_ray_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ClusterRefused, match=r'placement: "ray" needs Ray; install it with pip install "rlbench\[ray\]"'
    ):
        connect_ray(ClusterConfig(address="10.77.0.1:6379"), "some-run", 1.0)

"""Ray over simulated hosts: who is in the cluster, what another host sees, and how soon a loss is noticed."""

import sys
import time

import pytest
from host_driver import HostDriver

from rlbench.bench.host_faults import PlannedBlow, repair_host

pytestmark = pytest.mark.slow
CONNECT = """
import os, ray, socket, threading, time
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
ray.init(address="ADDRESS", log_to_driver=False, logging_level="ERROR")

def node_of(address):
    return next(n for n in ray.nodes() if n["NodeManagerAddress"] == address and n["Alive"])

def is_alive(node):
    return next(n["Alive"] for n in ray.nodes() if n["NodeID"] == node)

@ray.remote(num_cpus=0, max_restarts=0)
class Place:
    def facts(self, folder):
        return socket.gethostname(), os.listdir(folder)
    def count(self):
        number = 0
        while True:
            number += 1
            yield number
            time.sleep(0.1)

def place_on(address):
    strategy = NodeAffinitySchedulingStrategy(node_of(address)["NodeID"], soft=False)
    return Place.options(scheduling_strategy=strategy).remote()

def count_until_it_fails(actor, seen):
    try:
        for reference in actor.count.options(num_returns="streaming").remote():
            seen.append(ray.get(reference))
    except Exception as error:
        seen.append(type(error).__name__)

def watch(actor):
    seen = []
    threading.Thread(target=count_until_it_fails, args=(actor, seen), daemon=True).start()
    while not seen:
        time.sleep(0.01)
    return seen

def seconds_until(is_so, limit=40):
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < limit, "not within the limit"
        time.sleep(0.05)
    return time.monotonic() - began
"""


@pytest.fixture(scope="module")
def driver(cluster):
    "A driver on the first host."
    started = HostDriver(cluster.head)
    started.ask(CONNECT.replace("ADDRESS", cluster.address))
    yield started
    started.close()


def test_the_nodes_have_the_names_and_addresses_of_the_hosts(cluster, driver):
    rows = driver.ask("", "[(n['NodeManagerHostname'], n['NodeManagerAddress']) for n in ray.nodes() if n['Alive']]")
    assert sorted(map(tuple, rows)) == [(host.name, host.address) for host in cluster.hosts]


def test_a_driver_without_the_token_is_refused(cluster):
    code = f"import ray; ray.init(address={cluster.address!r}, logging_level='ERROR')"
    variables = {"RAY_AUTH_TOKEN": "0" * 64, "RAY_NUM_REDIS_GET_RETRIES": "1"}  # Ray tries 20 times, a second apart
    with pytest.raises(RuntimeError, match="InvalidAuthToken"):
        cluster.host(2).run([sys.executable, "-c", code], environment=variables, folder="/")


def test_an_actor_on_another_host_answers_without_the_shared_folder(cluster, driver, runs):
    (runs / "status.json").write_text("{}")
    driver.ask("actor = place_on('10.77.0.2')")
    assert driver.ask("", f"ray.get(actor.facts.remote({str(runs.parent)!r}))") == ["host-2", []]


def test_a_short_silence_loses_nothing(cluster, driver):
    driver.ask("seen = watch(place_on('10.77.0.2'))")
    cluster.cut(2)
    time.sleep(1.5)
    cluster.restore(2)
    count = driver.ask("", "len(seen)")
    driver.ask(f"seconds_until(lambda: len(seen) > {count} + 20 or isinstance(seen[-1], str))")
    seen = driver.ask("", "list(seen)")
    assert seen == list(range(1, len(seen) + 1))


def test_a_killed_raylet_is_noticed_and_its_host_joins_again(cluster, driver):
    driver.ask("node = node_of('10.77.0.2')['NodeID']; seen = watch(place_on('10.77.0.2'))")
    cluster.kill_raylet(2)
    stream_s = driver.ask("took = seconds_until(lambda: isinstance(seen[-1], str))", "took")
    assert driver.ask("", "seen[-1]") in ("ActorUnavailableError", "ActorDiedError") and stream_s < 10
    assert driver.ask("took = seconds_until(lambda: not is_alive(node))", "took") < 20
    cluster.join_hosts(2)
    driver.ask("actor = place_on('10.77.0.2')")
    assert driver.ask("", "ray.get(actor.facts.remote('/'))[0]") == "host-2"
    assert driver.ask("", "node_of('10.77.0.2')['NodeID'] != node")


def test_a_cut_link_ends_streams_when_the_node_is_dead_or_at_once_by_kill(cluster, driver):
    driver.ask("node = node_of('10.77.0.3')['NodeID']; one, other = place_on('10.77.0.3'), place_on('10.77.0.3')")
    driver.ask("seen, killed = watch(one), watch(other)")
    cluster.cut(3)
    driver.ask("time.sleep(0.5); ray.kill(other)")
    driver.ask("seconds_until(lambda: isinstance(killed[-1], str))")
    assert not driver.ask("", "isinstance(seen[-1], str)"), "the other one is heard of when its node is dead"
    took = driver.ask("took = seconds_until(lambda: isinstance(seen[-1], str))", "took")
    assert 2 < took < 20 and driver.ask("", "[seen[-1], killed[-1]]") == ["ActorDiedError"] * 2
    driver.ask("seconds_until(lambda: not is_alive(node))")
    assert driver.ask("began = time.monotonic(); ray.shutdown(); took = time.monotonic() - began", "took") < 20
    repair_host(cluster, PlannedBlow("half-open link", "generation", 3, ""))

"""Checks and plans of a cluster, from views of it; and what is refused before a run starts."""

import socket

import pytest

import rlbench as rl
from rlbench.loop.config_tables import ActorNeeds
from rlbench.models.hardware import MODELS
from rlbench.runtime.cluster_look import ClusterView, GpuView, HostView, look_at_cluster, view_as_text, view_of_text
from rlbench.runtime.cluster_plan import check_cluster, place_workers, plan_on_hosts, seen_cluster, worker_wants
from rlbench.workbench.cluster_doctor import check_clocks, check_ports, check_token, check_weights, cluster_checks
from rlbench.workbench.prepare import check_places

SAME = {"rlbench": "1 (ab)", "python": "3.11.7", "torch": "2.13.0", "ray": "2.60.0"}
ROOM = {"memory_free": 6e10, "shared_memory_free": 3e10, "temporary_free": 1e11}


def host(name: str, number: int, **changes) -> HostView:
    "A host that is as it should be, but for what is changed."
    resources = {"CPU": 4.0, "object_store_memory": 2e10}
    return HostView(name, f"10.0.0.{number}", resources, {}, **{"versions": SAME, "cores": 4, **ROOM, **changes})


def closed_port() -> int:
    "A port on which nobody listens."
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_a_cluster_of_equal_hosts_passes_all_checks():
    view = ClusterView("10.0.0.1:6379", (host("a", 1), host("b", 2)))
    checks = cluster_checks(view, SAME, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "1" * 64})
    assert [check.name for check in checks if not check.ok] == []


@pytest.mark.parametrize(
    "changes, failing, words",
    [
        ({"versions": {**SAME, "rlbench": "none (No module)"}}, "versions", "b has rlbench none"),
        ({"versions": {**SAME, "torch": "2.12.0"}}, "versions", "b has torch 2.12.0"),
        ({"unreachable": ("a",)}, "ports", "b reaches no port of a"),
        ({"fault": "ActorDiedError: gone"}, "answers", "b (ActorDiedError: gone)"),
        ({"gpus": (GpuView("H100", 8e10),)}, "cores and GPUs", "no GPU of b"),
        ({"shared_memory_free": 1e5}, "weights", "100.0 kB in the shared memory of b"),
        ({"clock_ahead": -40.0}, "clocks", "b is -40.0 s ahead"),
    ],
)
def test_a_fault_of_one_host_is_named_with_a_remedy(changes, failing, words):
    view = ClusterView("10.0.0.1:6379", (host("a", 1), host("b", 2, **changes)))
    checks = cluster_checks(view, SAME, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "1" * 64})
    failed = [check for check in checks if not check.ok]
    assert [check.name for check in failed] == [failing]
    assert words in failed[0].found


def test_a_clock_is_not_blamed_for_a_slow_answer():
    assert check_clocks([host("a", 1, clock_ahead=3.0, clock_doubt=2.5)]).ok
    assert not check_clocks([host("a", 1, clock_ahead=3.0, clock_doubt=0.1)]).ok


def test_weights_count_twice():
    assert check_weights([host("a", 1)], {"one": 1e10}).ok
    assert not check_weights([host("a", 1)], {"one": 1.01e10}).ok
    assert "one (20.2 GB)" in check_weights([host("a", 1)], {"small": 1e6, "one": 1.01e10}).found


def test_the_token_is_looked_for_where_ray_looks(tmp_path):
    file = tmp_path / "token"
    file.write_text("1" * 64)
    assert check_token({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}).ok
    assert not check_token({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")}).ok
    assert not check_token({"RAY_AUTH_TOKEN": "1" * 64}).ok
    assert "1111" not in check_token({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "1" * 64}).found


def test_one_host_has_no_port_to_reach():
    assert check_ports([host("a", 1)]).ok


def test_a_view_survives_its_way_as_text():
    view = ClusterView("auto", (host("a", 1, gpus=(GpuView("H100", 8e10),), unreachable=("b",)),), "")
    assert view_of_text(view_as_text(view)) == view


def test_a_port_without_a_listener_is_no_cluster():
    port = closed_port()
    assert f"nothing answers at 127.0.0.1:{port}" in look_at_cluster(f"127.0.0.1:{port}").failure


def test_workers_take_what_is_left():
    hosts = [host("a", 1), host("b", 2)]
    where = place_workers({"trainer": ActorNeeds(cpus=3), "generator": ActorNeeds(cpus=2)}, hosts)
    assert {worker: each.name for worker, each in where.items()} == {"trainer": "a", "generator": "b"}
    with pytest.raises(ValueError, match="cluster.trainers: trainer takes 2 CPU, and no host has that left"):
        place_workers({"trainer": ActorNeeds(cpus=2), **{f"generator-{i}": ActorNeeds(cpus=3) for i in (1, 2)}}, hosts)
    with pytest.raises(ValueError, match="cluster.generators: no host can hold generator-1"):
        place_workers({"generator-1": ActorNeeds(gpus=1)}, hosts)


def test_workers_with_few_possible_hosts_are_placed_first():
    hosts = [HostView("a", "10.0.0.1", {"CPU": 2.0, "mark": 1.0}, {}), HostView("b", "10.0.0.2", {"CPU": 2.0}, {})]
    marked = ActorNeeds(resources={"mark": 0.1})
    wants = {"trainer": marked, "generator-1": ActorNeeds(), "generator-2": ActorNeeds(), "environment": marked}
    where = {worker: host.name for worker, host in place_workers(wants, hosts).items()}
    assert where == {"trainer": "a", "generator-1": "b", "generator-2": "b", "environment": "a"}


def test_memory_is_planned_on_the_hosts_of_the_workers():
    tables = {"trainers": {"gpus": 1}, "generators": {"labels": {"kind": "writer"}}}
    config = rl.load_config("tiny", {"placement": "ray", "cluster": {"address": "a:1", **tables}})
    gpu = GpuView("H100", 1e6)
    a = HostView("a", "10.0.0.1", {"CPU": 4.0, "GPU": 2.0}, {}, gpus=(gpu, gpu), **ROOM)
    b = HostView("b", "10.0.0.2", {"CPU": 4.0}, {"kind": "writer"}, **ROOM)
    plan = plan_on_hosts(config, {"model": MODELS["tiny"]}, "", ClusterView("a:1", (a, b)))
    assert plan.hosts == {"trainer": "a", "generator": "b", "environment": "a"}
    assert not plan.fits and [place.name for place in plan.memory.crowded] == ["a, GPU 0, H100"]
    travels = {need.place.name for need in plan.memory.needs if need.what == "weights that travel"}
    assert travels == {"a, memory", "b, memory"}


def test_each_rank_of_a_trainer_takes_a_place():
    config = rl.load_config("tiny", {"placement": "ray", "trainers": 3, "cluster": {"trainers": {"cpus": 2}}})
    wants = worker_wants(config)
    assert list(wants) == ["trainer", "trainer-rank-1", "trainer-rank-2", "generator", "environment"]
    assert [needs.cpus for needs in wants.values()] == [2, 2, 2, 1, 1]


def test_a_run_is_refused_before_it_starts_where_nothing_answers():
    address = f"127.0.0.1:{closed_port()}"
    config = rl.load_config("tiny", {"placement": "ray", "cluster": address})
    with pytest.raises(ValueError, match=f"cluster.address: {address} cannot be reached"):
        check_places(config)
    with pytest.raises(ValueError, match="cluster.address"):
        seen_cluster(config, with_probes=True)


def test_gpus_that_ray_would_hide_are_refused():
    config = rl.load_config("tiny", {"placement": "ray", "device": "cuda", "cluster": "a:1"})
    with pytest.raises(ValueError, match="cluster.trainers.gpus = 0 hides all GPUs"):
        check_cluster(config)


def test_a_run_without_ray_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr("rlbench.runtime.cluster_plan.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'pip install "rlbench\[ray\]"'):
        check_places(rl.load_config("tiny", {"placement": "ray"}))


def test_the_address_of_a_ray_client_is_refused():
    "Ray's client cannot choose a concurrency group for a call, which posting to a worker needs."
    from ray.util.client.options import validate_options

    with pytest.raises(ValueError, match="concurrency_group"):
        validate_options({"concurrency_group": "inbox"})
    with pytest.raises(ValueError, match="cluster.address: 'ray://head:10001' is that of a Ray Client.*ray job submit"):
        rl.load_config("tiny", {"placement": "ray", "cluster": "ray://head:10001"})

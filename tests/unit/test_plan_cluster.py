"""The file of a run on a cluster as a plan, and a plan as the tables of such a run."""

import tomllib

import pytest

import rlbench as rl
from rlbench.planning.plan_cluster import cluster_text, is_run_file, read_run_file, run_as_plan, write_cluster_file
from rlbench.planning.planner import plan_run

RUN = """
model = "Qwen/Qwen3-4B"
placement = "ray"
generators = 6
trainers = 8
batch = 512
concurrency = 128
max_tokens = 4096
staleness = 2
rollout_dtype = "bfloat16"
[cluster]
address = "10.0.0.1:6379"
generators = {gpus = 2}
trainers = {gpus = 1}
"""


@pytest.fixture
def run_file(tmp_path):
    "The file of a run on a cluster."
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return str(path)


def test_files_of_runs_and_of_plans_are_told_apart(run_file, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text("[generators]\ngpus = 2\n")
    broken = tmp_path / "broken.toml"
    broken.write_text("= 2\n")
    assert is_run_file(run_file)
    assert [is_run_file(str(each)) for each in (plan, broken, tmp_path / "none.toml", "tiny")] == [False] * 4


def test_a_run_becomes_a_plan_with_its_gpus(run_file):
    found = read_run_file(run_file, {"generators.gpu": "H100"})
    plan = plan_run(found.table, {"generators.gpu": "H100"}, simulate=False)
    assert (plan.file.generators.gpus, plan.file.generators.engine, plan.file.trainer.gpus) == (12, 2, 8)
    assert plan.file.concurrency == 6 * 128
    assert plan.file.run.staleness == 2


def test_what_is_given_is_not_assumed(run_file):
    given = {"generators.gpu": "H100", "rollouts.response": 1800}
    assert any("rollouts.response" in text for text in read_run_file(run_file, {"generators.gpu": "H100"}).assumed)
    assert not any("rollouts.response" in text for text in read_run_file(run_file, given).assumed)


def test_gpus_of_an_unknown_kind_are_refused(run_file):
    with pytest.raises(ValueError, match="generators.gpu: .*add --set generators.gpu=H100"):
        read_run_file(run_file, {})


def test_a_label_of_ray_names_the_gpus():
    tables = {"generators": {"gpus": 1, "labels": {"ray.io/accelerator-type": "A100"}}, "address": "auto"}
    found = run_as_plan(rl.load_config("tiny", {"placement": "ray", "cluster": tables}))
    assert found.table["generators"]["gpu"] == "A100"
    assert found.table["trainer"]["gpu"] == "CPU"


def test_actors_that_take_turns_are_refused():
    with pytest.raises(ValueError, match="placement: .*take turns"):
        run_as_plan(rl.load_config("tiny", {"placement": "colocated"}))


def test_the_written_split_is_part_of_a_run(tmp_path):
    plan = plan_run("tiny", {"generators.gpus": 3}, simulate=False)
    path = tmp_path / "cluster.toml"
    write_cluster_file(plan, str(path))
    config = rl.load_config("tiny", tomllib.loads(path.read_text()))
    assert config.placement == "ray" and config.cluster.address == "auto"
    assert config.cluster.generators.cpus == 1.0 and config.cluster.generators.gpus == 0.0
    assert config.generators + config.trainers == 4
    with pytest.raises(ValueError, match="--write-cluster: .* exists"):
        write_cluster_file(plan, str(path))
    assert path.read_text() == cluster_text(plan)

"""`rlbench gpu-check` on a CPU: each check fails when its subject is broken, results are kept,
and the page says it all."""

import json
from dataclasses import asdict
from pathlib import Path

import broken_checks
import pytest
from broken_checks import APART, RUNS, ask_for_vllm
from typer.testing import CliRunner

from rlbench.base.run_files import read_json, write_json
from rlbench.bench import gpu_check
from rlbench.bench.gpu_check import GPU_CHECKS, check_gpu, limit_of, wanted_checks
from rlbench.bench.gpu_engine_checks import stays_near
from rlbench.bench.gpu_records import CANNOT_RUN, FAILED, PASSED, CheckContext, CheckResult, CheckSighting, GpuCheck
from rlbench.cli.main import app

HERE = [name for name in broken_checks.BROKEN if name not in (*APART, *RUNS)]
SETTINGS = {"model-run": {"model": "no-model"}, "qwen3-0.6b-memory": {"device": "cuda", "gpus": 1}}
PASSES = [name for name in HERE if name not in ("engine-rate", "memory-plan", "trainer-speed", "tiny-run", *SETTINGS)]


def test_every_check_that_a_cpu_can_run_is_broken_once():
    names = {check.name for check in wanted_checks(shape_names=("qwen3-0.6b",)) if not check.without_gpu}
    assert names - set(broken_checks.BROKEN) == {"conformance-vllm", "prefix-vllm", "turns-vllm"}  # as those of torch


@pytest.mark.slow
@pytest.mark.parametrize("name", HERE)
def test_a_broken_subject_fails_its_check(name, tmp_path, monkeypatch, request):
    "And the result has a remedy."
    ask_for_vllm(name, request)
    result = broken_checks.result_of(name, tmp_path, monkeypatch, True, **SETTINGS.get(name, {}))
    assert result.verdict == FAILED and result.remedy, result
    assert name == "model-run" or "Error:" not in result.seen, result


@pytest.mark.slow
@pytest.mark.parametrize("name", PASSES)
def test_a_whole_subject_passes(name, tmp_path, monkeypatch):
    result = broken_checks.result_of(name, tmp_path, monkeypatch, False)
    assert result.verdict == PASSED and not result.remedy, result


def sees_nothing(context: CheckContext) -> CheckSighting:
    return CheckSighting(True, "all well")


LISTED = (
    GpuCheck("first", "nothing", sees_nothing, "mend it"),
    GpuCheck("second", "nothing", sees_nothing, "mend it"),
    GpuCheck("graphs", "graphs", sees_nothing, "mend it", without_gpu="CUDA graphs need a GPU"),
)


@pytest.fixture
def calls(monkeypatch):
    "The names of the checks that were run, in a list of three that see nothing; `second` fails the first time."
    called = []

    def run_apart(check, context, shape_names):
        called.append(check.name)
        verdict = FAILED if check.name == "second" and called.count("second") == 1 else PASSED
        return CheckResult(check.name, check.expected, "seen", verdict, "mend it" if verdict == FAILED else "", 1.0)

    monkeypatch.setattr(gpu_check, "GPU_CHECKS", LISTED)
    monkeypatch.setattr(gpu_check, "run_apart", run_apart)
    return called


def test_a_finished_check_is_not_run_again_unless_asked(calls, tmp_path):
    first = check_gpu(tmp_path, "cpu")
    assert calls == ["first", "second"] and not first.is_green
    assert check_gpu(tmp_path, "cpu") == first and calls == ["first", "second"]
    mended = check_gpu(tmp_path, "cpu", again=["failed"])
    assert calls == ["first", "second", "second"] and mended.is_green
    check_gpu(tmp_path, "cpu", again=["first"])
    assert calls[3:] == ["first"]
    check_gpu(tmp_path, "cpu", model="another")
    assert calls[4:] == ["first", "second"]


def test_a_check_that_is_run_again_finds_no_parts_of_its_last_time(calls, tmp_path):
    "They would be its result; those of a check that was interrupted, which has none yet, stay."
    (tmp_path / "files" / "cpu-first").mkdir(parents=True)
    part = tmp_path / "files" / "cpu-first" / "part.json"
    part.write_text("{}")
    check_gpu(tmp_path, "cpu")
    assert part.exists()
    check_gpu(tmp_path, "cpu", again=["second"])
    assert part.exists()
    check_gpu(tmp_path, "cpu", again=["first"])
    assert not part.exists() and calls == ["first", "second", "second", "first"]


def test_the_page_and_the_json_file_say_the_same(calls, tmp_path):
    report = check_gpu(tmp_path, "cpu")
    stored = read_json(tmp_path / "result.json")
    assert [result["verdict"] for result in stored["results"]] == [PASSED, FAILED, CANNOT_RUN]
    assert stored == json.loads(json.dumps(asdict(report)))
    page = (tmp_path / "index.html").read_text()
    assert "CUDA graphs need a GPU" in page and "mend it" in page and "1 failed" in page


def test_the_verb_prints_json_and_ends_with_1_if_a_check_failed(calls, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["gpu-check", "--device", "cpu", "--json"])
    assert done.exit_code == 1, done.output
    assert json.loads(done.stdout.splitlines()[-1])["results"][1]["verdict"] == FAILED
    done = CliRunner().invoke(app, ["gpu-check", "--device", "cpu", "--again", "failed"])
    assert done.exit_code == 0 and "gpu-check/index.html" in done.stdout
    done = CliRunner().invoke(app, ["gpu-check", "--device", "cpu", "--only", "frist"])
    assert done.exit_code == 2 and "did you mean 'first'" in done.stderr


@pytest.mark.slow
def test_an_answer_comes_from_a_child(tmp_path):
    "The child's whole way, with the cheapest check."
    (check,) = wanted_checks(["qwen3-0.6b-memory"], ["qwen3-0.6b"])
    result = gpu_check.run_apart(check, CheckContext(str(tmp_path)), ["qwen3-0.6b"])
    assert result.verdict == CANNOT_RUN and "on RTX 4090 the plan takes" in result.seen, result


def test_only_vllm_on_a_gpu_may_be_coarse():
    "There its tokens may be twice as far from the model as before the swap; everywhere else 2e-3 nats are the bound."
    gpu, cpu = CheckContext("", "cuda", 1), CheckContext("", "cpu")
    assert stays_near(gpu, "vllm", 7e-3, 7e-3) and not stays_near(gpu, "vllm", 7e-3, 0.02)
    assert not stays_near(gpu, "vllm", 0.5, 0.5), "an engine that is far away before is not near after"
    assert not any(stays_near(context, "torch", 7e-3, 7e-3) for context in (gpu, cpu))
    assert not stays_near(cpu, "vllm", 7e-3, 7e-3) and stays_near(cpu, "torch", 0.0, 1e-3)


def test_a_gpu_that_is_missing_is_named():
    on_one = CheckContext("", "cuda", 1)
    lacking = [check.name for check in GPU_CHECKS if gpu_check.why_not_here(check, on_one)]
    assert lacking == ["transport-nccl", "ranks", "split"]
    assert not any(gpu_check.why_not_here(check, CheckContext("", "cuda", 2)) for check in GPU_CHECKS)
    assert sum(limit_of(check, on_one) for check in GPU_CHECKS) < 3600 * 2


def test_a_result_of_other_packages_is_not_used(calls, tmp_path):
    check_gpu(tmp_path, "cpu")
    path = Path(tmp_path, "results", "cpu-first.json")
    stored = read_json(path)
    stored["key"]["packages"]["torch"] = "1.0"
    write_json(path, stored)
    check_gpu(tmp_path, "cpu")
    assert calls == ["first", "second", "first"]

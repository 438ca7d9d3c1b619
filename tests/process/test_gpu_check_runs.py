"""`rlbench gpu-check` on a CPU, as far as it starts processes:
a check of a run, or of a team of ranks or an engine, fails when its subject is broken."""

import subprocess
import sys

import broken_checks
import pytest
from broken_checks import APART, RUNS, ask_for_vllm

from rlbench.bench.gpu_records import FAILED


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_broken_run_fails_its_check(name, tmp_path, monkeypatch):
    result = broken_checks.result_of(name, tmp_path, monkeypatch, True)
    assert result.verdict == FAILED and result.remedy, result


@pytest.mark.slow
@pytest.mark.parametrize("name", APART)
def test_a_broken_subject_fails_its_check_in_another_process(name, tmp_path, request):
    ask_for_vllm(name, request)
    command = [sys.executable, broken_checks.__file__, name, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == FAILED, done.stderr[-2000:]

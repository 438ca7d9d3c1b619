"""The bench of all objectives, on a toy budget."""

import json
from dataclasses import asdict

import pytest

from rlbench.bench import objectives as b
from rlbench.loop.config_files import load_config


def test_every_arm_is_a_configuration_that_can_run():
    "Twelve families at least, a critic among them, each different from the preset and from the others."
    made = [load_config("tiny", {**knobs, "steps": 1}).model_dump_json() for knobs in b.FAMILIES.values()]
    assert len(set(made)) == len(made) >= 12 and any(knobs.get("critic") for knobs in b.FAMILIES.values())


def test_rows_over_seeds():
    "Mean, t interval and mean costs; a single seed is its own interval."
    arms = [b.ObjectiveResult("x", seed, rate, 10.0 + seed, 400.0, 20.0) for seed, rate in enumerate((0.9, 0.94, 0.92))]
    row = b.family_row(arms)
    assert (row.solve_rate, row.gpu_or_cpu_s, row.peak_mb, row.seeds) == (0.92, 11.0, 400.0, (0.9, 0.94, 0.92))
    assert row.low == pytest.approx(0.92 - 4.3027 * 0.02 / 3**0.5, abs=3e-3) and row.low < 0.92 < row.high
    assert (one := b.family_row(arms[:1])).low == one.high == 0.9


@pytest.mark.slow
def test_it_runs_and_goes_on(tmp_path):
    "One arm of one version in real processes; the second time nothing runs."
    name, said = "RLOO", []
    first = b.bench_objectives(tmp_path, 1, 1, (name,), said.append)
    (row,) = first.rows
    assert (
        row.objective == name
        and 0 < row.solve_rate < 1
        and row.gpu_or_cpu_s > 0
        and row.peak_mb > 50
        and name in said[0]
    )
    runs = sorted((tmp_path / "runs").iterdir())
    assert (
        b.bench_objectives(tmp_path, 1, 1, (name,)).rows == first.rows and sorted((tmp_path / "runs").iterdir()) == runs
    )
    assert {"objective", "solve_rate", "low", "high", "gpu_or_cpu_s", "peak_mb"} <= json.loads(
        json.dumps(asdict(first))
    )["rows"][0].keys()
    with pytest.raises(ValueError, match="is not an arm; there are"):
        b.bench_objectives(tmp_path, only=("grpoo",))
    with pytest.raises(ValueError, match="give 1 or more"):
        b.bench_objectives(tmp_path, seeds=0)

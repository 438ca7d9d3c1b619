"""Results of benches as records: the JSON keys that `--json` prints stay as they are,
and what was printed is read again."""

import json
from dataclasses import asdict
from importlib import import_module
from importlib.resources import files

import pytest

from rlbench.base.run_files import read_json
from rlbench.bench.harness import measured_result, median_ratio

RESULTS = {  # file of data/measured: module and class of the result
    "balance": "bench.balance.BalanceBench",
    "chain": "bench.chain.OverBench",
    "crashes": "bench.crashes.CrashBench",
    "delay": "studies.delay.DelayBench",
    "diagnosis": "bench.diagnosis.DiagnosisBench",
    "distill": "bench.chain.DistillBench",
    "engine": "bench.engine.EngineBench",
    "environment": "bench.environment.EnvironmentBench",
    "faults": "bench.faults.FaultBench",
    "limit": "bench.limit.LimitBench",
    "mismatch": "bench.mismatch.MismatchBench",
    "mismatch_top_p": "bench.mismatch.MismatchBench",
    "modes": "bench.modes.ModesBench",
    "objectives": "bench.objectives.ObjectivesBench",
    "overhead": "bench.overhead.OverheadBench",
    "panel": "bench.panel.PanelBench",
    "planner": "bench.planner.PlannerBench",
    "process": "bench.chain.ProcessBench",
    "sandbox": "bench.sandbox.SandboxBench",
    "simulator": "bench.simulator.SimulatorBench",
    "size": "bench.trl.SizeBench",
    "staleness": "bench.staleness.StalenessBench",
    "stragglers": "bench.stragglers.StragglerBench",
    "study_group_size": "studies.study.StudyBench",
    "study_mismatch": "studies.study.StudyBench",
    "study_switches": "studies.study.StudyBench",
    "training_service": "bench.training_service.ServiceBench",
    "trl": "bench.trl.TrlBench",
}


def missing_parts(measured, again, place: str = ""):
    "Where what was measured is not in what was made of it again."
    if isinstance(measured, dict):
        for name, value in measured.items():
            if name not in again:
                yield f"{place}.{name}"
            else:
                yield from missing_parts(value, again[name], f"{place}.{name}")
    elif isinstance(measured, list):
        if len(measured) != len(again):
            yield f"{place}: {len(measured)} and {len(again)}"
        for number, (one, other) in enumerate(zip(measured, again)):
            yield from missing_parts(one, other, f"{place}[{number}]")
    elif measured != again:
        yield f"{place}: {measured!r} and {again!r}"


@pytest.mark.parametrize("name", RESULTS)
def test_what_was_printed_is_read_and_printed_again(name):
    "Every key and every value of a stored result is in the JSON of the record that is read from it."
    module, _, kind = RESULTS[name].rpartition(".")
    result = measured_result(getattr(import_module(f"rlbench.{module}"), kind), name)
    again = json.loads(json.dumps(asdict(result)))
    measured = read_json(files("rlbench.data") / "measured" / f"{name}.json")
    notes = {"command", "date"}  # written beside a result by hand
    found = list(missing_parts({key: value for key, value in measured.items() if key not in notes}, again))
    assert not found, found[:5]
    assert str(result)


def test_a_ratio_needs_both_sides_of_every_pair():
    assert median_ratio([2.0, 3.0, 2.0], [1.0, 1.0, 4.0]) == 2.0
    assert median_ratio([], []) is None and median_ratio([1.0, None], [1.0, 1.0]) is None

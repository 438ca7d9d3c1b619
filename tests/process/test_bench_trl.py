"""The bench against TRL, without TRL: what it makes of finished arms, how it resumes, what it refuses."""

import json
import math
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
from command_line import run_verb
from patience import until
from scripted import WITHOUT_MODEL

from rlbench.bench import trl as bench
from rlbench.bench import trl_sides
from rlbench.bench.trl import bench_trl, curve_gap, samples_per_second, time_to_solve, trl_result
from rlbench.bench.trl_arm import TrlSetting
from rlbench.bench.trl_sides import TrlArm, kept_arm, make_environment, open_folder
from rlbench.loop.config_files import load_config
from rlbench.workbench.handle import attach
from rlbench.workbench.runs_table import runs

VERSIONS = {"trl": "1.0", "transformers": "5.0", "torch": "2.13.0", "accelerate": "1.0"}


def arm(side: str, pair: int, step: float, solved_at: int, late: float = 3.0) -> TrlArm:
    "Thirty steps of `step` seconds; right answers rise from a quarter to three quarters at batch `solved_at`."
    correct = tuple(64 if i < solved_at else 192 for i in range(30))
    return TrlArm(side, pair, late, tuple(step * (i + 1) for i in range(30)), (256,) * 30, correct, (2560,) * 30)


def pairs(ours: list[TrlArm], theirs: list[TrlArm]) -> bench.TrlBench:
    "The result of such arms; the preset's arm is rlbench's at twice the speed."
    presets = [replace(a, side="preset", seconds=tuple(s / 2 for s in a.seconds)) for a in ours]
    return trl_result(
        [*theirs, *ours, *presets],
        bench.ours_config(0, 30),
        TrlSetting(threads=2),
        {TrlSetting(threads=2): 100.0},
        VERSIONS,
    )


def test_ratios_are_medians_of_pairs():
    ours = [arm("ours", 0, 1.0, 10), arm("ours", 1, 1.0, 10), arm("ours", 2, 4.0, 10)]
    theirs = [arm("trl", 0, 2.0, 10), arm("trl", 1, 3.0, 10), arm("trl", 2, 2.0, 10)]
    result = pairs(ours, theirs[::-1])  # in whatever order they come
    assert (
        result.samples_ratio == 2.0 and result.time_to_solve_ratio == 2.0 and result.as_it_comes_samples_ratio == 4.0
    )  # of 2, 3 and 1/2
    assert result.samples_per_second["trl"] == [128.0, 85.3, 128.0] and result.curve_gap == 0
    assert result.wall_to_solve_ratio == round((2 * 11 + 3) / (11 + 3), 3)
    told = json.loads(json.dumps(asdict(result)))
    assert told["samples_ratio"] == 2.0 and len(told["arms"]) == 9 and told["chosen"].startswith("2 threads")
    assert "2.00 x TRL's" in str(result) and "TRL 1.0" in str(result)


def test_a_side_that_does_not_solve_has_no_ratio():
    result = pairs([arm("ours", 0, 1.0, 10)], [arm("trl", 0, 1.0, 99)])
    assert result.time_to_solve_ratio is None and result.time_to_solve == {"ours": [11.0], "trl": [None]}
    assert "time to solve      - as fast" in str(result) and result.curve_gap == round(0.5 * 20 / 30, 4)


def test_time_to_solve_wants_five_in_a_row():
    a = arm("trl", 0, 1.0, 10)
    assert time_to_solve(a) == 11.0 and time_to_solve(a, rate=0.8) is None
    broken = replace(a, correct=(*a.correct[:13], 64, *a.correct[14:]))
    assert time_to_solve(broken) == 15.0  # three right batches, a bad one, then five
    assert time_to_solve(replace(a, correct=a.correct[:14], rollouts=a.rollouts[:14])) is None


def test_rates_ignore_the_warm_up_and_the_end():
    a = arm("ours", 0, 1.0, 10)
    slow = replace(a, seconds=tuple(s + 60 for s in a.seconds[:15]) + tuple(s + 900 for s in a.seconds[15:]))
    assert samples_per_second(slow) == samples_per_second(a) == 256
    with pytest.raises(ValueError, match="14 steps are too few"):
        samples_per_second(replace(a, seconds=a.seconds[:14]))


def test_curve_gap_compares_equal_rollouts():
    a, behind = arm("ours", 0, 1.0, 10), arm("trl", 0, 9.0, 12)
    assert math.isclose(curve_gap(a, behind), 0.5 * 2 / 30) and curve_gap(behind, a) == -curve_gap(
        a, behind
    )  # seconds do not matter
    coarse = replace(
        behind,
        rollouts=(512,) * 15,
        correct=tuple(128 if i < 6 else 384 for i in range(15)),
        seconds=behind.seconds[:15],
        tokens=(0,) * 15,
    )
    assert abs(curve_gap(a, coarse)) < 0.06  # its batches are twice as large, so its rise is two batches wide


def test_finished_arms_are_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(trl_sides, "await_quiet", lambda: None)
    monkeypatch.setattr(trl_sides, "watched", lambda make: make())
    made = []

    def make() -> TrlArm:
        made.append(1)
        return arm("ours", 0, 1.0, 10)

    first = kept_arm(tmp_path / "a.json", make)
    assert kept_arm(tmp_path / "a.json", make) == first == arm("ours", 0, 1.0, 10) and made == [1]
    with pytest.raises(ChildProcessError, match="pair 1: it broke"):
        kept_arm(tmp_path / "b.json", lambda: TrlArm("trl", 1, error="it broke"))
    assert not (tmp_path / "b.json").exists()  # tried again next time
    assert (
        kept_arm(tmp_path / "c.json", lambda: TrlArm("trl", 1, error="it broke"), failed=True).error
        and samples_per_second(kept_arm(tmp_path / "c.json", make)) == 0
    )


def test_a_disturbed_arm_is_run_again_and_the_quietest_is_kept(tmp_path, monkeypatch):
    "Whatever the arms say: the slowest stays if it was the quietest."
    monkeypatch.setattr(trl_sides, "await_quiet", lambda: None)
    monkeypatch.setattr(trl_sides, "watched", lambda make: make())
    told = iter([(0.5, 1.0), (0.2, 3.0), (0.3, 2.0), (0.9, 1.0)])

    def make() -> TrlArm:
        busy, step = next(told)
        return replace(arm("trl", 0, step, 10), busy=busy)

    assert kept_arm(tmp_path / "a.json", make).busy == 0.2 and next(told) == (0.9, 1.0)
    calm = iter([0.05, 0.0])
    assert kept_arm(tmp_path / "b.json", lambda: replace(arm("trl", 0, 1.0, 10), busy=next(calm))).busy == 0.05


def others() -> float:
    "Seconds that others computed, of 4 that the machine was busy, beside an arm whose children compute for two."
    count = "import time; until = time.process_time() + 1\nwhile time.process_time() < until: pass"
    readings = iter([1000.0, 1004.0])

    def make() -> TrlArm:
        for _ in range(2):
            subprocess.run([sys.executable, "-c", count])
        return arm("ours", 0, 1.0, 10)

    began = time.monotonic()
    return (
        trl_sides.watched(make, every=0.02, busy=lambda: next(readings)).busy
        * psutil.cpu_count()
        * (time.monotonic() - began)
    )


def test_others_are_told_from_our_own(script):
    "What children of the arm compute is its own, also when they have ended. In a process without other children."
    child = script(
        "import sys; sys.path[:0] = sys.argv[1:]; import test_bench_trl; print(test_bench_trl.others())",
        Path(__file__).parent,
        Path(__file__).parents[1] / "helpers",
    )
    told, trouble = child.communicate(timeout=400)
    assert 0.5 < float(told or "nan") < 2.5, (
        told + trouble
    )  # two seconds, and what starting Python took; a child's last moments may go unseen


def test_others_use_no_more_than_the_machine():
    "The system counts in ticks: over a short time, somewhat more than there is."
    readings = iter([0.0, 60.0])
    assert trl_sides.watched(lambda: arm("ours", 0, 1.0, 10), busy=lambda: next(readings)).busy == 1.0


def test_an_interrupted_bench_goes_on(tmp_path, monkeypatch):
    "The second call runs only what the first one did not finish, and gives what one call would have given."
    ran: list[str] = []

    def side(name: str, pair: int, step: float) -> TrlArm:
        ran.append(f"{name}-{pair}")
        if len(ran) == 20:
            raise KeyboardInterrupt
        return arm(name, pair, step, 10)

    monkeypatch.setattr(trl_sides, "await_quiet", lambda: None)
    monkeypatch.setattr(trl_sides, "watched", lambda make: make())
    monkeypatch.setattr(bench, "make_environment", lambda folder, say: VERSIONS)
    monkeypatch.setattr(
        trl_sides, "run_trl", lambda folder, job, name, limit: side("trl", job.seed, 2.0 / job.setting.threads)
    )
    monkeypatch.setattr(trl_sides, "run_ours", lambda folder, name, config, run, limit: side(name, config.seed, 0.5))
    with pytest.raises(KeyboardInterrupt):
        bench_trl(tmp_path / "b", pairs=3)
    assert len(ran) == 20
    result = bench_trl(tmp_path / "b", pairs=3)
    assert ran.count(ran[19]) == 2 and len(ran) - 1 == len(list((tmp_path / "b" / "arms").iterdir()))
    assert (
        result.pairs == 3
        and bench_trl(tmp_path / "b", pairs=3) == result
        and len(ran) - 1 == len(list((tmp_path / "b" / "arms").iterdir()))
    )
    assert json.loads((tmp_path / "b" / "result.json").read_text())["samples_ratio"] == result.samples_ratio


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="pairs: 0 pairs give no ratio"):
        bench_trl(tmp_path / "new", pairs=0)
    with pytest.raises(ValueError, match="steps: 5 are too few"):
        bench_trl(tmp_path / "new", steps=5)
    with pytest.raises(ValueError, match="placement"):
        bench_trl(tmp_path / "new", placement="everywhere")
    assert not (tmp_path / "new").exists()  # before any work
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("one")
    for other in ("thesis", "thesis/chapter.txt"):
        with pytest.raises(ValueError, match="holds something else"):
            bench_trl(tmp_path / other)
    assert [p.name for p in (tmp_path / "thesis").iterdir()] == ["chapter.txt"]
    assert open_folder(tmp_path / "ours") == open_folder(tmp_path / "ours")


def test_the_command_refuses_too(tmp_path):
    done = run_verb(tmp_path, "bench", "trl", "--pairs", 0, "--json", code=2)
    assert "pairs: 0" in done.stderr and done.stdout == "" and not list(tmp_path.iterdir())


def test_without_an_index_the_remedy_is_named(tmp_path, monkeypatch):
    "pip fails at once; what it said and what to do are in the message, and the next call tries again."
    for name, value in {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    folder = open_folder(tmp_path / "b")
    with pytest.raises(OSError, match="TRL's environment: ERROR: No matching distribution.*pip reaches an index"):
        make_environment(folder, lambda line: None)
    assert not (folder / "versions.json").exists() and (folder / "venv").exists()


def test_an_interrupt_leaves_no_process(tmp_path):
    "TRL's script and what it started end with the bench."
    folder = open_folder(tmp_path / "b")
    (folder / "venv" / "bin").mkdir(parents=True)
    python = folder / "venv" / "bin" / "python"
    python.write_text('#!/bin/sh\n(sleep 300) &\necho here > "$0.started"\nsleep 300\n')
    python.chmod(0o755)
    script = f"""
from pathlib import Path
from rlbench.bench.trl import ours_config
from rlbench.bench.trl_arm import TrlSetting
from rlbench.bench.trl_sides import run_trl, trl_job
folder = Path({str(folder)!r})
run_trl(folder, trl_job(folder, ours_config(0, 15), TrlSetting()), "x")
"""
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    until(Path(f"{python}.started").exists)
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 3
    process.send_signal(signal.SIGINT)
    process.wait(400)
    assert psutil.wait_procs(started, timeout=10)[1] == []


def test_an_arm_of_rlbench_is_a_real_run(tmp_path):
    "Read from the ledger of a run in its processes; the tasks served are those that TRL would get."
    config = load_config(bench.ours_config(3, 4), {"group": 4, "batch": 16, **WITHOUT_MODEL})
    a = trl_sides.run_ours(tmp_path, "ours", config, "x")
    assert (a.side, a.pair, a.rollouts, len(a.seconds), a.error) == ("ours", 3, (16,) * 4, 4, "")
    assert (
        0 < a.seconds[0] < a.seconds[1] < a.seconds[3]
        and a.startup > 0
        and sum(a.tokens) >= 64
        and sum(a.correct) <= 64
    )
    r = attach("x", runs=tmp_path / "runs")
    served = r.groups.sort("group")["task"].to_list()
    wanted = [task.id for task in trl_sides.served_tasks(config, len(served))]
    assert len(served) >= 16 and served == wanted
    trl_sides.remove_run(r.folder)
    assert len(runs(tmp_path / "runs")) == 0


def test_arms_depend_on_what_they_measured(tmp_path):
    one, other = bench.ours_config(0, 30), bench.ours_config(1, 30)
    jobs = [trl_sides.trl_job(tmp_path, c, TrlSetting()) for c in (one, one, other)]
    names = [trl_sides.short_digest(json.dumps(asdict(job))) for job in jobs]
    assert (
        names[0] == names[1] != names[2]
        and trl_sides.source_digest() == trl_sides.source_digest()
        and trl_sides.weight_digest("tiny")
    )

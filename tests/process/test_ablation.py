"""Ablations as a person runs them: interrupted, taken up again, with a run that failed,
refused before anything starts."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest
from patience import until
from typer.testing import CliRunner

import rlbench as rl
from rlbench.cli.main import app

VIRTUAL = dict(
    generator="scripted",
    clock="virtual",
    group=4,
    batch=32,
    concurrency=16,
    preflight=0,
    eval=[{"name": "held_out", "count": 16, "every": 4}],
)
SET = [
    "--set",
    "generator=scripted",
    "--set",
    "clock=virtual",
    "--set",
    "group=4",
    "--set",
    "batch=32",
    "--set",
    "preflight=0",
    "--set",
    'eval=[{name="held_out", count=16, every=20}]',
]


def rlbench(*words) -> list[str]:
    return [sys.executable, "-m", "rlbench.cli.main", *map(str, words)]


def test_an_interrupted_ablation_goes_on(tmp_path):
    "Ctrl-C in the middle of a run: what is stored stays, the run under way is taken up, nothing is made twice."
    line = rlbench("ablate", "tiny", "band=[[0.1, 0.9]]", "--seeds", 2, "--set", "steps=16", *SET, "--folder", "kept")
    first = subprocess.Popen(
        line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    until(
        lambda: (
            list((tmp_path / "kept").glob("*.json")) and len(list((tmp_path / "kept/runs").glob("*/status.json"))) == 2
        ),
        120,
    )
    os.killpg(first.pid, signal.SIGINT)
    _, told = first.communicate(timeout=400)
    assert first.returncode == 130 and "The same call goes on from here" in told, told
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "kept").glob("*.json")}
    assert 1 <= len(before) < 6
    again = subprocess.run(
        [*line, "--json", "--page", "page.html"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert again.returncode == 0, again.stderr
    found = json.loads(again.stdout.splitlines()[-1])
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "kept").glob("*.json")}
    assert len(after) == 6 == len(list((tmp_path / "kept/runs").iterdir())) and before.items() <= after.items()
    assert found["null"]["holds"] and found["null"]["exact"] and found["null"]["equal"] == 2
    assert [row["arm"] for row in found["table"]] == ["base", "base again", "band = 0.1–0.9"] and "null arm holds" in (
        tmp_path / "page.html"
    ).read_text()


def beyond(curriculum, u, band, progress):
    return 10**6


def test_a_run_that_failed_is_told_left_out_and_tried_again(tmp_path):
    "An arm that cannot run does not take the others with it, and it is not stored."

    def again():
        return rl.ablate(
            "tiny",
            arms={"gone": {"sampler": beyond}},
            seeds=2,
            at_once=2,
            folder=tmp_path / "kept",
            say=lambda line: None,
            null=False,
            **VIRTUAL,
            steps=3,
        )

    found = again()
    assert [t.state for t in found.trials] == ["finished", "failed"] * 2 and found.difference("gone").missing == (0, 1)
    assert "gone, seed 0: failed" in found.cautions[0] and "sampler beyond: raised IndexError" in found.cautions[0]
    assert len(list((tmp_path / "kept").glob("*.json"))) == 2
    again()
    assert len(list((tmp_path / "kept/runs").glob("*.1"))) == 2  # what failed is put aside


@pytest.mark.parametrize(
    "words",
    [
        ["los=ppo"],
        ["loss=ppo,pppo"],
        ["loss=ppo,reinforce", "--seeds", "0"],
        ["loss=ppo,reinforce", "--measure", "solved"],
        ["loss=ppo,reinforce", "--set", "loss=ppo"],
        ["staleness=1", "--set", "seed=3"],
    ],
    ids=str,
)
def test_bad_input_is_refused_before_anything_starts(tmp_path, words):
    "In this process: that the command line ends with the status of its verb is seen where it is interrupted."
    with contextlib.chdir(tmp_path):
        done = CliRunner().invoke(app, ["ablate", "tiny", *words])
    assert done.exit_code == 2 and done.stderr.startswith("error: ") and not list(tmp_path.iterdir()), done.output

"""Every verb of the command line, on one small real run, with `--json` and for people."""

import asyncio
import contextlib
import json
import subprocess
import sys

import pytest
from click.testing import Result
from patience import until
from scripted import SET_WITHOUT_MODEL
from typer.testing import CliRunner

import rlbench as rl
from rlbench.cli.main import app


def call(folder, *arguments, code: int = 0) -> subprocess.CompletedProcess:
    "Run the command line in a folder."
    done = subprocess.run(
        [sys.executable, "-m", "rlbench.cli.main", *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def told(folder, *arguments, code: int = 0) -> dict:
    "The JSON object a verb prints last."
    return json.loads(call(folder, *arguments, "--json", code=code).stdout.splitlines()[-1])


def inside(folder, *arguments, code: int = 0) -> Result:
    "Run a verb in this process, where a process of its own shows nothing more."
    with contextlib.chdir(folder):
        done = CliRunner().invoke(app, [*map(str, arguments)])
    assert done.exit_code == code, (done.output, done.exception)
    return done


def told_inside(folder, *arguments) -> dict:
    "The JSON object that a verb in this process prints last."
    return json.loads(inside(folder, *arguments, "--json").stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "A folder with one finished run made by the command line."
    where = tmp_path_factory.mktemp("cli")
    small = [
        f"--set={s}"
        for s in (
            "steps=4",
            "batch=64",
            "group=8",
            "preflight=8",
            "preflight_k=2",
            'eval=[{name = "held_out", count = 64, every = 2}]',
        )
    ]
    end = told(where, "run", "tiny", "--name", "x", *small)
    assert end["state"] == "finished" and end["books_closed"] and end["versions"] == 4
    return where


def test_show_has_the_promised_keys(folder):
    shown = told(folder, "show", "x")
    assert {"solve_rate_start", "solve_rate_end", "length_growth", "wall_s", "books_closed"} <= set(shown) and shown[
        "wall_s"
    ] > 0
    text = call(folder, "show", "x").stdout
    assert "books closed" in text and "report.html" in text and "held-out solve rate" in text


def test_ls_digest_and_log(folder):
    (listed,) = told(folder, "ls")["runs"]
    assert (listed["run"], listed["state"], listed["version"]) == ("x", "finished", 4)
    assert told(folder, "digest", "x")["digest"] == rl.attach("x", runs=folder / "runs").status.digest != ""
    assert told(folder, "log", "x")["commands"] == [] and "x" in call(folder, "ls").stdout


def test_sample_eval_and_export(folder):
    sampled = told(folder, "sample", "x", "17+25=", "-n", 3)
    assert len(sampled["responses"]) == 3 and sampled == told_inside(folder, "sample", "x", "17+25=", "-n", 3)
    (row,) = told_inside(folder, "eval", "x")["evals"]
    assert row["tasks"] == 64 and 0 < row["avg"] < 1
    assert (folder / told_inside(folder, "export", "x", "policy")["policy"] / "model.safetensors").exists()
    assert "policy" in inside(folder, "export", "x", "policy", code=2).stderr  # it is there already


def test_report_is_written_again(folder):
    (folder / "runs" / "x" / "report.html").unlink()
    told(folder, "report", "x")
    assert (folder / "runs" / "x" / "report.html").exists()


def test_doctor(folder):
    found = told(folder, "doctor")
    checks = {c["name"]: c for c in found["checks"]}
    assert {
        "python",
        "torch",
        "disk",
        "vllm",
        "peft",
        "gpu",
        "memory",
        "shared memory",
        "open files",
        "processes",
    } <= set(checks) and found["ok"]
    assert all(c["ok"] or ";" in c["found"] for c in checks.values()), "a line that says no says the remedy"


def test_doctor_of_sandboxes(folder):
    "The table and the ramp, of sandboxes that are there and of such that are not."
    played = told(folder, "doctor", "--sandbox", "--tier", "fake", "--target", 200)
    assert played["ok"] and [level["at_once"] for level in played["programs"]] == [1, 16, 96, 200] == [
        level["at_once"] for level in played["sandboxes"]
    ]
    assert (
        {f["name"] for f in played["findings"]} >= {"memory", "pids", "inodes", "round trip"}
        and all(f["verdict"] in ("pass", "warn") for f in played["findings"])
        and played["binding"]
    )
    gone = call(folder, "doctor", "--sandbox", "--tier", "remote", "--url", "http://127.0.0.1:1", code=1).stdout
    assert "fail  account" in gone and "binding limit: account" in gone
    assert (
        "--target: 0" in call(folder, "doctor", "--sandbox", "--target", 0, code=2).stderr
        and "tier: 'jail' is no tier" in call(folder, "doctor", "--sandbox", "--tier", "jail", code=2).stderr
    )


def test_doctor_against_a_run(folder):
    assert "nothing has changed since x was made" in call(folder, "doctor", "--against", "x").stdout
    noted = folder / "runs" / "x" / "provenance.json"
    before = noted.read_text()
    then = json.loads(before)
    noted.write_text(json.dumps({**then, "cores": 512, "packages": {**then["packages"], "numpy": "0.1"}}))
    changed = {c["what"]: c for c in told(folder, "doctor", "--against", "x")["changes"]}
    assert (
        set(changed) == {"cores", "numpy"}
        and changed["cores"]["then"] == "512"
        and changed["numpy"]["now"] == then["packages"]["numpy"]
    )
    noted.unlink()
    assert "provenance: x has none" in call(folder, "doctor", "--against", "x", code=2).stderr
    noted.write_text(before)


def test_commands_to_an_ended_run_are_refused(folder):
    assert "only a live run" in call(folder, "pause", "x", code=2).stderr
    assert "only a live run" in call(folder, "set", "x", "temperature=0.5", code=2).stderr
    assert "Did you mean 'engine'" in call(folder, "bench", "engin", code=2).stderr


def test_steering_a_live_run(folder):
    told(
        folder,
        "run",
        "tiny",
        "--name",
        "live",
        "-d",
        *SET_WITHOUT_MODEL,
        "--set=steps=100000",
        "--set=eval=[]",
        "--set=preflight=0",
        "--set=batch=64",
        "--set=group=8",
    )
    run = rl.attach("live", runs=folder / "runs")
    until(lambda: run.status and run.status.version >= 1)
    (row,) = told(folder, "set", "live", "temperature=0.9", "--over", 4, "--author", "me")["commands"]
    assert (row["status"], row["author"], row["knob"]) == ("applied", "me", "temperature")
    assert "outside" in inside(folder, "set", "live", "temperature=9", code=2).stderr
    assert "applied" in call(folder, "pause", "live").stdout and run.state == "paused"
    assert "running" not in inside(folder, "show", "live").stdout
    assert "stop it first" in inside(folder, "rm", "live", "-y", code=2).stderr and run.folder.exists()
    assert told_inside(folder, "go", "live")["commands"][0]["status"] == "applied"
    assert asyncio.run(asyncio.wait_for(run.until(step=run.status.version + 3), 60)) == "running"
    assert told(folder, "stop", "live")["commands"][0]["status"] == "applied"
    assert run.wait(60) == "stopped" and run.rollouts["temperature"].min() < 1
    assert told_inside(folder, "rm", "live", "-y")["removed"] and not run.folder.exists()

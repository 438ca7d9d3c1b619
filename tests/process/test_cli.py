"""Every verb of the command line on one small real run, with `--json` and for people."""

import asyncio
import json

import pytest
from command_line import command_facts, run_command, run_verb, verb_facts
from patience import until
from scripted import SET_WITHOUT_MODEL

import rlbench as rl

SMALL = (
    "--set=steps=4",
    "--set=batch=64",
    "--set=group=8",
    "--set=preflight=8",
    "--set=preflight_k=2",
    '--set=eval=[{name = "held_out", count = 64, every = 2}]',
)
LIVE = ("--set=steps=100000", "--set=eval=[]", "--set=preflight=0", "--set=batch=64", "--set=group=8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "A folder with one finished run, made by a process of its own as a person makes it."
    folder = tmp_path_factory.mktemp("cli")
    facts = command_facts(folder, "run", "tiny", "--name", "x", *SMALL)
    assert facts["state"] == "finished" and facts["books_closed"] and facts["versions"] == 4
    return folder


def test_show_has_the_promised_keys(folder):
    "The same facts in a process of its own and in this one; and text for a person."
    facts = command_facts(folder, "show", "x")
    assert {"solve_rate_start", "solve_rate_end", "length_growth", "wall_s", "books_closed"} <= set(facts)
    assert facts["wall_s"] > 0 and facts == verb_facts(folder, "show", "x")
    text = run_verb(folder, "show", "x").stdout
    assert "books closed" in text and "report.html" in text and "held-out solve rate" in text


LISTING = """
import sys
from rlbench.cli.main import main
sys.argv[1:] = {words}
try:
    main()
except SystemExit as end:
    assert not end.code
print(*sys.modules)
"""
# the classes of the configuration bring in all that a run can choose from; the formats are those of other systems
NOT_READ_WITH = {"torch", "transformers", "plotly", "pandas", "rlbench.loop.config", "rlbench.foreign.registry"}


@pytest.mark.parametrize("words", [["--help"], ["ls"], ["show", "x"], ["show", "x", "--json"]], ids=" ".join)
def test_commands_that_only_look_import_little(folder, words, script):
    "A person waits for these imports at every command."
    process = script(LISTING.format(words=words), cwd=folder)
    output, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors
    modules = set(output.splitlines()[-1].split())
    assert "rlbench.cli.main" in modules and modules & NOT_READ_WITH == set()


def test_ls_digest_and_log(folder):
    (listed,) = verb_facts(folder, "ls")["runs"]
    assert (listed["run"], listed["state"], listed["version"]) == ("x", "finished", 4)
    digest = rl.attach("x", runs=folder / "runs").status.digest
    assert digest and verb_facts(folder, "digest", "x")["digest"] == digest
    assert verb_facts(folder, "log", "x")["commands"] == []
    assert "x" in run_verb(folder, "ls").stdout


def test_sample_eval_and_export(folder):
    "Samples are the same in another process; a policy is not written over."
    sampled = verb_facts(folder, "sample", "x", "17+25=", "-n", 3)
    assert len(sampled["responses"]) == 3
    assert sampled == command_facts(folder, "sample", "x", "17+25=", "-n", 3)
    (row,) = verb_facts(folder, "eval", "x")["evals"]
    assert row["tasks"] == 64 and 0 < row["avg"] < 1
    policy = folder / verb_facts(folder, "export", "x", "policy")["policy"]
    assert (policy / "model.safetensors").exists()
    assert "policy" in run_verb(folder, "export", "x", "policy", code=2).stderr


def test_report_is_written_again(folder):
    (folder / "runs" / "x" / "report.html").unlink()
    verb_facts(folder, "report", "x")
    assert (folder / "runs" / "x" / "report.html").exists()


def test_doctor(folder):
    found = verb_facts(folder, "doctor")
    checks = {check["name"]: check for check in found["checks"]}
    hardware = {"disk", "gpu", "memory", "shared memory", "open files", "processes"}
    assert {"python", "torch", "vllm", "peft"} | hardware <= set(checks) and found["ok"]
    assert all(check["ok"] or ";" in check["found"] for check in checks.values()), "a line that says no has the remedy"


def test_doctor_of_sandboxes(folder):
    "The table and the ramp, for sandboxes that are there and for some that are not."
    sandbox = ("doctor", "--sandbox", "--tier")
    found = verb_facts(folder, *sandbox, "fake", "--target", 200)
    ramps = [[level["at_once"] for level in found[kind]] for kind in ("programs", "sandboxes")]
    assert found["ok"] and found["binding"] and ramps == [[1, 16, 96, 200]] * 2
    assert {finding["name"] for finding in found["findings"]} >= {"memory", "pids", "inodes", "round trip"}
    assert all(finding["verdict"] in ("pass", "warn") for finding in found["findings"])
    gone = run_verb(folder, *sandbox, "remote", "--url", "http://127.0.0.1:1", code=1).stdout
    assert "fail  account" in gone and "binding limit: account" in gone
    assert "--target: 0" in run_verb(folder, "doctor", "--sandbox", "--target", 0, code=2).stderr
    assert "tier: 'jail' is no tier" in run_verb(folder, *sandbox, "jail", code=2).stderr


def test_doctor_against_a_run(folder):
    assert "nothing has changed since x was made" in run_verb(folder, "doctor", "--against", "x").stdout
    file = folder / "runs" / "x" / "provenance.json"
    written = file.read_text()
    then = json.loads(written)
    file.write_text(json.dumps({**then, "cores": 512, "packages": {**then["packages"], "numpy": "0.1"}}))
    changed = {change["what"]: change for change in verb_facts(folder, "doctor", "--against", "x")["changes"]}
    assert set(changed) == {"cores", "numpy"} and changed["cores"]["then"] == "512"
    assert changed["numpy"]["now"] == then["packages"]["numpy"]
    file.unlink()
    assert "provenance: x has none" in run_verb(folder, "doctor", "--against", "x", code=2).stderr
    file.write_text(written)


def test_commands_to_an_ended_run_are_refused(folder):
    "In a process of its own: the message, the exit status, and no traceback."
    refused = run_command(folder, "pause", "x", code=2).stderr
    assert "only a live run" in refused and "Traceback" not in refused
    assert "only a live run" in run_verb(folder, "set", "x", "temperature=0.5", code=2).stderr
    assert "Did you mean 'engine'" in run_verb(folder, "bench", "engin", code=2).stderr


def test_steering_a_live_run(folder):
    "Commands of this process and of another one, one after the other."
    verb_facts(folder, "run", "tiny", "--name", "live", "-d", *SET_WITHOUT_MODEL, *LIVE)
    run = rl.attach("live", runs=folder / "runs")
    until(lambda: run.status and run.status.version >= 1)
    (row,) = verb_facts(folder, "set", "live", "temperature=0.9", "--over", 4, "--author", "me")["commands"]
    assert (row["status"], row["author"], row["knob"]) == ("applied", "me", "temperature")
    assert "outside" in run_verb(folder, "set", "live", "temperature=9", code=2).stderr
    assert "applied" in run_command(folder, "pause", "live").stdout and run.state == "paused"
    assert "running" not in run_verb(folder, "show", "live").stdout
    assert "stop it first" in run_verb(folder, "rm", "live", "-y", code=2).stderr and run.folder.exists()
    assert verb_facts(folder, "go", "live")["commands"][0]["status"] == "applied"
    assert asyncio.run(asyncio.wait_for(run.until(step=run.status.version + 3), 60)) == "running"
    assert verb_facts(folder, "stop", "live")["commands"][0]["status"] == "applied"
    assert run.wait(400) == "stopped" and run.rollouts["temperature"].min() < 1
    assert verb_facts(folder, "rm", "live", "-y")["removed"] and not run.folder.exists()

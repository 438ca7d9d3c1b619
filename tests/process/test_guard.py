"""Guards that act while nobody looks, alerts, the webhook, knobs kept under a name, and modules made of notebooks."""

import contextlib
import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import module_from_spec, spec_from_file_location

import polars as pl
import pytest
from inline import check_books, inline_run
from patience import until
from scripted import SET_WITHOUT_MODEL, WITHOUT_MODEL
from typer.testing import CliRunner

import rlbench as rl
from rlbench.base.ledger_reading import read_table
from rlbench.base.status import read_status
from rlbench.cli.main import app
from rlbench.knobs import capture_function
from rlbench.objective.loss import LossTerms
from rlbench.runtime.steer import read_guards

SMALL = dict(steps=100_000, batch=64, group=8, preflight=0, staleness=0, eval=[])
SCRIPTED = {
    "generator": "scripted",
    "clock": "virtual",
    "steps": 1_000_000,
    "group": 4,
    "batch": 32,
    "staleness": 2,
    "preflight": 0,
    "eval": [],
}


def rows_of(run: rl.Run, author: str) -> list[dict]:
    "The journal's rows of an author."
    return [row for row in run.commands.to_dicts() if row["author"] == author]


@pytest.fixture
def room():
    "A server that keeps what is posted to it."

    class Room(BaseHTTPRequestHandler):
        def do_POST(self):
            self.server.heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Room)
    server.heard = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_guard_pauses_turns_and_stops_a_live_run(tmp_path, room, monkeypatch):
    monkeypatch.setenv("ROOM_OF_THE_TEST", f"http://127.0.0.1:{room.server_port}/hook")
    run = rl.run("tiny", runs=tmp_path, webhook="$ROOM_OF_THE_TEST", **SMALL, **WITHOUT_MODEL)
    asked = run.guard("version >= 3", "pause", author="test")
    until(lambda: run.state == "paused")
    (pause,) = until(lambda: rows_of(run, "guard: version >= 3"))
    assert (pause["knob"], pause["status"], pause["reason"]) == ("pause", "applied", "version 3 at version 3")
    held = until(lambda: run.status.version if run.status.version in (3, 4) else 0)
    (watched,) = [g for g in run.guards if g.id == asked]
    assert (watched.fired, watched.armed) == (3, False) and len(run.guards) == 11
    time.sleep(1.0)
    assert run.status.version <= held + 1 and run.state == "paused"  # a batch that had begun is finished, and no other

    run.guard(f"version >= {held + 3}", "temperature = 0.7")
    run.go()
    until(lambda: run.settings.temperature == 0.7)
    assert run.state == "running" and len(rows_of(run, "guard: version >= 3")) == 1  # it fires once
    run.unguard("version >= 3")
    until(lambda: asked not in [g.id for g in run.guards])
    with pytest.raises(ValueError, match="did you mean 'entropy'"):
        run.guard("entrpy < 0.1", "pause")
    with pytest.raises(ValueError, match=r"outside \[0.01, 4\]"):
        run.guard("entropy < 0.1", "temperature = 9.0")
    run.guard("solve_rate >= 0", "stop")
    assert (
        run.wait(400) == "stopped"
        and run.status.reason == "stopped by guard: solve_rate >= 0"
        and run.status.books_closed
    )
    (turned,) = rows_of(run, f"guard: version >= {held + 3}")
    assert (turned["knob"], turned["value"], turned["apply"]) == ("temperature", "0.7", "dispatch")
    assert run.rollouts["temperature"].tail(1).item() == 0.7
    assert [(told["do"], told["run"]) for told in room.heard] == [
        (do, "tiny-1") for do in ("pause", "temperature = 0.7", "stop")
    ]
    assert room.heard[0] == {
        "run": "tiny-1",
        "version": 3,
        "when": "version >= 3",
        "figure": 3.0,
        "do": "pause",
        "text": "version 3 at version 3",
        "guard": asked,
    }
    assert str(room.server_port) not in (run.folder / "config.toml").read_text()


def broken(logprobs_RT, old_RT, advantages_RT):
    "A loss of numbers whose sum is none; its gradient is one, so that the run goes on."
    never_RT = logprobs_RT.new_zeros(logprobs_RT.shape, dtype=bool)
    return LossTerms(
        loss_RT=-advantages_RT * logprobs_RT + 3e38 * (advantages_RT > 0).float() - 3e38 * (advantages_RT < 0).float(),
        clipped_low_RT=never_RT,
        clipped_high_RT=never_RT,
    )


def added(mask_RT, totals):
    "Every token counts one."
    return mask_RT * 1.0


def test_a_loss_that_is_no_number_is_told(tmp_path):
    run = rl.Run(
        inline_run(
            tmp_path,
            "a",
            {**SMALL, "generator": "torch", "model": "tiny", "loss": broken, "aggregation": added, "steps": 1},
        ).folder
    )
    assert run.state == "finished"
    (told,) = rows_of(run, "guard: loss is nan")
    assert (told["knob"], told["status"], told["reason"], told["version"]) == (
        "alert",
        "applied",
        "loss nan at version 1",
        1,
    )
    assert run.steps["loss"].is_nan().all()


def test_guards_of_a_configuration(tmp_path, capsys):
    """On rows of both tables, with three in a row, refused where the run refuses, and the same every time;
    an address that nobody answers costs one line."""
    table = {
        "steps": 12,
        "group": 4,
        "batch": 16,
        "staleness": 2,
        "preflight": 4,
        "preflight_k": 2,
        "eval": [{"name": "held_out", "count": 8, "every": 2}],
        "guards": [
            {"when": "version >= 2 for 3", "do": "temperature = 0.5"},
            {"when": "held_out >= 0 for 2", "do": "concurrency=9"},
            {"when": "preflight >= 0"},
            {"when": "version==6", "do": "batch = 18"},
        ],
    }
    first, second = (
        inline_run(tmp_path, name, {**table, "webhook": "http://127.0.0.1:9"}) for name in ("first", "second")
    )
    check_books(first)
    assert first.state.digest == second.state.digest
    rows = read_table(first.folder, "commands")
    assert rows.drop("at").equals(read_table(second.folder, "commands").drop("at"))
    told = {row["author"].removeprefix("guard: "): row for row in rows.to_dicts()}
    turned = told["version >= 2 for 3"]
    assert (turned["reason"], turned["status"], turned["value"]) == (
        "version 4 at version 4, 3 rows in a row",
        "applied",
        "0.5",
    )
    assert told["held_out >= 0 for 2"]["knob"] == "concurrency" and "held_out" in told["held_out >= 0 for 2"]["reason"]
    assert told["preflight >= 0"]["knob"] == "alert" and told["preflight >= 0"]["version"] == 0
    assert (
        told["version == 6"]["status"] == "refused"
        and "whole number of groups" in told["version == 6"]["reason"]
        and "at version 6" in told["version == 6"]["reason"]
    )
    trained = read_table(first.folder, "rollouts").filter(pl.col("trained_at") > 10)
    assert trained["temperature"].unique().to_list() == [0.5] and first.state.config.concurrency == 9
    assert [g.id for g in read_guards(first.folder)][-4:] == [
        "guard-1",
        "guard-2",
        "guard-3",
        "guard-4",
    ] and read_status(first.folder).state == "finished"
    assert capsys.readouterr().err.count("webhook: 127.0.0.1 was not told") == 2  # once for each of the two runs


def test_alerts_change_nothing(tmp_path):
    "A run whose alerts all fire trains what a run without alerts trains."
    table = {"steps": 6, "group": 4, "batch": 16, "staleness": 1, "preflight": 0, "eval": []}
    loud = inline_run(tmp_path, "loud", {**table, "alerts": ["version > 0", "all_pass + all_fail >= 0 for 2"]})
    silent = inline_run(tmp_path, "silent", {**table, "alerts": False})
    rows = read_table(loud.folder, "commands")
    assert (
        rows["knob"].to_list() == ["alert", "alert"]
        and rows["version"].to_list() == [1, 2]
        and len(read_table(silent.folder, "commands")) == 0
    )
    assert loud.state.digest == silent.state.digest


def test_what_cannot_be_watched_is_refused_before_a_run_starts(tmp_path):
    for wrong, said in (
        ({"guards": [{"when": "entropy < 0.1", "do": "temperature = 9.0"}]}, "outside"),
        ({"guards": [{"when": "held_in < 0.1"}]}, "neither a number"),
        ({"webhook": "$NO_SUCH_ADDRESS"}, "export it before the run starts"),
    ):
        with pytest.raises(ValueError, match=said):
            rl.run(SCRIPTED, runs=tmp_path, name="x", **wrong)
    assert not list(tmp_path.iterdir())


def cli(folder, *arguments, code: int = 0) -> str:
    "What a verb of the command line prints in this process, standard error included."
    with contextlib.chdir(folder):
        done = CliRunner().invoke(app, [*map(str, arguments)])
    assert done.exit_code == code, (done.output, done.exception)
    return done.output


def told(folder, *arguments, code: int = 0) -> dict:
    "The JSON object a verb prints last."
    return json.loads(cli(folder, *arguments, "--json", code=code).splitlines()[-1])


def test_knobs_are_kept_and_put_to_work(tmp_path):
    """What was turned in one run is asked for in another:
    group and batch, which are only right together, come into force together."""
    first, second = (
        rl.run({**SCRIPTED, "publish_every": 2}, runs=tmp_path / "runs", name=name) for name in ("first", "second")
    )
    until(lambda: first.status and first.status.version and second.status and second.status.version)
    for knob, value in (("batch", 48), ("group", 12), ("loss.high", 0.3), ("steps", 900_000)):
        first.set({knob: value})
        until(lambda: knob in first.status.changed)
    assert told(tmp_path, "knobs", "first", "--save", "careful")["saved"].endswith(".knobs/careful.toml")
    with open(tmp_path / "runs" / ".knobs" / "careful.toml", "r+") as file:
        text = file.read().replace("temperature = 1.0", "temperature = 9.0")
        file.seek(0), file.truncate(), file.write(text)
    said = told(tmp_path, "knobs", "second", "--apply", "careful", code=2)
    assert {row["knob"]: row["status"] for row in said["commands"]} == {
        "batch": "applied",
        "group": "applied",
        "loss.high": "applied",
    }
    assert list(said["refused"]) == ["temperature"] and "outside" in said["refused"]["temperature"]
    now = second.settings
    assert (now.group, now.batch, now.loss["high"], now.steps) == (12, 48, 0.3, 1_000_000)
    rows = {row["knob"]: row for row in told(tmp_path, "knobs", "second")["knobs"]}
    assert rows["group"]["in_force"] == 12 and rows["group"]["since"] > 0 and rows["temperature"]["since"] == 0
    assert "did you mean 'careful'" in cli(tmp_path, "knobs", "second", "--apply", "carefull", code=2)
    assert [r.name for r in rl.runs(tmp_path / "runs")] == ["first", "second"]
    first.stop(), second.stop()
    assert first.wait(400) == second.wait(400) == "stopped"


REWARD = """#| export
FREE: int = 10

class Excess:
    "A helper that only the whole module has."
    def __call__(self, length):
        return max(0, length - FREE)

def shorter(r: Rollout, w: Knob(0, 1, help="price of a token") = 0.01, slack: Knob(0, 99) = FREE) -> float:
    "Right, less the price of what is too long."
    return r.correct - w * (Excess()(r.length) + 0 * slack)

def steep(r):
    "Calls a function beside it."
    return shorter_by(r, 2)

def shorter_by(r, power):
    return r.correct - r.length**power"""


def a_notebook(path, *sources):
    "A notebook of code cells."
    cells = [
        {"cell_type": "code", "id": f"my-{n}", "metadata": {}, "execution_count": None, "outputs": [], "source": source}
        for n, source in enumerate(sources)
    ]
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))


def test_a_notebook_becomes_a_reward(tmp_path):
    """Exported, named in a configuration, copied into the run's folder by its hash,
    and in force after the original is gone; then guarded, steered and watched by the command line."""
    a_notebook(
        tmp_path / "my.ipynb", "#| default_exp my_rewards", "#| export\nfrom rlbench import Knob, Rollout", REWARD
    )
    module = told(tmp_path, "export", "my.ipynb", "--to", "modules")
    assert (
        module["functions"] == ["shorter", "steep", "shorter_by"]
        and (tmp_path / module["path"]).name == "my_rewards.py"
    )
    table = "".join(f"{key} = {json.dumps(value)}\n" for key, value in SMALL.items())
    (tmp_path / "modules" / "mine.toml").write_text(
        table + 'reward = {name = "shorter", source = "my_rewards.py", w = 0.5}\n'
    )
    told(tmp_path, "run", "modules/mine.toml", "--name", "mine", "-d", *SET_WITHOUT_MODEL)
    spec = spec_from_file_location("my_rewards", tmp_path / "modules" / "my_rewards.py")
    spec.loader.exec_module(imported := module_from_spec(spec))
    assert (
        "def shorter_by" in capture_function(imported.steep).source
        and "import" not in capture_function(imported.steep).source
    )  # a run takes what lies beside it along
    (tmp_path / "modules" / "my_rewards.py").unlink()
    run = rl.attach("mine", runs=tmp_path / "runs")
    until(lambda: run.status and run.status.version >= 2)
    assert (
        run.config.reward
        == {"name": "shorter", "w": 0.5, "slack": 10, "source": f"functions/shorter-{module['hash']}.py"}
        and (run.folder / run.config.reward["source"]).is_file()
    )
    scored = run.rollouts.filter(pl.col("reward").is_not_null()).head(50)
    assert [row["correct"] - 0.5 * max(0, row["length"] - 10) for row in scored.to_dicts()] == pytest.approx(
        scored["reward"].to_list()
    )

    assert "applied" in cli(tmp_path, "publish", "mine")
    assert "applied" in cli(tmp_path, "guard", "mine", "version > 1", "reward.w = 0.25")
    until(lambda: run.settings.reward["w"] == 0.25)
    listed = cli(tmp_path, "guard", "mine")
    assert "version > 1" in listed and "loss is nan" in listed and "still true" in listed
    assert told(tmp_path, "guard", "mine", "--remove", "loss is nan")["commands"][0]["status"] == "applied"
    assert (
        "did you mean" in cli(tmp_path, "guard", "mine", "entrpy < 1", "pause", code=2)
        and len(told(tmp_path, "guard", "mine")["guards"]) == 10
    )
    watching = subprocess.Popen(
        [sys.executable, "-m", "rlbench.cli.main", "attach", "mine", "--json"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    run.stop()
    out, _ = watching.communicate(timeout=400)
    assert watching.returncode == 0 and json.loads(out.splitlines()[-1])["state"] == "stopped"


def test_what_is_wrong_with_a_notebook_is_said(tmp_path):
    a_notebook(tmp_path / "none.ipynb", "x = 1")
    a_notebook(
        tmp_path / "broken.ipynb", "#| default_exp my_rewards", "#| export\ndef brief(r):\n    return r.correct +"
    )
    assert "default_exp" in cli(tmp_path, "export", "none.ipynb", code=2)
    assert "cell my-1, line 3" in cli(tmp_path, "export", "broken.ipynb", code=2)
    assert "No such file" in cli(tmp_path, "export", "away.ipynb", code=2)
    assert not list(tmp_path.glob("*.py"))

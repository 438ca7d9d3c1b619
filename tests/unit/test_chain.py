"""The classic chain on small data: demonstrations, fine-tuning, preference pairs, a reward model;
every verb, and what it refuses."""

import contextlib
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from rlbench.base.ledger import Ledger
from rlbench.base.run_files import create_run_folder
from rlbench.cli.main import app
from rlbench.engines.torch import TorchGenerator, settle_cpu
from rlbench.environments.tasks import arithmetic
from rlbench.generator import Request
from rlbench.loop.config_files import load_config, to_toml
from rlbench.models.heads import load_reward_model
from rlbench.models.model import decode_response, encode_prompt, load_policy
from rlbench.records import Sampling, stream_key
from rlbench.reward import exact
from rlbench.views.preferences import append_choice, make_choice
from rlbench.views.response_pairs import draw_pairs


def call(folder, *arguments, code: int = 0) -> Result:
    "Run a verb in this process."
    with contextlib.chdir(folder):
        done = CliRunner().invoke(app, [*map(str, arguments)])
    assert done.exit_code == code, (done.output, done.exception)
    return done


def told(folder, *arguments) -> dict:
    "The JSON object a verb prints last."
    return json.loads(call(folder, *arguments, "--json").stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a run: eight responses of the tiny policy to each of 160 tasks and an evaluation,
    as its ledger keeps them."""
    settle_cpu()
    where, policy, tasks = tmp_path_factory.mktemp("chain"), load_policy("tiny"), arithmetic(seed=2)[:160]
    generator = TorchGenerator(policy.model, max_length=96, slots=256)
    generator.submit(
        Request(
            (i, 0),
            encode_prompt(policy, tasks[i // 8].prompt),
            Sampling(),
            stream_key(0, tasks[i // 8].id, i),
            policy.stop_ids,
        )
        for i in range(8 * len(tasks))
    )
    results = []
    while not generator.idle:
        results += generator.step(64)
    run = create_run_folder(where / "runs", "monday")
    (run / "config.toml").write_text(to_toml(load_config("tiny")), encoding="utf-8")
    ledger = Ledger(run, 0)
    rows = [
        (r.key[0], tasks[r.key[0] // 8], decode_response(policy, r.segment.tokens), r.reason, len(r.segment))
        for r in sorted(results, key=lambda r: r.key)
    ]
    rows.append((len(rows), arithmetic(split="held_out", seed=2)[0], ":1", "stop", 3))
    for i, task, text, reason, length in rows:
        group, right = (i // 8, exact(text, task.answer)) if i < 8 * len(tasks) else (-1, True)
        ledger.append(
            "rollouts",
            at=1.0,
            rollout=i,
            **{"try": 0},
            group=group,
            k=i % 8,
            task=task.id,
            set=task.set,
            level=task.level,
            fate="trained" if group >= 0 else "evaluated",
            reason=reason,
            correct=right,
            reward=float(right),
            length=length,
            turns=1,
            dispatched=i // 640,
            oldest=0,
            newest=0,
            trained_at=1,
            prompt=task.prompt,
            text=text,
            answer=task.answer,
        )
    ledger.close()
    return where


@pytest.mark.slow
def test_sft_on_demonstrations_lowers_the_held_out_loss_and_raises_the_solve_rate(folder):
    assert told(folder, "demonstrations", "arithmetic", "--count", 200, "--out", "demos.jsonl")["demonstrations"] == 200
    done = told(folder, "sft", "demos.jsonl", "--out", "sft", "--epochs", 2, "--eval", "arithmetic")
    fit = done["fit"]
    assert (
        fit["held_out"][fit["kept"]] < 0.6 * fit["held_out"][0] and done["after"]["rate"] > done["before"]["rate"] + 0.2
    )
    assert json.loads((folder / "sft/sft.json").read_text())["after"] == done["after"]
    again = told(folder, "sft", "demos.jsonl", "--out", "sft", "--epochs", 2)  # in its own place, and the same numbers
    assert again["fit"]["losses"] == fit["losses"] and again["after"] is None


@pytest.mark.slow
def test_sft_on_a_runs_right_answers(folder):
    done = told(folder, "sft", "monday", "--rejection", "--per-task", 2, "--epochs", 2, "--batch", 16, "--out", "rft")
    assert done["model"] == "tiny" and done["fit"]["held_out"][done["fit"]["kept"]] < done["fit"]["held_out"][0]
    assert done["after"]["rate"] > done["before"]["rate"] + 0.1
    few = told(folder, "sft", "monday", "--rejection", "--until", 1, "--per-task", 1, "--epochs", 1, "--out", "few")[
        "fit"
    ]
    assert 0 < few["trained_on"] + few["examined_on"] < done["fit"]["trained_on"] + done["fit"]["examined_on"]
    assert "solve rate" in call(folder, "sft", "monday", "--rejection", "--epochs", 1, "--out", "rft").stdout


@pytest.mark.slow
def test_a_reward_model_of_verifier_pairs_is_right_on_prompts_it_has_not_seen(folder, script):
    made = told(folder, "pairs", "monday", "--from", "verifier", "--per-task", 2, "--out", "pairs.jsonl")
    assert made["sources"] == [["verifier", made["pairs"]]] and made["pairs"] > 200
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    right = {task.prompt: task.answer for task in arithmetic(seed=2)[:160]}
    assert all(
        exact(row["chosen"], right[row["prompt"]]) and not exact(row["rejected"], right[row["prompt"]]) for row in rows
    )
    result = told(folder, "reward-model", "pairs.jsonl", "--out", "reward")["result"]
    h = result["held_out"]
    assert (
        h["accuracy"] > 0.75
        and h["pairs"] > 40
        and 0 <= h["ece"] < 0.3
        and h["log_loss"] < 0.6
        and sum(b["count"] for b in h["bins"]) == h["pairs"]
    )
    assert json.loads((folder / "reward/reward_model.json").read_text())["held_out"] == h
    texts = [("17+25=", "7+5=2c1;1+2=4c0:42"), ("17+25=", ":24")]
    child = script(
        f"from rlbench.models.heads import load_reward_model as load\n"
        f"m = load({str(folder / 'reward')!r})\n"
        f"print(*m.scores([m.encode(*pair) for pair in {texts}]))"
    )
    out, error = child.communicate(timeout=400)
    assert child.returncode == 0, error
    here = load_reward_model(str(folder / "reward"))
    scores = here.scores([here.encode(*pair) for pair in texts])
    assert np.allclose([float(v) for v in out.split()], scores, atol=1e-5) and scores[0] > scores[1]
    assert (
        "the longer response wins"
        in call(folder, "reward-model", "pairs.jsonl", "--out", "reward", "--most", 60, "--epochs", 1).stdout
    )


def test_pairs_of_people_and_files_are_put_together(folder):
    run = folder / "runs/monday"
    pair = next(draw_pairs(run))
    append_choice(run, make_choice(pair, "better", "ann"))
    (folder / "mine.jsonl").write_text('{"prompt": "1+1=", "chosen": ":2", "rejected": ":3"}\n' * 2)
    made = told(folder, "pairs", "monday", "--from", "ranking", "--from", "mine.jsonl", "--out", "both.jsonl")
    assert made["sources"] == [["ranking ann", 1], ["file", 1]]  # the same pair counts once
    first = json.loads((folder / "both.jsonl").read_text().splitlines()[0])
    assert {first["chosen"], first["rejected"]} == {pair.left.text, pair.right.text} and first[
        "chosen"
    ] == pair.left.text


@pytest.fixture
def endpoint():
    """A judge that prefers the longer response, and, for a tenth of the prompts, whatever stands first.

    Yields (address, what it was asked)."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, self.headers.get("Authorization"), body))
            prompt, a, b = (
                part.split("\n\n")[0].split("]\n")[1] for part in body["messages"][0]["content"].split("\n\n[")[1:]
            )
            answer = "A" if sum(prompt.encode()) % 10 == 0 or len(a) > len(b) else "C" if len(a) == len(b) else "B"
            data = json.dumps({"choices": [{"message": {"role": "assistant", "content": f"Well.\n{answer}"}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            "Nothing on standard error."

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", asked
    server.shutdown()
    server.server_close()


def test_a_judge_is_asked_in_both_orders(folder, endpoint, monkeypatch):
    url, asked = endpoint
    monkeypatch.setenv("RLBENCH_JUDGE_KEY", "k3y")
    made = told(
        folder,
        "pairs",
        "monday",
        "--from",
        "judge",
        "--judge-url",
        url,
        "--judge-model",
        "long",
        "--per-task",
        1,
        "--out",
        "judged.jsonl",
    )
    j = made["judge"]
    assert (
        len(asked) == 2 * j["asked"]
        and j["kept"] == made["pairs"] > 30
        and j["contradicted"] > 3
        and j["first_place"] > 0.5
    )
    assert {(path, key, body["model"], body["temperature"]) for path, key, body in asked} == {
        ("/v1/chat/completions", "Bearer k3y", "long", 0.0)
    }
    rows = [json.loads(line) for line in (folder / "judged.jsonl").read_text().splitlines()]
    assert all(len(row["chosen"]) > len(row["rejected"]) and row["source"] == "judge long" for row in rows)
    assert "k3y" not in (folder / "judged.jsonl").read_text()


REFUSED = (
    (("sft", "none.jsonl", "--out", "x"), "no file"),
    (("sft", "bad.jsonl", "--out", "x"), "bad.jsonl, line 2"),
    (("sft", "strange.jsonl", "--out", "x"), "'ü'"),
    (("sft", "monday", "--out", "runs"), "holds something else"),
    (("sft", "tuesday", "--rejection", "--out", "x"), "tuesday"),
    (("sft", "monday", "--rejection", "--pick", "worst", "--out", "x"), "pick"),
    (("sft", "monday", "--rejection", "--until", "0", "--out", "x"), "before version 0"),
    (("sft", "strange.jsonl", "--epochs", "0", "--out", "x"), "epochs"),
    (("demonstrations", "chains", "--count", "3", "--out", "x"), "arithmetic"),
    (("demonstrations", "--written", "2", "--out", "x"), "written"),
    (("pairs", "--from", "verifier", "--out", "x"), "name the run"),
    (("pairs", "monday", "--from", "verifyer", "--out", "x"), "neither a file"),
    (("pairs", "monday", "--from", "judge", "--out", "x"), "--judge-url"),
    (
        ("pairs", "monday", "--from", "judge", "--judge-url", "http://127.0.0.1:9/v1", "--out", "x"),
        "both --judge-url and --judge-model",
    ),
    (("reward-model", "strange.jsonl", "--out", "x"), "'chosen'"),
    (("reward-model", "one.jsonl", "--out", "x"), "held_out"),
    (("reward-model", "one.jsonl", "--model", "./nowhere", "--out", "x"), "no folder"),
    (("reward-model", "one.jsonl", "--held-out", "1", "--out", "x"), "held_out"),
)


@pytest.mark.parametrize("arguments, says", REFUSED, ids=[" ".join(arguments[:4]) for arguments, _ in REFUSED])
def test_what_cannot_be_used_is_refused_and_nothing_is_left(folder, arguments, says):
    (folder / "bad.jsonl").write_text('{"prompt": "1+1=", "response": ":2"}\n{"prompt": 1}\n')
    (folder / "strange.jsonl").write_text(
        "".join(json.dumps({"prompt": f"1+{i}=", "response": ":ü"}) + "\n" for i in range(3))
    )
    (folder / "one.jsonl").write_text('{"prompt": "1+1=", "chosen": ":2", "rejected": ":3"}\n')
    done = call(folder, *arguments, code=2)
    assert says in " ".join(done.stderr.split()) and "Traceback" not in done.stderr and not (folder / "x").exists()

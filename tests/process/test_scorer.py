"""Other models are asked about finished rollouts: in order, in the books, through losses, refreshes and resumes."""

import contextlib
import json
import os
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import polars as pl
import pytest
from inline import check_books, inline_run
from patience import until
from real_runs import assert_books, ended

import rlbench as rl
from rlbench.base.ledger_reading import read_table

SMALL = dict(
    steps=6,
    batch=32,
    group=4,
    preflight=4,
    preflight_k=2,
    staleness=0,
    eval=[{"name": "held_out", "count": 8, "every": 3}],
)
ASKED = {**SMALL, "reference": "start", "reward_model": "scripted"}


@pytest.mark.parametrize("bound", [0, 2])
def test_a_scripted_run_asks_about_every_rollout(tmp_path, bound):
    driver = inline_run(tmp_path, "asked", {**ASKED, "staleness": bound})
    check_books(driver)
    rows, tokens = read_table(driver.folder, "rollouts"), read_table(driver.folder, "tokens")
    judged = rows.filter(pl.col("reward").is_not_null())
    assert (
        len(judged) > 150
        and (judged["score_names"].list.len() == 1).all()
        and judged["score_values"].explode().is_between(0, 1).all()
    )
    trained = tokens.join(rows.filter(pl.col("fate") == "trained"), on=["rollout", "try"], how="semi")
    assert (trained["reference"] == trained["logprobs"]).all()  # the scripted reference is the policy
    evaluated = tokens.join(rows.filter(pl.col("fate") == "evaluated"), on=["rollout", "try"], how="semi")
    assert len(evaluated) and evaluated["reference"].list.len().fill_null(0).sum() == 0
    steps = read_table(driver.folder, "steps")
    parts = [f"scorer_{part}" for part in ("compute", "wait", "publish", "overhead")]
    assert (steps["scorer_compute"] > 0).all() and (
        (steps.select(pl.sum_horizontal(parts)).to_series() - steps["seconds"]).abs() < 1e-6
    ).all()


def test_a_run_without_a_scorer_has_none(tmp_path):
    driver = inline_run(tmp_path, "plain", SMALL)
    assert (
        "scorer" not in driver.workers.layout and read_table(driver.folder, "steps")["scorer_compute"].null_count() == 6
    )
    asked = inline_run(tmp_path, "asked", ASKED)
    assert asked.state.digest == driver.state.digest  # the scripted environment pays for verdicts alone


TORCH = dict(
    generator="torch",
    model="tiny",
    group=4,
    batch=16,
    steps=4,
    concurrency=16,
    max_tokens=24,
    preflight=4,
    preflight_k=2,
    eval=[],
    staleness=0,
    filter="none",
    checkpoint_every=1,
)


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    "The folder of a reward model that has not learned anything."
    import torch

    from rlbench.models.heads import new_value_model, save_value_model
    from rlbench.models.model import load_policy

    policy = load_policy("tiny")
    model = new_value_model(policy)
    torch.manual_seed(0)
    with torch.no_grad():
        model.score.weight.normal_()
    return str(save_value_model(model, policy.tokenizer, tmp_path_factory.mktemp("models") / "reward"))


def policy_of(folder):
    "The model that a folder's weights are, or the tiny policy."
    from rlbench.models.model import load_policy
    from rlbench.runtime.checkpoint import read_weights

    policy = load_policy("tiny")
    if folder:
        read_weights(folder, policy.model)
    return policy


def largest_gap(rows: pl.DataFrame, policy) -> float:
    "Largest difference between the stored reference and the log-probabilities of a policy, computed here one by one."
    import numpy as np
    import torch

    from rlbench.models.model import token_logprobs

    worst = 0.0
    for prompt, tokens, reference, temperature in rows.select(
        "prompt_tokens", "tokens", "reference", "temperature"
    ).iter_rows():
        whole = torch.tensor([[*prompt, *tokens]])
        with torch.no_grad():
            direct = token_logprobs(policy.model, whole, torch.tensor([whole.shape[1]]), temperature)[0][
                0, len(prompt) :
            ].numpy()
        worst = max(worst, float(np.abs(direct - np.array(reference)).max()))
    return worst


def told(folder) -> pl.DataFrame:
    "Trained rollouts with their tokens."
    return (
        read_table(folder, "tokens")
        .drop("seq", "attempt", "at")
        .join(read_table(folder, "rollouts").filter(pl.col("fate") == "trained"), on=["rollout", "try"], how="inner")
    )


@pytest.mark.parametrize("placement", ["colocated", "split"])
def test_traces_are_the_references_own_and_a_refresh_is_exact(tmp_path, placement):
    """Refreshed every second version: rollouts of versions 0 and 1 have the first policy's numbers,
    those of 2 and 3 the second version's."""
    driver = inline_run(
        tmp_path,
        placement,
        {
            **TORCH,
            "placement": placement,
            "reference": "start",
            "reference_every": 2,
            "kl": "k3",
            "checkpoints_kept": 9,
        },
    )
    check_books(driver)
    rows = told(driver.folder)
    start, later = rows.filter(pl.col("dispatched") < 2), rows.filter(pl.col("dispatched") >= 2)
    assert len(start) == len(later) == 32
    second = policy_of(driver.folder / "checkpoints" / "v000002" / "trainer")
    assert largest_gap(start, policy_of(None)) < 1e-4 and largest_gap(later, second) < 1e-4 < largest_gap(
        later, policy_of(None)
    )
    assert not (driver.folder / "reference.safetensors").exists()


def test_a_resumed_run_with_a_refreshed_reference_is_the_same_run(tmp_path, reward_model):
    """Killed after the reference was refreshed, and taken up from a checkpoint before and after it;
    a fork begins with the reference of its point."""
    from resumed_runs import a_run, check_resumed, taken_up

    from rlbench.loop.ending import FINISHED
    from rlbench.runtime.checkpoint import find_checkpoint
    from rlbench.runtime.driver import drive
    from rlbench.workbench.fork import prepare_fork

    table = {
        **TORCH,
        "steps": 5,
        "batch": 8,
        "concurrency": 8,
        "reference": "start",
        "reference_every": 2,
        "kl": "k3",
        "kl_in": "loss",
        "kl_weight": 0.1,
        "reward_model": reward_model,
        "reward": {"name": "scored", "correct_weight": 1.0},
        "checkpoints_kept": 9,
    }
    whole = a_run(tmp_path / "whole", table)
    drive(whole)
    assert read_table(whole.folder, "rollouts").filter(pl.col("fate") == "trained")["part_names"].to_list()[0] == [
        "reward_model",
        "correct",
    ]
    for share in (0.55, 0.9):
        copy = tmp_path / f"killed-{share}"
        drive(a_run(tmp_path / f"first-{share}", table, {int(share * whole.state.seq): copy}))
        resumed = taken_up(copy)
        version = resumed.state.version
        assert (find_checkpoint(copy) / "trainer" / "reference.safetensors").exists() == (version >= 2)
        drive(resumed)
        check_resumed(resumed)
        assert resumed.state.digest == whole.state.digest and resumed.state.phase in FINISHED
    child = prepare_fork(whole.folder, "child", at=3)
    forked = taken_up(child, 0)
    drive(forked)
    assert (
        told(child).filter(pl.col("trained_at") == 4)["reference"].to_list()
        == told(whole.folder).filter(pl.col("trained_at") == 4)["reference"].to_list()
    )


def test_what_a_model_fails_on_is_asked_again_and_is_no_reward(tmp_path, monkeypatch):
    "A reward model that fails on every seventh rollout the first time, and on rollout 5 for ever."
    import rlbench.runtime.placement as placement_module
    from rlbench.training.scoring_models import ScoringModels, scripted_models

    seen = []

    def fussy(rollouts):
        seen.extend(r.id for r in rollouts)
        return [float("nan") if r.id == 5 or r.id % 7 == 0 and seen.count(r.id) <= 2 else 0.5 for r in rollouts]

    monkeypatch.setattr(
        placement_module,
        "scorer_models",
        lambda config, folder: ScoringModels(scripted_models(0, ["reference"], []).traces, {"reward_model": fussy}),
    )
    driver = inline_run(tmp_path, "fussy", {**ASKED, "staleness": 2, "eval": [], "preflight": 0})
    check_books(driver)
    rows = read_table(driver.folder, "rollouts")
    failed = rows.filter(pl.col("outcome") == "environment_error")
    assert (
        failed["rollout"].to_list() == [5]
        and "gave nan" in failed["message"].item()
        and failed["fate"].item() == "environment_error"
        and failed["reward"].item() is None
    )
    assert rows.filter(pl.col("rollout") == 7)["score_values"].to_list() == [[0.5]]


def test_a_move_leaves_the_scorer_where_it_is(tmp_path):
    "From split to colocated and back while the reference is refreshed; every rollout is asked about."
    driver = inline_run(
        tmp_path,
        "moved",
        {**ASKED, "staleness": 2, "placement": "split", "reference_every": 1, "checkpoint_every": 2, "steps": 8},
        [(60, "placement", "colocated", 0), (250, "placement", "split", 0)],
    )
    check_books(driver)
    commands = read_table(driver.folder, "commands").filter(pl.col("knob") == "placement")
    assert commands["status"].to_list() == ["applied", "applied"] and driver.workers.layout["scorer"] == ("scorer",)
    judged = read_table(driver.folder, "rollouts").filter(pl.col("reward").is_not_null())
    assert (judged["score_names"].list.len() == 1).all()


def test_a_split_run_outlives_its_scorer_killed_and_stopped(tmp_path, reward_model):
    """In processes of their own: what the scorer had in hand is asked again, no rollout is lost,
    and the numbers are the reference's."""
    run = rl.run(
        "tiny",
        runs=tmp_path,
        steps=100_000,
        batch=16,
        group=4,
        preflight=4,
        preflight_k=2,
        staleness=2,
        concurrency=32,
        placement="split",
        eval=[{"name": "held_out", "count": 8, "every": 4}],
        reference="start",
        kl="k3",
        reward_model=reward_model,
        reward={"name": "scored", "correct_weight": 1.0},
    )
    until(lambda: run.status and run.status.version >= 1, 120)
    for signal_ in (signal.SIGKILL, signal.SIGSTOP):
        lost, version = run.status.workers["scorer"], run.status.version
        os.kill(lost, signal_)
        until(lambda: run.status.workers["scorer"] != lost, 90)
        until(lambda: run.status.version >= version + 4, 120)  # more than were finished before: the new one is at work
    run.stop(author="test")
    ended(run, "stopped")
    assert_books(run)
    assert not [fate for fate in run.status.books if fate.startswith("lost")] and run.steps[
        "version"
    ].to_list() == list(range(1, run.status.version + 1))
    events = read_table(run.folder, "events").filter(
        pl.col("kind").is_in(["Lost", "Start"]), pl.col("fields").str.contains("scorer")
    )
    assert events["kind"].to_list() == ["Lost", "Start"] * 2, events
    rows = told(run.folder)
    assert (rows["score_names"].list.join(",") == "reward_model").all() and largest_gap(
        rows.sample(40, seed=0), policy_of(None)
    ) < 1e-3
    assert (
        run.steps["scorer_compute"].sum() > 0 and (run.steps["scorer_wait"] >= 0).all()
    )  # a step may need nothing of a scorer that is just starting
    evaluated = run.rollouts.filter(pl.col("set") == "held_out", pl.col("fate") == "evaluated")
    assert len(evaluated) and (evaluated["score_names"].list.len() == 1).all()


class Verdicts(BaseHTTPRequestHandler):
    """A judge that prefers short responses; every tenth answer is an error, every tenth comes too late,
    every tenth is no number."""

    asked = 0

    def do_POST(self):
        Verdicts.asked += 1
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.headers["Authorization"] == "Bearer sesame" and body["model"] == "small"
        length = len(body["messages"][0]["content"].partition("Response:\n")[2].partition("\n\nHow good")[0])
        trouble = Verdicts.asked % 10
        if trouble == 3:
            return self.send_error(500)
        time.sleep(1.0 if trouble == 6 else 0.0)
        said = "excellent" if trouble == 9 else f"{max(0.0, 1 - length / 100):.2f}"
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):
            self.wfile.write(json.dumps({"choices": [{"message": {"content": said}}]}).encode())

    def log_message(self, *told):
        pass


@pytest.fixture
def judge():
    "The address of a judge."
    server = ThreadingHTTPServer(("127.0.0.1", 0), Verdicts)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_a_judge_behind_an_address_gives_the_reward(tmp_path, judge, monkeypatch):
    "Errors, late answers and answers that are no number are asked again and never a reward; the key is in no file."
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    monkeypatch.setenv("JUDGE_URL", judge)
    run = ended(
        rl.run(
            "tiny",
            runs=tmp_path,
            steps=2,
            batch=16,
            group=4,
            concurrency=32,
            preflight=0,
            eval=[],
            staleness=1,
            score_retries=5,
            judge={"url": "$JUDGE_URL", "model": "small", "key": "$JUDGE_KEY", "timeout": 0.5},
            reward={"name": "scored", "by": "judge"},
        )
    )
    assert_books(run)
    trained = run.rollouts.filter(pl.col("fate") == "trained")
    for row in trained.iter_rows(named=True):
        assert row["reward"] == row["score_values"][0] == round(max(0.0, 1 - len(row["text"]) / 100), 2)
    log = (run.folder / "run.log").read_text()
    assert all(words in log for words in ("500", "within 0.5 s", "named no number")) and "sesame" not in log
    assert not any("sesame" in path.read_text(errors="ignore") for path in run.folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"judge": "http://127.0.0.1:9/v1"}, "judge.url: nobody answers"),
        ({"judge": "$NO_SUCH_JUDGE"}, "judge.url: the environment has no NO_SUCH_JUDGE"),
        ({"reward_model": "./no-such-folder"}, "reward_model: './no-such-folder' is no folder"),
        ({"teacher": "/no/such"}, "teacher: '/no/such' is no folder"),
    ],
)
def test_a_model_that_is_not_there_is_refused_before_anything_starts(tmp_path, table, words):
    with pytest.raises(ValueError, match=words):
        rl.run("tiny", runs=tmp_path, **table)
    assert not list(tmp_path.iterdir())


def test_a_teacher_with_other_tokens_is_refused_with_the_remedy(tmp_path):
    from checkpoints import checkpoint

    folder = checkpoint("qwen3", tmp_path / "other")
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"7":', '"\N{SNOWMAN}":', 1))
    settings = dict(steps=2, batch=16, group=4, concurrency=16, preflight=0, eval=[])
    run = ended(rl.run("tiny", runs=tmp_path / "runs", **settings, teacher=str(folder)), "failed")
    assert (
        "another vocabulary than the policy" in run.status.reason
        and "take a model with the policy's tokenizer" in run.status.reason
        and run.status.books_closed
    )

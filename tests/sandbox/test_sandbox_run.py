"""Runs that judge code: whole runs whose every verdict comes from a sandbox,
with machines that fail in every way they can. No failure is ever paid, or punished."""

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
import sandbox_runs
from inline import check_books, inline_run
from local_runner import LocalRunner
from patience import until
from real_runs import assert_books, ended
from sandbox_runs import ANSWER, EVEN, SMALL, Quick, even
from typer.testing import CliRunner

import rlbench as rl
from rlbench.base.ledger_reading import read_table
from rlbench.cli.main import app
from rlbench.environments.code_verifier import CODE_REWARDS, CODE_VERIFIERS
from rlbench.environments.environment import EnvironmentActor
from rlbench.environments.judging import judge_rollout
from rlbench.environments.judging_pool import JudgingPool
from rlbench.environments.scoring_messages import ScoreRequest
from rlbench.loop.fates import are_books_closed
from rlbench.records import Outcome, Rollout, Task
from rlbench.reward import REWARDS
from rlbench.runtime.live_view import LiveView
from rlbench.sandbox.pool import PoolClient, stop_pool
from rlbench.sandbox.types import End, Execution, Fault
from rlbench.sandbox.verdict import verdict_from_row
from rlbench.views.card_html import run_card_html
from rlbench.views.cards import CARDS
from rlbench.views.regrade import kept_verdicts
from rlbench.views.report import write_report

MACHINE = [end for end in End if not end.of_model]


def run_with(tmp_path, monkeypatch, pool, **table):
    monkeypatch.setattr("rlbench.runtime.environment_worker.open_pool", lambda config: pool)
    driver = inline_run(tmp_path, "coded", {**SMALL, "tasks": even, **table})
    assert are_books_closed(driver.state)
    return driver


def test_a_run_is_judged_in_sandboxes(tmp_path, monkeypatch):
    "Rewards are what tests say, rows hold the evidence, and the books close."
    driver = run_with(tmp_path, monkeypatch, Quick())
    check_books(driver)
    assert driver.state.version == 3 and driver.state.phase == "done"
    rollouts, verdicts, steps = (read_table(driver.folder, table) for table in ("rollouts", "verdicts", "steps"))
    joined = rollouts.join(verdicts, on=["rollout", "try"], suffix="_of")
    assert (
        len(joined)
        and (joined["reward"] == joined["score"]).all()
        and set(joined["score"]) == {0.0, 1.0}
        and (joined["correct"] == joined["passed"]).all()
    )
    assert (joined["text"].str.split(" ").list.len() % 2 == 0).to_list() == joined["passed"].to_list()
    assert (
        steps["infra_masked"].to_list() == steps["infra_failed"].to_list() == [0.0] * 3
        and steps["tripped"].to_list() == [0.0] * 3
    )
    assert all(names and names[0] == "tests" for names in joined["score_names"].to_list())
    row = verdict_from_row(verdicts.row(0, named=True))
    assert row.tier == "fake" and row.checks and row.limits.cpu_s == 2.0 and (verdicts["version"] >= 0).all()


@pytest.mark.parametrize("end", ["raise", *MACHINE], ids=str)
def test_a_failure_now_and_then_is_tried_again(tmp_path, monkeypatch, end):
    "Every fourteenth execution fails: the loop asks again, and no reward is missing or invented."
    driver = run_with(tmp_path, monkeypatch, Quick(lambda n: end if n % 14 == 9 else None))
    rollouts, verdicts = (read_table(driver.folder, table) for table in ("rollouts", "verdicts"))
    lost = verdicts.filter(pl.col("score").is_null())
    assert driver.state.phase == "done" and driver.state.version == 3
    alone = (
        not End(end if end != "raise" else End.BACKEND_LOST).needs_witness
    )  # else a known-good program has shown that the machine is well, and the second attempt was the verdict
    assert lost["passed"].is_null().all() and set(lost["ends"].list.last()) == ({end} if alone else set())
    good = rollouts.filter(pl.col("reward").is_not_null())
    assert (good["text"].str.split(" ").list.len() % 2 == 0).to_list() == (good["reward"] == 1.0).to_list()
    assert (read_table(driver.folder, "steps")["infra_failed"].max() > 0) == alone


@pytest.mark.parametrize("end", ["raise", *MACHINE], ids=str)
def test_a_machine_that_goes_on_failing_stops_the_run(tmp_path, monkeypatch, end):
    "From some moment on nothing runs: no reward comes of it, nothing is trained on it, and the run says why it ended."
    pool = Quick(lambda n: end if n >= 60 else None)
    driver = run_with(tmp_path, monkeypatch, pool, steps=50, score_retries=1)
    rollouts, verdicts = (read_table(driver.folder, table) for table in ("rollouts", "verdicts"))
    assert (
        driver.state.phase == "failed"
        and "infra_stop = 0.2" in driver.state.reason
        and str(End.BACKEND_LOST if end == "raise" else end) in driver.state.reason
    )
    bad = rollouts.filter(pl.col("outcome") == "environment_error")
    assert (
        len(bad)
        and bad["reward"].is_null().all()
        and bad["correct"].is_null().all()
        and not (bad["fate"] == "trained").any()
    )
    assert (verdicts.filter(pl.col("score").is_null())["try"].len()) >= 2 * len(
        bad.filter(pl.col("fate") == "environment_error")
    ), "asked again before it was given up"


def test_a_share_between_the_two_knobs_alerts_and_goes_on(tmp_path, monkeypatch):
    "One scoring in eleven is lost for good: the journal says so, groups go on without it."
    driver = run_with(
        tmp_path,
        monkeypatch,
        Quick(lambda n: End.HOST_OOM if n > 20 and n % 11 == 0 else None),
        score_retries=0,
        steps=4,
    )
    alerts = read_table(driver.folder, "commands").filter(pl.col("author").str.contains("infra_masked"))
    rollouts = read_table(driver.folder, "rollouts")
    assert driver.state.phase == "done" and len(alerts) and "the machine failed" in alerts["reason"][0]
    lost = rollouts.filter(pl.col("outcome") == "environment_error")
    assert (
        len(lost)
        and lost["reward"].is_null().all()
        and set(lost["fate"]) <= {"environment_error", "left_at_stop", "surplus"}
    )


def test_a_sandbox_that_answers_nonsense_is_found_out(tmp_path, monkeypatch):
    """From some moment on every program ends at once, as a broken interpreter does.

    The canary fails, so none of it becomes a zero, and the run stops."""

    class Mute(Quick):
        def run(self, program, limits, owner=""):
            said = super().run(program, limits, owner)
            return (
                said
                if self.runs < 80
                else Execution(End.EXITED, 1, answers=tuple(None for _ in program.calls), tier="fake")
            )

    driver = run_with(tmp_path, monkeypatch, Mute(), steps=50)
    verdicts = read_table(driver.folder, "verdicts")
    assert driver.state.phase == "failed" and "canary" in driver.state.reason
    assert not verdicts.filter(
        pl.col("test_why").list.first().fill_null("").str.starts_with("no answer") & (pl.col("score") == 0)
    ).height


def test_verdicts_of_a_broken_sandbox_are_taken_back(tmp_path, monkeypatch):
    """For a while every answer is the wrong one, which no verdict shows;
    then nothing is answered, and the canary that this calls for fails.
    What was said since the last good one is scored again, and nothing false that did not train already is trained
    on."""

    class Lies(Quick):
        def run(self, program, limits, owner=""):
            said = super().run(program, limits, owner)
            if not 66 <= self.runs < 100:
                return said
            swap = {'["b", "1"]': '["b", ""]', '["b", ""]': '["b", "1"]'}
            lies = tuple(
                next((line.replace(a, b) for a, b in swap.items() if a in line), line) for line in said.answers
            )
            return (
                replace(said, answers=lies)
                if self.runs not in (75, 76)
                else Execution(End.EXITED, 1, answers=tuple(None for _ in program.calls), tier="fake")
            )

    driver = run_with(
        tmp_path, monkeypatch, Lies(), steps=6, infra_stop=1.0, infra_warn=1.0, score_retries=10, staleness=2
    )
    check_books(driver)
    rollouts, verdicts = (read_table(driver.folder, table) for table in ("rollouts", "verdicts"))
    right = {row["rollout"]: len(row["text"].split(" ")) % 2 == 0 for row in rollouts.to_dicts()}
    lies = {
        (row["rollout"], row["try"])
        for row in verdicts.to_dicts()
        if row["passed"] is not None and row["passed"] != right[row["rollout"]]
    }
    trained = rollouts.filter(pl.col("fate") == "trained")
    assert driver.state.phase == "done" and driver.state.version == 6 and len(lies) >= 4, (
        driver.state.phase,
        driver.state.reason,
        len(lies),
    )
    back = verdicts.filter(pl.col("message").str.contains("no verdict is believed"))
    begun = {
        json.loads(fields)["version"]: at
        for at, kind, fields in read_table(driver.folder, "events", ["at", "kind", "fields"]).iter_rows()
        if kind == "Train"
    }
    false = {
        (row["rollout"], row["try"]): row["trained_at"]
        for row in trained.to_dicts()
        if right[row["rollout"]] != (row["reward"] == 1.0)
    }
    assert all(begun[version] < back["at"].min() for version in false.values()), (
        "what was being trained on when the canary failed stays what it was"
    )
    taken_back = {(row["rollout"], row["try"]) for row in back.to_dicts()}
    ended = {
        key: fate for *key_, fate in rollouts.select("rollout", "try", "fate").iter_rows() for key in [tuple(key_)]
    }
    assert back["score"].null_count() == len(back) and {ended[key] for key in lies - set(false) - taken_back} <= {
        "filtered"
    }, "a group that had ended is not there any more"
    assert len([key for key in lies & taken_back if ended[key] == "trained"]) >= 2, (
        "scored again, and trained with what is right"
    )
    assert all(
        right[row["rollout"]] == row["passed"]
        for row in kept_verdicts(driver.folder)
        if ended[row["rollout"], row["try"]] == "trained" and (row["rollout"], row["try"]) not in false
    )


def test_what_a_reference_takes_is_known_of_its_canary(tmp_path, monkeypatch):
    "A program that is right for far less CPU time than the task's own solution, or for far more, trips a wire."

    class Uneven(Quick):
        def run(self, program, limits, owner=""):
            said = super().run(program, limits, owner)
            return replace(said, cpu_s=1.0 if owner.endswith("canary") else (0.01, 0.9, 60.0)[self.runs % 3])

    driver = run_with(tmp_path, monkeypatch, Uneven(), steps=1, sandbox={"canaries": 1})
    verdicts = read_table(driver.folder, "verdicts")
    wires = {(row["cpu_s"], bool(row["passed"])): set(row["tripwires"]) for row in verdicts.to_dicts()}
    assert (wires[0.01, True], wires[0.9, True], wires[60.0, True]) == ({"fast"}, set(), {"dear"}) and not any(
        signs for (_, passed), signs in wires.items() if not passed
    )
    assert read_table(driver.folder, "steps")["tripped"][0] > 0


def test_a_broken_canary_ends_a_run_before_it_begins(tmp_path, monkeypatch):
    "A pool in which nothing runs, and a task whose solution is wrong."
    with pytest.raises(ValueError, match="could not be run: start_failed: played; the machine failed"):
        run_with(tmp_path / "a", monkeypatch, Quick(lambda n: End.START_FAILED))
    monkeypatch.setattr(sandbox_runs, "ANSWER", json.dumps({**EVEN, "reference": "1 2 3"}))
    with pytest.raises(
        ValueError,
        match="the reference solution fails: test 0: wrong, it gave False; either the task or the sandbox is broken",
    ):
        run_with(tmp_path / "b", monkeypatch, Quick())


def test_real_programs_in_a_run(tmp_path, monkeypatch):
    "The same run with processes in place of the modelled pool comes to the same rewards."
    modelled = run_with(tmp_path / "a", monkeypatch, Quick(), steps=1, sandbox={"canaries": 1})
    real = run_with(tmp_path / "b", monkeypatch, LocalRunner(), steps=1, sandbox={"canaries": 1})
    assert modelled.state.digest == real.state.digest
    assert set(read_table(real.folder, "verdicts")["tier"]) == {"local"}


def test_programs_are_tried_before_they_are_judged(tmp_path, monkeypatch):
    """Episodes of several turns: a program that fails what is shown is written anew,
    and a machine that fails in between ends no episode."""
    driver = run_with(
        tmp_path,
        monkeypatch,
        Quick(lambda n: End.BACKEND_LOST if n % 17 == 16 else None),
        environment="code",
        max_turns=3,
        observation_tokens=64,
    )
    check_books(driver)
    rollouts = read_table(driver.folder, "rollouts").filter(pl.col("fate").is_in(["trained", "filtered"]))
    assert driver.state.version == 3 and set(rollouts["turns"]) == {1, 2, 3}
    assert (rollouts["text"].str.split(" ").list.len() % 2 == 0).to_list() == (rollouts["reward"] == 1.0).to_list()
    again = rollouts.filter(pl.col("turns") > 1)["correct"]
    assert again.any() and not again.all() and rollouts["correct"].mean() > 0.6, (
        "half in the first turn, and more in the next ones; some run out of tokens"
    )
    assert any(", got " in said for words in rollouts.filter(pl.col("turns") > 1)["said"] for said in words)


def test_verdicts_are_under_way_together():
    "Four programs run at a time, and a pool that is slow for one of them holds up nobody else."
    together = threading.Barrier(4, timeout=20)

    class Waits(Quick):
        def run(self, program, limits, owner=""):
            together.wait()
            assert owner.startswith("monday/")
            return super().run(program, limits, owner)

    actor = EnvironmentActor(
        CODE_VERIFIERS["code"], CODE_REWARDS["tests"], judging_pool=JudgingPool(Waits(), 4, "monday")
    )
    actor.receive(
        [ScoreRequest(Rollout(i, 0, 0, i, Task("a", "b", ANSWER), text="1 2" if i % 2 else "1")) for i in range(8)]
    )
    done = {}
    while not actor.idle:
        done |= {said.key[0]: said.judged.reward for said in actor.work()}
    assert done == {i: float(i % 2) for i in range(8)}


def test_a_verifier_of_ones_own_may_fail_like_a_machine():
    "A Fault that a verifier raises is nobody's wrong answer."

    def flaky(response, answer):
        raise Fault(End.QUOTA, "no credit")

    found = judge_rollout(Rollout(1, 0, 1, 0, Task("a", "b", "c")), flaky, REWARDS["correct"])
    assert (found.reward, found.correct, found.outcome) == (
        None,
        None,
        Outcome.ENVIRONMENT_ERROR,
    ) and "no credit" in found.message
    without = judge_rollout(Rollout(1, 0, 1, 0, Task("a", "b", ANSWER)), CODE_VERIFIERS["code"], REWARDS["correct"])
    assert without.outcome is Outcome.FUNCTION_ERROR and "no pool of sandboxes" in without.message


def test_a_trained_run_and_its_verdicts_once_more(tmp_path, monkeypatch):
    """A model, processes, sandboxes: what its programs are paid for is the same the second time,
    and its report shows where they ran."""
    monkeypatch.chdir(tmp_path)
    config = {
        "steps": 2,
        "batch": 32,
        "group": 8,
        "preflight": 4,
        "preflight_k": 1,
        "eval": [],
        "tasks": "expressions",
        "verifier": "code",
        "reward": "tests",
        "sandbox.folder": str(tmp_path / "pool"),
    }
    try:
        run = rl.run("tiny", name="coded", **config)
        while run.state not in ("finished", "failed"):
            time.sleep(0.2)
        assert run.state == "finished", (Path(run.folder) / "run.log").read_text()[-2000:]
        verdicts, rollouts = (read_table(run.folder, table) for table in ("verdicts", "rollouts"))
        right = {
            row["rollout"]: row["text"].rpartition(":")[2].strip() == str(eval(row["prompt"].rstrip("=")))
            for row in rollouts.to_dicts()
            if row["text"]
        }
        assert len(verdicts) >= 64 and all(
            right[rollout] <= passed for rollout, passed in verdicts.select("rollout", "passed").iter_rows()
        )
        told = CliRunner().invoke(app, ["regrade", "coded", "--json"])
        found = json.loads(told.stdout.splitlines()[-1])
        assert (
            told.exit_code == 0
            and found["same"] == found["verdicts"] == len(verdicts)
            and (found["other"], found["lost"]) == (0, 0)
        ), found
        page = write_report(run.folder).read_text(encoding="utf-8")
        assert (
            "Starts of sandboxes" in page
            and "<th>wanted</th><th>got</th>" in page
            and "solve() = " in page
            and "&quot;kind&quot;" not in page
            and "Programs were locked in by" in page
        )
        failed = run.rollout(int(verdicts.filter(~verdicts["passed"])["rollout"][0]))
        (test,) = failed.tests.failed
        assert (
            test.asked == "solve()"
            and test.wanted == str(eval(failed.prompt.rstrip("="))) != test.got
            and "exited" in failed.tests.facts
            or failed.tests.ends != "exited"
        )
        assert "&quot;kind&quot;" not in failed._repr_html_() and f"<td>{test.wanted}</td>" in failed._repr_html_()
        assert "the machine failed 0.0 % of the verdicts" in CliRunner().invoke(app, ["show", "coded"]).stdout.replace(
            "\n", " "
        )
        snapshot = LiveView(run.folder).poll()
        assert all(chart.series for chart in CARDS["sandbox"].charts(snapshot)[:4])
        face = run_card_html("sandbox", snapshot)
        assert (
            face.count("<figure>") == 6
            and face.count("0 0 360 ") == 6
            and "rl-whole" in face
            and "found a child waiting" in face
            and "locked in by" in face
        )
        owners = set(read_table(tmp_path / "pool", "executions")["owner"])
        assert {f"coded/{rollout}" for rollout in verdicts["rollout"]} <= owners and "coded/canary" in owners
    finally:
        stop_pool(tmp_path / "pool")


def test_a_program_that_prints_a_set_is_judged_the_same_again(tmp_path, monkeypatch):
    "Which text of a set comes first decides the verdict. The second pool's jails put it where the first's did."
    table = {
        "kind": "stdio",
        "wrap": 'print(next(iter({"{answer} a", "{answer} b"}))[-1])',
        "tests": [{"stdin": "", "stdout": "a"}],
    }
    monkeypatch.setattr(sandbox_runs, "ANSWER", json.dumps(table))
    pool = {"folder": str(tmp_path / "pool"), "canaries": 0}
    driver = inline_run(tmp_path / "runs", "sets", {**SMALL, "tasks": even, "steps": 2, "sandbox": pool})
    assert stop_pool(tmp_path / "pool") == 0
    told = CliRunner().invoke(app, ["regrade", "sets", "--runs", str(tmp_path / "runs"), "--json"])
    stop_pool(tmp_path / "pool")
    found, verdicts = json.loads(told.stdout.splitlines()[-1]), read_table(driver.folder, "verdicts")
    assert found["same"] == found["verdicts"] == len(verdicts) >= 32 and set(verdicts["score"]) == {0.0, 1.0}, found


def test_a_folder_that_cannot_be_a_pools(tmp_path):
    "Named, with what to do."
    from rlbench.loop.config import make_config
    from rlbench.runtime.environment_worker import open_pool

    (tmp_path / "file").write_text("")
    config = make_config(
        {
            "tasks": "expressions",
            "verifier": "code",
            "reward": "tests",
            "sandbox": {"folder": str(tmp_path / "file" / "pool")},
        }
    )
    with pytest.raises(ValueError, match="sandbox.folder: .*file/pool' cannot be a pool's .*leave it empty"):
        open_pool(config)


def test_two_environments_of_a_run_share_one_pool(tmp_path):
    """Each is a client of its own.

    One is killed: the programs of the other go on, and every execution has the run's name."""
    pool = tmp_path / "pool"
    config = {
        **SMALL,
        "environments": 2,
        "steps": 100_000,
        "tasks": "expressions",
        "sandbox": {"folder": str(pool), "at_once": 4},
        "staleness": 2,
        "filter": "none",
        "checkpoint_every": 0,
        "generator": "scripted",
        "virtual": {"scripted_pace": 0.2},
    }
    try:
        run = rl.run("tiny", runs=tmp_path, name="shared", **config)
        until(lambda: run.status and run.status.version >= 1 or run.state == "failed", 120)
        client = PoolClient.connect(pool)
        assert client.status().clients == 3, "both environments, and this one"
        before = dict(run.status.workers)
        os.kill(before["environment-2"], signal.SIGKILL)
        until(lambda: run.status.workers.get("environment-2") not in (None, before["environment-2"]), 120)
        until(lambda: client.status().clients == 3, 120)  # the new one, and no longer the killed one
        client.close()
        version = run.status.version
        until(lambda: run.status.version >= version + 2 or run.state == "failed", 120)
        after = dict(run.status.workers)
        assert {name for name in before if before[name] != after[name]} == {"environment-2"}
        run.stop()
        ended(run, "stopped")
        assert_books(run)
        verdicts = read_table(run.folder, "verdicts")
        assert len(verdicts) >= 32
        owners = set(read_table(pool, "executions")["owner"])
        assert {f"shared/{rollout}" for rollout in verdicts["rollout"]} <= owners
        assert all(owner.startswith("shared/") for owner in owners)
        assert read_table(pool, "executions").filter(pl.col("owner") == "shared/canary").height >= 3
    finally:
        stop_pool(pool)

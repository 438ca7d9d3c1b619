"Responses of a run in the formats of other tools, written and read back."

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import polars as pl
import pytest
from typer.testing import CliRunner

from rlbench.base.ledger import Ledger
from rlbench.base.run_files import create_run_folder
from rlbench.base.status import Status, write_status
from rlbench.cli.main import app
from rlbench.foreign.opening import cached_folder, opened_table, refresh
from rlbench.foreign.registry import FORMATS, find_foreign_runs
from rlbench.foreign.source_files import ZipMembers
from rlbench.views.export_tables import export_responses
from rlbench.views.exported_responses import exported_responses

STEPS, GROUP = 3, 4
COMPARED = ("step", "reward", "prompt", "text")


def rollout_row(number: int) -> dict:
    "A rollout of a step: eight of each, in two groups; the last one was filtered, those before were trained on."
    step = 1 + number // 8
    right = number % 3 == 0
    fate = "filtered" if number % 8 >= GROUP and step == 2 else "trained"
    return {
        "at": float(step),
        "rollout": number,
        "try": 0,
        "group": number // GROUP,
        "k": number % GROUP,
        "task": f"sums/{number // GROUP}",
        "set": "sums",
        "fate": fate,
        "reason": "stop",
        "correct": right,
        "reward": 0.9 if right else -0.1,
        "part_names": ["right", "short"],
        "part_values": [float(right), -0.1],
        "length": 3,
        "turns": 1,
        "dispatched": step - 1,
        "oldest": step - 1,
        "newest": step - 1,
        "trained_at": step if fate == "trained" else -1,
        "seconds": 0.5,
        "prompt": f"{number // GROUP}+1=",
        "text": f'<b>{number}</b>\n"Ω"',
        "answer": "7",
    }


def token_row(number: int) -> dict:
    "The tokens of a rollout."
    return {
        "at": 1.0,
        "rollout": number,
        "try": 0,
        "prompt_tokens": [49, 43],
        "tokens": [50 + number, 51, 0],
        "logprobs": [-0.5, -0.25, -0.125 * number],
        "versions": [number // 8] * 3,
        "mask": [1, 1, 1],
        "advantage": 1.5 - number,
        "start_logprobs": [-0.5, -0.5, -0.125 * number],
    }


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    "A run of three steps with tokens and an evaluation."
    monkeypatch.setenv("RLBENCH_CACHE", str(tmp_path / "cache"))
    folder = create_run_folder(tmp_path / "runs", "monday")
    (folder / "config.toml").write_text('name = "monday"\nmodel = "tiny"\n')
    count = STEPS * 8
    evaluated = {"fate": "evaluated", "group": -1, "trained_at": -1, "dispatched": 2, "set": "held_out"}
    ledger = Ledger(folder, attempt=0)
    ledger.extend("rollouts", [rollout_row(number) for number in range(count)])
    ledger.extend("rollouts", [{**rollout_row(number), **evaluated} for number in range(count, count + 2)])
    ledger.extend("tokens", [token_row(number) for number in range(count)])
    means = [0.25, 0.5, 0.125]
    ledger.extend("steps", [{"at": 1.0, "version": 1 + i, "reward_mean": mean} for i, mean in enumerate(means)])
    ledger.close()
    write_status(folder, Status("finished", version=STEPS, started=1.0, updated=2.0))
    return folder


def read_back(folder: Path) -> dict[str, pl.DataFrame]:
    "The tables of all runs under a folder: rollouts with their tokens, and steps."
    rollouts, steps = [], []
    for found in find_foreign_runs(folder):
        refresh(found)
        place = cached_folder(found)
        table, tokens = opened_table(place, "rollouts"), opened_table(place, "tokens")
        if len(tokens):
            both = [name for name in tokens.columns if name in table.columns and name != "rollout"]
            table = table.join(tokens.drop(both), on="rollout", how="left")
        rollouts.append(table)
        steps.append(opened_table(place, "steps"))
    return {"rollouts": pl.concat(rollouts, how="diagonal_relaxed"), "steps": steps[0]}


def trained(table: pl.DataFrame) -> pl.DataFrame:
    "The responses that were trained on, in order."
    return table.filter(pl.col("text").is_in([f'<b>{i}</b>\n"Ω"' for i in range(24) if i not in range(12, 16)])).sort(
        "text"
    )


def expected(run: Path) -> pl.DataFrame:
    "The responses of the run that were trained on, in the same order."
    rows = [row for row in exported_responses(run) if row.fate == "trained"]
    names = (*COMPARED, "group", "k", "tokens", "logprobs", "trainer_logprobs", "advantage")
    return pl.DataFrame({name: [getattr(row, name) for row in rows] for name in names}).sort("text")


@pytest.mark.parametrize("to", ["jsonl", "parquet", "verifiers", "inspect"])
def test_round_trip(run: Path, tmp_path: Path, to: str) -> None:
    written = export_responses(run, to, tmp_path / to)
    assert written.responses == STEPS * 8 + 2
    found, wanted = trained(read_back(tmp_path / to)["rollouts"]), expected(run)
    assert found.select(COMPARED).equals(wanted.select(COMPARED))
    same_group = found["group_name"].rank("dense").to_list()
    assert same_group == wanted["group"].rank("dense").to_list() or to == "inspect"
    assert found.group_by("group_name").len()["len"].to_list() == [GROUP] * 5
    assert found["logprobs"].to_list() == wanted["logprobs"].to_list()
    assert found["tokens"].to_list() == wanted["tokens"].to_list()
    if to != "verifiers":
        assert found["correct"].to_list() == [reward == 0.9 for reward in wanted["reward"]]
    if to != "inspect":
        assert found["start_logprobs"].to_list() == wanted["trainer_logprobs"].to_list()
        assert found["advantage"].to_list() == wanted["advantage"].to_list()
        assert found["staleness"].to_list() == [0] * 20


@pytest.mark.parametrize("to", ["jsonl", "parquet", "verifiers"])
def test_groups_staleness_and_fates_come_back(run: Path, tmp_path: Path, to: str) -> None:
    export_responses(run, to, tmp_path / to)
    found = read_back(tmp_path / to)["rollouts"]
    assert found["fate"].value_counts(sort=True).rows() == [("trained", 20), ("filtered", 4), ("evaluated", 2)]
    names = found.filter(pl.col("fate") == "trained").select("group_name", "k").rows()
    assert sorted(names)[:4] == [("0", 0), ("0", 1), ("0", 2), ("0", 3)] or to == "verifiers"


def test_trl(run: Path, tmp_path: Path) -> None:
    written = export_responses(run, "trl", tmp_path / "trl")
    assert written.responses == 20
    first = pl.read_parquet(tmp_path / "trl/completions/completions_00001.parquet")
    assert first.columns == ["step", "prompt", "completion", "reward", "advantage"]
    assert first["prompt"].to_list() == ["0+1="] * 4 + ["1+1="] * 4
    state = json.loads((tmp_path / "trl/checkpoint-3/trainer_state.json").read_text())
    assert [row["reward"] for row in state["log_history"]] == [0.25, 0.5, 0.125]
    if any(form.name == "trl" for form in FORMATS.values()):
        tables = read_back(tmp_path / "trl")
        found = trained(tables["rollouts"])
        assert found.select(COMPARED).equals(expected(run).select(COMPARED))
        assert found.group_by("step", "group").len().sort("step", "group")["len"].to_list() == [GROUP] * 5


def test_several_turns(run: Path, tmp_path: Path) -> None:
    row = {**rollout_row(24), "turns": 2, "said": ["try 1", "wrong", "try 2"], "text": "try 2", "trained_at": 4}
    ledger = Ledger(run, attempt=0)
    ledger.extend("rollouts", [{**row, "rollout": 50}])
    ledger.extend("tokens", [{**token_row(24), "rollout": 50, "turn": [0, 0, 1]}])
    ledger.close()
    for to in ("jsonl", "verifiers", "inspect"):
        export_responses(run, to, tmp_path / to)
        found = read_back(tmp_path / to)["rollouts"].filter(pl.col("step") == 4).to_dicts()
        assert found[0]["said"] == ["try 1", "wrong", "try 2"] and found[0]["turns"] == 2
    export_responses(run, "trl", tmp_path / "trl")
    last = pl.read_parquet(tmp_path / "trl/completions/completions_00004.parquet")
    assert [message["role"] for message in last["completion"][0]] == ["assistant", "user", "assistant"]


def test_an_opened_run_is_exported(run: Path, tmp_path: Path, root: Path) -> None:
    "Steps count from 1 in an export, also where the source counts from 0."
    (found,) = find_foreign_runs(root / "tests/foreign/tinker_cookbook")
    refresh(found)
    export_responses(cached_folder(found), "verifiers", tmp_path / "verifiers")
    steps = read_back(tmp_path / "verifiers")["steps"]
    assert steps["step"].to_list() == [1, 2, 3] and steps["reward_mean"].to_list() == [0.75, 0.5, 0.625]
    assert steps["lag_max"].to_list() == [0, 1, 2]


def export_opened(source: Path, *words: str) -> tuple[int, str]:
    "Exit status and output of the export of another system's run."
    result = CliRunner().invoke(app, ["export", str(source), *words])
    return result.exit_code, result.output


@pytest.mark.parametrize("name", ["verl/v1", "trl/monday", "slime/dump", "tinker_cookbook"])
def test_steps_without_a_time_go_to_a_tracker(name: str, tmp_path: Path, root: Path) -> None:
    code, text = export_opened(root / "tests/foreign" / name, str(tmp_path / "out"), "--to", "tensorboard")
    assert code == 0 and "3 steps" in text
    assert list((tmp_path / "out").rglob("events.out.tfevents.*"))


def test_trl_refuses_a_run_without_steps_and_counts_what_it_leaves_out(tmp_path: Path, root: Path) -> None:
    foreign = root / "tests/foreign"
    code, text = export_opened(foreign / "inspect/sums.json", str(tmp_path / "none"), "--to", "trl")
    assert code == 2 and "has no steps (6 evaluated)" in " ".join(text.split()) and not (tmp_path / "none").exists()
    code, text = export_opened(foreign / "slime/dump", str(tmp_path / "some"), "--to", "trl")
    words = " ".join(text.split())
    assert code == 0 and "3 responses left out" in words and "these are 3 evaluated" in words


def test_a_failed_response_has_no_length(tmp_path: Path, root: Path) -> None:
    name = "sums--tiny--bash--1a2b3c4d"
    source = shutil.copytree(root / "tests/foreign/verifiers" / name, tmp_path / name)
    lines = (source / "traces.jsonl").read_text().splitlines()
    episode = json.loads(lines[0]) | {"id": "failed"}
    error = {"type": "Error", "message": "the sandbox is gone"}
    episode["traces"][0] |= {"id": "failed", "nodes": [], "rewards": {}, "errors": [error], "num_output_tokens": 0}
    (source / "traces.jsonl").write_text("\n".join([*lines, json.dumps(episode)]) + "\n")
    code, _ = export_opened(source, str(tmp_path / "out"), "--to", "jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out/rollouts.jsonl").read_text().splitlines()]
    (failed,) = [row for row in rows if row.get("message")]
    assert code == 0 and len(rows) == 7 and "length" not in failed


def test_refusals(run: Path, tmp_path: Path) -> None:
    runner = CliRunner()

    def export(*words: str) -> tuple[int, str]:
        result = runner.invoke(app, ["export", str(run), *words])
        return result.exit_code, result.output

    folder = str(tmp_path / "out")
    assert export("--to", "jsonl")[0] == 2 and export(folder, "--to", "jsonl")[0] == 0
    code, text = export(folder, "--to", "jsonl")
    assert code == 2 and "--force" in text and export(folder, "--to", "jsonl", "--force")[0] == 0
    code, text = export(folder, "--to", "parquett")
    assert code == 2 and "did you mean 'parquet'?" in text and "tensorboard" in text


def test_inspect_ai_reads_its_log_where_it_is_installed(run: Path, tmp_path: Path) -> None:
    export_responses(run, "inspect", tmp_path / "inspect")
    log = tmp_path / "inspect/monday.eval"
    members = ZipMembers(log).members
    assert {"header.json", "summaries.json", "_journal/start.json"} < set(members)
    assert sum(name.startswith("samples/") for name in members) == 24
    if find_spec("inspect_ai"):
        from inspect_ai.log import read_eval_log

        samples = read_eval_log(str(log)).samples
        assert len(samples) == 24 and {sample.scores["reward"].value for sample in samples} == {0.9, -0.1}


@pytest.mark.slow
def test_verifiers_reads_its_episodes_where_it_is_installed(run: Path, tmp_path: Path) -> None:
    export_responses(run, "verifiers", tmp_path / "out")
    lines = (tmp_path / "out/traces.jsonl").read_text().splitlines()
    assert len(lines) == 26
    if find_spec("verifiers"):
        from verifiers.v1.episode import WireEpisode

        episode = WireEpisode.model_validate(json.loads(lines[0]))
        (trace,) = episode.traces
        assert trace.reward == 0.9 and trace.nodes[1].token_ids == [50, 51, 0] and episode.run.work.step == 1

"Runs of TRL: what its files say, what they do not say, and what a changed copy still gives."

import json
import shutil
from pathlib import Path

import polars as pl
import pytest

import rlbench as rl
from rlbench.foreign.opening import cached_folder, opened_table, refresh
from rlbench.foreign.registry import find_foreign_runs
from rlbench.foreign.source import read_source
from rlbench.foreign.trl import TRL
from rlbench.views.export_tables import TRL_FIGURES


@pytest.fixture
def runs(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    "Copies of made-up runs: one of messages with a checkpoint, one of texts."
    monkeypatch.setenv("RLBENCH_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(root / "tests/foreign/trl", tmp_path / "some runs"))


def open_only(path: Path) -> Path:
    "The cached folder of the only run under a path."
    (found,) = find_foreign_runs(path)
    assert found.kind == "trl"
    refresh(found)
    return cached_folder(found)


def part(rollouts: pl.DataFrame, name: str) -> pl.DataFrame:
    "By step: the mean of a part of the reward."
    parts = rollouts.explode("part_names", "part_values").filter(pl.col("part_names") == name)
    return parts.group_by("step", maintain_order=True).agg(pl.col("part_values").mean())


def test_names_that_are_read_are_those_that_an_export_writes() -> None:
    assert {ours: TRL.metrics[ours][0] for ours in TRL_FIGURES} == TRL_FIGURES


def test_messages(runs: Path) -> None:
    folder = open_only(runs / "monday")
    steps, rollouts = opened_table(folder, "steps"), opened_table(folder, "rollouts")
    assert steps["reward_mean"].to_list() == [1.375, 1.125, 1.25]
    assert part(rollouts, "accuracy_reward")["part_values"].to_list() == [0.75, 0.5, 0.625]
    assert rollouts["prompt"][0] == "17+25=" and rollouts["text"][0] == "7+5=12:42" and rollouts["reward"][0] == 2.0
    assert opened_table(folder, "groups")["size"].to_list() == [4] * 6
    assert steps["seconds"].to_list() == [11.9] * 3 and steps["length_mean"].to_list() == [8.625, 8.375, 8.5]
    source = read_source(folder)
    assert not any("reward" in guess for guess in source.guesses)  # the weights follow from the figures
    assert not source.has("rollouts.length") and not source.has("rollouts.staleness") and not source.has("tokens")


def test_texts(runs: Path) -> None:
    folder = open_only(runs / "plain")
    assert opened_table(folder, "steps")["reward_mean"].to_list() == [0.75]
    source = read_source(folder)
    assert any(guess.startswith("reward: its only part") for guess in source.guesses)
    assert "save_steps" in source.remedy("steps.loss")


def test_two_runs_of_a_folder(runs: Path) -> None:
    assert [found.path.name for found in find_foreign_runs(runs)] == ["monday", "plain"]


def test_weights_of_the_figures(runs: Path) -> None:
    state = runs / "monday/checkpoint-3/trainer_state.json"
    record = json.loads(state.read_text())
    for entry, shape in zip(record["log_history"], (0.625, 0.5, 0.875), strict=True):
        right = entry["rewards/accuracy_reward/mean"]
        entry["rewards/format_reward/mean"] = shape
        entry["reward"] = 2 * right + 0.5 * shape
        entry["grad_norm"] = float("nan")
    state.write_text(json.dumps(record))
    rollouts = opened_table(open_only(runs / "monday"), "rollouts")
    assert rollouts["reward"][0] == 2.5


def test_changed_copy(runs: Path) -> None:
    folder = runs / "monday"
    path = folder / "completions/completions_00002.parquet"
    table = pl.read_parquet(path).head(5).with_columns(pl.lit(70).alias("step"), pl.lit("x").alias("note"))
    table.rename({"accuracy_reward": "right"}).drop("format_reward").write_parquet(path)
    (folder / "completions/completions_00003.parquet").write_bytes(b"PAR1 torn")
    shutil.rmtree(folder / "checkpoint-3")
    opened = open_only(folder)
    assert opened_table(opened, "steps")["step"].to_list() == [1, 70]
    assert opened_table(opened, "rollouts").filter(pl.col("step") == 70)["reward"].to_list() == [
        0.0,
        1.0,
        0.0,
        0.0,
        1.0,
    ]


def test_turns_and_tools(runs: Path) -> None:
    call = {"function": {"name": "add", "arguments": "{}"}}
    completion = [
        {"role": "assistant", "content": "I add.", "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_calls": None},
        {"role": "assistant", "content": "42", "tool_calls": None},
    ]
    record = {"step": 1, "prompt": "17+25=", "completion": completion, "right": 1.0, "advantage": 0.0}
    place = runs / "tools/completions/completions_00001.parquet"
    place.parent.mkdir(parents=True)
    pl.DataFrame([record]).write_parquet(place)
    rollouts = opened_table(open_only(runs / "tools"), "rollouts")
    assert rollouts["text"][0] == "42" and rollouts["turns"][0] == 2 and "add" in rollouts["said"][0][0]


@pytest.mark.parametrize("missing", ["step", "advantage", "accuracy_reward"])
def test_a_missing_column(runs: Path, missing: str) -> None:
    path = runs / "plain/completions/completions_00001.parquet"
    pl.read_parquet(path).drop(missing).write_parquet(path)
    folder = open_only(runs / "plain")
    assert opened_table(folder, "rollouts")["step"].to_list() == [1] * 8
    assert read_source(folder).has("rollouts.reward") == (missing != "accuracy_reward")


def test_columns_that_no_figures_name_are_a_guess(runs: Path) -> None:
    "Without a state, a logged column of numbers may be taken for a reward function; it is said, and one can be chosen."
    path = next((runs / "plain").rglob("*.parquet"))
    table = pl.read_parquet(path)
    function = table.columns[table.columns.index("completion") + 1]
    logged = table.select(*table.columns[:-1], pl.lit(7.0).alias("seconds_taken"), "advantage")
    logged.write_parquet(path)
    run = rl.open(runs / "plain")
    assert any("`seconds_taken`" in guess and "log_extra" in guess for guess in run.source.guesses)
    chosen = rl.open(runs / "plain", kind="TRL", columns={"reward": function})
    assert chosen.rollouts["reward"].to_list() == table[function].to_list()


def test_event_files_name_the_reward_functions(runs: Path) -> None:
    "Of a run without a checkpoint, event files name the functions and tell their weights."
    from torch.utils.tensorboard import SummaryWriter

    path = next((runs / "plain").rglob("*.parquet"))
    table = pl.read_parquet(path)
    function = table.columns[table.columns.index("completion") + 1]
    table.select(*table.columns[:-1], pl.lit(7.0).alias("seconds_taken"), "advantage").write_parquet(path)
    with SummaryWriter(str(runs / "plain" / "runs")) as writer:
        writer.add_scalar(f"train/rewards/{function}/mean", table[function].mean(), 1)
        writer.add_scalar("train/reward", table[function].mean(), 1)
    run = rl.open(runs / "plain")
    assert run.rollouts["part_names"].to_list() == [[function]] * len(table)
    assert run.rollouts["reward"].to_list() == table[function].to_list()
    assert not any(guess.startswith(("reward", "parts")) for guess in run.source.guesses)


def test_weights_that_a_checkpoint_tells_later_are_taken_for_what_was_read_before(runs: Path) -> None:
    state = runs / "monday" / "checkpoint-3" / "trainer_state.json"
    aside = state.rename(runs / "state.json")
    run = rl.open(runs / "monday")
    assert any(guess.startswith("reward: the sum of its parts") for guess in run.source.guesses)
    written = json.loads(aside.read_text())
    for entry in written["log_history"]:
        entry["reward"] = 0.5 * entry["rewards/accuracy_reward/mean"] + 2 * entry["rewards/format_reward/mean"]
    state.write_text(json.dumps(written))
    assert run.look() and not any(guess.startswith("reward") for guess in run.source.guesses)
    for parts, reward in run.rollouts.select("part_values", "reward").iter_rows():
        assert reward == pytest.approx(0.5 * parts[0] + 2 * parts[1])


def test_a_reward_function_without_a_column_is_said(runs: Path) -> None:
    for path in (runs / "monday").rglob("*.parquet"):
        pl.read_parquet(path).drop("format_reward").write_parquet(path)
    guesses = rl.open(runs / "monday").source.guesses
    assert any("no column of `format_reward`, which the figures name" in guess for guess in guesses)

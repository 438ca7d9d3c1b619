"Evaluation logs of inspect-ai: ZIP and JSON, one that crashed, changes, damaged samples."

import json
import shutil
import zipfile
from pathlib import Path

import pytest
from opened_runs import Tables, column, open_only

import rlbench as rl
from rlbench.foreign.opening import opened_table
from rlbench.foreign.registry import find_foreign_runs
from rlbench.foreign.source import read_source
from rlbench.foreign.source_files import ForeignError, ZipMembers


@pytest.fixture
def logs(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    "A folder with a copy of a made-up log in both formats."
    monkeypatch.setenv("RLBENCH_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(root / "tests/foreign/inspect", tmp_path / "logs"))


def rewrite(path: Path, edit) -> None:
    "Write the members of a ZIP file anew, each as `edit(name, content)` gives it; None leaves it out."
    archive = ZipMembers(path)
    members = {name: edit(name, archive.read(name)) for name in archive.members}
    with zipfile.ZipFile(path, "w") as file:
        for name, content in members.items():
            if content is not None:
                file.writestr(name, content)


def test_a_member_without_its_local_header(tmp_path: Path) -> None:
    "The error names the file, the member and the remedy."
    path = tmp_path / "log.eval"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("header.json", "{}")
    archive = ZipMembers(path)
    path.write_bytes(b"gone" + path.read_bytes()[4:])
    with pytest.raises(ForeignError, match="log.eval: damaged .member 'header.json': .*; copy it again"):
        archive.read("header.json")


@pytest.mark.parametrize("name", ["sums.eval", "sums.json"])
def test_tables(logs: Path, name: str) -> None:
    folder = open_only(logs / name, "inspect")
    assert column(folder, "evals", "eval") == ["sums"] and column(folder, "evals", "avg") == [0.5]
    assert column(folder, "evals", "tasks") == [3] and column(folder, "evals", "k") == [2]
    assert column(folder, "evals", "version") == [2] and column(folder, "evals", "step") == [3]
    rollouts = opened_table(folder, "rollouts").sort("task", "k")
    assert rollouts["correct"].to_list() == [True, False, False, True, True, False]
    assert rollouts["prompt"][0] == "17+25=" and rollouts["answer"][0] == "42" and rollouts["length"][0] == 3
    (change,) = opened_table(folder, "changes").to_dicts()
    assert (change["setting"], change["value"], change["author"]) == ("eval.max_samples", "4", "nobody")
    assert not len(opened_table(folder, "steps")) and not read_source(folder).has("tokens")


def test_folder_of_logs(logs: Path) -> None:
    "Each log is a run."
    assert [found.path.name for found in find_foreign_runs(logs)] == ["sums.eval", "sums.json"]


def test_crashed(logs: Path) -> None:
    "Without a header, the journal says what was evaluated and what was changed."
    update = {"changes": [{"config": "generate", "name": "max_retries", "value": 2}], "provenance": {"author": "me"}}
    log = logs / "sums.eval"

    def edit(name: str, content: bytes) -> bytes | None:
        if name == "_journal/summaries/1.json":
            return json.dumps([]).encode()
        return None if name in ("header.json", "summaries.json", "samples/c_epoch_2.json") else content

    rewrite(log, edit)
    with zipfile.ZipFile(log, "a") as file:
        file.writestr("_journal/config_updates/1.json", json.dumps(update))
    folder = open_only(log, "inspect")
    assert len(opened_table(folder, "rollouts")) == 5 and column(folder, "evals", "eval") == ["sums"]
    assert column(folder, "changes", "setting") == ["generate.max_retries"]


def test_mutated(logs: Path) -> None:
    "A sample that is no JSON, scores of other types, log-probabilities, messages in parts, an error."
    log = logs / "sums.eval"

    def edit(name: str, content: bytes) -> bytes:
        if name == "samples/a_epoch_1.json":
            return content[:-20]
        if not name.startswith("samples/"):
            return content
        sample = json.loads(content)
        sample["extra"] = {"deep": [1]}
        if name == "samples/b_epoch_1.json":
            sample["scores"] = {"judge": {"value": {"style": 0.25, "facts": "C"}}}
            sample["output"]["choices"][0]["logprobs"] = {"content": [{"token": "1", "logprob": -0.5}] * 2}
            sample["messages"][0]["content"] = [{"type": "text", "text": "5+5"}, {"type": "text", "text": "+4="}]
        if name == "samples/c_epoch_1.json":
            sample |= {"scores": None, "error": {"message": "out of memory"}, "messages": [], "output": {}}
        return json.dumps(sample).encode()

    rewrite(log, edit)
    folder = open_only(log, "inspect")
    rollouts = {(row["task"], row["k"]): row for row in opened_table(folder, "rollouts").to_dicts()}
    assert len(rollouts) == 5
    judged, failed = rollouts["b", 0], rollouts["c", 0]
    assert judged["reward"] is None  # it has no score of the scorer that was taken for the others
    assert judged["part_names"] == ["judge/style", "judge/facts"]
    assert judged["prompt"] == "5+5+4=" and column(folder, "tokens", "logprobs") == [[-0.5, -0.5]]
    assert failed["reward"] is None and failed["message"] == "out of memory"


def test_several_turns(logs: Path) -> None:
    log = json.loads((logs / "sums.json").read_text())
    call = {"id": "1", "function": "add", "arguments": {"a": 8}}
    log["samples"] = log["samples"][:1]
    log["samples"][0]["messages"][1]["tool_calls"] = [call]
    log["samples"][0]["messages"] += [{"role": "tool", "content": "9"}, {"role": "assistant", "content": "56"}]
    (logs / "sums.json").write_text(json.dumps(log))
    folder = open_only(logs / "sums.json", "inspect")
    assert column(folder, "rollouts", "turns") == [2] and column(folder, "rollouts", "calls") == [1]
    assert column(folder, "rollouts", "said")[0][1:] == ["9", "56"]


def test_the_score_that_is_the_reward_is_a_guess_and_can_be_chosen(logs: Path) -> None:
    log = json.loads((logs / "sums.json").read_text())
    scorer = next(iter(log["samples"][0]["scores"]))
    assert any(
        guess.startswith(f"reward: its only part, `{scorer}`") for guess in Tables(logs / "sums.json").source.guesses
    )
    for number, sample in enumerate(log["samples"]):
        sample["scores"]["brevity"] = {"value": number / 10}
    (logs / "sums.json").write_text(json.dumps(log))
    taken = rl.open(logs / "sums.json")
    (sentence,) = (guess for guess in taken.source.guesses if guess.startswith("reward:"))
    assert f"the part `{scorer}`" in sentence and "`brevity`" in sentence and "columns" in sentence
    chosen = rl.open(logs / "sums.json", kind="inspect", columns={"reward": "brevity"})
    assert chosen.rollouts["reward"].to_list() == [number / 10 for number in range(6)]
    assert "correct" not in chosen.rollouts.columns  # the verdict was another scorer's
    assert not any(guess.startswith("reward:") for guess in chosen.source.guesses)
    with pytest.raises(ValueError, match=r"columns: reward: unknown name 'brevty'; did you mean 'brevity'"):
        rl.open(logs / "sums.json", kind="inspect", columns={"reward": "brevty"})

"""What is refused: before a folder exists, by the actor that loads the model, or by a disk that is full."""

import json
import shutil
import sys
from importlib.resources import files

import pytest
import torch
from command_line import run_command, run_verb
from inline import inline_run
from namespaces import in_namespace
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

import rlbench as rl
from rlbench.base.ledger_reading import read_table
from rlbench.cli.progress import disk_text

SMALL = dict(steps=3, batch=32, group=8, preflight=0, eval=[])
SCRIPTED = dict(generator="scripted", clock="virtual", **SMALL)


def check_refused(tmp_path, *words: str, **knobs) -> None:
    "A start with these settings is refused at once with these words, and leaves no folder behind."
    with pytest.raises(ValueError) as error:
        rl.run("tiny", runs=tmp_path / "runs", **knobs)
    for word in words:
        assert word in str(error.value), str(error.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        (dict(tasks="arithmetik"), ("tasks", "arithmetik", "arithmetic")),
        (dict(loss="ppoo"), ("loss", "ppoo", "ppo")),
        (dict(loss={"name": "ppo", "hihg": 0.3}), ("hihg", "high")),
        (dict(stalenes=1), ("stalenes", "staleness")),
        (dict(staleness="two"), ("staleness", "two")),
        (dict(staleness=-1), ("staleness", "-1")),
        (dict(temperature=float("nan")), ("temperature", "nan")),
        (dict(batch=100), ("batch", "100", "96", "112")),
        (dict(group=1, batch=16), ("group", "grpo", "reinforce")),
        (dict(band=(0.8, 0.2)), ("band", "0.8", "0.2")),
        (dict(eval=[{"name": "a", "conut": 5}]), ("conut", "count")),
        (dict(learning_rate=2), ("learning_rate", "2")),
        (dict(name="a/b"), ("name", "a/b")),
    ],
)
def test_a_wrong_field_is_refused_by_name_value_and_remedy(tmp_path, knobs, words):
    check_refused(tmp_path, *words, **knobs)


def test_the_command_line_prints_a_refusal_without_a_traceback(tmp_path):
    "Exit status 2, the words and nothing else; no folder is made."
    refused = run_command(tmp_path, "run", "tiny", "--set", "stalenes=1", code=2).stderr
    assert "did you mean 'staleness'" in refused and "Traceback" not in refused
    assert not list(tmp_path.iterdir())
    refused = run_verb(tmp_path, "show", "monday", code=2).stderr
    assert "monday" in refused and "Traceback" not in refused


def check_fails(tmp_path, *words: str, **knobs) -> None:
    """A run with these settings starts and is refused by an actor in its process before any rollout, with closed books
    and these words in the status."""
    run = rl.run("tiny", runs=tmp_path / "runs", **{**SMALL, **knobs})
    assert run.wait(400) == "failed", run.status
    status = run.status
    for word in words:
        assert word in status.reason, status.reason
    assert status.books_closed and not status.books and status.tokens == 0
    assert "Traceback" not in status.reason


def check_fails_inline(tmp_path, *words: str, **knobs) -> None:
    """A run in this process with these settings is refused by an actor before any rollout, with an error of these words
    and closed books."""
    with pytest.raises((ValueError, OSError)) as error:
        inline_run(tmp_path / "runs", "a", {**SMALL, "generator": "torch", "model": "tiny", **knobs})
    for word in words:
        assert word in str(error.value), str(error.value)
    status = rl.Run(tmp_path / "runs" / "a").status
    assert status.state == "failed" and status.books_closed and not status.books and status.tokens == 0


def test_a_model_that_is_not_there(tmp_path):
    "Before a folder exists; and by the worker that loads it, where it goes later."
    for name in (str(tmp_path / "nowhere"), "nobody/nowhere"):
        with pytest.raises(OSError, match="model: .*nowhere' is no folder"):
            rl.run("tiny", runs=tmp_path / "runs", model=name)
    assert not (tmp_path / "runs").exists()
    check_fails_inline(tmp_path, "model", "nowhere", model=str(tmp_path / "nowhere"))


def test_a_device_that_is_not_there(tmp_path):
    check_refused(tmp_path, "device", "gpu", "cuda", device="gpu")
    if not torch.cuda.is_available():
        check_refused(tmp_path, "device", '"cuda" is asked for', device="cuda")


def test_a_kv_budget_too_small_for_one_sequence(tmp_path):
    "The generator refuses it; the trainer has no objection."
    check_fails(tmp_path, "KV", "one sequence", kv_megabytes=0.01, placement="split")


def test_a_model_without_tokenizer(tmp_path):
    shutil.copytree(
        str(files("rlbench.data") / "tiny"), tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*")
    )
    check_fails_inline(tmp_path, "tokenizer", model=str(tmp_path / "model"))


def test_an_architecture_the_torch_generator_does_not_know(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(str(files("rlbench.data") / "tiny"))
    GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), n_positions=256, n_embd=32, n_layer=1, n_head=2)
    ).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    check_fails_inline(tmp_path, "gpt2", model=str(tmp_path / "model"))


def test_a_prompt_longer_than_the_context(tmp_path):
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(40)] + [
        {"prompt": "1+" * 150 + "1=", "answer": "151"}
    ]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    check_fails_inline(
        tmp_path, "tasks", "context", "256", tasks={"name": "file", "path": str(tmp_path / "tasks.jsonl")}
    )


def test_a_response_budget_beyond_the_context(tmp_path):
    check_fails_inline(tmp_path, "max_tokens", "context of 256", max_tokens=255)


def test_a_task_file_with_a_missing_column(tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"query": "1+1=", "answer": "2"}\n')
    check_refused(tmp_path, "tasks.jsonl", "prompt", tasks={"name": "file", "path": str(tmp_path / "tasks.jsonl")})


def test_a_name_in_use_leaves_the_old_run_alone(tmp_path):
    first = rl.run("tiny", runs=tmp_path, name="monday", **SCRIPTED)
    assert first.wait(400) == "finished"
    before = first.status
    with pytest.raises(FileExistsError, match="a run of this name exists"):
        rl.run("tiny", runs=tmp_path, name="monday", **SCRIPTED)
    assert first.status == before


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "runs").write_text("a file, not a folder")
    with pytest.raises(OSError, match="not a folder"):
        rl.run("tiny", runs=tmp_path / "runs", **SMALL)


COMMAND = f"{sys.executable} -m rlbench.cli.main run tiny --runs there"


def test_a_read_only_folder_is_refused_at_once(tmp_path):
    (tmp_path / "there").mkdir()
    script = f"set -e; mount -t tmpfs none there; mount -o remount,ro there; {COMMAND}"
    done = in_namespace(script, tmp_path)
    assert done.returncode == 2 and "there" in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_full_disk_ends_the_run_with_readable_closed_books(tmp_path):
    "On a disk of 5 MB: the run waits for space, then ends; the rows in its tables are those it counted."
    (tmp_path / "there").mkdir()
    settings = "--set generator=scripted --set steps=100000 --set eval=[] --set preflight=0"
    run = f"{COMMAND} --name full --quiet --json {settings} || true"
    done = in_namespace(f"set -e; mount -t tmpfs -o size=5m none there; {run}; cp -r there/full kept", tmp_path)
    kept = rl.Run(tmp_path / "kept")
    status = kept.status
    assert kept.state in ("stopped", "failed"), (done.stdout[-800:], done.stderr[-800:], status)
    assert "disk is full" in status.reason and status.books_closed and status.version >= 1
    rollouts = read_table(kept.folder, "rollouts")
    assert len(rollouts) == status.dispatched and rollouts["length"].sum() == status.tokens


def test_a_full_disk_is_visible_in_the_terminal(tmp_path):
    assert disk_text(tmp_path) == ""
    (tmp_path / "there").mkdir()
    look = "from pathlib import Path; from rlbench.cli.progress import disk_text; print(disk_text(Path('there')))"
    script = f'mount -t tmpfs -o size=256k none there && {sys.executable} -c "{look}"'
    done = in_namespace(script, tmp_path, timeout=400)
    assert done.stdout.startswith("full: rows wait in memory"), done.stderr

"""Data sets by their name on the Hub, from its cache and from folders, and real runs of models with a chat template on
them."""

import hashlib
import json
import os
import re
import threading
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

import polars as pl
import pytest
from command_line import verb_facts
from inline import inline_run

import rlbench as rl
from rlbench.base.chat import read_chat
from rlbench.base.ledger_reading import read_table
from rlbench.environments.code_datasets import ALL_SETS
from rlbench.environments.tasks import make_tasks

CARD = """---
configs:
- config_name: main
  data_files: [{split: train, path: main/train-*}, {split: test, path: main/test-*}]
- config_name: socratic
  data_files: [{split: train, path: socratic/train-*}, {split: test, path: socratic/test-*}]
---
"""
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def question(n: int) -> dict:
    "A row in the shape of GSM8K."
    return {"question": f"Ann has {n} boxes of 7.", "answer": f"{n}*7={7 * n}\n#### {7000 * n:,}"}


def write_dataset(folder: Path) -> Path:
    """A data set in the Hub's layout: 60 problems to train on, in two shards, and 20 to be examined on,
    two of which are among the 60."""
    for config in ("main", "socratic"):
        (folder / config).mkdir(parents=True)
        for name, numbers in (
            ("train-00000-of-00002", range(30)),
            ("train-00001-of-00002", range(30, 60)),
            ("test-00000-of-00001", range(58, 78)),
        ):
            pl.DataFrame([question(n) for n in numbers]).write_parquet(folder / config / f"{name}.parquet")
    (folder / "README.md").write_text(CARD, encoding="utf-8")
    return folder


class Hub(BaseHTTPRequestHandler):
    "The part of the Hub's interface that reading a data set needs, over the folders in `server.root`."

    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        self.server.asked.append(self.path)

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        kind, _, rest = unquote(urlparse(self.path).path).partition("datasets/")
        owner, name, *rest = rest.split("/") + [""]
        repository, rest = self.server.root / owner / name, [part for part in rest if part]
        if not repository.is_dir():
            return self.answer(404, X_Error_Code="RepoNotFound")
        if len(rest) > 1 and rest[1] not in ("main", COMMIT):
            return self.answer(404, X_Error_Code="RevisionNotFound")
        files = [path for path in sorted(repository.rglob("*")) if path.is_file()]
        inside = repository.joinpath(*rest[2:])
        if kind == "/" and rest[0] == "resolve":
            body = inside.read_bytes() if inside.is_file() else None
            return (
                self.answer(404, X_Error_Code="EntryNotFound")
                if body is None
                else self.answer(200, body, ETag=f'"{hashlib.sha256(body).hexdigest()}"')
            )
        if rest[:1] == ["tree"]:
            listed = sorted(inside.rglob("*") if "recursive=true" in self.path.lower() else inside.glob("*"))
            found = [
                {
                    "type": "file" if path.is_file() else "directory",
                    "path": str(path.relative_to(repository)),
                    "size": path.stat().st_size,
                    "oid": COMMIT,
                }
                for path in listed
            ]
        else:
            found = {
                "id": f"{owner}/{name}",
                "sha": COMMIT,
                "siblings": [{"rfilename": str(path.relative_to(repository))} for path in files],
                "tags": [],
            }
        self.answer(200, json.dumps(found).encode(), Content_Type="application/json")


@pytest.fixture
def served(tmp_path):
    "A Hub with one data set, the environment that leads to it, and what it was asked."
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.root, server.asked = tmp_path / "served", []
    write_dataset(server.root / "school" / "boxes")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield (
        server,
        {
            **os.environ,
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_OFFLINE": "0",
        },
    )
    server.shutdown()
    server.server_close()


ASK = """
import json, sys
from rlbench.loop.config_files import load_config
from rlbench.runtime.prompts import make_pools
told = []
for table in json.loads(sys.argv[1]):
    try:
        pools = make_pools(load_config("tiny", {"tasks": {"name": "hub", **table}}))
        told.append({name: [[task.id, task.prompt, task.answer] for task in tasks] for name, tasks in pools.items()})
    except (ValueError, OSError) as error:
        told.append(str(error))
print(json.dumps(told))
assert "datasets" in sys.modules, "the run process reads data sets"
assert not {"torch", "transformers", "tensorflow"} & set(sys.modules), "the run process stays light"
"""


def pools_of(script, environment: dict, *tables: dict) -> list:
    "What a process of its own makes of task tables: pools by name, or a message."
    out, err = (process := script(ASK, json.dumps(tables), env=environment)).communicate(timeout=400)
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])


def test_a_name_on_the_hub_is_fetched_once_and_then_served_by_the_cache(script, served):
    server, environment = served
    table = {"dataset": "school/boxes", "config": "main", "held_out": "test"}
    pools, pinned = pools_of(script, environment, table, {**table, "revision": COMMIT})
    assert pinned == pools
    assert any(path.endswith("main/test-00000-of-00001.parquet") for path in server.asked)
    train, held_out = ({prompt: answer for _, prompt, answer in pools[name]} for name in ("train", "held_out"))
    assert len(train) == 58 and len(held_out) == 20 and not set(train) & set(held_out)
    assert all(
        question(int(prompt.split()[2]))["answer"].endswith(f"{int(answer):,}")
        for prompt, answer in {**train, **held_out}.items()
    )
    assert {i.rpartition("/")[0] for i, *_ in pools["held_out"]} == {"school/boxes/main/test"}
    before = len(server.asked)
    assert pools_of(script, {**environment, "HF_HUB_OFFLINE": "1"}, table) == [pools] and len(server.asked) == before


def test_what_the_hub_does_not_have_is_said_with_the_nearest_name(script, served):
    _, environment = served
    base = {"dataset": "school/boxes", "config": "main"}
    good, unknown, config, several, split, revision = pools_of(
        script,
        environment,
        base,
        {"dataset": "school/boxs"},
        {**base, "config": "mian"},
        {"dataset": "school/boxes"},
        {**base, "train": "trian"},
        {**base, "revision": "v9"},
    )
    assert len(good["train"]) + len(good["held_out"]) == 60
    assert "tasks.dataset" in unknown and "did you mean 'school/boxes'" in unknown and "hf auth login" in unknown
    assert "tasks.config" in config and "did you mean 'main'" in config
    assert "choose one of main, socratic" in several
    assert "tasks.train" in split and "did you mean 'train'" in split
    assert "v9" in revision
    offline, cached = pools_of(
        script, {**environment, "HF_HUB_OFFLINE": "1"}, {"dataset": "school/other"}, {**base, "config": "mian"}
    )
    assert all(
        word in offline for word in ("school/other", "not reachable", "local folder", "HF_HOME", "HF_HUB_OFFLINE")
    )
    assert "tasks.config" in cached and "mian" in cached and "main" in cached


def test_a_missing_package_is_named_with_its_remedy(script, tmp_path):
    (tmp_path / "datasets.py").write_text("raise ImportError('No module named datasets')")
    refused = (
        "import rlbench as rl\n"
        "try:\n"
        "    rl.run('tiny', tasks={'name': 'hub', 'dataset': 'openai/gsm8k'})\n"
        "except ValueError as error:\n"
        "    print(error)"
    )
    out, err = script(
        refused, env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    ).communicate(timeout=400)
    assert "tasks.hub" in out and "pip install" in out and not (tmp_path / "runs").exists(), err


SPECIAL = {
    "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
}
TEMPLATE = {
    "qwen": "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}",
    "llama": "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n"
    "\n"
    "{{ m['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
}
RENDERED = {
    "qwen": "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n",
    "llama": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n"
    "\n"
    "{prompt}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n"
    "\n",
}


def write_model(folder: Path, family: str):
    """A small random checkpoint of a family with a byte-level tokenizer and the family's chat template;
    returns the tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens(SPECIAL[family])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=SPECIAL[family][-1],
        pad_token=SPECIAL[family][0],
        chat_template=TEMPLATE[family],
        **({"bos_token": SPECIAL[family][0]} if family == "llama" else {}),
    )
    torch.manual_seed(0)
    config = {"qwen": Qwen3Config, "llama": LlamaConfig}[family](
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        tie_word_embeddings=family == "qwen",
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def upper(r: rl.Rollout) -> float:
    return sum(c.isupper() for c in r.text) / (1 + len(r.text))


@pytest.mark.parametrize("family", ["qwen", "llama"])
def test_a_checkpoint_with_a_chat_template_is_trained_on_a_hub_data_set(tmp_path, monkeypatch, family):
    "One in processes of its own, the other in this one."
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    tokenizer, data = write_model(tmp_path / "model", family), write_dataset(tmp_path / "boxes")
    tasks = {
        "name": "hub",
        "dataset": str(data),
        "config": "main",
        "held_out": "test",
        "template": "{prompt} How many? End with ####.",
    }
    settings = dict(
        model=str(tmp_path / "model"),
        tasks=tasks,
        verifier="gsm8k",
        reward=upper,
        steps=2,
        batch=16,
        group=4,
        max_tokens=12,
        preflight=0,
        filter="none",
        eval=[{"name": "held_out", "count": 8, "every": 0}],
    )
    if family == "qwen":
        run = rl.Run(inline_run(tmp_path / "runs", "tiny-1", {"generator": "torch", **settings}).folder)
    else:
        run = rl.run("tiny", runs=tmp_path / "runs", **settings)
        assert run.wait(400) == "finished", f"{run.status}\n{(run.folder / 'run.log').read_text()[-3000:]}"
    assert run.state == "finished"
    assert run.status.books_closed and run.steps["version"].to_list() == [1, 2] and run.steps["grad_norm"].min() > 0
    rollouts, tokens = run.rollouts, read_table(run.folder, "tokens")
    asked = dict(zip(rollouts["rollout"], rollouts["prompt"]))
    assert (
        set(rollouts["prompt"]) <= {f"Ann has {n} boxes of 7. How many? End with ####." for n in range(78)}
        and len(tokens) >= 32
    )
    for rollout, prompt in tokens.select("rollout", "prompt_tokens").iter_rows():
        assert tokenizer.decode(prompt) == RENDERED[family].format(prompt=asked[rollout])
    for fate, split, count in (("trained", "train", 32), ("evaluated", "test", 16)):
        told = rollouts.filter(pl.col("fate") == fate)
        assert len(told) == count and told["task"].str.starts_with(f"boxes/main/{split}/").all()
    assert not set(rollouts.filter(pl.col("fate") == "trained")["prompt"]) & {
        f"Ann has {n} boxes of 7. How many? End with ####." for n in (58, 59)
    }
    assert (
        run.rollouts["correct"].null_count() == 0
        and (tmp_path / "runs" / run.name / "policy" / "config.json").is_file()
    )


def test_the_command_line_takes_a_file_in_the_shape_of_gsm8k(tmp_path):
    rows = [{"question": f"{n}+{n}=", "answer": f"{n}+{n} is {2 * n}\n#### {2 * n:,}"} for n in range(10, 99)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "tasks": '{name="file",path="sums.jsonl"}',
        "verifier": "gsm8k",
        "steps": 2,
        "batch": 16,
        "group": 4,
        "preflight": 0,
        "eval": [],
        "clock": "virtual",
    }
    told = (f"--set={knob}={value}" for knob, value in settings.items())
    assert verb_facts(tmp_path, "run", "tiny", "--name", "x", *told)["state"] == "finished"
    run = rl.Run(tmp_path / "runs" / "x")
    assert (
        run.status.books_closed
        and 0 < run.rollouts["correct"].mean() < 1
        and set(read_table(run.folder, "groups")["set"]) == {"file"}
    )


def same_problem(name: str, task) -> str:
    """What a task asks, however it is put: operands in order, single blanks;
    of a program the function and the shown examples."""
    prompt = " ".join(task.prompt.split())
    if name == "verifiers":
        return " ".join(read_chat(task.prompt).messages[-1]["content"].split())
    if name == "programs":
        table = json.loads(task.answer)
        return (
            f"{table['reference']} "
            f"{sorted(str(test['args']) for test in table['tests'] if test['id'].startswith('shown'))}"
        )
    first, *rest = prompt.removesuffix("=").split(";")
    return ";".join(["+".join(sorted(first.split("+"))) if re.fullmatch(r"[\d+]+", first) else first, *rest])


SMALL_SETS = {
    "addition": [{"high": 2}, {}],
    "sums": [{}],
    "counting": [{}],
    "arithmetic": [{"high_digits": 2}],
    "chains": [{"high": 1}, {"low": 2, "high": 2}, {}],
    "expressions": [{}],
    "programs": [{}],
    "code": [{}],
}


ENVIRONMENT_OF_ROWS = """
import json
from pathlib import Path

import verifiers as vf
from datasets import Dataset


def load_environment():
    rows = [json.loads(line) for line in (Path(__file__).parent / "tasks.jsonl").read_text().splitlines()]
    rows = [{"question": row["prompt"], "answer": row["answer"]} for row in rows]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(), system_prompt="Be  brief.")
"""


def repeating_rows(name: str, folder: Path) -> dict:
    "The table of a task set of one's own: forty problems, each written in five ways."
    ends = ["", " ", "  ", "", "\n"]
    rows = [{"prompt": f"How many  are\n{n} boxes?{end}", "answer": str(n)} for n in range(40) for end in ends]
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "rows.py").write_text(ENVIRONMENT_OF_ROWS)
    own = {
        "file": {"path": str(folder / "tasks.jsonl")},
        "hub": {"dataset": str(folder), "prompt": "prompt"},
        "verifiers": {"id": str(folder / "rows.py")},
    }
    return {**own[name], "one_in": 2}


@pytest.mark.parametrize("name", sorted(ALL_SETS))
def test_no_problem_is_on_both_sides(tmp_path, name):
    "Of every task set: what is examined is not trained on, also with its operands changed, or with other blanks."
    tables = SMALL_SETS.get(name) or [repeating_rows(name, tmp_path)]
    for table in tables:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            pools = [
                make_tasks({"name": name, **table}, split, count=count, functions=ALL_SETS)
                for split, count in (("train", 4096), ("held_out", 512))
            ]
        train, held_out = ({same_problem(name, task) for task in pool} for pool in pools)
        assert train and held_out and not train & held_out, (table, len(train & held_out))
        if name in ("file", "hub", "verifiers"):
            field = "path" if name == "file" else name
            assert len(pools[0]) + len(pools[1]) == 40 == len(train | held_out)
            assert {str(each.message) for each in told} == {
                f"tasks.{field}: 160 of 200 rows repeat the prompt of an earlier row and were joined with it"
            }

"""The workbench's own surface, as an attacker would look at it:
command files, captured functions, pages, terminal, names, secrets, addresses.
What is promised stands in nbs/guide/security.ipynb."""

import ast
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import polars as pl
import pytest
import torch
import websocket
from command_line import run_verb
from fake_run import fake_run
from inline import Told, check_books
from notebooks import ROOT, cells
from patience import until

import rlbench as rl
from rlbench.base import http as exchange_module
from rlbench.base.commands import mark_done, read_commands, send_command
from rlbench.base.http import Unanswered, exchange, is_metadata
from rlbench.base.ledger import Ledger
from rlbench.base.ledger_reading import read_table
from rlbench.base.plotly_charts import to_plotly
from rlbench.base.run_files import create_run_folder, write_json
from rlbench.base.status import read_status, write_status
from rlbench.knobs import Captured, capture_function, load_function, save_function
from rlbench.loop.config import make_config
from rlbench.loop.config_files import captured_functions, read_config, to_toml
from rlbench.loop.webhook import check_address
from rlbench.runtime.driver import drive
from rlbench.runtime.knobsets import knob_file
from rlbench.runtime.lineage import Family, write_family
from rlbench.runtime.prompts import make_pools
from rlbench.runtime.steer import last_asked
from rlbench.untrusted import OBEYED, hide_secrets, make_json_visible, make_visible, read_regular_file
from rlbench.views.serve import serve

SCRIPTED = {
    "generator": "scripted",
    "clock": "virtual",
    "group": 4,
    "batch": 16,
    "staleness": 1,
    "preflight": 0,
    "eval": [],
    "concurrency": 8,
}
BEYOND = tuple(chr(n) for n in (0x1B, 0x07, 0x08, 0x7F, 0x9B, 0x90, 0x202E, 0x2066))
PAYLOADS = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</script></style></pre></svg><iframe src=javascript:alert(1)>",
    "<a href='javascript:alert(1)'>here</a>",
    "[x](javascript:alert(1))",
)
HOSTILE = "".join(PAYLOADS) + "a" + "".join(f"{c}[31m" for c in BEYOND) + "]0;owned[/red][link=file:///etc/passwd]"


def in_time(work, seconds: float = 60.0):
    "What some work gives; fails where it waits for somebody."
    found = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "it waits, or it raised"
    return found[0]


# ---- command files


def plant(commands: Path) -> dict[str, str]:
    """Things in a folder of commands that are none: name of each -> a word of its refusal.

    Those without a word are refused under another name."""

    def text(**told):
        return json.dumps({"author": "eve", "knob": "temperature", "value": 0.5, **told})

    files = {
        "torn": ('{"knob": "temp', "cannot be read"),
        "empty": ("", "cannot be read"),
        "number": ("5", "not a table"),
        "null": ("null", "not a table"),
        "list": ("[]", "not a table"),
        "bytes": ("\udcff\udcfe", "cannot be read"),
        "zeros": ("\0" * 4096, "cannot be read"),
        "deep": ("[" * 100_000 + "]" * 100_000, "deep"),
        "nested": (text(value=json.loads("[" * 60 + "]" * 60)), "deep"),
        "table-deep": ('{"knob": "loss", "value": ' + '{"a":' * 500 + "1" + "}" * 500 + "}", "deep"),
        "digits": ('{"knob": "group", "value": ' + "9" * 5000 + "}", "cannot be read"),
        "nan": (text(value=float("nan")), "no number"),
        "infinite": (text(value=[float("-inf")]), "no number"),
        "half": ('{"knob": "temperature", "author": "\\ud800", "value": 1}', "cannot be read"),
        "half-value": ('{"knob": "temperature", "value": {"\\udfff": 1}}', "cannot be read"),
        "huge": (text(value="x" * (2 << 20)), "bytes"),
        "long-author": (text(author="x" * 5000), "author"),
        "long-knob": (text(knob="k" * 5000), "knob"),
        "no-knob": ('{"value": 1}', "knob"),
        "false-over": (text(over=True), "over"),
        "negative": (text(over=-1), "over"),
        "wrong-author": (text(author={"a": 1}), "author"),
        "unknown": (text(knob="../../x"), "x"),
        "unknown-2": (text(knob="__class__"), "__class__"),
        "source": (text(knob="reward", value={"name": "x", "source": "../../../x.py"}), ""),
    }
    for name, (content, _) in files.items():
        (commands / f"{name}.json").write_bytes(content.encode(errors="surrogateescape"))
    outside = commands.parent / "outside.json"
    outside.write_text(text(value=0.123))
    links = {
        "link": outside,
        "link-zero": "/dev/zero",
        "link-random": "/dev/urandom",
        "link-self": "link-self.json",
        "link-folder": "/",
        "link-nowhere": "/nonexistent/x",
        "link-stdin": "/dev/stdin",
    }
    for name, target in links.items():
        (commands / f"{name}.json").symlink_to(target)
    os.mkfifo(commands / "pipe.json")
    (commands / "folder.json").mkdir()
    (commands / "folder.json" / "full").write_text("")
    (commands / "done" / "folder.json").mkdir()
    (commands / "done" / "folder.json" / "full").write_text("")
    (commands / "done" / "torn.json").mkdir()
    with socket.socket(socket.AF_UNIX) as one, contextlib.chdir(commands):
        one.bind("socket.json")
    refused = (
        {name: word for name, (_, word) in files.items()}
        | dict.fromkeys(links, "is a link")
        | {"pipe": "is a pipe", "folder": "is a folder", "socket": "is a socket"}
    )
    for name in (
        b"-rf.json",
        b"\xff\xfe.json",
        "\x1b[2J.json".encode(),
        "a\nb.json".encode(),
        "\u202egnp.json".encode(),
        b" .json",
        b"$(x).json",
        b"a'b.json",
        b"x" * 200 + b".json",
    ):
        with open(os.fsencode(commands) + b"/" + name, "w") as file:
            file.write(text())
    if os.geteuid() == 0:
        (commands / "stranger.json").write_text(text())
        os.chown(commands / "stranger.json", 65534, 65534)
        refused["stranger"] = "another user"
    return refused


MISNAMED = 9  # files that `plant` gives names which are none


class Flooded(Told):
    "A run that finds such things among its commands, a thousand beside them, and one that is well."

    planted: dict = {}
    good = ""

    def flush(self) -> None:
        super().flush()
        if not self.planted:
            self.planted = plant(self.folder / "commands")
            for n in range(1000):
                (self.folder / "commands" / f"z{n}.json").write_text("{")
            self.good = send_command(self.folder, "ada", "temperature", 0.8)


def inline(folder: Path, kind=Told, **table):
    "A driver of its own kind, driven to its end."
    made = create_run_folder(folder, "x")
    (made / "config.toml").write_text(to_toml(make_config({**SCRIPTED, **table})))
    config = read_config(made)
    driver = kind(made, config, make_pools(config, {}))
    in_time(lambda: drive(driver) or driver, 300)
    return driver


def test_strange_command_files_are_refused_by_name_and_the_run_goes_on(tmp_path, monkeypatch):
    """Malformed, huge, deep, links, pipes, sockets, folders, odd names, a thousand at once:
    each is refused with its name, none ends or blocks the run, the good one takes effect."""
    monkeypatch.setattr("rlbench.runtime.commands.LOOK_SECONDS", -1.0)
    driver = inline(tmp_path, Flooded, steps=60)
    check_books(driver)
    rows = {row["command"]: row for row in read_table(driver.folder, "commands").to_dicts()}
    assert read_status(driver.folder).state == "finished" and rows[driver.good]["status"] == "applied"
    for name, word in driver.planted.items():
        assert (
            rows[name]["status"] == "refused" and word in rows[name]["reason"] and len(rows[name]["reason"]) < 3000
        ), (name, rows.get(name))
        assert not OBEYED.search(rows[name]["reason"])
    odd = [row for name, row in rows.items() if name.startswith("misnamed-")]
    assert len(odd) >= MISNAMED and all(row["status"] == "refused" and "no name" in row["reason"] for row in odd)
    assert not any(row["author"] == "eve" and row["status"] == "applied" for row in rows.values())
    assert oct(driver.folder.stat().st_mode & 0o777) == "0o700"


def test_reading_commands_never_waits_and_reads_no_more_than_it_may(tmp_path):
    "The readers beside the run (panel, command line) pass over the same things."
    folder = create_run_folder(tmp_path, "x")
    refused = plant(folder / "commands")
    found = in_time(lambda: read_commands(folder))
    assert all(command.error or command.id in ("unknown", "unknown-2", "source") for command in found) and set(
        refused
    ) <= {command.id for command in found}
    assert in_time(lambda: (last_asked(folder, "temperature", 1000), 1))[1]
    for n in range(1000):
        (folder / "commands" / f"z{n}.json").write_text("{")
    seen = set()
    while batch := read_commands(folder, seen):
        assert len(batch) <= 256
        seen |= {command.id for command in batch if not mark_done(folder, command.id)}
    assert not seen


def test_a_command_that_cannot_be_moved_takes_effect_once(tmp_path):
    "What stands in the way of commands/done/ makes no command come again and again."
    folder = create_run_folder(tmp_path, "x")
    (folder / "commands" / "done").rmdir()
    (folder / "commands" / "done").write_text("in the way")
    sent = send_command(folder, "ada", "temperature", 0.8)
    assert (
        not mark_done(folder, sent)
        and [c.id for c in read_commands(folder)] == [sent]
        and read_commands(folder, {sent}) == []
    )

    class Blocked(Told):
        def flush(self):
            super().flush()
            if not self.commands.unmovable and (self.folder / "commands" / "done").is_dir():
                (self.folder / "commands" / "done").rmdir()
                (self.folder / "commands" / "done").write_text("in the way")
                send_command(self.folder, "ada", "temperature", 0.7)

    driver = inline(tmp_path / "runs", Blocked, steps=40)
    assert [(c["value"], c["status"]) for c in read_table(driver.folder, "commands").to_dicts()] == [
        ("0.7", "applied")
    ] and len(driver.commands.unmovable) == 1


def test_a_link_that_replaces_a_file_while_it_is_read_is_not_followed(tmp_path):
    "A plain file and a link change places thousands of times: the content behind the link is never returned."
    place, stop = tmp_path / "x", threading.Event()
    (tmp_path / "secret").write_text("secret")

    def swap():
        while not stop.is_set():
            (tmp_path / "plain").write_text("plain")
            os.replace(tmp_path / "plain", place)
            (tmp_path / "link").symlink_to(tmp_path / "secret")
            os.replace(tmp_path / "link", place)

    place.write_text("plain")
    thread = threading.Thread(target=swap, daemon=True)
    thread.start()
    found = set()
    for _ in range(3000):
        with contextlib.suppress(ValueError, OSError):
            found.add(read_regular_file(place, 100))
    stop.set(), thread.join()
    assert found <= {b"plain", b""}


# ---- captured functions


LENGTH = 3


def shorter(r, w=0.1):
    "A reward that uses a constant."
    return r.correct - w * r.length / LENGTH


def unknown_name(r):
    return r.correct + undefined_anywhere  # noqa: F821


def test_captured_functions_are_checked_before_anything_of_them_is_executed(tmp_path):
    """An edited file, another's text under the name, a link, a pipe, a folder, no Python, no such function,
    defaults that leave: each is refused by name, and nothing in it ran."""
    folder = create_run_folder(tmp_path, "x")
    functions, canary = folder / "functions", tmp_path / "ran"
    name = save_function(capture_function(shorter), functions)
    evil = f"open({str(canary)!r}, 'w')\n"
    (functions / f"edited-{'0' * 12}.py").write_text(evil + "def edited(r): return 0\n")
    made = {
        kind: Captured("f", source)
        for kind, source in {
            "no-python": "def f(:\n",
            "no-function": evil,
            "leaves": "def f(r, x=exit()):\n    return 0\n",
            "fails": "def f(r, x=1 / 0):\n    return 0\n",
            "nameless": "def f(r, x=undefined):\n    return 0\n",
        }.items()
    }
    for captured in made.values():
        (functions / f"{captured.stem}.py").write_text(captured.source)
    (functions / f"link-{'1' * 12}.py").symlink_to(functions / name)
    os.mkfifo(functions / f"pipe-{'2' * 12}.py")
    (functions / f"folder-{'3' * 12}.py").mkdir()
    (functions / f"bytes-{'4' * 12}.py").write_bytes(b"\xff\xfe")
    (functions / f"large-{'5' * 12}.py").write_bytes(b"#" * (5 << 20))
    known = in_time(lambda: captured_functions(folder))["reward"]
    assert set(known) == {Path(name).stem}
    for path in functions.glob("*.py"):
        if path.name != name:
            with pytest.raises(ValueError, match=re.escape(path.name)):
                load_function(path)
    assert not canary.exists()
    load_function(functions / name).load()
    (functions / name).write_text(evil + capture_function(shorter).source)
    with pytest.raises(ValueError, match="edited after it was captured"):
        load_function(functions / name)
    assert not canary.exists()
    with pytest.raises(ValueError, match="undefined_anywhere"):
        capture_function(unknown_name)


# ---- nothing pickled, nothing evaluated


EXECUTES = {  # module -> how it turns text or bytes into code, and whose they are; guide/security says why each may
    "knobs": {"exec"},
    "loop/config_files": {"exec"},  # functions of the user's own, by source
    "environments/programs": {"exec"},  # bodies of the package's own tasks
    "sandbox/grading_task": {"exec", "eval"},
    "sandbox/zygote_child": {"exec"},  # inside the sandbox, or written into it
    "sandbox/zygote": {"exec"},  # its own text, to warm up
    "bench/trl_arm": {"exec"},  # benches
    "foreign/source_files": {"torch.load"},  # tensors and plain values only: weights_only=True
    "foreign/skyrl": {"pickle.Unpickler", "torch.load"},  # an unpickler that knows four names and refuses every other
    "training/weight_transport": {"pickle.loads", "pickle.dumps"},
    "training/data_parallel": {"pickle.loads", "pickle.dumps"},  # between a run's own workers
    "runtime/far_process": {"pickle.loads", "pickle.dumps"},  # and between them and the run process, on other hosts
}
DOUBTED = {
    "eval",
    "exec",
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "pickle.dumps",
    "marshal.load",
    "marshal.loads",
    "yaml.load",
    "yaml.unsafe_load",
    "shelve.open",
    "dill.loads",
    "cloudpickle.loads",
    "joblib.load",
    "torch.load",
    "np.load",
    "numpy.load",
    "os.system",
    "os.popen",
    "pickle.dump",
    "tar.extract",
    "tar.extractall",
    "archive.extractall",
}


UNPICKLERS = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}


def dotted_name(node: ast.expr) -> str:
    "The names of an expression such as `a.b.c`, with dots; empty where it begins with anything but a name."
    if isinstance(node, ast.Attribute):
        owner = dotted_name(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return node.id if isinstance(node, ast.Name) else ""


def last_name(node: ast.expr) -> str:
    "The name of what is called, without its owner: `c` of `a().b.c`."
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def doubted_in(tree: ast.AST) -> set[str]:
    """What a module names that turns text or bytes into code, whatever it calls it:
    by import, by alias, by attribute, as a value, by a name in a string."""
    names = {"np": "numpy", "builtins": "builtins"}
    nodes = list(ast.walk(tree))
    found, called = set(), {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    own = {node.arg for node in nodes if isinstance(node, ast.arg)}  # parameters, such as `eval` of a run
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {
                each.asname or each.name.partition(".")[0]: each.name if each.asname else each.name.partition(".")[0]
                for each in node.names
            }
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
            found |= {f"from {node.module}" for each in node.names if node.module.partition(".")[0] in UNPICKLERS}
    for node in nodes:
        name = ""
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
            if isinstance(node, ast.Name) and node.id in own and id(node) not in called:
                continue
            first, dot, rest = dotted_name(node).partition(".")
            name = (names.get(first, first) + dot + rest).removeprefix("builtins.").replace("numpy.", "np.")
        elif isinstance(node, ast.Call) and last_name(node.func) in (
            "getattr",
            "import_module",
            "__import__",
        ):
            words = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            owner = names.get(ast.unparse(node.args[0]), "") if node.args else ""
            name = (
                f"{owner}.{words[-1]}".replace("numpy.", "np.")
                if owner and words
                else words[0]
                if words and words[0].partition(".")[0] in UNPICKLERS
                else ""
            )
            found |= {name} if name in UNPICKLERS else set()
        if name in DOUBTED:
            found.add(name)
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.loads(b'')",
        "import pickle as p\np.loads(b'')",
        "from pickle import loads\nloads(b'')",
        "from pickle import loads as read\nread(b'')",
        "from pickle import *\nloads(b'')",
        "import pickle\nread = pickle.loads\nread(b'')",
        "import pickle\nmap(pickle.loads, [b''])",
        "import pickle\ngetattr(pickle, 'loads')(b'')",
        "import importlib\nimportlib.import_module('pickle').loads(b'')",
        "__import__('marshal').loads(b'')",
        "import torch as t\nt.load('x')",
        "from torch import load\nload('x')",
        "import numpy\nnumpy.load('x')",
        "from numpy import load as read\nread('x')",
        "from os import system\nsystem('x')",
        "run = eval\nrun('1')",
        "import builtins\nbuiltins.exec('1')",
    ],
)
def test_every_way_to_name_an_unpickling_function_is_found(source):
    "Imports by name, other names, values, attributes by a string."
    assert doubted_in(ast.parse(source))


def test_functions_that_only_share_a_name_are_not_reported():
    "Functions of the same name that belong to somebody else."
    assert not doubted_in(
        ast.parse(
            "import json\n"
            "import re\n"
            "from json import loads\n"
            "loads('1')\n"
            "json.load\n"
            "re.compile('x')\n"
            "model.eval()\n"
            "box.exec(1)\n"
            "load = 3\n"
            "getattr(json, 'loads')"
        )
    )


def test_nothing_in_the_package_unpickles_or_evaluates_beyond_what_the_guide_names():
    """No torch.load, np.load, yaml, shell or archive is unpacked;
    pickle only between a run's own workers, exec only for the user's own functions and inside the sandbox;
    remote code of models is refused by name."""
    found = {}
    for path in sorted((ROOT / "rlbench").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if doubted := doubted_in(tree):
            found[path.relative_to(ROOT / "rlbench").with_suffix("").as_posix()] = doubted
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = dotted_name(node.func)
                extracts = isinstance(node.func, ast.Attribute) and node.func.attr in ("extract", "extractall")
                shell = any(
                    k.arg == "shell" and not (isinstance(k.value, ast.Constant) and k.value.value is False)
                    for k in node.keywords
                )
                if extracts or shell:
                    found.setdefault(path.relative_to(ROOT / "rlbench").with_suffix("").as_posix(), set()).add(
                        "shell" if shell else ast.unparse(node.func)
                    )
                if name.endswith(".from_pretrained") and name.startswith("Auto") and path.stem in ("model", "heads"):
                    assert any(k.arg == "trust_remote_code" and k.value.value is False for k in node.keywords), (
                        f"{path.name}: {ast.unparse(node)}"
                    )
    assert found == EXECUTES


class Owns:
    "Pickled, it is a program that leaves a file."

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_policy_that_brings_code_is_refused(tmp_path):
    """A model whose configuration names Python beside it, and weights that are a pickled program:
    loading says no, and nothing ran."""
    from rlbench.models.model import load_policy, locate_model

    canary, code, weights = tmp_path / "ran", tmp_path / "code", tmp_path / "weights"
    for folder in (code, weights):
        shutil.copytree(locate_model("tiny"), folder)
    told = json.loads((code / "config.json").read_text())
    (code / "config.json").write_text(
        json.dumps(
            {**told, "model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
        )
    )
    (code / "own.py").write_text(f"open({str(canary)!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    for file in weights.glob("*.safetensors*"):
        file.unlink()
    torch.save({"model.embed_tokens.weight": Owns(canary)}, weights / "pytorch_model.bin")
    for folder in (code, weights):
        with pytest.raises(Exception) as refused:
            load_policy(str(folder))
        assert not canary.exists() and re.search(
            "trust_remote_code|custom code|weights_only|Weights only", str(refused.value)
        ), refused.value


# ---- pages


class Page(HTMLParser):
    "The tags and attributes of a page, as a browser would make them."

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.attributes, self.values = set(), set(), set()
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.values |= {value or "" for _, value in attrs}

    def check(self) -> None:
        "Nothing of the payloads became a tag, an attribute or a link."
        assert not self.tags & {"script", "img", "iframe", "object", "embed", "link", "meta", "form", "a", "base"} - {
            "meta"
        }, self.tags
        assert not {name for name in self.attributes if name.startswith("on")} | self.attributes & {
            "href",
            "src",
            "srcdoc",
        }, self.attributes


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Path:
    "A run folder in which every text is somebody's payload."
    folder = fake_run(
        tmp_path_factory.mktemp("runs"), "hostile", batches=12, planned=12, rollouts=0, state="failed", reason=HOSTILE
    )
    quoted = json.dumps(HOSTILE)
    broken = fake_run(folder.parent, "broken", batches=0, evals=False)
    (broken / "config.toml").write_text(f"model = {quoted}\n[{quoted}]\n[judge]\nurl = {quoted}\n")
    table = {
        **SCRIPTED,
        "steps": 12,
        "model": HOSTILE,
        "eval": [{"name": HOSTILE, "count": 16}],
        "judge": {"model": HOSTILE},
        "webhook": "https://hooks.example/secret-of-the-hook",
        "environment": {
            "name": "verifiers",
            "id": HOSTILE,
            "args": {"api_key": "secret-of-the-hook", HOSTILE: HOSTILE},
        },
    }
    (folder / "config.toml").write_text(to_toml(make_config(table)))
    write_json(
        folder / "provenance.json",
        {
            "commit": HOSTILE,
            "diff": HOSTILE,
            "processor": HOSTILE,
            HOSTILE: HOSTILE,
            "packages": {HOSTILE: HOSTILE, "torch": HOSTILE},
        },
    )
    write_family(
        folder,
        folder.parent / "parent",
        Family("parent", "fork", 3, {HOSTILE: HOSTILE, "webhook": "https://hooks.example/secret-of-the-hook"}),
    )
    (folder / "run.log").write_text(HOSTILE + "\n" + "\x1b[2J\n")
    ledger = Ledger(folder, attempt=1)
    told = {
        "author": HOSTILE,
        "knob": HOSTILE,
        "value": quoted,
        "reason": f"{HOSTILE}\nversion 0 forged",
        "apply": "now",
    }
    ledger.extend(
        "commands",
        [
            {"at": 1.0 + i, "command": f"h{i}", "status": status, "version": 3 + i, "dispatched": 9, **told}
            for i, status in enumerate(("applied", "refused"))
        ],
    )
    row = {
        "at": 1.0,
        "try": 0,
        "level": 2,
        "reason": "stop",
        "oldest": 1,
        "newest": 1,
        "trained_at": 2,
        "temperature": 1.0,
        "length": 3,
        "task": HOSTILE,
        "set": HOSTILE,
        "prompt": HOSTILE,
        "text": HOSTILE,
        "answer": HOSTILE,
    }
    ledger.extend(
        "rollouts",
        [
            {
                **row,
                "rollout": i,
                "group": i // 4,
                "k": i % 4,
                "fate": "trained" if i % 3 else "environment_error",
                "correct": bool(i % 2) if i % 3 else None,
                "reward": float(i % 2) if i % 3 else None,
                "message": "" if i % 3 else HOSTILE,
                "part_names": [HOSTILE],
                "part_values": [1.0],
            }
            for i in range(40)
        ],
    )
    ledger.extend(
        "evals",
        [
            {
                "at": 2.0,
                "eval": HOSTILE,
                "version": v,
                "tasks": 16,
                "k": 1,
                "temperature": 1.0,
                "avg": 0.5,
                "avg_se": 0.1,
                "avg_low": 0.4,
                "avg_high": 0.6,
            }
            for v in (0, 6)
        ],
    )
    ledger.close()
    return folder


def test_no_page_executes_what_a_model_or_a_colleague_wrote(hostile):
    """Report, comparison, inspector, cards: prompts, responses, answers, names, task ids, messages, authors,
    settings and reasons stay text, in attributes too; nothing is fetched, nothing hidden from the reader."""
    from rlbench.runtime.live_view import LiveView
    from rlbench.views.card_html import still_cards_html
    from rlbench.views.comparison import compare
    from rlbench.views.light import run_light
    from rlbench.views.report import write_report
    from rlbench.views.stored_rollout import rollout_html

    pages = {
        "report": write_report(hostile).read_text(),
        "rollout": rollout_html(hostile, 1),
        "failed": rollout_html(hostile, 0),
        "compare": compare(hostile, hostile.parent / "broken")._repr_html_(),
    }
    for name, page in pages.items():
        assert "alert(1)" in page, name
        Page(page).check()
        assert not OBEYED.search(page), name
        assert "secret-of-the-hook" not in page, name
    snapshot = LiveView(hostile).poll()
    Page(still_cards_html(snapshot, run_light(snapshot))).check()


def test_plotly_reads_no_tags_in_the_words_of_others(hostile):
    "Names of series, marks, titles and labels reach plotly as text: it would make links of tags."
    from rlbench.runtime.live_view import LiveView
    from rlbench.views.cards import CARDS

    snapshot = LiveView(hostile).poll()
    seen = 0
    for spec in CARDS.values():
        for chart in spec.charts(snapshot):
            figure = json.loads(to_plotly(chart).to_json())
            del figure["layout"]["template"]
            found = list(texts_in(figure))
            assert not any(tag in text for text in found for tag in ("<script", "<a ", "<img", "<iframe")), chart.title
            seen += sum("&lt;script" in text for text in found)
    assert seen


def texts_in(part) -> Iterator[str]:
    "Every text in JSON data, keys aside."
    if isinstance(part, str):
        yield part
    elif isinstance(part, (dict, list)):
        for each in part.values() if isinstance(part, dict) else part:
            yield from texts_in(each)


# ---- the terminal


VERBS = (
    ("show", "hostile"),
    ("log", "hostile"),
    ("ls",),
    ("knobs", "hostile"),
    ("guard", "hostile"),
    ("why", "hostile"),
    ("compare", "hostile", "broken"),
    ("digest", "hostile"),
    ("card", "hostile", "1"),
    ("card", "hostile", "99999"),
    ("export", "hostile"),
    ("sample", "hostile", "1+1="),
    ("set", "hostile", f"{HOSTILE}=1"),
    ("fork", "hostile"),
    ("replay", "hostile"),
    ("resume", "hostile"),
    ("report", "hostile"),
    ("attach", "hostile"),
    ("doctor", "--against", "hostile"),
    *((verb, "broken") for verb in ("show", "log", "knobs", "guard", "why", "attach", "digest", "stop", "fork")),
    ("show", HOSTILE),
    ("rm", HOSTILE),
    ("run", HOSTILE),
    ("plan", HOSTILE),
    ("eval", "hostile"),
    ("regrade", "hostile"),
)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: "-".join(re.sub(r"\W", "", part)[:12] for part in verb))
def test_no_verb_passes_control_characters_on(hostile, verb, tmp_path):
    "What a verb prints, for people and as JSON, holds nothing that a terminal obeys, and no line that another forged."
    place = () if verb[0] == "plan" else ("--runs", hostile.parent)
    for extra in ((), ("--json",)):
        done = run_verb(tmp_path, *verb, *place, *extra, code=None)
        shown = done.output
        assert done.exception is None or isinstance(done.exception, SystemExit), (verb, done.exception)
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown), (verb, shown)
        assert "\nversion 0 forged" not in shown and "secret-of-the-hook" not in shown, verb
    if verb[0] in ("show", "log") and verb[1] == "hostile":
        assert "alert(1)" in shown


def test_run_log_holds_no_control_characters_of_others(tmp_path):
    "An error that carries a response's bytes is readable by `tail -f run.log`, too."
    from io import StringIO

    from rlbench.runtime.run_log import to_log

    heard = StringIO()
    with contextlib.redirect_stderr(heard):
        to_log(HOSTILE)
    assert not OBEYED.search(heard.getvalue()) and "alert(1)" in heard.getvalue()
    assert (
        json.loads(make_json_visible(json.dumps({"a": HOSTILE}, ensure_ascii=False))) == {"a": HOSTILE}
        and make_visible("a\tb\n") == "a\tb\n"
    )


# ---- names and folders that lead elsewhere


def test_names_and_folders_that_lead_elsewhere(hostile, tmp_path):
    """Runs, forks, replays and saved knobs take no name that is a path; rm removes run folders and nothing else;
    an export takes no links along."""
    for name in ("../x", "/tmp/x", "a/b", "..", ".", "", "-rf", "a\nb", "x\0", "\u202ex", "x" * 101, "~x", "$(x)"):
        with pytest.raises(ValueError, match="name: "):
            create_run_folder(tmp_path / "runs", name)
        with pytest.raises(ValueError, match="knobs: "):
            knob_file(tmp_path, name)
    (tmp_path / "runs").mkdir(exist_ok=True)
    runs, precious = tmp_path / "runs", tmp_path / "precious"
    ended = fake_run(runs, "ended", batches=1, rollouts=0, evals=False)
    (ended / "config.toml").write_text(to_toml(make_config({**SCRIPTED, "generator": "torch"})))
    precious.mkdir()
    (precious / "config.toml").write_text("")
    (runs / "project").mkdir()
    (runs / "project" / "config.toml").write_text("")
    write_status(runs / "project", read_status(ended))
    (runs / "linked").symlink_to(ended)
    (ended / "policy").mkdir()
    (ended / "policy" / "config.json").write_text("{}")
    (ended / "policy" / "model.safetensors").symlink_to("/etc/passwd")
    (ended / "outside").symlink_to(precious)
    refused = {
        "linked": "is a link",
        "project": "no run's folder",
        "../precious": "starting",
        str(precious): "starting",
        "nobody": "unknown name",
    }
    for name, word in refused.items():
        done = run_verb(tmp_path, "rm", name, "--yes", "--runs", runs, code=2)
        assert word in done.output, (name, done.output)
    done = run_verb(tmp_path, "export", "ended", tmp_path / "copy", "--runs", runs, code=2)
    assert "no plain file" in done.output and not (tmp_path / "copy").exists()
    (ended / "policy" / "model.safetensors").unlink()
    (tmp_path / "there").mkdir()
    run_verb(tmp_path, "export", "ended", tmp_path / "there", "--runs", runs, code=2)
    assert not list((tmp_path / "there").iterdir())
    run_verb(tmp_path, "fork", "ended", "--name", "../elsewhere", "--runs", runs, code=2)
    assert not (tmp_path / "elsewhere").exists()
    run_verb(tmp_path, "rm", "ended", "--yes", "--runs", runs)
    assert not ended.exists() and (precious / "config.toml").exists() and (runs / "project").exists()


# ---- secrets


SECRET = "sk-planted-0123456789abcdef"


class Rude(BaseHTTPRequestHandler):
    "A server that answers with what it was told, or sends whoever asks elsewhere."

    def do_POST(self):
        self.server.heard.append(
            (
                self.path,
                self.headers.get("Authorization", ""),
                self.rfile.read(int(self.headers.get("Content-Length") or 0)),
            )
        )
        code = int(self.path.split("/")[1]) if self.path.split("/")[1].isdigit() else 200
        body = f"Cannot POST {self.path} for {self.headers.get('Authorization', '')} \x1b[2J".encode()
        self.send_response(code, f"no {self.headers.get('Authorization', '')}")
        if 300 <= code < 400:
            self.send_header("Location", self.server.elsewhere)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, *_):
        pass


@pytest.fixture
def rude():
    "Two such servers: the one that is asked, and the one it sends others to."
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Rude) for _ in range(2)]
    for server in servers:
        server.heard, server.elsewhere = [], f"http://127.0.0.1:{servers[1].server_port}/200/inner"
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield servers
    for server in servers:
        server.shutdown(), server.server_close()


def everything(folder: Path) -> str:
    "All that a run folder says: its files as bytes, its tables as rows."
    files = "\n".join(path.read_bytes().decode("latin-1") for path in folder.rglob("*") if path.is_file())
    return files + "\n".join(
        str(read_table(folder, table).to_dicts()) for table in ("steps", "commands", "events", "rollouts", "evals")
    )


def test_no_secret_of_the_environment_reaches_a_run_folder(tmp_path, rude, monkeypatch):
    """Keys in the environment, a webhook given as $NAME whose server repeats what it was sent:
    none stands in config, provenance, log, ledger, report or status, nor on the command line."""
    asked, _ = rude
    for name in (
        "OPENAI_API_KEY",
        "WANDB_API_KEY",
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "RLBENCH_JUDGE_KEY",
        "SANDBOX_TOKEN",
        "MY_SECRET",
    ):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("HOOK", f"http://127.0.0.1:{asked.server_port}/404/services/{SECRET}?key={SECRET}")
    run = rl.run(
        "tiny",
        runs=tmp_path,
        name="x",
        **SCRIPTED,
        steps=4,
        webhook="$HOOK",
        guards=[{"when": "solve_rate >= 0", "do": "alert"}],
    )
    assert run.wait(180) == "finished", (run.folder / "run.log").read_text()
    assert any(SECRET in path for path, *_ in asked.heard)
    shown = everything(run.folder)
    assert (
        SECRET not in shown
        and "was not told: 404" in (run.folder / "run.log").read_text()
        and "$HOOK" in (run.folder / "config.toml").read_text()
    )
    for verb in ("show", "log", "why", "guard"):
        assert SECRET not in run_verb(tmp_path, verb, "x", "--runs", tmp_path, "--json").output


def test_secrets_are_left_out_of_what_travels(hostile):
    """A secret that was written into the configuration all the same is not in report, comparison, tracker,
    family or the command line; and other settings stay."""
    from rlbench.views.run_data import read_run_data
    from rlbench.views.sinks import read_exported_run

    kept = {
        "args": [{"api_key": SECRET, "n": 1}],
        "db_password": SECRET,
        "auth.token": SECRET,
        "Authorization": f"Bearer {SECRET}",
        "url": f"https://u:{SECRET}@h/v1?api_key={SECRET}&page=2",
        "webhook": f"https://h/{SECRET}",
        "credentials": SECRET,
    }
    assert SECRET not in json.dumps(hide_secrets(kept)) and hide_secrets(
        {"token": "$NAME", "scorer_tokens": 5, "old_tokens": "mask", "key": ""}
    ) == {"token": "$NAME", "scorer_tokens": 5, "old_tokens": "mask", "key": ""}
    assert "secret-of-the-hook" in (hostile / "config.toml").read_text()
    assert (
        "secret-of-the-hook"
        not in str(read_run_data(hostile)) + str(read_exported_run(hostile)) + (hostile / "family.json").read_text()
    )
    for field, value in (
        ("sandbox", {"tier": "remote", "url": "http://h", "token": SECRET}),
        ("judge", {"url": "http://h/v1", "key": SECRET}),
    ):
        with pytest.raises(ValueError, match=r"\$NAME") as refused:
            make_config({**SCRIPTED, field: value})
        assert SECRET not in str(refused.value)


def test_provenance_names_no_remote_and_no_variable(monkeypatch):
    """What a run was made with: commit, names of changed files, packages, hardware;
    no diff's text, no remote, no environment."""
    from rlbench.runtime.provenance import provenance

    monkeypatch.setenv("MY_SECRET", SECRET)
    told = provenance()
    assert set(told) == {
        "commit",
        "diff",
        "python",
        "platform",
        "cores",
        "processor",
        "packages",
    } and SECRET not in json.dumps(told)
    assert not re.search(r"^[-+]", told["diff"], re.M) and "://" not in told["diff"]


# ---- addresses


METADATA = (
    "169.254.169.254",
    "169.254.170.2",
    "2852039166",
    "0xA9FEA9FE",
    "0xa9.0xfe.0xa9.0xfe",
    "0251.0376.0251.0376",
    "169.254.43518",
    "169.16689662",
    "[::ffff:169.254.169.254]",
    "[::ffff:a9fe:a9fe]",
    "[fe80::1]",
    "[fd00:ec2::254]",
    "100.100.100.200",
    "168.63.129.16",
)


def test_a_clouds_own_addresses_are_never_asked(rude, monkeypatch):
    """However it is written, such an address is refused, in the configuration and when it is asked;
    where a name leads there, nothing is sent."""
    for host in METADATA:
        assert is_metadata(host.strip("[]"))
        with pytest.raises(ValueError, match="link-local"):
            check_address(f"http://{host}/latest/meta-data")
        with pytest.raises(ValueError, match="link-local"):
            make_config({**SCRIPTED, "webhook": f"https://{host}:80/x"})
        with pytest.raises(Unanswered, match="link-local"):
            exchange(f"http://{host}/latest", b"{}", timeout=1.0)
    for host in (
        "127.0.0.1",
        "10.0.0.5",
        "192.168.1.1",
        "intranet",
        "[::1]",
    ):  # the author of a configuration may have a server there
        check_address(f"http://{host}:8080/hook")
    asked, _ = rude
    monkeypatch.setattr(exchange_module, "is_metadata", lambda host: host == "127.0.0.1")  # what `localhost` leads to
    with pytest.raises(Unanswered, match="link-local"):
        exchange(f"http://localhost:{asked.server_port}/200/x", b"{}", token=SECRET)
    assert not asked.heard


@pytest.mark.parametrize("code", (301, 302, 303, 307, 308))
def test_redirects_are_not_followed(rude, code):
    """Neither the message nor the token goes to an address that another server names, and the error says so,
    without the token."""
    asked, inner = rude
    with pytest.raises(Unanswered, match="redirect, which is not followed") as refused:
        exchange(f"http://127.0.0.1:{asked.server_port}/{code}/{SECRET}", b"{}", token=SECRET)
    assert (
        len(asked.heard) == 1
        and not inner.heard
        and SECRET not in str(refused.value)
        and not OBEYED.search(str(refused.value))
    )


@pytest.mark.parametrize(
    "url",
    (
        "file:///etc/passwd",
        "ftp://127.0.0.1/x",
        "data:text/plain,x",
        "gopher://127.0.0.1/",
        "FILE:///etc/passwd",
        "jar:file:///x",
        "//127.0.0.1/x",
        "javascript:alert(1)",
    ),
)
def test_only_http_is_asked(url):
    "No file, no ftp, no data."
    with pytest.raises(Unanswered):
        exchange(url)
    with pytest.raises(ValueError, match="webhook"):
        check_address(url)
    with pytest.raises(ValueError, match="webhook"):
        make_config({**SCRIPTED, "webhook": url})


def test_no_command_sets_an_address(tmp_path):
    "Where a run posts to and asks is fixed at its start: a command for it is refused by name, from a file as well."
    asked = {
        "webhook": "http://127.0.0.1/x",
        "judge": {"url": "http://127.0.0.1/x"},
        "judge.url": "http://127.0.0.1/x",
        "sandbox": {"url": "http://127.0.0.1"},
        "sandbox.url": "http://127.0.0.1",
        "sandbox.token": "$HOME",
        "sinks": ["wandb"],
        "environment": {"name": "verifiers", "id": "x"},
        "name": "../x",
        "model": "x",
    }

    class Asked(Told):
        sent = False

        def flush(self):
            super().flush()
            if not self.sent:
                self.sent = True
                for knob, value in asked.items():
                    send_command(self.folder, "eve", knob, value)

    driver = inline(tmp_path, Asked, steps=30)
    rows = read_table(driver.folder, "commands").filter(pl.col("author") == "eve").to_dicts()
    assert {row["knob"]: row["status"] for row in rows} == dict.fromkeys(asked, "refused"), [
        (row["knob"], row["status"], row["reason"]) for row in rows
    ]


# ---- the served page


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    "`rlbench serve` of a made-up run with another beside it: port, token, the run's folder."
    root = tmp_path_factory.mktemp("served")
    folder = fake_run(root / "runs", "monday", batches=3, planned=3, rollouts=8)
    (folder / "config.toml").write_text(to_toml(make_config({**SCRIPTED, "steps": 3})))
    shutil.copytree(folder, root / "runs" / "tuesday")
    (root / "secret.txt").write_text("the-text-of-another-file")
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    (root / "home").mkdir()
    command = [
        sys.executable,
        "-m",
        "rlbench.cli.main",
        "serve",
        "monday",
        f"--port={port}",
        "--runs",
        str(root / "runs"),
    ]
    server = subprocess.Popen(
        command,
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "HOME": str(root / "home"), "RLBENCH_TOKEN": "a-token-of-the-test"},
    )
    assert f":{port}/?token=a-token-of-the-test" in server.stdout.readline()
    until(lambda: answer(port, "/login")[0])
    yield port, "a-token-of-the-test", folder
    server.send_signal(signal.SIGINT)
    server.wait(400)


def answer(port: int, path: str, method: str = "GET", **headers) -> tuple[int, str, dict]:
    "Status, text and headers of an answer, the path as it is written; status 0 while nobody listens."
    connection = HTTPConnection("127.0.0.1", port, timeout=400)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        found = connection.getresponse()
        return found.status, found.read().decode(errors="replace"), dict(found.getheaders())
    except ConnectionRefusedError:
        return 0, "", {}
    finally:
        connection.close()


KERNEL = "/api/kernels/01234567-89ab-cdef-0123-456789abcdef"
CLOSED = (
    "/",
    "/index",
    "/monday.ipynb",
    "/voila/render/monday.ipynb",
    "/voila/files/monday.ipynb",
    "/voila/tree",
    "/api",
    "/api/contents",
    "/api/contents/secret.txt",
    "/api/sessions",
    "/api/terminals",
    "/api/kernelspecs",
    "/terminals/1",
    "/files/secret.txt",
    "/tree",
    "/lab",
    KERNEL,
    f"{KERNEL}/channels",
    f"{KERNEL}/../../contents",
    "/voila/api/contents",
    "/?token=",
    "/?token=wrong",
    "/?token[]=a-token-of-the-test",
)
OUTWARD = tuple(
    f"{start}/{up * 12}{where}"
    for start in (
        "",
        "/voila/files",
        "/voila/static",
        "/voila/templates/lab/static",
        "/voila/labextensions",
        "/voila/api/themes",
        "/files",
        "/static",
    )
    for up, where in (
        ("../", "etc/passwd"),
        ("..%2f", "etc/passwd"),
        ("%2e%2e/", "etc/passwd"),
        ("..%5c", "etc/passwd"),
        ("....//", "etc/passwd"),
    )
)


def test_a_served_page_shows_nothing_without_its_token(served):
    """Every address but the login and fixed assets leads to the login, refuses, or is not there;
    a token that can be guessed is refused before anything listens."""
    port, _, folder = served
    for path in CLOSED:
        for method in ("GET", "POST", "DELETE"):
            status, text, _ = answer(port, path, method)
            assert status in (302, 400, 401, 403, 404, 405, 426), (method, path, status)
            assert (
                "monday" not in text.replace("monday.ipynb", "")
                and "rl-panel" not in text
                and "the-text-of-another-file" not in text
            ), (method, path)
    assert (
        answer(port, "/", Authorization="token wrong")[0] == 302
        and answer(port, "/", Cookie="username-127-0-0-1=forged")[0] == 302
    )
    with pytest.raises(ValueError, match="token: 5 characters can be guessed"):
        serve(folder, port=0, token="short")


def test_a_served_page_leads_to_no_file(served):
    "Neither without the token nor with it, however a path is written."
    port, token, folder = served
    inside = [
        f"/voila/files/{name}" for name in ("monday.ipynb", "config.toml", "secret.txt", f"..{folder}/config.toml")
    ] + ["/voila/files//etc/passwd"]
    for path in (*OUTWARD, *inside):
        for extra in ({}, {"Authorization": f"token {token}"}):
            status, text, _ = answer(port, path, **extra)
            assert (
                "root:" not in text
                and "the-text-of-another-file" not in text
                and "generator" not in text
                and status != 200
            ), (path, status)


def test_a_visitor_of_a_served_page_drives_no_kernel(served):
    """With the token: the page is the panel of the served run and no other;
    code, completion, inspection, history, debugging and input sent to its kernel are not passed on;
    a foreign page's socket is refused."""
    port, token, folder = served
    for path in ("/..%2ftuesday.ipynb", "/tuesday", "/runs/tuesday"):
        status, text, headers = answer(port, path, Authorization=f"token {token}")
        assert status == 302 and headers["Location"].startswith("/voila/files/") and not text
    status, page, headers = answer(
        port, "/?voila-template=../../../tmp&voila-theme=../x&path=../tuesday.ipynb", Authorization=f"token {token}"
    )
    kernel = re.search(r'"kernelId": "([0-9a-f-]{36})"', page)[1]
    assert status == 200 and "monday" in page and "tuesday" not in page and headers["Referrer-Policy"] == "no-referrer"
    address, own = f"ws://127.0.0.1:{port}/api/kernels/{kernel}/channels", f"Authorization: token {token}"
    for header in ([], ["Authorization: token wrong"], [f"Cookie: username-127-0-0-1-{port}=forged"]):
        with pytest.raises(websocket.WebSocketBadStatusException):
            websocket.create_connection(address, header=header, timeout=400)
    cookie = headers["Set-Cookie"].partition(";")[0]
    with pytest.raises(websocket.WebSocketBadStatusException):
        websocket.create_connection(address, header=[f"Cookie: {cookie}"], origin="http://evil.example", timeout=400)
    websocket.create_connection(address, header=[f"Cookie: {cookie}"], timeout=400).close()  # the page's own
    canary = folder.parent / "written"
    code = f"open({str(canary)!r}, 'w')"
    sent = {
        ("shell", "execute_request"): {
            "code": code,
            "silent": False,
            "store_history": False,
            "user_expressions": {"x": code},
            "allow_stdin": False,
        },
        ("control", "execute_request"): {"code": code, "silent": False},
        ("shell", "complete_request"): {"code": "open.", "cursor_pos": 5},
        ("shell", "inspect_request"): {"code": "open", "cursor_pos": 4, "detail_level": 1},
        ("shell", "history_request"): {"hist_access_type": "tail", "n": 10, "output": True, "raw": True},
        ("shell", "is_complete_request"): {"code": code},
        ("control", "debug_request"): {
            "type": "request",
            "seq": 1,
            "command": "evaluate",
            "arguments": {"expression": code},
        },
        ("stdin", "input_reply"): {"value": code},
        ("shell", "create_subshell_request"): {},
        ("control", "interrupt_request"): {},
        ("iopub", "execute_request"): {"code": code, "silent": False},
    }
    line = websocket.create_connection(address, header=[own], timeout=400)
    for (channel, kind), content in sent.items():
        header = {
            "msg_id": f"{channel}-{kind}",
            "username": "",
            "session": "other",
            "msg_type": kind,
            "version": "5.4",
            "date": "2026-01-01T00:00:00Z",
        }
        line.send(
            json.dumps(
                {
                    "header": header,
                    "parent_header": {},
                    "metadata": {},
                    "content": content,
                    "channel": channel,
                    "buffers": [],
                }
            )
        )
    ask = {
        "msg_id": "last",
        "username": "",
        "session": "other",
        "msg_type": "kernel_info_request",
        "version": "5.4",
        "date": "2026-01-01T00:00:00Z",
    }
    line.send(
        json.dumps(
            {"header": ask, "parent_header": {}, "metadata": {}, "content": {}, "channel": "shell", "buffers": []}
        )
    )
    heard = []
    while "kernel_info_reply" not in heard:  # what was sent before it would have been answered before it
        heard.append(json.loads(line.recv())["header"]["msg_type"])
    line.close()
    assert (
        not {kind for _, kind in sent} & {each.replace("reply", "request") for each in heard} and "error" not in heard
    ), heard
    assert not canary.exists() and not list((folder / "commands").glob("*.json"))


def test_a_served_page_is_read_only_unless_writing_is_asked_for(served):
    """The notebook that is served makes a panel without controls, which has nothing that a visitor's message could
    press; the settings leave no template, file or source to choose."""
    from rlbench.views.panel import Panel
    from rlbench.views.serve import page_notebook, voila_settings

    _, _, folder = served
    assert (
        "readonly=True" in page_notebook(folder)["cells"][0]["source"]
        and "readonly" not in page_notebook(folder, write=True)["cells"][0]["source"]
    )
    panel = Panel(folder, readonly=True)
    assert panel.knobs is None and panel.buttons is None
    told = voila_settings("127.0.0.1", 8866, "x" * 20)["VoilaConfiguration"]
    assert told["file_allowlist"] == [] and told["allow_template_override"] == told["allow_theme_override"] == "NO"
    evil = folder.parent / "a'); __import__('os').system('touch owned'); ('"
    assert (
        ast.unparse(ast.parse(page_notebook(evil)["cells"][0]["source"]).body[1]).count("Panel(") == 1
        and len(ast.parse(page_notebook(evil)["cells"][0]["source"]).body) == 2
    )


# ---- the page that says so


def test_every_promise_of_the_guide_names_a_test_that_exists():
    "Each row of its tables ends with the tests that hold it, and those are there."
    text = "\n".join(cell["source"] for cell in cells(ROOT / "nbs/guide/security.ipynb", "markdown"))
    rows = [line for line in text.splitlines() if line.startswith("|") and not re.fullmatch(r"[|\s:-]+", line)]
    promises = [row for row in rows if not row.rstrip(" |").endswith("held by")]
    assert len(promises) >= 20
    known = {
        path.stem: set(re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M))
        for path in (ROOT / "tests").rglob("test_*.py")
    }
    for row in promises:
        named = re.findall(r"`(test_\w+)::(test_\w+)`", row.rstrip(" |").rsplit("|", 1)[1])
        assert named, f"no test: {row[:120]}"
        for file, test in named:
            assert test in known.get(file, ()), f"{file}::{test} is not there"
    mine = set(known["test_surface"])
    assert mine - {test for _, test in re.findall(r"`(test_\w+)::(test_\w+)`", text)} <= {
        "test_every_promise_of_the_guide_names_a_test_that_exists"
    }

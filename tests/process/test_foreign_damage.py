"""Two hundred damaged copies of the made-up runs of other systems: each gives tables or a ForeignError, and nothing is
written outside the cache."""

import copy
import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from rlbench.foreign.opening import cached_folder, opened_table, refresh
from rlbench.foreign.registry import find_foreign_runs
from rlbench.foreign.source import read_source
from rlbench.foreign.source_files import ForeignError

ROUNDS = 200
BATCH = 20  # of rounds in one test
SYSTEMS = sorted(path.name for path in (Path(__file__).parent.parent / "foreign").iterdir() if path.is_dir())
TABLES = ("steps", "groups", "rollouts", "tokens", "evals", "metrics", "phases", "hosts", "changes", "settings")
ODD = (None, True, -1, 2**70, 1e400, float("nan"), "", "word", [], [[]], ["a", 1, None], {}, {"a": {"b": [1]}})

Damage = Callable[[random.Random, list[Path]], None]


def cut(rng: random.Random, files: list[Path]) -> None:
    "Cut a file anywhere."
    path = rng.choice(files)
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data) + 1)])


def flip_bytes(rng: random.Random, files: list[Path]) -> None:
    "Change a few bytes of a file."
    path = rng.choice(files)
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 3, 30)) if data else 0):
        data[rng.randrange(len(data))] = rng.randrange(256)
    path.write_bytes(data)


def swap_lines(rng: random.Random, files: list[Path]) -> None:
    "Put the lines of a file into another order, some of them twice."
    path = rng.choice(files)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(rng.choices(lines, k=len(lines))) if lines else b"\n")


def changed_value(rng: random.Random, value: object) -> object:
    "A JSON value in which one value has another type."
    inner = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    if not inner or rng.random() < 0.2:
        return copy.deepcopy(rng.choice(ODD))
    key, old = rng.choice(inner)
    value[key] = changed_value(rng, old)
    return value


def change_types(rng: random.Random, files: list[Path]) -> None:
    "Change types of values in the records of a JSON file."
    path = rng.choice([path for path in files if path.suffix in (".json", ".jsonl")] or files)
    text = path.read_text(errors="replace")
    whole = path.suffix == ".json"
    records = []
    for line in [text] if whole else text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        for _ in range(rng.choice((0, 1, 4))):
            record = changed_value(rng, record)
        records.append(json.dumps(record))
    path.write_text("\n".join(records) + "\n")


def change_columns(rng: random.Random, files: list[Path]) -> None:
    "Change the type or the name of a column of a parquet file."
    tables = [path for path in files if path.suffix == ".parquet"]
    if not tables:
        change_types(rng, files)
        return
    path = rng.choice(tables)
    try:
        table = pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError):  # another damage came first
        return
    name = rng.choice(table.columns)
    odd = rng.choice((pl.lit(None), pl.lit("x"), pl.lit([1]), pl.struct(pl.lit(1).alias("a")), pl.lit(2.5)))
    damaged = table.rename({name: "other"}) if rng.random() < 0.3 else table.with_columns(odd.alias(name))
    damaged.write_parquet(path)


def exchange_files(rng: random.Random, files: list[Path]) -> None:
    "Put the content of two files into each other's place."
    first, second = rng.choice(files), rng.choice(files)
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)


def empty_file(rng: random.Random, files: list[Path]) -> None:
    "Leave nothing of a file."
    rng.choice(files).write_bytes(b"")


def rename_file(rng: random.Random, files: list[Path]) -> None:
    "Give a file another name, the name of another kind, or none."
    path = rng.choice(files)
    names = (f"{path.stem}_9{path.suffix}", f"{path.stem}.jsonl", f"{path.stem}.pt", "step_x.json", "ü \\.parquet")
    target = path.with_name(rng.choice(names))
    if not target.exists():
        path.rename(target)


DAMAGES: tuple[Damage, ...] = (
    cut,
    flip_bytes,
    swap_lines,
    change_types,
    change_columns,
    exchange_files,
    empty_file,
    rename_file,
)


def files_below(folder: Path) -> list[Path]:
    "All files of a folder, in order."
    return sorted(path for path in folder.rglob("*") if path.is_file())


def fingerprint(folder: Path, leave_out: Path) -> dict[str, str]:
    "Every file and folder below a folder with what is in it, without one of them."
    found = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_relative_to(leave_out):
            content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
            found[str(path.relative_to(folder))] = content
    return found


def open_all(path: Path) -> int:
    "How many rows all tables of all runs under a path have."
    rows = 0
    for found in find_foreign_runs(path):
        try:
            refresh(found)
        except ForeignError:
            continue
        folder = cached_folder(found)
        assert read_source(folder).words
        rows += sum(len(opened_table(folder, name)) for name in TABLES)
    return rows


@pytest.mark.parametrize("first", range(0, ROUNDS, BATCH))
def test_damaged_runs_give_tables_or_a_foreign_error(first: int, root: Path, tmp_path: Path, cache: Path) -> None:
    opened = 0
    for seed in range(first, first + BATCH):
        rng = random.Random(seed)
        system = SYSTEMS[seed % len(SYSTEMS)]
        run = Path(shutil.copytree(root / "tests/foreign" / system, tmp_path / f"run {seed}"))
        done = rng.choices(DAMAGES, k=rng.choice((1, 1, 2, 3)))
        for damage in done:
            damage(rng, files_below(run))
        before = fingerprint(tmp_path, cache)
        try:
            opened += open_all(run) > 0
        except ForeignError as error:
            assert str(error), seed
        except Exception as error:
            names = [damage.__name__ for damage in done]
            raise AssertionError(f"seed {seed}, {system}, {names}: {type(error).__name__}: {error}") from error
        assert fingerprint(tmp_path, cache) == before, seed
        shutil.rmtree(run)
        shutil.rmtree(cache, ignore_errors=True)
    assert opened > BATCH // 2  # most damages leave something to read


@pytest.mark.parametrize("system", SYSTEMS)
def test_changed_copies_open(system: str, root: Path, tmp_path: Path, cache: Path) -> None:
    "Unknown fields in every record, a torn last line in every file of lines, and other names of the folders above."
    run = Path(shutil.copytree(root / "tests/foreign" / system, tmp_path / "other name" / "copy"))
    rows = open_all(root / "tests/foreign" / system)
    for path in files_below(run):
        if path.suffix == ".jsonl":
            records = [json.loads(line) for line in path.read_text().splitlines()]
            lines = [json.dumps(record | {"unknown_field": {"a": [1, None]}}) for record in records]
            path.write_text("\n".join(lines) + '\n{"torn": [1, ')
    before = fingerprint(tmp_path, cache)
    assert open_all(run) >= rows * 0.9
    assert fingerprint(tmp_path, cache) == before

"""Runs of other systems for tests: made-up ones, copied, rewritten record by record, and opened."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import polars as pl

from rlbench.foreign.opening import cached_folder, opened_table, refresh
from rlbench.foreign.registry import find_foreign_runs
from rlbench.foreign.source import ForeignSource, read_source

MADE_UP = Path(__file__).parent.parent / "foreign"


class Tables:
    "The tables of the one run under a path, and what is known of its source."

    def __init__(self, path: Path):
        (self.found,) = find_foreign_runs(path)
        refresh(self.found)
        self.folder = cached_folder(self.found)

    @property
    def source(self) -> ForeignSource:
        return read_source(self.folder)

    def __getitem__(self, name: str) -> pl.DataFrame:
        return opened_table(self.folder, name)

    def column(self, table: str, name: str) -> list:
        return self[table][name].to_list()


def open_only(path: Path, kind: str) -> Path:
    "The cached folder of the only run under a path, which must be of a kind."
    tables = Tables(path)
    assert tables.found.kind == kind
    return tables.folder


def column(folder: Path, table: str, name: str) -> list:
    "The values of a column of an opened run."
    return opened_table(folder, table)[name].to_list()


def copy_made_up(system: str, place: Path) -> Path:
    "A copy of the made-up run of a system, to be changed."
    return shutil.copytree(MADE_UP / system, place / "renamed")


def kinds_under(path: Path) -> list[str]:
    "The formats of the runs under a path."
    return [found.kind for found in find_foreign_runs(path)]


def rewrite_lines(path: Path, change: Callable[[dict], dict | None]) -> None:
    "Replace each record of a file of JSON lines; None leaves it out."
    changed = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(record) + "\n" for record in changed if record is not None))


def tear_last_line(path: Path) -> None:
    "Cut the last line of a file in half."
    content = path.read_bytes()
    start = content.rstrip(b"\n").rfind(b"\n") + 1
    path.write_bytes(content[: start + (len(content) - start) // 2])


def lines_of(path: Path) -> Iterator[dict]:
    "The records of a file of JSON lines."
    return map(json.loads, path.read_text().splitlines())

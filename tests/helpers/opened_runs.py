"""Runs of other systems in tests: opened as a person opens them, and copied with changes."""

import shutil
from pathlib import Path

import polars as pl

from rlbench.foreign.opening import cached_folder, opened_table, refresh
from rlbench.foreign.registry import FoundRun, find_foreign_runs
from rlbench.foreign.source import ForeignSource, read_source

EXAMPLES = Path(__file__).parent.parent / "foreign"  # a made-up run in each format


class OpenedRun:
    "A run that was opened. Its tables are attributes."

    def __init__(self, found: FoundRun):
        self.found = found
        refresh(found)
        self.folder = cached_folder(found)

    @property
    def source(self) -> ForeignSource:
        return read_source(self.folder)

    def __getattr__(self, name: str) -> pl.DataFrame:
        return opened_table(self.folder, name)


def open_only_run(path: Path) -> OpenedRun:
    "The one run under a path."
    (found,) = find_foreign_runs(path)
    return OpenedRun(found)


def copy_example(system: str, place: Path) -> Path:
    "A copy of the made-up run of a system, to be changed."
    return shutil.copytree(EXAMPLES / system, place / "renamed")

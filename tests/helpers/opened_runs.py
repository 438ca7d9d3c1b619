"""The made-up runs of other systems, opened into a cache of their own or copied with changes."""

import shutil
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


def copy_made_up(system: str, place: Path) -> Path:
    "A copy of the made-up run of a system, to be changed."
    return shutil.copytree(MADE_UP / system, place / "renamed")

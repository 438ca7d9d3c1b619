"Opening made-up runs of other systems in tests."

from pathlib import Path

from rlbench.foreign.opening import cached_folder, opened_table, refresh
from rlbench.foreign.registry import find_foreign_runs


def open_only(path: Path, kind: str) -> Path:
    "The cached folder of the only run under a path, which must be of a kind."
    (found,) = find_foreign_runs(path)
    assert found.kind == kind
    refresh(found)
    return cached_folder(found)


def column(folder: Path, table: str, name: str) -> list:
    "The values of a column of an opened run."
    return opened_table(folder, table)[name].to_list()

"""Runs without a model on the virtual clock, written down with what they did:
whoever rewrites the loop or the driver finds every decision that is no longer the same.

For a change of behaviour that is meant, `python tests/helpers/stored_runs.py "drawn 1"` writes down what the named runs
do now, with the configuration that they have; without a name, the whole file is drawn anew.
"""

import hashlib
import json
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from inline import inline_run
from resumed_runs import SYNC, a_run, taken_up
from small_loops import a_command, a_config

from rlbench.base.ledger_reading import read_table
from rlbench.loop.config import make_config
from rlbench.loop.config_files import captured_functions, read_config
from rlbench.runtime.checkpoint import checkpoint_folders, find_checkpoint, load_checkpoint, read_manifest
from rlbench.runtime.driver import Driver, drive
from rlbench.runtime.prompts import make_pools
from rlbench.workbench.fork import prepare_fork
from rlbench.workbench.replay import prepare_replay

STORED = Path(__file__).with_name("stored_runs.json")
COLUMNS = {
    "rollouts": "rollout try group k task fate length dispatched oldest newest trained_at",
    "steps": "version trained_rollouts trained_tokens lag_max",
    "commands": "command knob value status apply version event",
}


@dataclass(frozen=True)
class StoredRun:
    """A configuration and how it is run: `whole`; `resumed` from the copy of its folder at event `at`; `forked` at its
    checkpoint number `at`; `replayed` from its journal. `told`: commands as (event, knob, value, over)."""

    name: str
    how: str
    table: dict
    told: tuple = ()
    at: int = 0

    def driver(self, folder: Path) -> Driver:
        "The finished driver."
        return {"whole": self._whole, "resumed": self._resumed, "forked": self._forked, "replayed": self._replayed}[
            self.how
        ](folder)

    def _whole(self, folder: Path) -> Driver:
        return inline_run(folder, "run", self.table, list(self.told))

    def _resumed(self, folder: Path) -> Driver:
        drive(a_run(folder / "run", self.table, {self.at: folder / "killed"}, list(self.told)))
        return finished(taken_up(folder / "killed"))

    def _forked(self, folder: Path) -> Driver:
        run = finished(a_run(folder / "run", self.table, told=list(self.told)))
        child = prepare_fork(run.folder, "child", read_manifest(checkpoint_folders(run.folder)[self.at]).version)
        return finished(begun(child))

    def _replayed(self, folder: Path) -> Driver:
        run = self._whole(folder)
        again = prepare_replay(run.folder, "again")
        driver = finished(Driver(again, read_config(again), make_pools(read_config(again))))
        assert driver.state.digest == run.state.digest
        return driver


def begun(folder: Path) -> Driver:
    "A driver that begins at the newest checkpoint of a folder."
    start = load_checkpoint(find_checkpoint(folder), captured_functions(folder))
    return Driver(folder, read_config(folder), make_pools(read_config(folder)), start)


def finished(driver: Driver) -> Driver:
    "The driver, once its run has ended."
    drive(driver)
    return driver


def told_of(driver: Driver) -> dict:
    """What a run did: its digest, how many events it had, and a hash of what its tables say of rollouts,
    batches and commands."""
    rows = {
        table: read_table(driver.folder, table, columns.split()).select(columns.split()).rows()
        for table, columns in COLUMNS.items()
    }
    text = json.dumps(rows, ensure_ascii=False, separators=(",", ":"))
    return {
        "digest": driver.state.digest,
        "events": driver.state.seq,
        "rows": hashlib.sha256(text.encode()).hexdigest(),
    }


def stored_runs() -> list[tuple[StoredRun, dict]]:
    "Those that are written down, each with what it did."
    return [
        (StoredRun(**each["run"] | {"told": tuple(map(tuple, each["run"]["told"]))}), each["did"])
        for each in json.loads(STORED.read_text())
    ]


def steered(name: str, how: str, seed: int) -> StoredRun:
    "A drawn configuration with drawn commands."
    r = random.Random(seed)
    times = {"scripted_errors": r.choice((0.0, 0.2)), "train": r.choice((0.0001, 0.002)), "publish": 0.01}
    table = a_config(r) | {"virtual": times}
    told = [(r.randint(1, 200), *a_command(r, make_config(table))) for _ in range(6)]
    return StoredRun(name, how, table, tuple(told))


def to_store() -> list[StoredRun]:
    """Runs worth a place in the file: drawn ones with commands, every strategy for stragglers with and without waves,
    resumed, forked and replayed ones."""
    base = SYNC | {"max_tokens": 256, "virtual": {"scripted_length": 26.0, "scripted_tail": 0.9}}
    waves, ahead = base | {"checkpoint_every": 0, "steps": 5}, {"staleness": 2, "concurrency": 32}
    saved = base | {"checkpoint_every": 1, "checkpoints_kept": 9, "steps": 6}
    guarded = {"checkpoint_every": 0, "guards": [{"when": "live_groups >= 0 for 2", "do": "temperature = 0.7"}]}
    cut = ("oversample", "requeue", "partial")  # strategies that end or interrupt the late ones
    runs = [steered(f"drawn {seed}", "whole", seed) for seed in range(22)]
    for strategy in ("in_flight", "wait", "oversample", "requeue", "partial"):
        mask = {"old_tokens": "mask"} if strategy == "partial" else {}
        table = waves | {"stragglers": strategy, "oversample": 0.5 if strategy in cut else 0.0}
        runs.append(StoredRun(f"{strategy}, waves", "whole", table | mask))
        runs.append(StoredRun(f"{strategy}, ahead", "whole", table | ahead | {"placement": "split"}))
        if strategy in cut:
            runs.append(StoredRun(f"{strategy}, single", "whole", table | ahead | {"straggler_unit": "rollout"}))
    for name, more in {
        "waves": {},
        "ahead": ahead | {"placement": "split"},
        "partial": ahead | {"stragglers": "partial", "oversample": 0.5},
        "episodes": ahead | {"environment": {"name": "scripted", "low": 1, "high": 4}, "max_turns": 4},
    }.items():
        runs.append(StoredRun(f"resumed {name}", "resumed", saved | more, ((90, "temperature", 0.5, 0),), 150))
        runs.append(StoredRun(f"forked {name}", "forked", saved | more, ((90, "temperature", 0.5, 0),), 2))
        runs.append(StoredRun(f"replayed {name}", "replayed", saved | more | guarded))
    return runs


def main(names: list[str]) -> None:
    "Write down what the named runs of the file do now; without a name, what runs drawn anew do."
    runs = [run for run, _ in stored_runs()] if names else to_store()
    known = {run.name: did for run, did in stored_runs()}
    stored = []
    for run in runs:
        did = known.get(run.name)
        if not names or run.name in names:
            with tempfile.TemporaryDirectory() as folder:
                did = told_of(run.driver(Path(folder)))
            print(run.name, did["events"], did["digest"][:12], file=sys.stderr)
        stored.append({"run": vars(run), "did": did})
    STORED.write_text("[\n" + ",\n".join(json.dumps(each) for each in stored) + "\n]\n")


if __name__ == "__main__":
    main(sys.argv[1:])

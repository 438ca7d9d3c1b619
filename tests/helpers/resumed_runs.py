"""Runs that are saved, taken up again, and compared with those that were not."""

import shutil
from pathlib import Path

import polars as pl
from inline import Told

from rlbench.base.ledger_reading import read_table
from rlbench.base.run_files import create_run_folder
from rlbench.base.status import read_status
from rlbench.loop.config import make_config
from rlbench.loop.config_files import captured_functions, read_config, to_toml
from rlbench.loop.ending import FINISHED
from rlbench.runtime.checkpoint import find_checkpoint, load_checkpoint
from rlbench.runtime.driver import Driver
from rlbench.runtime.prompts import make_pools


class Killed(Told):
    "A driver whose run folder is copied at stated numbers of events, as a killed process would leave it."

    copies: dict  # event -> folder

    def flush(self) -> None:
        super().flush()
        for event in [event for event in self.copies if event <= self.state.seq and self.state.phase not in FINISHED]:
            shutil.copytree(self.folder, self.copies.pop(event))


def a_run(folder: Path, table: dict, copies: dict | None = None, told: list = ()) -> Killed:
    "A driver for a new run in a folder."
    create_run_folder(folder.parent, folder.name)
    (folder / "config.toml").write_text(to_toml(make_config({"clock": "virtual", "generator": "scripted", **table})))
    driver = Killed(folder, read_config(folder), make_pools(read_config(folder)))
    driver.copies, driver.told = dict(copies or {}), sorted(told, key=lambda each: each[0])
    return driver


def taken_up(folder: Path, attempt: int = 1, copies: dict | None = None, kind: type[Driver] = Killed) -> Driver:
    "A driver that goes on from the newest checkpoint of a folder."
    start = load_checkpoint(find_checkpoint(folder), captured_functions(folder))
    driver = kind(folder, read_config(folder), make_pools(read_config(folder)), start, attempt)
    driver.copies = dict(copies or {})
    return driver


def check_resumed(driver: Driver) -> None:
    "The surviving rows, the status and the loop say the same; nothing is trained twice, nothing is skipped."
    folder, state = driver.folder, driver.state
    rollouts, groups, steps = (read_table(folder, t) for t in ("rollouts", "groups", "steps"))
    assert rollouts.select("rollout", "try").is_unique().all(), rollouts.filter(
        rollouts.select("rollout", "try").is_duplicated()
    )
    told = {
        row["fate"]: (row["n"], row["tokens"])
        for row in rollouts.group_by("fate").agg(pl.len().alias("n"), pl.col("length").sum().alias("tokens")).to_dicts()
    }
    assert told == {fate: (count, length) for fate, (count, length, _) in state.books.items()}
    assert (
        sum(n for n, _ in told.values()) == state.dispatch.attempts
        and sum(t for _, t in told.values()) == state.generation.tokens
    )
    status = read_status(folder)
    assert status.books_closed and status.attempt == driver.run.restart
    trained = rollouts.filter(pl.col("fate") == "trained")
    assert trained["rollout"].is_unique().all() and (trained["trained_at"] - 1 - trained["oldest"] >= 0).all()
    assert steps["version"].to_list() == list(range(1, state.version + 1)) and steps["trained_rollouts"].sum() == len(
        trained
    )
    assert (
        trained.group_by("trained_at").len().sort("trained_at")["len"].to_list() == steps["trained_rollouts"].to_list()
    )
    assert groups["group"].is_unique().all()
    ended = {*groups["group"], *rollouts.filter(pl.col("group") < 0)["group"]}
    evaluated = state.dispatch.groups - len(groups)
    assert evaluated >= 0 and set(groups["group"]) | ended <= set(range(-1, state.dispatch.groups))
    assert not driver.live.rollouts and not driver.live.places and not state.groups


SYNC = {
    "group": 4,
    "batch": 16,
    "steps": 8,
    "concurrency": 16,
    "preflight": 8,
    "preflight_k": 2,
    "eval": [{"count": 10, "every": 3}],
    "staleness": 0,
    "checkpoint_every": 2,
}

"""Whole runs in this process, on the virtual clock, with commands at stated events."""

from pathlib import Path

import polars as pl

from rlbench.base.ledger_reading import read_table
from rlbench.base.run_files import create_run_folder
from rlbench.base.status import read_status
from rlbench.knobs import save_function
from rlbench.loop.config import make_config
from rlbench.loop.config_files import read_config, to_toml
from rlbench.loop.ending import FINISHED
from rlbench.loop.events import Commanded
from rlbench.loop.loop import step
from rlbench.runtime.driver import Driver, drive
from rlbench.runtime.prompts import make_pools
from rlbench.workbench.prepare import take_functions


class Told(Driver):
    """A driver to which commands are said after stated numbers of events: (event, knob, value, over).

    A pause that nothing else ends is ended by go."""

    told: list = []
    said = 0

    def flush(self) -> None:
        super().flush()
        resting = self.state.commands.is_paused and self.quiet
        if resting and not self.told:
            self.told = [(0, "go", None, 0)]
        while self.told and self.state.phase not in FINISHED and (self.told[0][0] <= self.state.seq or resting):
            number, knob, value, over = self.told.pop(0)
            self.said += 1
            for action in step(self.state, Commanded(f"told-{self.said}", "test", knob, value, over, self.clock.now())):
                self.carry(action)
            resting = False


def inline_run(root: Path, name: str, table: dict, told: list = ()) -> Told:
    "The finished driver of a run in `root/name`. A function among the settings is captured, as `rlbench.run` does."
    taken = take_functions({"clock": "virtual", "generator": "scripted", **table})
    folder = create_run_folder(root, name)
    for captured in taken.copies:
        save_function(captured, folder / "functions")
    (folder / "config.toml").write_text(to_toml(make_config(taken.knobs, taken.functions)))
    config = read_config(folder)
    driver = Told(folder, config, make_pools(config, taken.functions))
    driver.told = sorted(told, key=lambda each: each[0])
    drive(driver)
    return driver


def check_books(driver: Driver) -> None:
    "The tables, the status and the loop say the same."
    folder, state = driver.folder, driver.state
    rollouts, tokens, groups, steps = (read_table(folder, t) for t in ("rollouts", "tokens", "groups", "steps"))
    assert rollouts.select("rollout", "try").is_unique().all() and len(rollouts) == state.dispatch.attempts
    told = {
        row["fate"]: (row["n"], row["tokens"])
        for row in rollouts.group_by("fate").agg(pl.len().alias("n"), pl.col("length").sum().alias("tokens")).to_dicts()
    }
    assert told == {fate: (count, length) for fate, (count, length, _) in state.books.items()}
    status = read_status(folder)
    assert (
        status.books_closed
        and {f: (b["count"], b["tokens"]) for f, b in status.books.items()} == told
        and status.state == ("failed" if state.phase == "failed" else status.state)
    )
    assert (
        tokens.select(pl.col("tokens").list.len()).sum().item() == rollouts["length"].sum() == state.generation.tokens
    )
    assert (
        steps["version"].to_list() == list(range(1, state.version + 1))
        and steps["trained_rollouts"].sum() == (rollouts["fate"] == "trained").sum()
    )
    used = groups.filter(pl.col("fate") == "trained")
    weightless = rollouts.filter((pl.col("fate") == "masked") & pl.col("group").is_in(used["group"].implode()))
    assert groups["group"].is_unique().all() and used["scored"].sum() == steps["trained_rollouts"].sum() + len(
        weightless
    )
    trained = rollouts.filter(pl.col("fate") == "trained")
    assert (trained["trained_at"] - 1 - trained["oldest"] >= 0).all() and (
        rollouts.filter(pl.col("fate") != "trained")["trained_at"] == -1
    ).all()
    assert not driver.live.rollouts and not driver.live.places

"""What the driver takes as owed, and how long it waits for it; and what it does on a full disk."""

import pytest
from inline import Told, check_books, inline_run

import rlbench.runtime.run_context
from rlbench.base.ledger_reading import read_table
from rlbench.base.run_files import FAULTS, FULL_DISK, create_run_folder
from rlbench.environments.scoring_messages import ScoreRequest
from rlbench.loop.actions import Publish
from rlbench.loop.config import make_config
from rlbench.loop.config_files import to_toml
from rlbench.loop.events import Started
from rlbench.loop.loop import step
from rlbench.records import Rollout, Task, response_segment
from rlbench.runtime.driver import Driver
from rlbench.runtime.messages import LoadRequest, LoadResult, PublishRequest, PublishResult
from rlbench.runtime.prompts import make_pools
from rlbench.workbench.drill_faults import switch_fault


class Recorder:
    "A handle that remembers what it was given, and never answers."

    lost, closed = False, None

    def __init__(self):
        self.given, self.heard_at, self.moved_at = [], 0.0, 0.0

    def submit(self, message, now):
        self.given.append(message)

    def close(self, patience=5.0):
        self.lost = True


def a_driver(root, placement: str, generators: int = 1) -> Driver:
    "A driver whose actors are up, and nothing more."
    folder = create_run_folder(root, placement)
    config = make_config(
        {
            "placement": placement,
            "generators": generators,
            "preflight": 0,
            "eval": [],
            "checkpoint_every": 0,
            "deadlines": {"publish": 5.0, "generate": 30.0},
        }
    )
    (folder / "config.toml").write_text(to_toml(config))
    driver = Driver(folder, config, make_pools(config))
    driver.state.commands.is_paused = True  # nothing is dispatched
    driver.workers.handles = {worker: Recorder() for worker in driver.workers.layout}
    for worker, actors in driver.workers.layout.items():
        for actor in actors:
            step(driver.state, Started(actor, actor.partition("-")[0]))
    return driver


def test_a_publish_is_owed_until_it_is_confirmed_where_one_worker_does_all(tmp_path):
    driver = a_driver(tmp_path, "colocated")
    assert driver.watchdog.owed_kinds("worker") == []
    driver.publishing.carry_publish(Publish("generator", 1))
    assert driver.watchdog.owed_kinds("worker") == ["publish"] and driver.workers.handles["worker"].given == [
        PublishRequest(1)
    ]
    list(driver.publishing.hear_loaded("worker", LoadResult(1, 0.0)))
    assert driver.watchdog.owed_kinds("worker") == []


def test_the_trainer_writes_once_and_every_generator_loads(tmp_path):
    driver = a_driver(tmp_path, "split", generators=2)
    for generator in ("generator-1", "generator-2"):
        driver.publishing.carry_publish(Publish(generator, 3))
    assert driver.workers.handles["trainer"].given == [PublishRequest(3)] and driver.watchdog.owed_kinds("trainer") == [
        "publish"
    ]
    assert driver.watchdog.owed_kinds("generator-1") == []  # the trainer owes, not they
    list(driver.publishing.hear_published("trainer", PublishResult(3, 0.0)))
    assert all(
        driver.workers.handles[g].given == [LoadRequest(3)] and driver.watchdog.owed_kinds(g) == ["publish"]
        for g in ("generator-1", "generator-2")
    )
    list(driver.publishing.hear_loaded("generator-1", LoadResult(3, 0.0)))
    driver.publishing.carry_publish(Publish("generator-1", 3))  # started again: it is in the file already
    assert (
        driver.workers.handles["trainer"].given == [PublishRequest(3)]
        and driver.workers.handles["generator-1"].given == [LoadRequest(3)] * 2
    )


@pytest.mark.parametrize(
    ("unmoved", "unheard", "words"), [(4.0, 1.0, ""), (6.0, 1.0, "asked to publish"), (4.0, 20.0, "no sign of life")]
)
def test_a_worker_is_given_up_at_its_deadline_or_after_a_silence(tmp_path, unmoved, unheard, words):
    driver = a_driver(tmp_path, "colocated")
    driver.publishing.carry_publish(Publish("generator", 1))
    now, handle = driver.clock.now(), driver.workers.handles["worker"]
    handle.moved_at, handle.heard_at = now - unmoved, now - unheard
    cause = driver.watchdog.find_hung("worker")
    assert words in cause and bool(cause) == bool(words)
    assert handle.lost == bool(words) and driver.watchdog.find_hung("worker") == ""


@pytest.mark.parametrize(("turns", "hangs"), [(1, True), (4, False)])
def test_an_environment_has_the_time_to_rebuild_episodes(tmp_path, turns, hangs):
    "A deadline for each turn that it may have to take again, before it counts as hung."
    driver = a_driver(tmp_path, "colocated")
    handle = driver.workers.handles["environment"]
    segments = tuple(response_segment([0], [0.0], [0], turn=turn) for turn in range(turns))
    driver.scoring.episodes.requests[3, 0] = ScoreRequest(Rollout(3, 0, 0, 0, Task("a", "1+1=", "2", 1), segments))
    handle.heard_at, handle.moved_at = driver.clock.now(), driver.clock.now() - 2 * driver.state.config.score_deadline
    assert driver.watchdog.owed_kinds("environment") == ["score"]
    assert bool(driver.watchdog.find_hung("environment")) == hangs


SHORT = {
    "group": 4,
    "batch": 16,
    "steps": 6,
    "concurrency": 16,
    "max_tokens": 80,
    "preflight": 0,
    "eval": [],
    "checkpoint_every": 0,
    "staleness": 1,
    "filter": "none",
}


def filled(monkeypatch, seconds: float, reserve: int, until: int = 1000) -> list[tuple[int, str]]:
    "From version 2 on nothing can be written, for so many seconds or until a version; the reserve counts as so many bytes. Returns what runs say to run.log, each with the number of events before."
    struck, said, flush = [], [], Told.flush

    def strikes(driver):
        if driver.state.version == 2 and not struck:
            struck.append(driver)
            driver.tables.ballast.bytes = reserve
            switch_fault(driver.folder, FULL_DISK, seconds)
        if driver.state.version == until:
            (driver.folder / FAULTS / FULL_DISK).unlink(missing_ok=True)
        flush(driver)

    monkeypatch.setattr(Told, "flush", strikes)
    monkeypatch.setattr(rlbench.runtime.run_context, "to_log", lambda text: said.append((struck[0].state.seq, text)))
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "reserve", "until", "stands"), [(1.5, 1, 1000, True), (1000.0, 4_000_000, 4, False)]
)
def test_a_run_on_a_full_disk_goes_on_when_there_is_room(tmp_path, monkeypatch, seconds, reserve, until, stands):
    "It trains on while the reserve can take the rows that wait, and stands still when it cannot; the tables are those of a run that always had room."
    whole = inline_run(tmp_path, "whole", SHORT)
    said = filled(monkeypatch, seconds, reserve, until)
    driver = inline_run(tmp_path, "full", SHORT)
    (before, full), (after, room) = said
    assert "the disk is full" in full and "has room again" in room and (before == after) == stands
    assert (
        driver.state.phase == "done"
        and driver.state.version == 6
        and driver.state.digest == whole.state.digest
        and not driver.tables.full_since
    )
    check_books(driver)
    for table in ("steps", "groups", "rollouts", "tokens", "events"):
        had, has = (
            read_table(run.folder, table).drop("score_seconds", "fields", strict=False) for run in (whole, driver)
        )  # what is measured
        assert len(had) and had.equals(has), table


def test_a_disk_that_stays_full_ends_the_run(tmp_path, monkeypatch):
    "The reserve is freed for the rows that wait, the run ends at once, and its books close."
    monkeypatch.setattr(rlbench.runtime.run_context, "FULL_SECONDS", 0.5)
    said = filled(monkeypatch, 1000.0, 1)
    driver = inline_run(tmp_path, "full", SHORT)
    assert (
        "the disk is full" in said[0][1] and driver.state.version == 2 and "the disk is full" in driver.state.reason
    ), (said, driver.state.reason)
    assert not driver.tables.ballast.held and not (driver.folder / FAULTS / FULL_DISK).exists()
    check_books(driver)

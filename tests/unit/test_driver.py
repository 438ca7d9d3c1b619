"""What the driver takes as owed, and how long it waits for it; and what it does on a full disk."""

from types import SimpleNamespace

import pytest
from inline import Told, check_books, inline_run
from patience import until

import rlbench.runtime.run_context
from rlbench.base.ledger_reading import read_table
from rlbench.base.run_files import FAULTS, FULL_DISK, LOST_HOST, SLOW_LINK, create_run_folder
from rlbench.environments.scoring_messages import Forget, Gauges, ScoreRequest, TurnResult
from rlbench.loop.actions import Abort, Generate, Publish, Score, Start, Train, Write
from rlbench.loop.config import make_config
from rlbench.loop.config_files import to_toml
from rlbench.loop.events import HostLost, Lost, Started
from rlbench.loop.loop import step
from rlbench.loop.state import Checkpoint, RolloutState, start_state
from rlbench.records import Fate, Outcome, Rollout, RolloutRow, StepRow, Task, response_segment
from rlbench.runtime.actors import Beat, Gone, Refused
from rlbench.runtime.cluster import ClusterNews, ClusterRefused, HostDown, HostHeard, NoPlaceNow, WeightsThere
from rlbench.runtime.driver import Driver, hear_processes, orders_before_rows
from rlbench.runtime.far_handle import FarHandle, FarMain
from rlbench.runtime.far_team import FarTeam, RankBeat
from rlbench.runtime.host_agent import HostBeat
from rlbench.runtime.hosts import SLOW_LINK_SECONDS, Hosts
from rlbench.runtime.messages import LoadRequest, LoadResult, PublishRequest, PublishResult
from rlbench.runtime.prompts import make_pools
from rlbench.runtime.scoring import SentRequest
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


def a_driver(root, placement: str, generators: int = 1, environments: int = 1) -> Driver:
    "A driver whose actors are up, and nothing more."
    folder = create_run_folder(root, placement)
    config = make_config(
        {
            "placement": placement,
            "generators": generators,
            "environments": environments,
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
    request = ScoreRequest(Rollout(3, 0, 0, 0, Task("a", "1+1=", "2", 1), segments))
    driver.scoring.episodes.requests[3, 0] = SentRequest("environment", request)
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
    """From version 2 on nothing can be written, for so many seconds or until a version;
    the reserve counts as so many bytes. Returns what runs say to run.log, each with the number of events before."""
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
    """It trains on while the reserve can take the rows that wait, and stands still when it cannot;
    the tables are those of a run that always had room."""
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


# Several environments


def with_environments(tmp_path, count: int = 3) -> Driver:
    "A driver with several environments that are up, and three rollouts that are scored, one in each."
    driver = a_driver(tmp_path, "split", environments=count)
    for i in range(count):
        segments = (response_segment([0], [0.0], [0], turn=0),)
        rollout = Rollout(i, 0, i, 0, Task("a", "1+1=", "2", 1), segments)
        driver.live.rollouts[i, 0] = rollout
        name = f"environment-{i + 1}"
        driver.state.rollouts[i] = RolloutState(i, 0, i, status="scoring", environment=name)
        driver.carry(Score(name, i, 0, 1, 10.0, True))
    return driver


def test_what_is_asked_of_environments_reaches_the_right_one(tmp_path):
    driver = with_environments(tmp_path)
    handles, episodes = driver.workers.handles, driver.scoring.episodes
    assert [handles[f"environment-{i + 1}"].given[-1].key for i in range(3)] == [(0, 0), (1, 0), (2, 0)]
    driver.carry(Abort("environment-2", ((1, 0),)))
    assert handles["environment-2"].given[-1] == Forget(((1, 0),))
    list(driver.scoring.hear_turn("environment-3", TurnResult((2, 0), 1, "go on")))
    assert episodes.open == {(2, 0): "environment-3"}
    episodes.close((2, 0))
    assert handles["environment-3"].given[-1] == Forget(((2, 0),)) and not episodes.open
    assert len(handles["environment-1"].given) == 1


def test_the_loss_of_an_environment_names_its_own_rollouts_and_those_of_others(tmp_path):
    driver = with_environments(tmp_path)
    driver.models.requests[7, 0] = object()
    driver.scoring.episodes.open = {(8, 0): "environment-2", (9, 0): "environment-1"}
    lost = driver.loss_of("environment-2", "killed")
    assert lost.at_work == ((1, 0),) and set(lost.elsewhere) == {(7, 0), (0, 0), (2, 0)}
    assert driver.scoring.episodes.open == {(9, 0): "environment-1"}
    assert set(driver.loss_of("scorer", "killed").elsewhere) == {(0, 0), (2, 0)}


def test_only_an_environment_that_was_asked_owes_an_answer(tmp_path):
    driver = with_environments(tmp_path)
    del driver.scoring.episodes.requests[1, 0]
    owed = {name: driver.watchdog.owed_kinds(name) for name in driver.workers.actors_of("environment")}
    assert owed == {"environment-1": ["score"], "environment-2": [], "environment-3": ["score"]}


def test_a_reward_that_waited_for_scores_goes_to_an_environment_that_is_up(tmp_path):
    driver = with_environments(tmp_path)
    scoring, models, handles = driver.scoring, driver.models, driver.workers.handles
    reward = ScoreRequest(driver.live.rollouts[1, 0], part="reward")
    scoring.episodes.requests.pop((1, 0))
    models.answered = [reward]
    assert list(scoring.send_rewards()) == [] and handles["environment-2"].given[-1] is reward
    driver.state.actors["environment-2"].up = False
    scoring.episodes.requests.pop((1, 0))
    scoring.episodes.requests.pop((2, 0))
    models.answered = [reward]
    assert list(scoring.send_rewards()) == [] and handles["environment-3"].given[-1] is reward
    for name in driver.workers.actors_of("environment"):
        driver.state.actors[name].up = False
    models.answered = [reward]
    assert list(scoring.send_rewards()) == [] and models.answered == [reward], "it waits for a restart"
    for name in driver.workers.actors_of("environment"):
        driver.state.actors[name].given_up = True
    (event,) = scoring.send_rewards()
    assert event.outcome is Outcome.ENVIRONMENT_ERROR and not models.answered


def test_a_verdict_is_written_with_the_pool_of_its_own_environment(tmp_path):
    driver = with_environments(tmp_path)
    driver.scoring.hear_gauges("environment-1", Gauges(0, 4, 0, 0))
    driver.scoring.hear_gauges("environment-2", Gauges(0, 0, 4, 0))
    assert driver.scoring.pools["environment-1"].ready == 4 and driver.scoring.pools["environment-2"].ready == 0


def test_weights_and_batches_do_not_wait_for_rows():
    "Orders keep their order among themselves; a checkpoint, and a batch whose rollouts end now, stay behind the rows."
    rows = [
        Write("steps", StepRow(3, 3, (5,), 2)),
        *(Write("rollouts", RolloutRow(i, 0, 5, Fate.TRAINED, 3)) for i in range(2)),
    ]
    publish, train, generate = Publish("generator", 3), Train("trainer", (6, 7), 4), Generate("generator", ())
    late = Write("rollouts", RolloutRow(9, 0, 8, Fate.STALE, -1))
    asked = [*rows, publish, late, train, generate, rows[0]]
    assert orders_before_rows(asked) == [publish, train, *rows, late, generate, rows[0]]
    ends_now = Write("rollouts", RolloutRow(9, 0, 7, Fate.SURPLUS, -1))
    for kept in (
        [*rows, Checkpoint("trainer", 3, "every 3", start_state(make_config({}), [1], {})), train],
        [ends_now, publish, train],
    ):
        assert orders_before_rows(kept) == kept


def test_a_trainer_of_several_processes_is_as_silent_as_the_most_silent_one(tmp_path):
    "The beats of the first process do not stand for the others; a time in which nobody listened counts against none."

    def refuse(name):
        raise ClusterRefused("no place")

    main = FarMain(print, (), ())
    ranks = {"trainer-rank-1": main, "trainer-rank-2": main}
    team = FarTeam("trainer", SimpleNamespace(place_of=refuse), main, ranks, tmp_path, 1.0)
    until(lambda: team.inbox.waiting, 10)  # it has no place; its messages are put in line here
    team.inbox.take()
    team.heard_at = 100.0
    for message in (Beat(1), RankBeat(0, "trainer-rank-1"), RankBeat(0, "trainer-rank-2")):
        team.inbox.put(message)
    assert team.poll(105.0) == [] and (team.heard_at, team.moved_at) == (105.0, 105.0)
    for message in (Beat(2), RankBeat(0, "trainer-rank-2")):
        team.inbox.put(message)
    team.poll(120.0)
    assert team.heard_at == 105.0 and team.moved_at == 120.0
    team.heard_at += 10.0  # as the watchdog forgives
    team.inbox.put(RankBeat(0, "trainer-rank-1"))
    team.poll(121.0)
    assert team.heard_at == 121.0


def hosts_of_a_drill(folder) -> tuple[Hosts, list]:
    "Three hosts, the trainer on the first; and what the cluster was asked for."
    asked = []
    cluster = SimpleNamespace(
        news=ClusterNews(),
        places={},
        agents={f"host-{i}": f"agent {i}" for i in (1, 2, 3)},
        ray=SimpleNamespace(kill=lambda agent: asked.append(("kill", agent))),
        transport_weights=lambda *order: asked.append(order),
    )
    homes = {"trainer": 1, "generator-1": 2, "generator-2": 3}
    handles = {
        worker: SimpleNamespace(host=f"host-{i}", hosts=(f"host-{i}",), lost=False) for worker, i in homes.items()
    }
    folder.joinpath(FAULTS).mkdir()
    hosts = Hosts(folder, handles, cluster)
    for name in cluster.agents:
        cluster.news.put(HostHeard(name, HostBeat(0.5, 0.5, 1e9)))
    return hosts, asked


def test_a_drill_loses_one_host_that_has_no_trainer(tmp_path):
    hosts, asked = hosts_of_a_drill(tmp_path)
    switch_fault(tmp_path, LOST_HOST, 60.0)
    assert list(hosts.hear(1.0)) == []
    until(lambda: asked, 10)
    for name in hosts.cluster.agents:
        hosts.cluster.news.put(HostHeard(name, HostBeat(0.5, 0.5, 1e9)))
    list(hosts.hear(2.0))
    assert asked == [("kill", "agent 2")] and not (tmp_path / FAULTS / LOST_HOST).exists()


@pytest.mark.parametrize(("error", "message"), [(NoPlaceNow, Gone), (ClusterRefused, Refused)])
def test_a_worker_without_a_place_for_now_is_lost_and_the_configuration_is_not_refused(tmp_path, error, message):
    "Another host may join; only what can never run on the cluster is a refusal."

    def place_of(name):
        raise error("cluster: no host has a place")

    handle = FarHandle("generator-1", SimpleNamespace(place_of=place_of), FarMain(print, (), ()), tmp_path, 1.0)
    until(lambda: handle.inbox.waiting, 10)
    assert handle.poll(0.0) == [message("cluster: no host has a place")] and handle.lost


class WorkerOfLostHost(Recorder):
    "A worker that reports its end; its host is reported in the same moment, after the run process has asked for hosts."

    connection = None

    def __init__(self, host: str, report_host=None):
        super().__init__()
        self.host, self.hosts, self.report_host = host, (host,), report_host

    def poll(self, now):
        if self.report_host is None:
            return []
        self.report_host()
        self.report_host, self.lost = None, True
        return [Gone("killed")]

    def hang_up(self):
        self.lost = True


def test_a_lost_host_is_heard_before_its_workers_even_those_that_have_just_been_started(tmp_path):
    """Otherwise each of them would be started again at once, until no host that has room for it is a reason to give it
    up."""
    driver = a_driver(tmp_path, "split", generators=3)
    news = ClusterNews()
    driver.hosts.cluster = SimpleNamespace(news=news, places={}, agents={}, close=lambda: None)
    down = HostDown("host-2", "power cut", ("generator-1", "generator-2", "trainer-rank-1"))
    driver.workers.handles |= {
        "trainer": WorkerOfLostHost("host-1"),
        "generator-1": WorkerOfLostHost("host-2", lambda: news.put(down)),
        "generator-2": WorkerOfLostHost(""),  # it is being started there
        "generator-3": WorkerOfLostHost("host-1"),
        "environment": WorkerOfLostHost("host-1"),
    }
    heard = hear_processes(driver)
    assert isinstance(heard[0], HostLost) and set(heard[0].actors) == {"generator-1", "generator-2"}
    assert [event.actor for event in heard[1:] if isinstance(event, Lost)] == ["generator-2", "generator-1"]
    actions = [action for event in heard for action in step(driver.state, event)]
    assert not any(isinstance(action, Start) for action in actions)
    assert {name for name, each in driver.state.hosts.waiting.items() if each.is_lost} == set(heard[0].actors)
    assert all(driver.state.actors[name].restarts == 0 for name in heard[0].actors)


def test_a_drill_makes_weights_late_for_one_host_only(tmp_path):
    hosts, asked = hosts_of_a_drill(tmp_path)
    list(hosts.hear(1.0))
    switch_fault(tmp_path, SLOW_LINK, 60.0)
    hosts.transport_weights(4, hosts.handles)
    assert asked == [("host-1", ["host-3"], SLOW_LINK_SECONDS), ("host-1", ["host-2"])]
    (tmp_path / FAULTS / SLOW_LINK).unlink()
    for late, targets in (("host-2", ["host-2"]), ("host-3", ["host-3"])):  # behind a slow link nothing queues up
        asked.clear()
        hosts.cluster.news.put(WeightsThere(late, 4, 0.0, 0.0, 0.0))
        list(hosts.hear(2.0))
        hosts.transport_weights(5, hosts.handles)
        assert asked == [("host-1", targets)]

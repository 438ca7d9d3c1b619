"""Episodes of several turns in whole runs: token in, token out; real processes;
and the staleness of an environment's state."""

import json

import polars as pl
import pytest
from inline import check_books, inline_run
from real_runs import fork_workers_of
from small_loops import a_world
from turn_tables import by_turn

from rlbench.base.chart_parts import short_number
from rlbench.base.ledger_reading import read_table
from rlbench.base.run_files import create_run_folder
from rlbench.environments.kv_store import DrawnEpisode
from rlbench.loop.config import make_config
from rlbench.loop.config_files import read_config, to_toml
from rlbench.loop.events import Generated
from rlbench.runtime.driver import Driver, drive
from rlbench.runtime.live_view import LiveView
from rlbench.runtime.prompts import make_pools
from rlbench.views.card_html import run_card_html

STORE = {
    "model": "tiny",
    "tasks": {"name": "chains", "low": 2},
    "environment": "store",
    "group": 4,
    "batch": 16,
    "steps": 3,
    "max_tokens": 40,
    "observation_tokens": 32,
    "concurrency": 16,
    "filter": "none",
    "preflight": 0,
    "eval": [{"count": 8}],
    "staleness": 0,
    "sampler": "uniform",
    "checkpoint_every": 0,
}


@pytest.mark.slow
def test_what_the_policy_wrote_is_what_its_next_turn_reads(tmp_path, monkeypatch):
    """Every request holds the tokens of the turns before it as they were sampled,
    and the trainer finds the log-probabilities that the sampler had."""
    from rlbench.engines.torch import TorchGenerator

    asked: dict[tuple, list] = {}
    submit = TorchGenerator.submit

    def noting(self, requests):
        requests = list(requests)
        for request in requests:
            asked.setdefault(request.key, []).append(
                (request.prompt.tolist(), request.sampling.max_tokens, request.stream)
            )
        submit(self, requests)

    monkeypatch.setattr(TorchGenerator, "submit", noting)
    driver = inline_run(tmp_path, "a", STORE | {"generator": "torch"})
    check_books(driver)
    rows = read_table(driver.folder, "tokens")
    several = rows.filter(pl.col("turn").list.len() > 0)
    assert len(several) > len(rows) // 2, "the tasks ask for two turns and more"
    for row in several.to_dicts():
        responses, shown = by_turn(row["tokens"], row["turn"]), by_turn(row["observed"], row["observed_turn"])
        read, written = row["prompt_tokens"], 0
        requests = asked[row["rollout"], row["try"]]
        assert len(requests) == len(responses) and len({stream for *_, stream in requests}) == len(requests), (
            "a stream of its own for every turn"
        )
        for (prompt, budget, _), response, more in zip(requests, responses, [*shown, []]):
            assert prompt == read and budget == STORE["max_tokens"] - written
            read, written = read + response + more, written + len(response)
    steps = read_table(driver.folder, "steps")
    assert (steps["kl_sampler"].abs() < 1e-6).all() and (steps["ess"] > 0.999).all() and (steps["turns"] > 1).all()
    trained = (
        read_table(driver.folder, "rollouts").filter(pl.col("fate") == "trained").join(rows, on=["rollout", "try"])
    )
    assert trained["mask"].list.sum().sum() == steps["trained_tokens"].sum() == trained["length"].sum()
    assert {*read_table(driver.folder, "rollouts")["reason"]} <= {"stop", "length", "turns"}
    seen = LiveView(driver.folder).poll()
    assert any(len(set(r.turns.tolist())) > 1 for r in seen.ribbons) and all(
        len(r.turns) in (0, len(r.versions)) for r in seen.ribbons
    )
    assert "a line where a turn begins" in run_card_html(
        "ribbons", seen
    ) and f"in {short_number(steps['turns'][-1], 2)} turns" in run_card_html("length", seen)
    again = inline_run(tmp_path, "b", STORE | {"generator": "torch"})
    assert again.state.digest == driver.state.digest


@pytest.mark.slow
def test_a_run_over_the_store_in_processes(tmp_path):
    """Generator and trainer in one process, the environment in another;
    the environment is killed in the middle of the episodes and rebuilds them."""
    config = make_config(STORE | {"placement": "colocated", "steps": 2, "eval": []})
    folder = create_run_folder(tmp_path, "a")
    (folder / "config.toml").write_text(to_toml(config))

    class Kills(Driver):
        turns = 0

        def note_happened(self, happened):
            super().note_happened(happened)
            self.turns += isinstance(happened, Generated)
            if self.turns == 10 and "environment" in self.workers.handles:
                self.turns += 1
                self.workers.handles["environment"].process.kill()

    driver = Kills(folder, read_config(folder), make_pools(config))
    fork_workers_of(driver)
    assert drive(driver).phase == "done", driver.state.reason
    check_books(driver)
    rollouts, events = (read_table(folder, table) for table in ("rollouts", "events"))
    assert (
        "Lost" in events["kind"]
        and (rollouts["turns"] > 1).any()
        and not rollouts["fate"].is_in(["lost_environment", "environment_error"]).any()
    )


WAITS = {
    "environment": {"name": "scripted", "low": 2, "high": 4, "writes": 0.6, "undoes": 0.2},
    "staleness": 4,
    "stragglers": "partial",
    "straggler_unit": "rollout",
    "group": 4,
    "batch": 16,
    "steps": 25,
    "concurrency": 64,
    "max_tokens": 160,
    "preflight": 0,
    "eval": [],
    "checkpoint_every": 0,
    "filter": "none",
    "virtual": {"train": 0.0001, "scripted_length": 24.0},
}


def states_of(row: dict) -> tuple[list[str], list[int]]:
    "States and writers by the store's own history: the episode played again from its responses and their versions."
    episode, heard, states = DrawnEpisode(2, 4, 0.6, 0.2), None, []
    for text, versions in zip(row["said"][::2], by_turn(row["versions"], row["turn"])):
        states.append((episode.state.id if states else "", episode.state.writer))
        heard = episode.advance(text, versions[-1])
    assert heard is not None
    return [name for name, _ in states], [writer for _, writer in states]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["continue", "rewind", "restart"])
def test_the_lag_of_a_state_is_what_its_history_says(rule, tmp_path):
    """The columns of rollouts and steps against episodes played again;
    under `continue` nothing is undone, under the others what is undone has its fate."""
    driver = inline_run(tmp_path, "a", WAITS | {"on_resume": rule, "max_state_lag": 1})
    check_books(driver)
    rollouts, steps = read_table(driver.folder, "rollouts"), read_table(driver.folder, "steps")
    several = rollouts.filter((pl.col("turns") > 1) & (pl.col("fate") == "trained")).join(
        read_table(driver.folder, "tokens").drop("seq", "attempt", "at"), on=["rollout", "try"]
    )
    assert len(several) > 100
    for row in several.to_dicts():
        states, writers = states_of(row)
        assert (row["states"], row["writers"]) == (states, writers)
        assert row["writer"] == min((w for w in writers if w >= 0), default=-1)
    touched = several.filter(pl.col("writer") >= 0).with_columns(lag=pl.col("trained_at") - 1 - pl.col("writer"))
    said = dict(touched.group_by("trained_at").agg(pl.col("lag").mean()).iter_rows())
    assert {
        row["version"]: row["lag_state"] for row in steps.to_dicts() if row["lag_state"] is not None
    } == pytest.approx(said)
    rewound = rollouts.filter(pl.col("fate") == "rewound")
    assert bool(len(rewound)) == (rule != "continue") and (rewound["trained_at"] == -1).all()
    if rule == "restart":
        assert set(
            rollouts.filter(pl.col("rollout").is_in(rewound["rollout"].implode()) & (pl.col("fate") == "trained"))[
                "try"
            ]
        ) >= {1}


@pytest.mark.slow
def test_random_worlds_rewind():
    """The worlds of the loop's test hold what is claimed for them:
    episodes that are rewound, and others that keep turns."""
    worlds = [a_world(seed, False, False).run() for seed in range(0, 90, 3)]
    assert sum(world.watch.rewound for world in worlds) > 5 and any(
        len(marks) > 1 for world in worlds for marks in world.watch.marks.values()
    )


def test_words_that_the_policy_cannot_read_end_the_run(tmp_path):
    """An environment whose second turn is in letters that the model has no tokens for:
    it answers the first one, and that is not enough."""
    driver = inline_run(
        tmp_path, "a", STORE | {"generator": "torch", "environment": "scripted", "steps": 50, "eval": []}
    )
    assert driver.state.phase == "failed" and "would not write" in driver.state.reason, driver.state.reason
    check_books(driver)


def test_an_episode_stays_with_its_generator(tmp_path):
    "With two generators the work is shared, and the later turns of an episode go where its cache is."
    driver = inline_run(
        tmp_path,
        "two",
        STORE | {"placement": "split", "generators": 2, "staleness": 2, "concurrency": 24, "steps": 6, "eval": []},
    )
    check_books(driver)
    events = read_table(driver.folder, "events")
    asked: dict[tuple, list[str]] = {}
    for told in map(json.loads, events.filter(pl.col("kind") == "Generate")["fields"]):
        for rollout, attempt, _ in told["rollouts"]:
            asked.setdefault((rollout, attempt), []).append(told["actor"])
    first = [actors[0] for actors in asked.values()]
    assert min(first.count(name) for name in ("generator-1", "generator-2")) > len(first) / 4, "work is shared by load"
    several = [actors for actors in asked.values() if len(actors) > 1]
    assert len(several) > 30 and sum(len(set(actors)) == 1 for actors in several) > 0.9 * len(several)

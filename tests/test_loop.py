"""The loop over random configurations: books that close, no deadlock, nothing trained over the bound, and the same run twice."""
import random

import pytest
from inline import check_books, inline_run
from world import World

from rlbench.config import RunConfig, make_config
from rlbench.ledger import read_table
from rlbench.records import Fate


def a_config(r: random.Random) -> dict:
    "A table for `make_config`."
    group = r.choice((2, 2, 3, 4, 8))
    alone = r.random() < 0.05
    return {
        "placement": "inline", "generator": "scripted", "seed": r.randrange(1000), "steps": r.randint(1, 12), "group": 1 if alone else group,
        "batch": r.randint(1, 6) * (1 if alone else group), "advantage": "reinforce" if alone else r.choice(("grpo", "rloo", "dr_grpo")),
        "filter": "none" if alone else r.choice(("zero_advantage", "zero_advantage", "none")), "staleness": r.choice((0, 0, 1, 2, 3, 4)), "overdue": r.choice(("drop", "wait")),
        "oversample": r.choice((0.0, 0.0, 0.3, 1.0)), "concurrency": r.choice((1, 3, 8, 64)), "sampler": r.choice(("band", "uniform", "easy_to_hard")),
        "band": r.choice(((0.2, 0.8), (0.0, 1.0))), "score_retries": r.randint(0, 2), "preflight": r.choice((0, 0, 6)), "preflight_k": r.choice((1, 4)),
        "eval": [{"name": f"set-{i}", "count": r.randint(1, 10), "k": r.choice((1, 3)), "every": r.choice((0, 1, 2, 5))} for i in range(r.choice((0, 1, 1, 2)))],
        "tokens": r.choice((0,) * 9 + (3000,)), "minutes": r.choice((0.0,) * 9 + (0.1,)),
    }


def a_command(r: random.Random, config: RunConfig) -> tuple[str, object, int]:
    "Knob, value, over."
    g = config.group
    return r.choice((
        ("temperature", r.choice((0.5, 1.5, "hot")), r.choice((0, 3))), ("staleness", r.randint(0, 4), 0), ("staleness", 0, 0), ("staleness", r.randint(1, 4), r.choice((1, 4))),
        ("group", r.choice((2, 4, 5)), 0), ("group", 8, 3), ("batch", r.randint(1, 8) * g, r.choice((0, 0, 3))), ("band", [0.1, r.choice((0.5, 0.9))], r.choice((0, 4))),
        ("concurrency", r.choice((1, 5, 40)), r.choice((0, 2))), ("oversample", r.choice((0.0, 0.5, 2.0)), 0), ("overdue", r.choice(("drop", "wait")), 0), ("steps", r.randint(1, 14), 0),
        ("filter", r.choice(("none", "zero_advantage")), 0), ("score_retries", r.randint(0, 2), 0), ("tokens", r.choice((0, 2000)), 0), ("loss.high", 0.3, 0), ("sampler", "uniform", 0),
        ("pause", None, 0), ("pause", None, 0), ("go", None, 0), ("step", None, 0), ("step", None, 0), ("eval", None, 0), ("nonsense", 1, 0), ("seed", 1, 0), ("batch", 7.5, 0), ("band", [0.9, 0.1], 0),
    ))


def a_world(seed: int, commands: bool, faults: bool) -> World:
    "A world drawn from its number."
    r = random.Random(seed)
    config = make_config(a_config(r))
    told: dict[int, list] = {}
    for i in range(r.randint(1, 12) if commands else 0):
        told.setdefault(r.randint(1, 600), []).append((f"c{i}", "somebody", *a_command(r, config)))
    if commands and r.random() < 0.25:
        told.setdefault(r.randint(1, 600), []).append(("stop", "somebody", "stop"))
    lost = {r.randint(1, 600): r.choice(("generator", "generator", "environment")) for _ in range(r.randint(1, 6) if faults else 0)}
    if faults and r.random() < 0.15:
        lost[r.randint(1, 600)] = "trainer"
    slots = tuple(r.choice((1, 4, 16)) for _ in range(r.choice((1, 1, 2, 3))))
    return World(config, seed, slots, told, lost, errors=r.choice((0.0, 0.0, 0.1, 0.3)), pace=r.choice((0.0001, 0.001, 0.01)))


@pytest.mark.parametrize("seed", range(150))
def test_books_bound_and_repeat(seed):
    "Whatever happens: the watch in `world` looks at every action, the run ends, and it ends the same way twice."
    commands, faults = seed % 3 > 0, seed % 3 > 1
    world = a_world(seed, commands, faults).run()
    config = world.state.config
    if not commands and not faults:
        spent = config.tokens or config.minutes
        assert world.state.phase == "done" and (world.state.version == config.steps or spent), world.state.reason
        if config.staleness == 0:
            assert set(world.watch.lags) <= {0}
        if config.overdue == "wait" and not config.oversample:
            assert Fate.STALE not in world.watch.fates.values()
        assert {(row.eval, row.version) for row in world.watch.evals} >= {(e.name, v) for e in config.eval for v in (0, world.state.version)}
    assert a_world(seed, commands, faults).run().record() == world.record()


@pytest.mark.parametrize("seed", range(36))
def test_driver_tables_close_and_repeat(seed, tmp_path):
    "The same through the driver: the tables on disk agree with the books, and a second run writes the same ones."
    r = random.Random(1000 + seed)
    table = a_config(r) | {"virtual": {"scripted_errors": r.choice((0.0, 0.2)), "train": r.choice((0.0001, 0.002)), "publish": r.choice((0.01, 0.5))}}
    told = [(r.randint(1, 300), *a_command(r, make_config(table))) for _ in range(r.choice((0, 4, 8)))]
    told += [(r.randint(1, 300), "stop", None, 0)] if told and r.random() < 0.3 else []
    first, second = (inline_run(tmp_path, name, table, told) for name in ("a", "b"))
    check_books(first)
    steps, again = (read_table(d.folder, "steps") for d in (first, second))
    assert steps.equals(again) and first.state.digest == second.state.digest
    assert read_table(first.folder, "rollouts").equals(read_table(second.folder, "rollouts"))
    if not told:
        assert (steps["lag_max"] <= table["staleness"]).all()
        assert {*read_table(first.folder, "evals").select("eval", "version").rows()} >= {(e["name"], v) for e in table["eval"] for v in (0, first.state.version)}
    commands = read_table(first.folder, "commands")
    assert commands["command"].str.starts_with("told").sum() == len(told) - len(first.told)
    refused = commands.filter(commands["status"] == "refused")
    assert refused["reason"].str.len_chars().min() is None or refused["reason"].str.len_chars().min() > 10

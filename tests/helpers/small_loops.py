"""Loops on the virtual clock: their configurations, worlds and commands."""

import random

from world import World

from rlbench.loop.config import RunConfig, make_config


def a_config(r: random.Random) -> dict:
    "A table for `make_config`."
    group = r.choice((2, 2, 3, 4, 8))
    alone = r.random() < 0.05
    bound, placement = r.choice((0, 0, 1, 2, 3, 4)), r.choice(("colocated", "split"))
    stragglers = r.choice(("in_flight", "in_flight", "wait", "oversample", "requeue", "partial", "partial"))
    return {
        "clock": "virtual",
        "generator": "scripted",
        "seed": r.randrange(1000),
        "steps": r.randint(1, 12),
        "group": 1 if alone else group,
        "batch": r.randint(1, 6) * (1 if alone else group),
        "advantage": "reinforce" if alone else r.choice(("grpo", "rloo", "dr_grpo")),
        "filter": "none" if alone else r.choice(("zero_advantage", "zero_advantage", "band", "none")),
        "staleness": bound,
        "publish_every": r.choice((1, 1, r.randint(1, bound + 1))),
        "placement": placement,
        "generators": r.choice((1, 2, 3)) if placement == "split" else 1,
        "overdue": r.choice(("drop", "wait")),
        "stragglers": stragglers,
        "straggler_unit": r.choice(("group", "rollout")),
        "old_tokens": "mask" if stragglers == "partial" and not bound else r.choice(("train", "mask", "correct")),
        "oversample": r.choice((0.0, 0.3, 1.0, 1.5) if stragglers != "in_flight" else (0.0, 0.0, 0.3, 1.0)),
        "concurrency": r.choice((1, 3, 8, 64)),
        "sampler": r.choice(("band", "uniform", "easy_to_hard")),
        "band": r.choice(((0.2, 0.8), (0.0, 1.0))),
        "score_retries": r.randint(0, 2),
        "preflight": r.choice((0, 0, 6)),
        "preflight_k": r.choice((1, 4)),
        "eval": [
            {"name": f"set-{i}", "count": r.randint(1, 10), "k": r.choice((1, 3)), "every": r.choice((0, 1, 2, 5))}
            for i in range(r.choice((0, 1, 1, 2)))
        ],
        "infra_stop": 1.0,
        "tokens": r.choice((0,) * 9 + (3000,)),
        "minutes": r.choice((0.0,) * 9 + (0.1,)),
        "environment": r.choice(
            (
                "single",
                "single",
                {"name": "scripted", "low": 1, "high": 4},
                {"name": "scripted", "low": 2, "high": 3, "writes": 0.9},
            )
        ),
        "max_turns": r.choice((1, 3, 8)),
        "on_resume": r.choice(("continue", "rewind", "restart")),
        "max_state_lag": r.choice((0, 1, 2)),
        "backlog": r.choice(("hold", "hold", "drop_oldest")) if bound else "hold",
        "queue_batches": r.choice((0, 0, 1, 2)),
        "shaping": r.choice(("none", "none", "kimi_length", "length_share", "mask_truncated")),
        "environments": r.choice((1, 1, 2, 3)),
    }


def a_command(r: random.Random, config: RunConfig) -> tuple[str, object, int]:
    "Knob, value, over."
    g = config.group
    return r.choice(
        (
            ("temperature", r.choice((0.5, 1.5, "hot")), r.choice((0, 3))),
            ("staleness", r.randint(0, 4), 0),
            ("publish_every", r.randint(1, 4), 0),
            ("staleness", 0, 0),
            ("staleness", r.randint(1, 4), r.choice((1, 4))),
            ("group", r.choice((2, 4, 5)), 0),
            ("group", 8, 3),
            ("batch", r.randint(1, 8) * g, r.choice((0, 0, 3))),
            ("band", [0.1, r.choice((0.5, 0.9))], r.choice((0, 4))),
            ("concurrency", r.choice((1, 5, 40)), r.choice((0, 2))),
            ("oversample", r.choice((0.0, 0.5, 2.0)), 0),
            ("overdue", r.choice(("drop", "wait")), 0),
            ("steps", r.randint(1, 14), 0),
            ("backlog", r.choice(("hold", "drop_oldest")), 0),
            ("queue_batches", r.choice((0, 1, 3)), 0),
            ("filter", r.choice(("none", "band", "zero_advantage")), 0),
            ("score_retries", r.randint(0, 2), 0),
            ("tokens", r.choice((0, 2000)), 0),
            ("loss.high", 0.3, 0),
            ("sampler", "uniform", 0),
            ("shaping", r.choice(("none", "kimi_length", "mask_truncated")), 0),
            ("stragglers", r.choice(("in_flight", "wait", "oversample", "requeue", "partial")), 0),
            ("stragglers", r.choice(("wait", "requeue", "partial")), 0),
            ("straggler_unit", r.choice(("group", "rollout")), 0),
            ("old_tokens", r.choice(("train", "mask", "correct")), 0),
            ("stragglers", "late", 0),
            ("oversample", 1.0, 0),
            ("pause", None, 0),
            ("pause", None, 0),
            ("go", None, 0),
            ("step", None, 0),
            ("step", None, 0),
            ("eval", None, 0),
            ("nonsense", 1, 0),
            ("seed", 1, 0),
            ("batch", 7.5, 0),
            ("band", [0.9, 0.1], 0),
        )
    )


def a_world(seed: int, commands: bool, faults: bool) -> World:
    "A world drawn from its number."
    r = random.Random(seed)
    config = make_config(a_config(r))
    told: dict[int, list] = {}
    for i in range(r.randint(1, 12) if commands else 0):
        told.setdefault(r.randint(1, 600), []).append((f"c{i}", "somebody", *a_command(r, config)))
    if commands and r.random() < 0.25:
        told.setdefault(r.randint(1, 600), []).append(("stop", "somebody", "stop"))
    lost = {
        r.randint(1, 600): r.choice(("generator", "generator", "environment"))
        for _ in range(r.randint(1, 6) if faults else 0)
    }
    if faults and r.random() < 0.15:
        lost[r.randint(1, 600)] = "trainer"
    slots = tuple(r.choice((1, 4, 16)) for _ in range(r.choice((1, 1, 2, 3))))
    errors, pace = r.choice((0.0, 0.0, 0.1, 0.3)), r.choice((0.0001, 0.001, 0.01))
    turns, waits = r.choice((1, 1, 2, 4)), r.choice((0.0, 0.1, 0.5))
    return World(config, seed, slots, told, lost, errors, pace, turns, waits)

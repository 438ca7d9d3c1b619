"""A made-up run folder with every kind of row, for tests of what reads run folders.

`python tests/fake_run.py ROOT NAME` makes one to look at."""

import json
import sys
from pathlib import Path

import numpy as np

from rlbench.base.ledger import Ledger
from rlbench.base.run_files import create_run_folder, write_json
from rlbench.base.status import Status, write_status

CONFIG = """name = "{name}"
seed = {seed}
model = "tiny"
steps = {steps}
placement = "colocated"
group = 16
batch = 256
band = [0.2, 0.8]
staleness = 2
temperature = 1.0
max_tokens = 64
concurrency = 128
learning_rate = 5e-4
tasks = {{name = "arithmetic", levels = [2, 3, 4]}}
verifier = {{name = "exact"}}
reward = {{name = "correct"}}
advantage = {{name = "grpo", std = "sample"}}
loss = {{name = "ppo", low = 0.2, high = 0.28}}
correction = {{name = "none"}}
aggregation = {{name = "token_mean"}}
"""
EVAL = """
[[eval]]
name = "held_out"
count = 512
k = 1
temperature = 1.0
every = 20
"""
PACKAGES = {
    "rlbench": "0.1.0",
    "torch": "2.13.0",
    "transformers": "5.19.0",
    "numpy": "2.4.1",
    "polars": "2.1.0",
    "math-verify": "0.9.0",
    **{f"package-{i}": f"{i}.0" for i in range(60)},
}
FAILED = "reward shaky: passed its deadline of 10 s; make it <faster>\nTraceback: line 3, in shaky"


def written_out(a: int, b: int) -> str:
    "A sum with its carries, least digit first."
    out, carry, x, y = [], 0, a, b
    while x or y:
        carry = (x % 10 + y % 10 + carry) // 10
        out.append(f"{x % 10}+{y % 10}={(x % 10 + y % 10) % 10}c{carry}")
        x, y = x // 10, y // 10
    return ";".join(out) + f":{a + b}"


def step_row(v: int, learned: float, rng: np.random.Generator, seconds: float) -> dict:
    "One row of the step table."

    def noisy(mean, scale):
        return float(np.clip(mean + rng.normal(0, scale), 0, None))

    def share(mean, scale):
        return float(np.clip(mean + rng.normal(0, scale), 0, 1))

    median = noisy(11 + 16 * learned, 0.7)
    row = {
        "at": seconds * v,
        "version": v,
        "optimizer_steps": v,
        "seconds": seconds,
        "trained_rollouts": 256,
        "trained_tokens": int(256 * median),
        "generated_tokens": int(300 * median),
        "queue_depth": int(noisy(20 + 8 * np.sin(v / 9), 2)),
        "lag_in_flight": noisy(0.4, 0.06),
        "lag_in_queue": noisy(0.8, 0.1),
        "lag_max": 2 if v < 30 else 3,
        "solve_rate": share(0.34 + 0.4 * learned, 0.03),
        "solve_levels": [2, 3, 4],
        "solve_rates": [share(m, 0.04) for m in (0.5 + 0.45 * learned, 0.3 + 0.6 * learned, 0.1 + 0.6 * learned)],
        "all_pass": share(0.02 + 0.4 * learned, 0.03),
        "all_fail": share(0.3 - 0.28 * learned, 0.03),
        "reward_mean": share(0.34 + 0.4 * learned, 0.03),
        "reward_std": 0.46,
        "reward_min": 0.0,
        "reward_max": 1.0,
        "length_mean": median * 1.03,
        "length_p10": median * 0.5,
        "length_p25": median * 0.75,
        "length_p50": median,
        "length_p75": median * 1.25,
        "length_p90": median * 1.5,
        "length_max": 64.0,
        "truncated": share(0.015, 0.005),
        "loss": float(rng.normal(0, 0.02)),
        "entropy": noisy(0.55 - 0.3 * learned, 0.02),
        "grad_norm": noisy(0.5, 0.1),
        "clip_low": noisy(0.008, 0.003),
        "clip_high": noisy(0.015, 0.005),
        "kl_sampler": noisy(6e-4, 1e-4),
        "ess": share(0.94, 0.015),
        "learning_rate": 5e-4,
    }
    for actor, parts in (
        ("generator", (0.9, 0.3, 0.04, 0.1)),
        ("environment", (0.05, 1.2, 0.0, 0.05)),
        ("trainer", (0.7, 0.5, 0.03, 0.1)),
    ):
        row |= {
            f"{actor}_{part}": noisy(mean, 0.03)
            for part, mean in zip(("compute", "wait", "publish", "overhead"), parts, strict=True)
        }
    return row


def rollout_row(number: int, v: int, learned: float, rng: np.random.Generator, seconds: float) -> dict:
    "One row of the rollout table: early ones answer at once, late ones write their working."
    level = int(rng.integers(2, 5))
    a, b = (int(x) for x in rng.integers(10 ** (level - 1), 10**level, 2))
    works = rng.random() < 0.2 + 0.75 * learned
    right = rng.random() < (0.95 if works else 0.35 - 0.08 * level + 0.2)
    text = written_out(a, b) if works else f":{a + b}"
    text = text if right else text[:-1] + str((int(text[-1]) + 3) % 10)
    if number % 97 == 5:
        text, right = "0" * 64, False
    if number % 131 == 7:
        text, right = "<script>alert('x')</script>&amp;\x00\nΩ " + text, False
    ok = number % 61 != 3
    fate = "trained" if rng.random() < 0.8 and ok else "filtered" if ok else "environment_error"
    fate = "evaluated" if number % 50 == 49 and ok else fate
    return {
        "at": seconds * v,
        "rollout": number,
        "try": 0,
        "group": number // 16,
        "k": number % 16,
        "task": f"arithmetic/{a}+{b}",
        "set": "arithmetic",
        "level": level,
        "fate": fate,
        "reason": "length" if len(text) >= 64 else "stop",
        "outcome": "ok" if ok else "timeout",
        "correct": bool(right) if ok else None,
        "reward": float(right) if ok else None,
        "part_names": [],
        "part_values": [],
        "length": len(text),
        "turns": 1,
        "dispatched": max(0, v - 2),
        "oldest": max(0, v - 2),
        "newest": max(0, v - 1 - number % 2),
        "trained_at": v if fate == "trained" else -1,
        "temperature": 1.0,
        "seconds": 0.1,
        "score_seconds": 0.001,
        "message": "" if ok else FAILED,
        "prompt": f"{a}+{b}=",
        "text": text,
        "answer": str(a + b),
    }


def eval_rows(batches: int, every: int, seconds: float) -> list[dict]:
    "A preflight and held-out evaluations at the start, every so many versions and at the end."
    rows = [
        {
            "at": 0.5,
            "eval": "preflight",
            "version": 0,
            "tasks": 48,
            "k": 8,
            "temperature": 1.0,
            "avg": 0.41,
            "avg_se": 0.05,
            "avg_low": 0.31,
            "avg_high": 0.51,
            "zero_advantage": 0.3,
            "zero_advantage_low": 0.21,
            "zero_advantage_high": 0.4,
        }
    ]
    for v in sorted({*range(0, batches + 1, every), batches}):
        rate = 0.32 + 0.65 * (1 - np.exp(-v / 14))
        se = float(np.sqrt(rate * (1 - rate) / 512))
        rows.append(
            {
                "at": seconds * v,
                "eval": "held_out",
                "version": v,
                "tasks": 512,
                "k": 1,
                "temperature": 1.0,
                "avg": float(rate),
                "avg_se": se,
                "avg_low": float(rate - 1.96 * se),
                "avg_high": float(min(1, rate + 1.96 * se)),
                "pass_at_k": float(rate),
                "maj_at_k": float(rate),
                "length_mean": 11 + 16 * (1 - np.exp(-v / 14)),
                "tokens": 11_000,
                "seconds": 2.5,
            }
        )
    return rows


COMMANDS = (
    {
        "at": 18.0,
        "command": "c1",
        "author": "ada",
        "knob": "temperature",
        "value": "1.1",
        "over": 20,
        "status": "applied",
        "reason": "",
        "apply": "dispatch",
        "version": 12,
        "dispatched": 300,
    },
    {
        "at": 20.0,
        "command": "c2",
        "author": "ada",
        "knob": "group",
        "value": "1",
        "status": "refused",
        "reason": 'group: 1 gives advantage "grpo" no baseline; use group >= 2',
        "version": 13,
    },
    {
        "at": 46.0,
        "command": "c3",
        "author": "guardrail",
        "knob": "staleness",
        "value": "3",
        "status": "applied",
        "reason": "",
        "apply": "dispatch",
        "version": 30,
        "dispatched": 700,
    },
)


def books_of(rollouts: int) -> dict:
    "Books with a sum."
    parts = {
        "trained": 0.76,
        "filtered": 0.14,
        "evaluated": 0.07,
        "stale": 0.02,
        "environment_error": 0.005,
        "left_at_stop": 0.005,
    }
    counts = {fate: int(rollouts * share) for fate, share in parts.items()}
    return {fate: {"count": n, "tokens": 22 * n, "seconds": 0.004 * n} for fate, n in counts.items()}


def fake_run(
    root: str | Path,
    name: str = "monday",
    batches: int = 60,
    planned: int = 60,
    state: str = "finished",
    reason: str = "",
    evals: bool = True,
    rollouts: int = 2000,
    every: int = 20,
    closed: bool = True,
    seed: int = 0,
) -> Path:
    "Make a run folder and return its path. `batches` 0 and `evals` False leave those tables empty."
    rng, seconds = np.random.default_rng(seed), 1.55
    folder = create_run_folder(root, name)
    (folder / "config.toml").write_text(
        CONFIG.format(name=name, seed=seed, steps=planned) + (EVAL if evals else ""), encoding="utf-8"
    )
    write_json(
        folder / "provenance.json",
        {
            "commit": "0123456789abcdef0123456789abcdef01234567",
            "diff": "",
            "python": "3.11.9",
            "platform": "Linux-6.1-x86_64",
            "cores": 2,
            "processor": "A processor at 2.5 GHz",
            "packages": PACKAGES,
        },
    )

    def learned(v):
        return float(1 - np.exp(-v / 14 * 60 / max(batches, 1)))

    ledger = Ledger(folder, attempt=0)
    ledger.extend("steps", [step_row(v, learned(v), rng, seconds) for v in range(1, batches + 1)])
    ledger.extend("evals", eval_rows(batches, every, seconds) if evals else [])
    ledger.extend("commands", [c for c in COMMANDS if c["version"] <= batches])
    if batches:
        ledger.extend(
            "rollouts",
            [
                rollout_row(i, v, learned(v), rng, seconds)
                for i in range(rollouts)
                for v in [1 + i * batches // rollouts]
            ],
        )
    ledger.close()
    books = books_of(20_000 * batches // 60 if batches else 0)
    dispatched = sum(entry["count"] for entry in books.values()) + (0 if closed else 37)
    write_status(
        folder,
        Status(
            state,
            version=batches,
            host="bench",
            started=1_795_000_000.0,
            updated=1_795_000_000.0 + seconds * batches,
            reason=reason,
            seconds=seconds * batches,
            dispatched=dispatched,
            tokens=sum(entry["tokens"] for entry in books.values()),
            books=books,
            books_closed=closed,
        ),
    )
    return folder


if __name__ == "__main__":
    from rlbench.views.report import write_report

    print(json.dumps({"report": str(write_report(fake_run(*sys.argv[1:3])))}))

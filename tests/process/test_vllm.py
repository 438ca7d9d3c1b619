"The real vLLM, on a CPU: other families of models, a run in flight with two engines, and the loss of one."

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest

from rlbench.base.ledger_reading import read_table
from rlbench.bench.mismatch import ARMS, bench_mismatch
from rlbench.workbench.handle import run

pytestmark = pytest.mark.usefixtures("cpu_for_vllm")
HERE = Path(__file__).parents[1] / "helpers"


def test_families_are_served_as_transformers_computes_them(tmp_path):
    """Heads with and without bias, a sliding window, experts, tied and untied:
    first weights and swapped ones, in one process one after the other.
    Then vLLM's own sampler: exact log-probabilities under truncation, with drafts,
    and for tokens of steps that were started ahead of new weights."""
    said = subprocess.run(
        [sys.executable, str(HERE / "vllm_families.py")], cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert said.returncode == 0, said.stderr[-4000:]
    told = json.loads(said.stdout.splitlines()[-1])
    found = told["families"]
    assert set(found) == {"llama", "mistral", "gemma2", "gemma3", "qwen3_moe"}
    for family, figures in found.items():
        assert figures["tokens"] > 200, family
        assert figures["logprob_max_diff"] <= 2e-3 and figures["after_swap"] <= 2e-3, f"{family}: {figures}"
    own = told["drawn by vllm"]
    assert own["truncated"] < 2e-3 and own["greedy"] == 0 and own["swapped"] < 2e-3, own
    assert own["repeats"] and own["streams differ"] and own["ahead"] and own["all came"] and own["both versions"] > 1
    drafts = told["with drafts"]
    assert drafts["logprob_max_diff"] < 2e-3 and drafts["steps of several tokens"] > 0, drafts
    assert abs(drafts["surprise"]) < 4, drafts
    assert not told["imported the grammar"], "vLLM imports what its start leaves out"
    eight = told["quantized"]
    assert eight["swapped as fresh"] and not eight["as before"] and 0.01 < eight["rounding"] < 2, eight


def in_flight(run, generator: str) -> int:
    "Responses that a generator was asked for and has not handed over."
    asked = {}
    for kind, fields in read_table(run.folder, "events").select("kind", "fields").iter_rows():
        told = json.loads(fields) if kind in ("Generate", "Generated") else {}
        if kind == "Generate":
            asked.update({(rollout, attempt): told["actor"] for rollout, attempt, _ in told["rollouts"]})
        elif kind == "Generated":
            asked.pop((told["rollout"], told["attempt"]), None)
    return sum(actor == generator for actor in asked.values())


def test_two_engines_write_in_flight_and_one_is_lost(tmp_path):
    """Both engines write what the adapters make of the policy, every version reaches them while sequences run,
    a killed one comes back, and the books close."""
    r = run(
        "tiny-vllm-cpu",
        runs=tmp_path,
        name="two",
        generators=2,
        steps=12,  # of six, both engines may have written all by the blow
        preflight=0,
        concurrency=48,
        eval=[],
        lora=8,
        learning_rate=2e-3,
        warmup_steps=0,
    )
    struck = False
    until = time.monotonic() + 240
    while r.state in ("starting", "running") and time.monotonic() < until:
        status = r.status
        if not struck and status and status.version >= 2:
            engine = status.workers["generator-1"]
            os.kill(engine, signal.SIGSTOP)  # it finishes nothing any more
            time.sleep(0.5)  # in which what it had finished is read
            struck = in_flight(r, "generator-1") > 0
            os.kill(engine, signal.SIGKILL if struck else signal.SIGCONT)
        time.sleep(0.2)
    status = r.status
    assert struck, "the first engine was never seen with something to finish"
    assert status.state == "finished" and status.version == 12 and status.books_closed, status.reason
    events = read_table(r.folder, "events")
    wrote = {json.loads(f)["actor"] for f in events.filter(pl.col("kind") == "Generate")["fields"]}
    assert wrote == {"generator-1", "generator-2"}
    assert (events["kind"] == "Lost").sum() == 1 and (events["kind"] == "Start").sum() == 1
    trained = r.rollouts.filter(pl.col("fate") == "trained")
    assert (trained["newest"] > trained["oldest"]).any(), "no response was in flight when weights came"
    assert "lost_generator" in status.books and r.steps["lag_token"].max() > 0
    fresh = r.steps.filter(pl.col("lag_max") == 0)
    assert len(fresh) and (fresh["logprob_diff_max"] < 2e-3).all(), "what is served is not what is trained"
    assert (r.steps["update_norm"] > 0).all()


def test_the_control_stays_at_rounding_under_top_p(tmp_path):
    "vLLM hands over the tokens that top_p left, and the trainer divides by the same ones."
    done = bench_mismatch(tmp_path, 3, ("vllm",), {"control": ARMS["control"] | {"batch": 64}}, top_p=0.8)
    assert done.arms[0].worst < 1e-3 and done.control_mean_diff["vllm"] < 1e-5

"""Runs of ours whose weights lie on a training service, and the run folders that the service keeps of its tenants."""

import numpy as np
import polars as pl
import pytest
from patience import until
from typer.testing import CliRunner

import rlbench as rl
from rlbench.base.status import read_status
from rlbench.bench.training_service import LoopRecipe, TenantLoop
from rlbench.cli.main import make_app
from rlbench.service.service_replay import replay_tenant
from rlbench.service.tinker_service import serve_tinker

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
KEYS = "[alice]\n[bob]\n"
PRICES = {"prefill_price": 1.0, "sample_price": 2.0, "train_price": 3.0}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    "The folder of all runs of this file."
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def service(runs):
    "A service with two tenants and a price list."
    (runs / "keys.toml").write_text(KEYS)
    with serve_tinker("tiny", runs=runs, name="shared", keys=runs / "keys.toml", **PRICES) as started:
        yield started


@pytest.fixture
def away(service, monkeypatch):
    "The fields of a run whose weights lie on the service."
    monkeypatch.setenv("SERVICE_KEY", service.keys["alice"])
    server = {"base_url": service.url, "key": "$SERVICE_KEY", "rank": 4, "unembed": False, **PRICES}
    small = {"batch": 32, "group": 8, "preflight": 0, "eval": [{"count": 16, "every": 3}], "max_tokens": 32}
    return {"generator": "tinker", "trainer": "tinker", "tinker": server, "filter": "none", "staleness": 1, **small}


def test_a_run_trains_on_the_service_and_goes_on_from_its_checkpoint(runs, away):
    "Steps, staleness, bill and books are those of any run; the weights are paths on the server, also in a checkpoint."
    first = rl.run("tiny", name="away", runs=runs, steps=3, checkpoint_every=2, learning_rate=1e-3, **away)
    first.wait(timeout=200)
    assert first.status.state == "finished", first.status.reason
    steps = first.steps
    assert steps["version"].to_list() == [1, 2, 3] and first.status.books_closed
    assert steps["lag_max"].max() <= 1 and steps["kl_sampler"].abs().max() < 0.1
    assert steps["charged_tokens"].min() > steps["trained_tokens"].min() > 0
    assert steps["dollars"].is_sorted() and steps["dollars"][0] > 0
    assert not (runs / "away" / "policy" / "model.safetensors").exists()
    assert "tinker://" in (runs / "away" / "policy" / "tinker.json").read_text()
    with pytest.raises(ValueError, match="policy/tinker.json"):
        from rlbench.loop.config import check_has_policy

        check_has_policy(first.config, "away", "to export")

    first.resume(steps=4)  # from the newest checkpoint: its weights and its optimizer lie on the server
    first.wait(timeout=200)
    assert first.status.state == "finished", first.status.reason
    assert first.steps["version"].to_list()[-1] == 4 and first.steps["version"].is_sorted()
    assert first.status.books_closed and first.steps["attempt"].max() == 1

    second = first.fork(at=2, name="away-fork", steps=4)
    second.wait(timeout=200)
    assert second.status.state == "finished", second.status.reason
    assert second.steps["version"].to_list()[-1] == 4 and second.status.books_closed


def test_what_the_server_refuses_is_said_before_a_run_starts(runs, service, away, monkeypatch):
    "A wrong key and an unknown model are refused in a sentence, and no folder is made."
    with pytest.raises(ValueError, match="tinker.base_model: the server does not serve 'huge'"):
        rl.run("tiny", name="never", runs=runs, **{**away, "tinker": {**away["tinker"], "base_model": "huge"}})
    monkeypatch.setenv("SERVICE_KEY", "tml-somebody-elses")
    with pytest.raises(ConnectionError, match="tinker.key: the server at .* does not take it"):
        rl.run("tiny", name="never", runs=runs, **away)
    assert not (runs / "never").exists()


def test_a_tenants_loop_is_a_live_run(runs, service):
    """The books of somebody else's loop: verdicts from its advantages, no staleness, no mismatch,
    every token with a fate."""
    loop = TenantLoop(service.url, service.keys["bob"], LoopRecipe("importance_sampling", 1, False, 4, 1e-3, 0))
    rates = [loop.train_batch() for _ in range(2)]
    run = rl.attach("bob", runs=runs)
    until(lambda: len(run.steps) == 2, 60)
    steps = run.steps
    assert run.state == "running"
    assert steps["lag_max"].to_list() == [0, 0] and steps["logprob_diff_max"].max() < 1e-3
    assert steps["dollars"].is_sorted() and steps["grad_norm"].min() > 0
    trained = run.rollouts.filter(pl.col("fate") == "trained")
    assert set(trained["correct"].to_list()) == {True, False} and trained["prompt"].str.contains("=").all()
    assert all(0.0 < rate < 1.0 for rate in steps["solve_rate"]) and np.isfinite(rates).all()

    run.set(learning_rate=1e-4, author="somebody")
    asked = pl.col("author") == "somebody"
    until(lambda: len(run.commands.filter(asked)), 30)
    refused = run.commands.filter(asked)
    assert refused["status"].to_list() == ["refused"] and "client" in refused["reason"][0]
    assert "client" in str(run.why()) and run.why().limit in ("client", "sampling", "training") and not run.why().knobs
    card = CliRunner().invoke(make_app(), ["card", "bob", str(trained["rollout"][0]), "--runs", str(runs)])
    assert card.exit_code == 0 and "loss cispo" in card.stdout and "old = sampler" in card.stdout
    for verb in (["resume"], ["fork"], ["eval"], ["sample", "1+1="], ["knobs"], ["digest"]):
        said = CliRunner().invoke(make_app(), [verb[0], "bob", *verb[1:], "--runs", str(runs)])
        assert said.exit_code == 2, (verb, said.output)
        assert "the loop of tenant 'bob' of the service 'shared'" in said.stderr
    listed = CliRunner().invoke(make_app(), ["ls", "--runs", str(runs)]).stdout
    shown = CliRunner().invoke(make_app(), ["show", "bob", "--runs", str(runs)])
    assert shown.exit_code == 0 and "bob of the service shared" in shown.stdout
    assert "1000000" not in listed + shown.stdout
    loop.service.close("success").result()


def test_a_tenants_training_is_done_again_from_its_journal(runs, service):
    """Two batches of the loop above, then a state: the adapter of the replay has the same digest,
    also on the command line."""
    loop = TenantLoop(service.url, service.keys["bob"], LoopRecipe("ppo", 2, True, 4, 1e-3, 3))
    for _ in range(2):
        loop.train_batch()
    loop.client.save_state("final").result()
    replayed = replay_tenant(runs / "bob")
    assert replayed.equal and len(replayed.saves) >= 3, str(replayed)
    assert CliRunner().invoke(make_app(), ["replay", "bob", "--runs", str(runs)]).exit_code == 0
    loop.service.close("success").result()


def test_the_books_of_all_tenants_close_with_the_service(runs, service):
    "After the service stops, every sampled token of both tenants stands under one fate."
    service.stop()
    for tenant in ("alice", "bob"):
        status = until(lambda tenant=tenant: read_status(runs / tenant), 10)
        assert status.state == "stopped" and status.books_closed, (tenant, status)
        assert sum(entry["tokens"] for entry in status.books.values()) == status.tokens

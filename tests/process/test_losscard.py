"""Loss cards: a real run's losses taken apart and added up again, the group to check by hand,
words for every way to be 0, text of 100 columns, pages in light and dark."""

import json
import math
import re
import time
from html.parser import HTMLParser

import numpy as np
import polars as pl
import pytest
from inline import inline_run
from patience import until
from typer.testing import CliRunner

from rlbench.base.ledger import Ledger
from rlbench.base.ledger_reading import read_table
from rlbench.base.run_files import create_run_folder
from rlbench.cli.main import app
from rlbench.objective.loss import LossTerms
from rlbench.views import loss_batch
from rlbench.views.loss_batch import read_batch, read_waiting, settings_at
from rlbench.views.loss_card import CardComparison, loss_card, loss_cards, make_card
from rlbench.views.loss_card_html import framed_loss_card
from rlbench.views.loss_recipe import recipe_of, swap_parts
from rlbench.views.loss_terms import batch_loss, loss_sheets
from rlbench.views.loss_view import LossView
from rlbench.views.loss_words import why_zero
from rlbench.views.rollout_browser import browse
from rlbench.views.stored_rollout import read_rollout
from rlbench.workbench.handle import attach, run

RATIOS = ((1.5, 0.9), (0.7, 1, 1.2), (1.1,), (0.5, 1, 2, 1))
MISMATCH = ((1, 3), (0.4, 1, 1), (1,), (1, 1, 0.1, 6))
REFERENCE = ((1, 0.8), (1.25, 1, 1), (1,), (1, 1, 1, 1))
ONES = tuple((1.0,) * len(r) for r in RATIOS)
SMALL = {"steps": 3, "group": 4, "batch": 16, "staleness": 1, "clock": "virtual", "preflight": 0, "eval": ()}


def golden(
    root,
    name="golden",
    settings="",
    rewards=(1.0, 0.0, 0.0, 0.0),
    ratios=RATIOS,
    mismatch=MISMATCH,
    learning_rate=1e-3,
    masked=(),
    fate="trained",
    stored=None,
    **row,
):
    "Four rollouts of one group, every log-probability chosen."
    folder = create_run_folder(root, name)
    (folder / "config.toml").write_text(
        'model = "tiny"\ngroup = 4\nbatch = 4\nadvantage = "dr_grpo"\nloss = {name = "ppo", low = 0.2, high = 0.2}\n'
        + settings
    )
    ledger, trained = Ledger(folder, 0), fate == "trained"
    known = [r for r in rewards if r is not None]
    for i, (rho, c, ref, reward) in enumerate(zip(ratios, mismatch, REFERENCE, rewards)):
        n, key = len(rho), {"at": 1.0, "rollout": i, "try": 0}
        ledger.append(
            "rollouts",
            **key,
            **{
                "group": 0,
                "k": i,
                "task": "t",
                "set": "s",
                "level": 1,
                "fate": fate,
                "reason": "stop",
                "outcome": "ok",
                "correct": bool(reward),
                "reward": reward,
                "length": n,
                "turns": 1,
                "oldest": 2,
                "newest": 2,
                "trained_at": 3 if trained else -1,
                "temperature": 1.0,
                "prompt": "1+1=",
                "text": "<b>&",
                "answer": "2",
            }
            | row,
        )
        advantage = reward - float(np.mean(known)) if stored is None and reward is not None else stored
        told = {
            "advantage": advantage,
            "start_logprobs": [math.log(0.5)] * n,
            "step_logprobs": [math.log(0.5 * x) for x in rho],
            "reference": [math.log(0.5 * x * y) for x, y in zip(rho, ref)],
        }
        ledger.append(
            "tokens",
            **key,
            prompt_tokens=[3, 4],
            tokens=list(range(5, 5 + n)),
            logprobs=[math.log(0.5 / x) for x in c],
            versions=[2] * n,
            mask=[int(i not in masked)] * n,
            **(told if trained else {}),
        )
    ledger.append(
        "steps",
        at=1.0,
        version=3,
        loss=0.065,
        learning_rate=learning_rate,
        kl_weight=0.0,
        entropy_weight=0.0,
        replayed_rollouts=0,
    )
    ledger.close()
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return golden(tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two real runs of the tiny policy: one optimizer step a batch, and two with a large learning rate under another
    objective."""
    place = tmp_path_factory.mktemp("runs")
    plain = run("tiny", runs=place, name="plain", **SMALL)
    assert plain.wait(200) == "finished", (plain.folder / "run.log").read_text()
    steps = run(
        "tiny",
        runs=place,
        name="steps",
        **SMALL,
        optimizer_steps=2,
        learning_rate=3e-3,
        loss="cispo",
        correction="tis",
        aggregation="sequence_mean",
    )
    assert steps.wait(200) == "finished", (steps.folder / "run.log").read_text()
    return place


@pytest.mark.parametrize("name", ["plain", "steps"])
def test_the_terms_of_a_real_run_add_up_to_its_losses(runs, name):
    """The strongest check there is: read from disk, laid out, evaluated and added up,
    every batch gives the loss that the trainer logged."""
    r = attach(name, runs=runs)
    for version, logged in r.steps.select("version", "loss").iter_rows():
        mine = r.rollouts.filter(pl.col("trained_at") == version)
        batch = read_batch(r.folder, mine["rollout"][0])
        assert batch_loss(batch) == pytest.approx(logged, abs=1e-5), version
        found = loss_sheets(batch, recipe_of(batch))
        assert len(found) == (1 if name == "plain" else 2) and sum(len(s.arrays) for s in found) == len(mine)
        assert (
            sum(s.totals.tokens for s in found) == r.steps.filter(pl.col("version") == version)["trained_tokens"].item()
        )
        whole = loss_cards(r.folder, mine, policy=False)
        assert sum(c.loss for c in whole.cards) / len(found) == pytest.approx(logged, abs=1e-5)
        again = swap_parts(
            recipe_of(batch), batch, advantage=batch.config.advantage
        )  # computed from the rewards once more
        assert not again.stored_advantages and batch_loss(batch, again) == pytest.approx(logged, abs=1e-5)
    ratios = np.concatenate([s.ratio_RT[s.arrays.mask_RT] for s in found])
    assert (ratios == 1).all() if name == "plain" else (found[1].ratio_RT[found[1].arrays.mask_RT] != 1).any()


def test_the_saved_policy_computes_what_was_not_stored(runs):
    r = attach("plain", runs=runs)
    last = r.steps["version"].max()
    rollout = r.rollouts.filter(pl.col("trained_at") == last)["rollout"][0]
    before, now = r.rollout(rollout).card(), r.rollout(rollout).card(policy=True)
    a, b = before.frame["step"].to_numpy(), now.frame["step"].to_numpy()
    assert now.batch.policy == "the saved policy" and 0 < np.abs(a - b).max() < 2 and "computed now" in now.text()


def test_a_card_can_be_asked_for_in_every_way(runs):
    r = attach("plain", runs=runs)
    rollout = r.rollouts.filter(pl.col("fate") == "trained")["rollout"][0]
    assert r.rollout(rollout).card(loss="gspo").frame.equals(loss_card(r.folder, rollout, loss="gspo").frame)
    cards = r.cards([rollout], loss=["ppo", "cispo"])
    assert cards.summary["objective"].to_list() == ["ppo", "cispo"] and len(cards.text().splitlines()) == 3
    assert max(map(len, cards.text().splitlines())) <= 100
    b = browse(r.folder, fate="trained")
    b.parts.loss.selected_index = 0
    assert b.loss.note.value == "" and b.loss.rollout == b.parts.found.value[0] and "lc-strip" in b.loss.view.value
    b.parts.down.click()
    assert b.loss.rollout == b.parts.found.value[0]


@pytest.mark.parametrize(
    "swapped, loss",
    [
        ({}, 0.065),
        ({"aggregation": "sequence_mean"}, 0.009375),
        ({"aggregation": {"name": "constant", "length": 4}}, 0.040625),
        ({"aggregation": "sequence_sum"}, 0.1625),
        ({"loss": {"name": "ppo", "low": 0.2, "high": 0.28}}, 0.059),
        ({"loss": {"name": "two_sided", "delta": 1.4}}, 0.05),
        ({"loss": {"name": "cispo", "low": 0.2, "high": 0.28}}, -0.050957),
        ({"correction": "tis"}, -0.0345),
        ({"correction": {"name": "icepop", "high": 2.0}}, 0.0375),
        ({"loss": "gspo", "aggregation": "sequence_mean"}, 0.00615625),
        ({"kl": "k3", "kl_weight": 1.0}, 0.065 + 0.005),
        ({"kl": "k1", "kl_weight": 1.0}, 0.065),
        ({"advantage": "dr_grpo"}, 0.065),
    ],
)
def test_the_group_to_check_by_hand(folder, swapped, loss):
    card = loss_card(folder, 0, **swapped)
    assert card.sheet.loss == pytest.approx(loss, abs=2e-6)
    cards = [make_card(card.batch, i, card.recipe) for i in range(4)]
    assert sum(c.loss for c in cards) == pytest.approx(loss, abs=2e-6)


def test_the_gradient_is_that_of_the_loss(folder):
    "By hand for PPO with token mean: -A rho / 10 inside the bounds, 0 outside; for CISPO the capped ratio and no zero."
    for i, (advantage, ratios) in enumerate(zip((0.75, -0.25, -0.25, -0.25), RATIOS)):
        ppo = [0.0 if advantage > 0 and x > 1.2 or advantage < 0 and x < 0.8 else -advantage * x / 10 for x in ratios]
        assert np.allclose(loss_card(folder, i).frame["gradient"], ppo, atol=1e-7)
        cispo = [-advantage * min(max(x, 0.8), 1.28) / 10 for x in ratios]
        assert np.allclose(
            loss_card(folder, i, loss={"name": "cispo", "low": 0.2, "high": 0.28}).frame["gradient"], cispo, atol=1e-7
        )


@pytest.mark.parametrize(
    "rollout, changes, tokens",
    [
        (0, {"loss": {"name": "cispo", "low": 0.2, "high": 0.28}}, [1]),
        (1, {"loss": {"name": "cispo", "low": 0.2, "high": 0.28}}, [1]),
        (3, {"loss": {"name": "cispo", "low": 0.2, "high": 0.28}}, [1, 3]),
        (2, {"loss": {"name": "cispo", "low": 0.2, "high": 0.28}}, []),
        (0, {"loss": {"name": "ppo", "low": 0.2, "high": 0.6}}, [1]),
        (0, {"correction": "tis"}, [2]),
        (1, {"correction": "tis"}, []),
        (3, {"correction": "tis"}, [3, 4]),
        (1, {"aggregation": "sequence_sum"}, [2, 3]),
        (0, {"old": "sampler"}, [2]),
    ],
)
def test_a_swapped_part_changes_the_tokens_it_should(folder, rollout, changes, tokens):
    compared = loss_card(folder, rollout).compare(**changes)
    assert compared.changed["position"].to_list() == tokens
    assert ("no token changes" in repr(compared)) == (not tokens)


def test_a_factor_is_said_as_one(folder):
    assert "every gradient times 2" in repr(loss_card(folder, 2).compare(advantage="grpo"))


def zero(place, **made):
    changes = made.pop("changes", {})
    return why_zero(loss_card(golden(place, "zero", **made), made.pop("rollout", 2), **changes))


@pytest.mark.parametrize(
    "made, words",
    [
        ({"rewards": (1.0,) * 4}, "advantage 0: the group's 4 rewards are all 1"),
        ({"rewards": (0.0,) * 4, "fate": "filtered"}, "never trained on: its fate is filtered"),
        ({"rewards": (1.0, 0.0, None, 0.0), "fate": "stale"}, "it has no reward (fate stale)"),
        ({"masked": (2,)}, "none of its 1 token carries weight"),
        (
            {"fate": "stale", "reason": "length", "settings": 'shaping = "mask_truncated"\n'},
            "cut off at the length limit",
        ),
        ({"learning_rate": 0.0}, "the learning rate of version 3 was 0"),
        (
            {"mismatch": ((1, 1), (1, 1, 1), (9,), (1, 1, 1, 1)), "changes": {"correction": "icepop"}},
            "gives all 1 token weight 0",
        ),
        ({"ratios": (*RATIOS[:2], (0.5,), RATIOS[3])}, "all 1 token clipped low"),
        (
            {"ratios": ONES, "mismatch": ONES, "changes": {"aggregation": "sequence_mean"}},
            "the batch's loss is 0 and the gradient is not: every ratio is exactly 1",
        ),
        ({"ratios": ONES, "mismatch": ONES}, "every ratio is exactly 1 (one optimizer step per batch)"),
        ({"changes": {"kl": "k3", "kl_weight": 0.0}}, "has weight 0 in this batch"),
    ],
)
def test_why_it_is_zero(tmp_path, made, words):
    assert words in zero(tmp_path, **made)


def test_an_aggregation_may_give_nothing(tmp_path):
    def nothing(mask_RT, totals):
        return mask_RT * 0.0

    assert "the aggregation (nothing) gives all 1 token weight 0" in why_zero(
        loss_card(golden(tmp_path), 2, aggregation=nothing)
    )


def test_a_function_of_a_cell_is_a_loss(folder):
    def signs(logprobs_RT, old_RT, advantages_RT):
        never_RT = advantages_RT.isnan()
        return LossTerms(-advantages_RT.sign() * logprobs_RT, never_RT, never_RT)

    def broken(logprobs_RT, old_RT, advantages_RT):
        return LossTerms(-advantages_RT * logprobs_RT.detach(), advantages_RT.isnan(), advantages_RT.isnan())

    assert np.allclose(loss_card(folder, 0, loss=signs).frame["gradient"], -0.1)
    with pytest.raises(ValueError, match="does not depend on the log-probabilities"):
        loss_card(folder, 0, loss=broken)


@pytest.mark.parametrize(
    "asked, error",
    [
        ({"rollout": 77}, "has not ended"),
        ({"loss": "gspoo"}, "did you mean 'gspo'"),
        ({"loss": {"name": "ppo", "high": 99.0}}, "outside"),
        ({"los": "ppo"}, "unknown name 'los'"),
        ({"old": "new"}, "not one of"),
        ({"advantage": "gae"}, "critic = true"),
        ({"advantage": {"name": "distill", "bound": 3.0}}, "a teacher's log-probabilities"),
        ({"policy": True}, "no saved policy and no checkpoint"),
    ],
)
def test_what_cannot_be_is_said(folder, asked, error):
    with pytest.raises((ValueError, RuntimeError), match=error):
        loss_card(folder, **{"rollout": 0} | asked)


def test_an_evaluation_has_no_card(tmp_path):
    with pytest.raises(ValueError, match="belongs to an evaluation"):
        loss_card(golden(tmp_path, fate="evaluated", group=-1), 0)


def test_an_evaluation_names_a_rollout_that_has_one(tmp_path):
    made = golden(tmp_path)
    ledger = Ledger(made, 1)
    ledger.append("rollouts", at=1.0, rollout=9, **{"try": 0}, group=-1, fate="evaluated", trained_at=-1)
    ledger.close()
    with pytest.raises(ValueError, match="such as 0"):
        loss_card(made, 9)


def test_at_ratio_one_it_is_said_that_no_bound_acts(tmp_path):
    fresh = loss_card(golden(tmp_path, ratios=ONES, mismatch=ONES), 0)
    assert repr(fresh.compare(loss="cispo")).endswith(
        "no token changes; every ratio is 1 (one optimizer step per batch), where bounds do not act)"
    )
    assert (
        "every ratio" not in repr(fresh.compare(kl="k3", kl_weight=0.0))
        and "; the other: cispo" in fresh.compare(loss="cispo").text()
    )


def test_an_objective_that_a_run_refuses_is_shown_and_named(folder):
    refused = loss_card(folder, 0, old="sampler", correction="tis")
    assert (
        "A run refuses this objective: old" in refused.text()
        and "A run refuses" not in refused.swap(correction="veto").text()
    )


@pytest.mark.parametrize(("advantage", "whose"), [("grpo", "a group"), ("gae", "the batch")])
def test_whose_advantages_add_up(tmp_path, advantage, whose):
    settings = "critic = true\n" if advantage == "gae" else ""
    made = golden(tmp_path, ratios=ONES, mismatch=ONES, settings=settings)
    config = made / "config.toml"
    config.write_text(config.read_text().replace("dr_grpo", advantage))
    assert f"advantages of {whose} add up to 0" in why_zero(loss_card(made, 0, aggregation="sequence_mean"))


def test_settings_are_those_of_the_batch(tmp_path):
    made = golden(tmp_path)
    ledger = Ledger(made, 1)
    ledger.append("commands", at=1.0, knob="loss.high", value="0.6", over=4, status="applied", version=2)
    ledger.append("commands", at=1.0, knob="loss", value='{"name": "cispo"}', over=0, status="applied", version=8)
    ledger.append("commands", at=1.0, knob="loss", value='"gspo"', over=0, status="refused", version=9)
    ledger.append("commands", at=1.0, knob="temperature", value="0.7", over=0, status="applied", version=1)
    ledger.close()
    high = [settings_at(made, v).loss.get("high") for v in (1, 2, 3, 4, 5, 7, 8)]
    assert (
        np.allclose(high, (0.2, 0.2, 0.2, 0.3, 0.4, 0.6, 0.6))
        and settings_at(made, 9).loss["name"] == settings_at(made, 20).loss["name"] == "cispo"
    )


def test_text_fits_a_terminal(folder):
    for words in (
        loss_card(folder, 3).text(),
        loss_card(folder, 0, kl="k3", kl_weight=0.1).text(),
        loss_card(folder, 3).compare(loss="cispo", correction="tis").text(),
        loss_card(folder, 3).text(most=2),
    ):
        assert max(map(len, words.splitlines())) <= 100, words
    assert "... 2 more" in words


def test_the_command_line_says_the_same(folder):
    told = CliRunner().invoke(app, ["card", str(folder), "3", "--loss", "gspo", "--set", "aggregation=sequence_mean"])
    assert (
        told.exit_code == 0
        and "loss gspo (low 0.0003, high 0.0004)" in told.stdout
        and max(map(len, told.stdout.splitlines())) <= 100
    )
    told = CliRunner().invoke(app, ["card", str(folder), "0", "--against", "cispo:low=0.2,high=0.28", "--json"])
    row = json.loads(told.stdout.splitlines()[-1])
    assert [t["changed"] for t in row["tokens"]] == [True, False] and "1 of 2 tokens change" in row["words"]
    for loss, words in (
        ("gspoo", "did you mean"),
        ("my.py:plain", '--loss: .* write {name = "plain", source = "my.py"}'),
        ("ppo:high", "--loss: 'ppo:high' is not NAME"),
    ):
        refused = CliRunner().invoke(app, ["card", str(folder), "0", "--loss", loss])
        assert refused.exit_code == 2 and re.search(words, refused.stderr), refused.stderr


def test_a_loss_of_a_file_on_the_command_line(folder, tmp_path):
    mine = tmp_path / "my.py"
    mine.write_text(
        "from rlbench.knobs import Knob\n"
        "from rlbench.objective.loss import LossTerms\n"
        "\n"
        "def plain(logprobs_RT, old_RT, advantages_RT, scale: Knob(0, 9) = 1.0, shift=0.0):\n"
        "    never_RT = logprobs_RT > 0\n"
        "    return LossTerms(-scale * advantages_RT * logprobs_RT, never_RT, never_RT)\n"
    )
    told = CliRunner().invoke(
        app, ["card", str(folder), "0", "--loss", f'{{name = "plain", source = "{mine}", scale = 2.0}}', "--json"]
    )
    assert np.allclose([t["gradient"] for t in json.loads(told.stdout.splitlines()[-1])["tokens"]], -0.15)
    with pytest.raises(ValueError, match="a parameter without a Knob.*annotate it, as in shift: Knob"):
        loss_card(folder, 0, loss={"name": "plain", "source": str(mine), "shift": 1.0})


class Nested(HTMLParser):
    "Fails where tags do not nest; keeps the classes it saw."

    def __init__(self, page):
        super().__init__()
        self.open, self.classes = [], set()
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.classes |= set((dict(attrs).get("class") or "").split())

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_pages_nest_and_know_both_themes(folder):
    card = loss_card(folder, 3)
    for page in (
        card._repr_html_(),
        card.compare(loss="cispo")._repr_html_(),
        loss_cards(folder, range(4), loss=["ppo", "gspo"])._repr_html_(),
        loss_card(folder, 0, correction={"name": "icepop", "high": 2.0})._repr_html_(),
    ):
        assert {"rl-lc"} <= Nested(page).classes and '[data-jp-theme-light="false"]' in page and "<script" not in page
    assert {"u4", "k", "m", "x", "lc-strip"} <= Nested(framed_loss_card(card._repr_html_())).classes and "d5" in Nested(
        card._repr_html_()
    ).classes


def test_the_view_answers_fast_and_says_what_is_wrong(runs):
    r = attach("plain", runs=runs)
    mine = r.rollouts.filter(pl.col("fate") == "trained")["rollout"]
    view = LossView(r.folder, mine[0])
    took = []
    for loss in ("cispo", "gspo", "two_sided"):
        began = time.perf_counter()
        view.menus["loss"].value = loss
        took.append(time.perf_counter() - began)
    assert min(took) < 0.2 and view.note.value == "", took
    assert isinstance(view.card.compare(loss="ppo"), CardComparison)
    view.show_rollout(mine[1])
    assert view.menus["loss"].value == "two_sided" and view.card.rollout == mine[1]
    view.show_rollout_or_reason(10**6)
    assert "has not ended" in view.note.value and view.view.value == ""


def test_what_waits_is_read_from_the_checkpoint(tmp_path, monkeypatch):
    "A run that is held and saved: what waits in its queue has cards, under the sampler's log-probabilities."
    r = run(
        "tiny",
        runs=tmp_path,
        name="queue",
        steps=200,
        group=4,
        batch=16,
        staleness=2,
        preflight=0,
        eval=(),
        learning_rate=1e-5,
    )
    try:
        until(lambda: r.status and r.status.version >= 1)
        for _ in range(6):
            r.pause()
            until(lambda: r.state == "paused")
            saved = set(r.checkpoints)
            r.checkpoint()
            until(lambda: set(r.checkpoints) - saved)
            if found := read_waiting(r.folder):
                break
            version = r.status.version
            r.go()
            until(lambda: r.status.version > version)
        assert found, (r.folder / "run.log").read_text()
        looks = [found]
        monkeypatch.setattr(
            loss_batch, "read_waiting", lambda folder: looks.pop()
        )  # at the next look it would be another queue
        cards = r.cards("queue", loss=["ppo", "cispo"])
        assert {c.rollout for c in cards.cards} == {m.rollout.id for m in found} and {
            c.batch.place for c in cards.cards
        } == {"queue"}
        seen = [c for c in cards.cards if c.row is not None]
        assert seen and all(
            (c.sheet.ratio_RT[c.sheet.arrays.mask_RT] == 1).all() and "waits in the queue" in c.text() for c in seen
        )
    finally:
        r.stop()
        r.wait(400)


def test_a_name_that_is_no_queue_is_refused(folder):
    with pytest.raises(
        ValueError, match="rollouts: 'queu' names none; give ids, a frame with a column 'rollout', or 'queue'"
    ):
        loss_cards(folder, "queu")


def test_read_rollout_hands_out_its_card(folder):
    assert read_rollout(folder, 1).card(loss="gspo").rollout == 1


def test_tokens_without_weight_have_no_log_probability_of_training(tmp_path):
    "Of a partial rollout whose older tokens are masked: the row is written, and its card can be read."
    from straggler_runs import REAL

    virtual = {
        "generator": "torch",
        "steps": 2,
        "concurrency": 32,
        "staleness": 0,
        "stragglers": "partial",
        "old_tokens": "mask",
        "oversample": 1.0,
    }
    folder = inline_run(tmp_path, "run", REAL | virtual).folder
    rows = read_table(folder, "tokens", ["rollout", "mask", "start_logprobs"]).drop_nulls("start_logprobs")
    mixed = [row for row in rows.iter_rows(named=True) if not all(row["mask"])]
    assert mixed and all(
        [math.isnan(x) for x in row["start_logprobs"]] == [not m for m in row["mask"]] for row in mixed
    )
    card = loss_card(folder, mixed[0]["rollout"])
    assert card.frame["gradient"].is_null().sum() == mixed[0]["mask"].count(0)

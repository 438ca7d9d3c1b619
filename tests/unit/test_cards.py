"""What a panel shows, against run folders: read bit by bit or at once, long histories, damaged and empty ones;
the frame stays small and well formed."""

import re
from dataclasses import replace
from html import unescape
from xml.etree import ElementTree

import numpy as np
import polars as pl
import pytest
from fake_run import eval_rows, fake_run, rollout_row, step_row
from inline import inline_run

from rlbench.base.charts import to_svg
from rlbench.base.ledger import Ledger
from rlbench.base.ledger_reading import read_table
from rlbench.base.run_charts import solve_rate_chart
from rlbench.runtime.live_view import COMMANDS, RECENT, ROLLOUTS, LiveView
from rlbench.views.card_html import card_style_html, run_card_html, state_strip_html, still_cards_html
from rlbench.views.cards import CARDS, no_note
from rlbench.views.light import run_light

LONG = 100_000


def same(a, b) -> None:
    "Two snapshots show the same."
    assert a.seen == b.seen and a.version == b.version and a.batch == b.batch and a.lags.tolist() == b.lags.tolist()
    for mine, other in ((a.steps, b.steps), (a.low, b.low), (a.high, b.high), (a.recent, b.recent)):
        assert list(mine) == list(other)
        for name in mine:
            np.testing.assert_allclose(mine[name], other[name], rtol=1e-9, atol=1e-12)
    for mine, other in ((a.evals, b.evals), (a.commands, b.commands), (a.groups, b.groups), (a.rollouts, b.rollouts)):
        assert mine.equals(other)
    at = max(a.now, b.now)
    a, b = replace(a, now=at), replace(b, now=at)
    assert still_cards_html(a, run_light(a)) == still_cards_html(b, run_light(b))


def written(ledger: Ledger, versions: range, rng: np.random.Generator) -> None:
    "Batches of 16 rollouts with their tokens, an evaluation every 20, a command every 30."
    for v in versions:
        learned = 1 - np.exp(-v / 40)
        ledger.append("steps", **step_row(v, learned, rng, 1.5))
        for i in range(16 * v, 16 * v + 16):
            row = rollout_row(i, v, learned, rng, 1.5) | {"part_names": ["correct"], "part_values": [0.5]}
            ledger.append("rollouts", **row)
            ledger.append(
                "tokens",
                at=1.5 * v,
                rollout=i,
                **{"try": 0},
                prompt_tokens=[1],
                tokens=[5] * 9,
                logprobs=[-0.1] * 9,
                versions=[max(0, v - 2)] * 4 + [v - 1] * 5,
                mask=[1] * 9,
            )
        ledger.append("groups", at=1.5 * v, group=v, fate="trained" if v % 5 else "filtered", size=16, tokens=300)
        if v % 30 == 0:
            ledger.append(
                "commands",
                at=1.5 * v,
                command=str(v),
                author="ada",
                knob="temperature",
                value="0.9",
                over=v % 20,
                status="applied",
                version=v,
            )
        if v % 20 == 0:
            ledger.extend("evals", eval_rows(v, 20, 1.5)[-1:])


@pytest.mark.slow
def test_bit_by_bit_shows_the_same_as_at_once(tmp_path):
    """A view that was there from the beginning, while segments were sealed under it,
    and one that comes late agree in every figure and in the frame's text."""
    folder, rng = fake_run(tmp_path, batches=0, state="running", closed=False, evals=False), np.random.default_rng(1)
    ledger, view, cuts = Ledger(folder, 0, seal_rows=700), LiveView(folder), [1, 2, 3, 40, 41, 300, 301, 640]
    for a, b in zip([0, *cuts], cuts):
        written(ledger, range(a + 1, b + 1), rng)
        ledger.flush()
        snapshot = view.poll()
        assert snapshot.version == b
        same(snapshot, LiveView(folder).poll())
    assert len(list(folder.glob("ledger/rollouts/*.parquet"))) > 1
    same(view.poll(), snapshot)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    "A history of 100,000 steps in sealed segments, and more rollouts than a view keeps."
    folder, rng = (
        fake_run(tmp_path_factory.mktemp("runs"), "long", batches=0, planned=2 * LONG, state="running", closed=False),
        np.random.default_rng(0),
    )
    ledger, some = Ledger(folder, 0), [step_row(v, 1 - np.exp(-v / 900), rng, 1.5) for v in range(1, 2001)]
    for v in range(1, LONG + 1):
        ledger.append(
            "steps", **some[v % 2000] | {"version": v, "at": 1.5 * v, "optimizer_steps": v, "generated_tokens": 1000}
        )
        if v % 4096 == 0:
            ledger.flush()
    ledger.extend("evals", eval_rows(LONG, 20, 1.5))
    ledger.extend(
        "commands",
        [
            {
                "at": 1500.0 * i,
                "command": str(i),
                "author": "ada",
                "knob": "temperature",
                "value": "0.9",
                "over": 0,
                "status": "applied",
                "version": 100 * i,
            }
            for i in range(1, 1000)
        ],
    )
    for i in range(ROLLOUTS + 5000):
        v = LONG - (ROLLOUTS + 5000) // 256 + i // 256
        ledger.append("rollouts", **rollout_row(i, v, 0.9, rng, 1.5) | {"trained_at": v})
        ledger.append(
            "tokens",
            at=1.5 * v,
            rollout=i,
            **{"try": 0},
            tokens=[5] * 9,
            versions=[v - 2] * 4 + [v - 1] * 5,
            mask=[1] * 9,
        )
    ledger.close()
    return folder


@pytest.mark.slow
def test_a_long_history_is_kept_thin_and_drawn_small(long_run):
    "What is kept and what is sent do not grow with the history: 240 bins, a few hundred commands, 45 kB."
    view = LiveView(long_run)
    snapshot = view.poll()
    assert snapshot.version == LONG and len(list(long_run.glob("ledger/steps/*.parquet"))) > 10
    assert (
        120 < len(snapshot.steps["version"]) <= 240
        and snapshot.steps["version"][-1] == LONG
        and snapshot.steps["tokens_so_far"][-1] == 1000 * LONG
    )
    assert (
        len(snapshot.recent["version"]) == RECENT
        and len(snapshot.commands) == COMMANDS
        and len(snapshot.evals) <= 242
        and snapshot.evals["version"][-1] == LONG
    )
    assert (
        len(view.frames["rollouts"]) == ROLLOUTS
        and len(view.frames["tokens"]) <= 8192
        and snapshot.batch == LONG
        and len(snapshot.ribbons) == 8
    )
    frame = still_cards_html(snapshot, run_light(snapshot))
    assert len(frame.encode()) < 45_000
    assert all(len(run_card_html(key, snapshot)) < 20_000 for key in CARDS)
    same(snapshot, view.poll())


def test_the_spike_of_one_step_is_still_there(long_run):
    "Extremes survive the bins."
    ledger = Ledger(long_run, 0)
    ledger.append("steps", **step_row(LONG + 1, 1.0, np.random.default_rng(0), 1.5) | {"grad_norm": 1e6})
    ledger.close()
    snapshot = LiveView(long_run).poll()
    assert snapshot.high["grad_norm"][-1] == 1e6 and snapshot.version == LONG + 1


def test_filtered_groups_do_not_hide_the_last_batch(tmp_path):
    """The cards of the newest batch keep it while thousands of filtered rollouts follow:
    for who watched it, and for who opens the run later."""
    rng, folder = np.random.default_rng(0), fake_run(tmp_path, "late", batches=0, state="running", closed=False)
    ledger = Ledger(folder, 0)
    batch = [rollout_row(i, 7, 0.5, rng, 1.5) | {"fate": "trained", "trained_at": 7} for i in range(64)]
    filtered = [rollout_row(i, 7, 0.5, rng, 1.5) | {"fate": "filtered", "trained_at": -1} for i in range(64, 9000)]
    watched = LiveView(folder)
    watched.poll()
    for rows in (batch, filtered[:4000], filtered[4000:]):
        ledger.extend("rollouts", rows)
        ledger.extend(
            "tokens",
            [{"at": 10.0, "rollout": row["rollout"], "try": 0, "versions": [5, 6], "mask": [1, 1]} for row in rows],
        )
        ledger.flush()
        seen = [watched.poll(), LiveView(folder).poll()]
        assert [(s.batch, s.lags.tolist(), len(s.ribbons)) for s in seen] == [(7, [64, 64], 8)] * 2
    assert "no batch trained yet" not in run_card_html("ribbons", seen[1])
    ledger.close()


KINDS = {
    "finished": {},
    "live": {"batches": 31, "state": "running", "closed": False},
    "one": {"batches": 1, "planned": 1, "rollouts": 1, "every": 1},
    "nothing": {"batches": 0, "state": "starting", "evals": False, "rollouts": 0},
    "failed": {"batches": 0, "state": "failed", "reason": "trainer: out of <memory> & 'more'", "evals": False},
    "evaluated": {"batches": 0, "state": "running", "closed": False},
}
WORDS = {"finished": "finished", "one": "finished", "nothing": "starting", "failed": "failed"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_is_drawn(kind, tmp_path):
    "Strip and all cards are well formed, named for those who hear them, and load nothing."
    snapshot = LiveView(fake_run(tmp_path, kind, **KINDS[kind])).poll()
    snapshot = replace(snapshot, now=snapshot.alive_at + 1)
    told = run_light(snapshot)
    assert told.word == WORDS.get(kind, told.word) and told.word != "stale"
    frame = (
        f"<div>{card_style_html()}{state_strip_html(snapshot, told)}"
        f"{''.join(run_card_html(key, snapshot) for key in CARDS)}</div>"
    )
    tree = ElementTree.fromstring(re.sub(r"&ensp;", " ", frame.replace("<br>", "<br/>")))
    charts = [svg for svg in tree.iter() if svg.tag.endswith("svg") and svg.get("class") == "rl-chart"]
    assert len(charts) >= 15 and all(svg.get("role") == "img" and len(svg.get("aria-label")) > 10 for svg in charts)
    assert [e.text for e in tree.iter() if e.get("role") == "status"] == [told.word]
    assert not re.search(r"url\(|@import|<script|href=|src=", frame) and "nan" not in frame.lower().replace("nanos", "")


def test_a_folder_that_is_none_and_one_that_is_empty(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder"):
        LiveView(tmp_path / "nowhere")
    view = LiveView(tmp_path)
    assert run_light(view.poll()).word == "starting"
    folder = fake_run(tmp_path, "later", batches=3, state="running")
    (folder / "config.toml").rename(tmp_path / "config.toml")
    (folder / "ledger").rename(tmp_path / "ledger")
    assert view.poll().version == 3 and view.poll().held_out == "held_out"


@pytest.mark.slow
def test_the_last_batch_is_found_behind_a_window_of_filtered_rollouts(tmp_path):
    """Whoever opens the run when no row of the last trained batch is among those that a view keeps still sees that
    batch, in the cards and in their table."""
    rng, folder = np.random.default_rng(0), fake_run(tmp_path, "late", batches=0, state="running", closed=False)
    ledger = Ledger(folder, 0)
    rows = [rollout_row(i, 7, 0.5, rng, 1.5) | {"fate": "trained", "trained_at": 7} for i in range(64)]
    filtered = rollout_row(64, 7, 0.5, rng, 1.5) | {"fate": "filtered", "trained_at": -1}
    ledger.extend(
        "tokens", [{"at": 10.0, "rollout": i, "try": 0, "versions": [5, 6], "mask": [1, 1]} for i in range(64)]
    )
    ledger.extend("rollouts", [*rows, *({**filtered, "rollout": i} for i in range(64, 64 + ROLLOUTS + 10))])
    ledger.close()
    snapshot = LiveView(folder).poll()
    assert (snapshot.batch, snapshot.lags.tolist(), len(snapshot.ribbons)) == (7, [64, 64], 8)
    assert CARDS["staleness"].frame(folder)["tokens"].sum() == 128


def test_trained_stands_beside_served_and_curves_go_through_gaps(tmp_path):
    """Versions at which nothing was served leave no hole; what was trained is drawn for every version;
    a folder without its columns opens as before."""
    folder = fake_run(tmp_path, "gaps", batches=0, state="running", closed=False, evals=False)
    rng, ledger = np.random.default_rng(0), Ledger(folder, 0)
    served = (
        "solve_rate",
        "solve_levels",
        "solve_rates",
        "length_p10",
        "length_p25",
        "length_p50",
        "length_p75",
        "length_p90",
        "truncated",
    )
    for v in range(1, 13):
        row = step_row(v, 0.5, rng, 1.5)
        if v == 6:
            row = {name: value for name, value in row.items() if name not in served}
        ledger.append(
            "steps",
            **row,
            **({} if v < 4 else {"trained_solve_rate": 0.5, "trained_length": 20.0, "trained_reward": 0.5}),
        )
    ledger.close()
    snapshot = LiveView(folder).poll()
    assert np.isnan(snapshot.steps["solve_rate"][5]) and snapshot.steps["trained_solve_rate"][5] == 0.5
    for key in ("solve", "length", "reward"):
        assert "trained" in run_card_html(key, snapshot)
    for chart in CARDS["length"].charts(snapshot):
        lines = re.findall(r"<path d='([^']*)' fill='none' stroke='var\(--rl-[^>]*stroke-linejoin", to_svg(chart))
        assert lines and all(line.count("M") == 1 for line in lines)
    whole, older = (
        to_svg(solve_rate_chart(snapshot.steps)),
        {name: y for name, y in snapshot.steps.items() if "trained" not in name},
    )
    assert "trained" in whole and "trained" not in to_svg(solve_rate_chart(older))


def test_a_start_shows_its_phases(tmp_path):
    "Process, workers, first responses, first batch: each is said while it lasts."
    folder = fake_run(tmp_path, "starts", batches=0, state="starting", evals=False, rollouts=0, closed=False)
    snapshot = LiveView(folder).poll()
    snapshot = replace(snapshot, state="starting", begun={}, now=snapshot.alive_at + 1)
    status = snapshot.status
    told = [
        run_light(replace(snapshot, status=replace(status, workers={}))),
        run_light(replace(snapshot, status=replace(status, workers={"trainer": 7}))),
        run_light(replace(snapshot, begun={"Generate": 40, "Generated": 31})),
        run_light(replace(snapshot, begun={"Generate": 40, "Generated": 40, "Train": 1})),
    ]
    assert [each.reason[:6] for each in told] == [f"{phase} of 4" for phase in (1, 2, 3, 4)]
    assert "31 so far" in told[2].reason and "trainer" in told[1].reason


def test_each_version_says_what_it_trained(tmp_path):
    "Solve rate, reward and length of a step row are those of the rollouts that this version was trained on."
    table = {"group": 4, "batch": 32, "steps": 4, "staleness": 1, "preflight": 0, "eval": []}
    folder = inline_run(tmp_path, "told", table).folder
    steps, rollouts = read_table(folder, "steps"), read_table(folder, "rollouts")
    for row in steps.iter_rows(named=True):
        mine = rollouts.filter((pl.col("fate") == "trained") & (pl.col("trained_at") == row["version"]))
        told = row["trained_solve_rate"], row["trained_reward"], row["trained_length"]
        assert told == pytest.approx((mine["correct"].mean(), mine["reward"].mean(), mine["length"].mean()))


@pytest.mark.parametrize(
    "ess, said", [(0.97, "97% of the batch's effective size: the correction holds"), (0.5, "does not hold")]
)
def test_the_mismatch_card_says_whether_the_correction_holds(tmp_path, ess, said):
    "Of engines that are a hundredth of a nat apart on the same weights; the batches after them are stale."
    folder = fake_run(tmp_path, batches=0, state="running", closed=False, evals=False)
    ledger, random = Ledger(folder, 0), np.random.default_rng(0)
    for version in range(1, 31):
        apart = {"lag_max": int(version > 20), "logprob_diff_mean": 0.01 if version <= 20 else 0.3}
        rest = {"ess": ess, "masked_tokens": 0.001}
        ledger.append("steps", **step_row(version, 0.5, random, 1.5) | apart | rest)
    ledger.close()
    snapshot = LiveView(folder).poll()
    assert "nothing corrects it" in run_card_html("mismatch", snapshot)
    card = run_card_html("mismatch", replace(snapshot, config={**snapshot.config, "correction": {"name": "tis"}}))
    told = unescape(str(card))
    assert "0.01 nats apart" in told and said in told, told[:600]
    silent = {name: value for name, value in snapshot.config.items() if name != "correction"}
    assert CARDS["mismatch"].note(replace(snapshot, source=object(), config=silent)) == "", "it is not known"


def test_no_card_hides_its_note(tmp_path):
    "A card whose first chart has the card's own title shows no header, and the note stands in the header."
    snapshot = LiveView(fake_run(tmp_path)).poll()
    noted = {key: spec for key, spec in CARDS.items() if spec.note is not no_note}
    assert len(noted) > 3
    assert [key for key, spec in noted.items() if spec.charts(snapshot)[0].title == spec.title] == []

"""Hosts as people see them: status, column, verb, table, card, why.

Host names are made up; runs on real hosts are tested elsewhere."""

import json
from dataclasses import asdict, replace

import polars as pl
import pytest
from command_line import run_verb, verb_facts
from fake_run import fake_run
from inline import inline_run

import rlbench as rl
from rlbench.base.ledger_reading import read_table
from rlbench.base.run_files import read_json, write_json
from rlbench.base.status import HostedActor, HostStatus, read_status, write_status
from rlbench.runtime.actors import InlineHandle
from rlbench.runtime.host_status import HOST_COLUMNS, DecodePace, slow_hosts
from rlbench.runtime.live_view import take_snapshot
from rlbench.views.card_html import run_card_html, still_cards_html
from rlbench.views.cards import CARDS, changed_cards
from rlbench.views.light import run_light
from rlbench.views.rollout_html import rollout_facts
from rlbench.views.stored_rollout import read_rollout
from rlbench.views.why import explain

SMALL = {"group": 4, "batch": 16, "steps": 3, "preflight": 0, "eval": [], "staleness": 1, "placement": "split"}
HOSTS = (
    HostStatus(
        "host-1",
        "10.0.0.11",
        since=1_795_000_000.0,
        workers=(HostedActor("trainer"), HostedActor("generator-1", "up", 60, 240.0, 300.0)),
    ),
    HostStatus(
        "host-2",
        "10.0.0.12",
        since=1_795_000_000.0,
        workers=(HostedActor("generator-2", "up", 58, 80.0, 100.0),),
    ),
    HostStatus(
        "host-3",
        "10.0.0.13",
        up=False,
        since=1_795_000_060.0,
        cause="no beat for 30 s",
        workers=(HostedActor("generator-3", "waits"), HostedActor("environment-2", "given up")),
    ),
)


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    "A folder of a run whose status has three hosts: one slow, one lost."
    root = tmp_path_factory.mktemp("several")
    folder = fake_run(root / "runs", state="running", closed=False)
    text = (folder / "config.toml").read_text().replace('placement = "colocated"', 'placement = "ray"')
    (folder / "config.toml").write_text(text)
    write_status(folder, replace(read_status(folder), hosts=HOSTS, host="elsewhere"))
    return folder


def test_rows_and_status_carry_the_hosts_and_the_digest_does_not(tmp_path, monkeypatch):
    local = inline_run(tmp_path, "local", SMALL)
    monkeypatch.setattr(InlineHandle, "host", "host-1", raising=False)
    placed = inline_run(tmp_path, "placed", SMALL)
    assert placed.state.digest == local.state.digest
    rows = [read_table(driver.folder, "rollouts") for driver in (local, placed)]
    assert rows[0]["host"].is_null().all() and rows[0].drop("host").equals(rows[1].drop("host"))
    written = rows[1].filter(pl.col("length") > 0)
    assert len(written) and (written["host"] == "host-1").all()
    assert read_status(local.folder).hosts == ()
    (host,) = read_status(placed.folder).hosts
    assert host.up and [(worker.name, worker.state) for worker in host.workers] == [
        ("trainer", "up"),
        ("generator", "up"),
        ("environment", "up"),
    ]
    assert host.workers[1].version == placed.state.actors["generator"].version > 0 and not placed.live.hosts
    assert "host" not in (local.folder / "ledger" / "rollouts" / "tail.jsonl").read_text()


def test_old_and_newer_statuses_open(tmp_path):
    folder = fake_run(tmp_path)
    stored = read_json(folder / "status.json")
    del stored["hosts"]
    write_json(folder / "status.json", stored)
    assert read_status(folder).hosts == ()
    newer = json.loads(json.dumps(asdict(HOSTS[0])))
    newer["colour"] = newer["workers"][0]["colour"] = "green"
    write_json(folder / "status.json", {**stored, "hosts": [newer]})
    assert read_status(folder).hosts == HOSTS[:1]


def test_the_verb_lists_hosts_with_what_runs_there(several):
    text = run_verb(several.parent.parent, "hosts", "monday").output
    for words in (
        "host-2  10.0.0.12  up for ",
        "v58, 2 behind",
        "ago: no beat for 30 s",
        "waits",
        "given up",
    ):
        assert words in text, text
    facts = verb_facts(several.parent.parent, "hosts", "monday")
    assert facts["version"] == 60 and all(list(row) == list(HOST_COLUMNS) for row in facts["hosts"])
    assert [(row["host"], row["actor"], row["lag"]) for row in facts["hosts"]][:3] == [
        ("host-1", "trainer", None),
        ("host-1", "generator-1", 0),
        ("host-2", "generator-2", 2),
    ]
    table = rl.attach(several).hosts
    assert dict(table.schema) == dict(pl.DataFrame(schema=HOST_COLUMNS).schema) and len(table) == 5
    assert table.filter(~pl.col("up"))["actor"].to_list() == ["generator-3", "environment-2"]


def test_the_verb_says_that_a_run_has_one_machine(tmp_path):
    fake_run(tmp_path / "runs")
    assert "one machine" in run_verb(tmp_path, "hosts", "monday").output
    assert verb_facts(tmp_path, "hosts", "monday")["hosts"] == []
    assert rl.attach(tmp_path / "runs" / "monday").hosts.is_empty()


def test_hostile_names_of_hosts_reach_no_markup(several, tmp_path):
    snapshot = take_snapshot(several)
    hostile = replace(HOSTS[2], name="<script>alert(1)</script>", cause="[bold]\x1b[31m<b>")
    snapshot = replace(snapshot, status=replace(snapshot.status, hosts=(hostile, *HOSTS[:2])))
    card = str(run_card_html("hosts", snapshot))
    assert "<script" not in card and "&lt;script" in card


def test_the_card_shows_slow_and_lost_hosts(several):
    snapshot = take_snapshot(several)
    spec = CARDS["hosts"]
    _, speed, weights = spec.charts(snapshot)
    assert speed.series[0].labels == ("host-1", "host-2") and speed.series[0].roles == ("blue", "vermilion")
    assert dict(zip(weights.series[0].labels, weights.series[0].values)) == {
        "generator-1 on host-1": 0.0,
        "generator-2 on host-2": 2.0,
    }
    note = spec.note(snapshot)
    assert "host-3 lost (no beat for 30 s): generator-3 (waits), environment-2 (given up)" in note
    assert "Hosts" in str(still_cards_html(snapshot, run_light(snapshot)))
    later = replace(snapshot, status=replace(snapshot.status, hosts=HOSTS[:2]))
    assert "hosts" in changed_cards(snapshot, later) and "hosts" not in changed_cards(snapshot, snapshot)


def test_a_local_run_is_not_offered_the_card(tmp_path):
    snapshot = take_snapshot(fake_run(tmp_path))
    assert "Speed of decoding" not in str(still_cards_html(snapshot, run_light(snapshot)))


def test_tokens_by_host_are_drawn_with_losses_as_marks(several, tmp_path, monkeypatch):
    monkeypatch.setattr(InlineHandle, "host", "host-1", raising=False)
    snapshot = take_snapshot(inline_run(tmp_path, "placed", SMALL).folder)
    (at, rate) = snapshot.by_host["host-1"]
    total = read_table(tmp_path / "placed", "rollouts")["length"].sum()
    assert rate.sum() * (at[1] - at[0]) == pytest.approx(total)
    row = {"author": "guard: host lost", "reason": "host host-1 lost: power cut", "at": 1.5}
    commands = pl.DataFrame([row])
    chart = CARDS["hosts"].charts(replace(snapshot, commands=commands))[0]
    assert [(mark.x, mark.label) for mark in chart.marks] == [(1.5, "host-1 lost")]
    assert set(CARDS["hosts"].frame(tmp_path / "placed")["host"]) == {"host-1"}


def test_why_names_lost_and_slow_hosts_with_figures(several):
    found = explain(take_snapshot(several))
    texts = {cause.name: cause.text for cause in found.besides}
    assert "generator-3 waits for a host and environment-2 is given up until a host joins" in texts["lost host"]
    assert "100 tokens a second, on the other hosts 300" in texts["slow host"] and "70%" in texts["slow host"]
    ended = replace(take_snapshot(several), state="finished")
    assert not {"lost host", "slow host"} & {cause.name for cause in explain(ended).besides}


def test_a_host_that_waits_for_work_is_not_slow():
    "Only the seconds in which a generator decodes count."
    pace = DecodePace()
    for second in range(60):
        pace.note("generator-1", float(second), 1.0, 300)
        pace.note("generator-2", float(second), 0.1, 30)
    hosts = []
    for number in (1, 2):
        name = f"generator-{number}"
        hosts.append(HostStatus(f"host-{number}", workers=(HostedActor(name, "up", 1, *pace.rates(name, 60.0)),)))
    assert slow_hosts(hosts) == [] and hosts[1].workers[0].tokens_per_s == pytest.approx(30, rel=0.02)
    for second in range(60, 120):
        pace.note("generator-2", float(second), 1.0, 200)
    slower = HostedActor("generator-2", "up", 1, *pace.rates("generator-2", 120.0))
    (found,) = slow_hosts([hosts[0], replace(hosts[1], workers=(slower,))])
    assert (found.host, round(found.tokens_per_s), round(found.usual)) == ("host-2", 200, 300)


def test_the_inspector_says_where_a_rollout_was_written(tmp_path, monkeypatch):
    local = inline_run(tmp_path, "local", SMALL)
    monkeypatch.setattr(InlineHandle, "host", "host-1", raising=False)
    placed = inline_run(tmp_path, "placed", SMALL)
    assert rollout_facts(read_rollout(placed.folder, 0))["generated on"] == "host-1"
    assert rollout_facts(read_rollout(local.folder, 0))["generated on"] == ""


def test_the_verb_says_that_no_host_is_known_yet(tmp_path):
    folder = fake_run(tmp_path / "runs", state="starting", closed=False)
    text = (folder / "config.toml").read_text().replace('placement = "colocated"', 'placement = "ray"')
    (folder / "config.toml").write_text(text)
    assert "no host yet" in run_verb(tmp_path, "hosts", "monday").output


def test_the_light_says_degraded_until_the_actors_of_a_lost_host_are_up(several):
    snapshot = take_snapshot(several)
    snapshot = replace(snapshot, now=snapshot.alive_at + 1)
    light = run_light(snapshot)
    assert light.word == "degraded" and light.shape == "◑"
    assert light.reason.startswith("host host-3 is lost (no beat for 30 s), and generator-3 waits for a host")
    assert "rlbench hosts monday" in light.helps
    assert explain(snapshot).limit not in ("degraded", "starting")  # a lost host is one cause among others
    elsewhere = (replace(HOSTS[1], workers=(*HOSTS[1].workers, *HOSTS[2].workers)), replace(HOSTS[2], workers=()))
    for hosts in (HOSTS[:2], elsewhere):
        whole = replace(snapshot, status=replace(snapshot.status, hosts=hosts))
        assert run_light(whole).word not in ("degraded", "starting")
    paused = replace(snapshot, state="paused")
    assert run_light(paused).word == "paused"

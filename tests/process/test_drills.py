"""Faults injected into live runs on purpose: each stated reaction is seen, and afterwards the run is sound."""

import json
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import polars as pl
import psutil
import pytest
from command_line import run_verb, verb_facts
from inline import inline_run
from namespaces import in_namespace
from patience import until
from real_runs import ended
from scripted import SET_WITHOUT_MODEL, WITHOUT_MODEL

import rlbench as rl
from rlbench.base.ledger_reading import read_table
from rlbench.base.run_files import FAULTS, FULL_DISK, read_json
from rlbench.bench.faults import book_problems
from rlbench.sandbox.pool import PoolClient, stop_pool
from rlbench.sandbox.pool_folder import PROCESSES
from rlbench.workbench.drill import DRILLS, drill, hold_drill, list_drills, suits_every_run
from rlbench.workbench.drill_scene import Drill, Sign, do_nothing

LIVE = dict(steps=100_000, batch=64, group=8, concurrency=64, preflight=0, eval=[], staleness=1)
OF_POOLS = ("killed-zygote", "dead-pool", "quota", "slow-start", "hung-tool")
OF_ALL = ("half-applied-edit", "failed-publish", "full-disk")


def live(tmp_path_factory, preset: str, **more) -> rl.Run:
    "A run that has made a version."
    run = rl.run(preset, runs=tmp_path_factory.mktemp("runs"), name="live", **{**LIVE, **more})
    until(lambda: run.status and run.status.version >= 1 or run.state == "failed", 150)
    assert run.state == "running", (run.folder / "run.log").read_text()[-2000:]
    return run


@pytest.fixture(scope="module")
def coded(tmp_path_factory):
    "A live run with a pool of its own; its last test stops it."
    pool = tmp_path_factory.mktemp("pool")
    slow = {"generator": "scripted", "virtual": {"scripted_pace": 1.0}}  # programs are under way, and not hundreds
    few = {"batch": 32, "concurrency": 32}
    verifier = {"name": "code", "wall_s": 5.0}  # whose worker is given up soon after that
    run = live(tmp_path_factory, "tiny-code", sandbox={"folder": str(pool)}, verifier=verifier, **slow, **few)
    yield run
    if run.state == "running":
        run.stop()
        run.wait(400)
    stop_pool(pool)


@pytest.fixture(scope="module")
def plain(tmp_path_factory, coded):
    "A live run without sandboxes. It begins when the other one has ended."
    run = live(tmp_path_factory, "tiny", generator="scripted", virtual={"scripted_pace": 0.6})  # versions each second
    yield run
    if run.state == "running":
        run.stop()
        run.wait(400)


def pool_of(run: rl.Run):
    from rlbench.runtime.environment_worker import pool_of

    return pool_of(run.config)[0]


def stopped(run: rl.Run) -> list[psutil.Process]:
    "Processes of a run's pool that are stopped."
    found = []
    for process in psutil.Process(read_json(pool_of(run) / PROCESSES)["controller"]).children(recursive=True):
        with suppress(psutil.Error):  # programs come and go
            found += [process] * (process.status() == psutil.STATUS_STOPPED)
    return found


def on(run: rl.Run, more: int = 2, seconds: float = 60.0) -> None:
    "The run goes on."
    goal = run.status.version + more
    until(lambda: run.status.version >= goal, seconds)


def commanded(run: rl.Run, *arguments: str) -> subprocess.Popen:
    "The command line, drilling."
    return subprocess.Popen(
        [sys.executable, "-m", "rlbench.cli.main", "drill", str(run.folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("name", OF_POOLS)
def test_a_pool_that_is_struck(coded, name):
    "What happens is what was stated, and nobody's reward is the machine's doing."
    states = []
    (told,) = coded.drill(name, say=lambda which, state, text: states.append(state))
    assert told.state == "passed" and not told.missing, told
    assert list(dict.fromkeys(states)) == ["waiting", "injected", "reaction seen", "passed"]
    assert coded.state == "running" and not stopped(coded) and not (coded.folder / FAULTS).exists()


def test_an_interrupt_wakes_what_was_stopped(coded):
    "Ctrl-C in the middle of a drill."
    seen = []

    def say(name, state, text):
        if state == "injected":
            seen.extend(until(lambda: stopped(coded), 5))  # it stops when it is next scheduled
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        coded.drill("hung-tool", say=say)
    assert seen and not stopped(coded) and not (coded.folder / FAULTS).exists()
    on(coded)


def test_a_pool_with_others_is_left_alone(coded):
    "Somebody else's programs run there, too."
    with PoolClient.connect(pool_of(coded)) as other:
        assert other.status().clients >= 2
        refused = {each.name: why for each, why in list_drills(coded.folder)}
        with pytest.raises(
            ValueError,
            match="serves 1 others, and the drill would strike them as well; start the run with a pool of its own",
        ):
            coded.drill(*OF_POOLS)
    assert all(("serves 1 others" in refused[name]) == (name in OF_POOLS) for name in DRILLS)


def test_the_books_of_a_run_that_was_struck_close(coded):
    "All attempts have one fate, no version is missing, and no verdict of the machine's was paid."
    coded.stop()
    assert book_problems(ended(coded, "stopped")) == []
    joined = coded.rollouts.join(read_table(coded.folder, "verdicts"), on=["rollout", "try"], suffix="_of")
    assert joined.filter(pl.col("outcome") == "environment_error")["reward"].is_null().all()
    cut = joined.filter(pl.col("tripwires").list.contains("exit"))
    assert not len(cut), f"a program that ends by itself is not cut off: {cut['text'].to_list()}"


@pytest.mark.parametrize("name", OF_ALL)
def test_a_run_that_is_struck(plain, name):
    "Disks, weights, files."
    (told,) = plain.drill(name)
    assert told.state == "passed" and not told.missing and plain.state == "running", told


def test_all_that_suit(plain):
    "From the command line: those that do not suit the run are refused with the reason, and the rest is held."
    done = run_verb(plain.folder, "drill", plain.folder, "half-applied-edit", "dead-pool", "--json")
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["passed"], told["failed"]) == (1, 0), done.stderr
    assert (
        [each["state"] for each in told["drills"]] == ["passed", "refused"]
        and "judges without sandboxes" in told["drills"][1]["why"]
        and "reaction seen" in done.stderr
    )
    found = verb_facts(plain.folder, "drill", plain.folder, "--list")["drills"]
    assert [each["drill"] for each in found if not each["refused"]] == list(OF_ALL) and len(found) == 10


@pytest.mark.parametrize("held", [("half-applied-edit",), ()])
def test_ctrl_c_on_the_command_line(plain, held):
    """What was injected is undone before it ends, and what was held before is told;
    if that is nothing, nothing is printed."""
    done = commanded(plain, *held, "full-disk", *["--json"] * bool(held))
    until((plain.folder / FAULTS / FULL_DISK).exists)
    done.send_signal(signal.SIGINT)
    out, err = done.communicate(timeout=400)
    if held:
        told = json.loads(out.splitlines()[-1])
        assert (told["passed"], [each["name"] for each in told["drills"]]) == (1, list(held))
    else:
        assert out == ""
    assert done.returncode == 130 and "stopped; what was injected is undone" in err and "Traceback" not in err
    assert not (plain.folder / FAULTS).exists()
    on(plain)


def test_whoever_drills_is_killed(plain):
    "The disk has room again by itself, and another one may drill."
    done = commanded(plain, "full-disk")
    until((plain.folder / FAULTS / FULL_DISK).exists)
    with pytest.raises(ValueError, match=f"process {done.pid} is drilling 'live'; wait until it is done"):
        plain.drill("full-disk")
    done.kill()
    done.communicate()
    logged = (plain.folder / "run.log").read_text().count("has room again")
    until(lambda: (plain.folder / "run.log").read_text().count("has room again") > logged, 30)
    on(plain)
    (told,) = plain.drill("half-applied-edit")
    assert told.state == "passed", told


def test_a_reaction_that_does_not_come(plain):
    "It is told what was not seen; and what raises while it is injected is no pass either."
    undone = []
    never = Drill(
        "never",
        "nothing",
        "something",
        0.5,
        suits_every_run,
        do_nothing,
        lambda scene: [Sign("it rains", False), Sign("it is day", True)],
        undone.append,
    )
    told = hold_drill(never, plain.folder)
    assert (
        told.state == "failed"
        and "it is day" in told.seen
        and any("it rains" in text for text in told.missing)
        and len(undone) == 1
    )

    def gone(scene):
        raise psutil.NoSuchProcess(1)

    assert (
        hold_drill(Drill("gone", "", "", 1, suits_every_run, gone, lambda scene: [], undone.append), plain.folder).state
        == "failed"
        and len(undone) == 2
    )


def test_the_panel(plain):
    "A button strikes, its line says how it goes; Stop takes it back."
    panel = plain.drills()
    assert [name for name, button in panel.buttons.items() if not button.disabled] == list(OF_ALL)
    assert (
        "judges without sandboxes" in panel.states["dead-pool"].value
        and 'aria-label="dead-pool: refused"' in panel.states["dead-pool"].value
    )
    panel.buttons["half-applied-edit"].click()
    assert panel.buttons["full-disk"].disabled and not panel.halt.disabled
    panel.thread.join(90)
    assert (
        "✓ passed" in panel.states["half-applied-edit"].value
        and "in force: temperature 1" in panel.states["half-applied-edit"].value
    )
    panel.buttons["full-disk"].click()
    until(lambda: "injected" in panel.states["full-disk"].value)
    panel.halt.click()
    panel.thread.join(60)
    assert (
        "stopped" in panel.states["full-disk"].value and not panel.all.disabled and not (plain.folder / FAULTS).exists()
    )


def test_unknown_and_unsuited(plain, tmp_path):
    "Refused before anything is struck."
    with pytest.raises(ValueError, match="drill: unknown name 'dead-pol'; did you mean 'dead-pool'"):
        plain.drill("full-disk", "dead-pol")
    with pytest.raises(ValueError, match='none of them suits .live.: .*verifier = "exact".*preset tiny-code'):
        plain.drill(*OF_POOLS)
    refused = run_verb(tmp_path, "drill", plain.folder, "dead-pool", code=2)
    assert "judges without sandboxes" in refused.stderr.replace("\n", " ")
    virtual = inline_run(tmp_path, "virtual", {"steps": 2, "batch": 16, "group": 4, "preflight": 0, "eval": []})
    with pytest.raises(ValueError, match="'virtual' is finished, and only a run that is running can be drilled"):
        drill(virtual.folder)
    plain.pause()
    until(lambda: plain.state == "paused")
    with pytest.raises(ValueError, match="is paused, .*release it first"):
        plain.drill()
    plain.go()
    until(lambda: plain.state == "running")


def test_the_books_close_and_an_ended_run_is_refused(plain):
    "After everything above."
    plain.stop()
    assert book_problems(ended(plain, "stopped")) == []
    with pytest.raises(ValueError, match="is stopped, .*start another, or rlbench resume"):
        plain.drill("full-disk")
    panel = plain.drills()
    assert (
        all(button.disabled for button in (*panel.buttons.values(), panel.all, panel.halt))
        and "is stopped" in panel.message.value
    )


def test_a_run_that_ends_in_the_middle(tmp_path):
    "Its end is told, and is no pass."
    run = rl.run("tiny", runs=tmp_path, **LIVE, **WITHOUT_MODEL)
    until(lambda: run.status and run.status.version >= 1, 120)
    threading.Timer(1.0, run.stop).start()
    (told,) = drill(run.folder, ["full-disk"])
    assert told.state == "failed" and any("has ended" in text or "not within" in text for text in told.missing)
    assert book_problems(ended(run, "stopped")) == []


SMALL_DISK = """
set -e
mount -t tmpfs -o size=40m none there
{python} -m rlbench.cli.main run tiny --runs there --name small --detach {settings} \\
    --set steps=100000 --set eval=[] --set preflight=0 --set batch=64 --set group=8
for i in $(seq 600); do grep -q '"version": [1-9]' there/small/status.json && break; sleep 0.2; done
{python} -m rlbench.cli.main drill there/small full-disk --json || true
{python} -m rlbench.cli.main stop there/small
for i in $(seq 300); do
    grep -q '"books_closed": true' there/small/status.json && test -e there/small/report.html && break
    sleep 0.2
done
cp -r there/small kept
"""


def test_a_small_disk_is_filled_in_truth(tmp_path):
    "Nothing can be written for a while, by anybody; the run goes on, and loses no row."
    (tmp_path / "there").mkdir()
    done = in_namespace(SMALL_DISK.format(python=sys.executable, settings=" ".join(SET_WITHOUT_MODEL)), tmp_path)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, (done.stdout[-2000:], done.stderr[-2000:])
    (told,) = next(json.loads(line)["drills"] for line in lines if "drills" in json.loads(line))
    assert told["state"] == "passed", told
    kept = rl.Run(tmp_path / "kept")
    assert kept.status.books_closed and book_problems(kept) == []

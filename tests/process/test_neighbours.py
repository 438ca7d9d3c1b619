"""What else uses the machine of a run: read from its processes, said by `why`, once a look."""

import os
import platform
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from fake_run import fake_run

from rlbench.base.neighbours import (
    Looker,
    Neighbours,
    live_runs,
    neighbours_in_short,
    neighbours_in_words,
    neighbours_of,
)
from rlbench.base.status import read_status, write_status
from rlbench.runtime.live_view import LiveView
from rlbench.views.why import explain
from rlbench.workbench.doctor import machine_in_use

BUSY_PAIR = Neighbours(("other",), 5.0, 2)


@pytest.fixture
def resting(tmp_path):
    "A process that looks like that of a run in `tmp_path/other`."
    code = "import time; time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "-m", "rlbench.workbench.supervisor", str(tmp_path / "other"), "0"]
    )
    yield process
    process.kill()
    process.wait()


def test_a_run_elsewhere_on_this_machine_is_found(tmp_path, resting):
    deadline = time.monotonic() + 10
    while (tmp_path / "other", resting.pid) not in live_runs() and time.monotonic() < deadline:
        time.sleep(0.05)
    other = tmp_path / "other"
    assert "other" in neighbours_of(tmp_path / "mine").runs
    assert str(other) in neighbours_of(tmp_path / "elsewhere" / "mine").runs
    assert "other" not in neighbours_of(other).runs


def test_runs_of_the_same_folder_come_first(tmp_path, monkeypatch):
    "`rlbench pause` finds the first name that is told, and a far run does not crowd it out."
    far, near, mine = tmp_path / "elsewhere" / "a", tmp_path / "runs" / "z", tmp_path / "runs" / "mine"
    monkeypatch.setattr("rlbench.base.neighbours.live_runs", lambda: [(far, 1), (near, 2), (mine, 3)])
    assert neighbours_of(mine).runs == ("z", str(far))
    assert neighbours_of().runs == (str(far), str(mine), str(near))


def test_nothing_is_said_where_nothing_else_is():
    assert neighbours_in_words(Neighbours((), 2.0, 2)) == ""
    assert "they slow each other" in neighbours_in_words(BUSY_PAIR)
    assert "slow" not in neighbours_in_words(Neighbours(("other",), 3.0, 64))


def test_in_short_the_names_come_first():
    "What the panel's line has room for."
    assert neighbours_in_short(BUSY_PAIR) == "other also runs here; they slow each other"
    assert neighbours_in_short(Neighbours(("a", "b", "c"), 1.0, 2)) == "a, b and 1 more also run here"
    assert neighbours_in_short(Neighbours((), 5.0, 2, 1)) == "other programs slow this run; others compute on the GPU"
    assert neighbours_in_short(Neighbours((), 2.0, 2)) == ""


def test_why_says_who_else_is_there_while_the_run_lives_here(tmp_path):
    folder = fake_run(tmp_path, "mine", batches=12, state="running")
    view = LiveView(folder)
    view.looker = Looker(folder, read=lambda folder: BUSY_PAIR)
    here = replace(read_status(folder), host=platform.node(), pid=os.getpid(), started=time.time(), updated=time.time())
    write_status(folder, here)
    snapshot = view.poll()
    assert snapshot.neighbours == BUSY_PAIR
    assert neighbours_in_words(BUSY_PAIR) in str(explain(snapshot))
    write_status(folder, replace(here, host="another-machine"))
    assert view.poll().neighbours == Neighbours()


def test_doctor_says_it():
    assert not machine_in_use(BUSY_PAIR).ok and "other" in machine_in_use(BUSY_PAIR).found
    assert machine_in_use(Neighbours((), 0.5, 2)).ok

"""The ledger under what notebooks cannot show: killed writers, readers in other processes, a disk that is full,
and time."""

import errno
import inspect
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import polars as pl
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlbench.base import ledger as ledger_module
from rlbench.base.commands import mark_done, read_commands, send_command
from rlbench.base.ledger import Ledger
from rlbench.base.ledger_reading import Follower, count_rows, read_table
from rlbench.base.run_files import Ballast, DiskFull, create_run_folder
from rlbench.base.status import (
    Status,
    is_alive,
    living_processes,
    read_status,
    write_status,
)

TABLE = "rollouts"


def row(number: int) -> dict:
    "A row that can be told from its number alone."
    reward = float("nan") if number % 11 == 0 else number / 7
    return {
        "at": float(number),
        "rollout": number,
        "reward": reward,
        "text": f"row {number}\n" * (number % 9),
        "part_values": [0.5] * (number % 4),
    }


def check(frame: pl.DataFrame, start: int = 0) -> int:
    "Rows are whole, in order, without holes or repeats. Returns the number after the last."
    numbers = list(range(start, start + len(frame)))
    assert frame["seq"].to_list() == numbers and frame["rollout"].to_list() == numbers
    for got, number in zip(frame.iter_rows(named=True), numbers):
        want = row(number)
        assert got["text"] == want["text"] and got["part_values"] == want["part_values"]
        assert got["reward"] == want["reward"] or np.isnan(got["reward"]) and np.isnan(want["reward"])
    assert frame["attempt"].is_sorted()
    return start + len(frame)


WRITER = (
    f"""
import sys, random
from rlbench.base.ledger import Ledger; from rlbench.base.ledger_reading import count_rows
TABLE = {TABLE!r}
{inspect.getsource(row)}
"""
    + """
folder, attempt = sys.argv[1], int(sys.argv[2])
ledger, number, chance = Ledger(folder, attempt, seal_rows=50), count_rows(folder, TABLE), random.Random(attempt)
print("ready", flush=True)
while True:
    count = chance.randrange(1, 9)
    ledger.extend(TABLE, [row(number + i) for i in range(count)])
    number += count
    ledger.flush()
"""
)


def test_killed_writers_leave_a_prefix(tmp_path, script):
    """Writers are killed (-9) at random moments while a reader follows;
    each next one goes on where the last whole row ended."""
    chance, follower, seen = random.Random(0), Follower(tmp_path, [TABLE]), 0
    for attempt in range(12):
        writer = script(WRITER, tmp_path, attempt)
        assert writer.stdout.readline() == "ready\n", writer.stderr.read()
        enough = seen + chance.randrange(1, 60)
        while seen < enough:
            seen = check(follower.poll()[TABLE], seen)
        time.sleep(chance.uniform(0, 0.01))
        writer.kill()
        writer.wait()
        seen = check(follower.poll()[TABLE], seen)
        frame = read_table(tmp_path, TABLE)
        assert check(frame) == seen == count_rows(tmp_path, TABLE)
    assert frame["attempt"].n_unique() == 12 and len(list((tmp_path / "ledger" / TABLE).glob("*.parquet"))) >= 3


class Killed(BaseException):
    "Stands for the moment a process is gone: nothing after it runs."


def dying(monkeypatch, after: int) -> list:
    """Every call that changes the disk counts; at number `after`, half of a write happens (or nothing else) and the
    process is 'gone'."""
    left = [after]

    def wrap(name, half):
        real = getattr(os, name)

        def call(*args):
            if left[0] < 0:
                raise Killed
            left[0] -= 1
            if left[0] < 0:
                half(real, *args)
                raise Killed
            return real(*args)

        monkeypatch.setattr(ledger_module.os, name, call)

    wrap("write", lambda real, file, data: real(file, bytes(data)[: len(data) // 2]))
    wrap("replace", lambda real, *args: None)
    wrap("fsync", lambda real, *args: None)
    wrap("ftruncate", lambda real, *args: None)
    return left


@pytest.mark.parametrize("after", range(60))
def test_a_crash_at_every_step_is_repaired(tmp_path, monkeypatch, after):
    """The writer is stopped at the n-th change of the disk, wherever that is;
    reader and next writer find whole rows in order."""
    follower, seen = Follower(tmp_path, [TABLE]), 0
    with monkeypatch.context() as patch:
        left = dying(patch, after)
        try:
            first = Ledger(tmp_path, 0, seal_rows=5)
            for number in range(0, 24, 2):
                first.extend(TABLE, [row(number), row(number + 1)])
                first.flush()
                seen = check(follower.poll()[TABLE], seen)
            first.close()
        except Killed:
            pass
    seen = check(follower.poll()[TABLE], seen)
    assert check(read_table(tmp_path, TABLE)) == seen == count_rows(tmp_path, TABLE)
    second = Ledger(tmp_path, 1, seal_rows=5)
    second.extend(TABLE, [row(number) for number in range(seen, seen + 9)])
    second.flush()
    assert check(follower.poll()[TABLE], seen) == seen + 9
    second.close()
    assert check(read_table(tmp_path, TABLE)) == seen + 9
    assert not list((tmp_path / "ledger" / TABLE).glob(".*"))
    assert after < 59 or left[0] >= 0  # the list of steps was long enough to reach an undisturbed run


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("extend"), st.integers(0, 12)),
            st.sampled_from(["flush", "seal", "poll", "reopen", "crash", "tear"]),
        ),
        max_size=40,
    )
)
def test_readers_agree_with_a_list(steps):
    "Any order of writing, sealing, closing and crashing looks to readers like a list that grows."
    folder = Path(mkdtemp())
    ledger, follower, written, shown, seen, attempt = (
        Ledger(folder, 0, seal_rows=7),
        Follower(folder, [TABLE]),
        0,
        0,
        0,
        0,
    )
    for step in steps:
        if isinstance(step, tuple):
            ledger.extend(TABLE, [row(written + i) for i in range(step[1])])
            written += step[1]
        elif step == "flush":
            ledger.flush()
        elif step == "seal":
            ledger.seal(TABLE)
        elif step == "poll":
            seen = check(follower.poll()[TABLE], seen)
            assert seen == shown
        else:
            if step == "reopen":
                ledger.close()
            tail = folder / "ledger" / TABLE / "tail.jsonl"
            if step == "tear" and tail.exists():
                with open(tail, "ab") as file:
                    file.write(b'{"seq":%d,"attempt":9,"at":1' % shown)
            attempt, written = attempt + 1, written if step == "reopen" else shown
            ledger = Ledger(folder, attempt, seal_rows=7)
        shown = written if step in ("flush", "seal", "reopen") else shown
        assert count_rows(folder, TABLE) == shown
    assert check(read_table(folder, TABLE)) == shown
    since, every = shown // 2, 3
    thin = read_table(folder, TABLE, ["rollout"], since=since, every=every)
    assert thin["rollout"].to_list() == [n for n in range(shown) if n > since and n % every == 0]
    shutil.rmtree(folder)


def test_readers_in_other_processes_while_sealing(tmp_path, script):
    """Two processes read all the time, piece by piece and from the start, while every few rows are sealed;
    every 50 rows the writer waits until each has looked again."""
    reader = """
import sys
sys.path.insert(0, sys.argv[3])
from test_ledger import check, TABLE
from rlbench.base.ledger_reading import Follower, read_table
follower, seen, last = Follower(sys.argv[1], [TABLE]), 0, int(sys.argv[2])
while seen < last:
    seen = check(follower.poll()[TABLE], seen)
    whole = check(read_table(sys.argv[1], TABLE))
    assert whole >= seen, (whole, seen)
    print("looked", flush=True)
"""
    readers = [script(reader, tmp_path, 1500, Path(__file__).parent) for _ in range(2)]
    ledger = Ledger(tmp_path, 0, seal_rows=7)
    for number in range(1500):
        ledger.append(TABLE, **row(number))
        ledger.flush()
        for child in readers if number % 50 == 0 else ():
            assert child.stdout.readline() == "looked\n", child.stderr.read()
    for child in readers:
        _, err = child.communicate(timeout=400)
        assert child.returncode == 0, err
    ledger.close()
    assert len(list((tmp_path / "ledger" / TABLE).glob("*.parquet"))) > 200


FULL = """
import os, subprocess, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
disk = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)], check=True)
from test_ledger import fill_and_recover

def fill():
    with open(disk / "filler", "ab", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 512)
        except OSError:
            pass

fill_and_recover(disk / "run", fill)
print("recovered")
"""


def fill_and_recover(folder: Path, fill) -> None:
    "The disk fills up under the writer; after `release` all rows are there, in order, and the run can close."
    follower, number, seen = Follower(folder, [TABLE]), 0, 0
    ledger = Ledger(folder, 0, seal_rows=100, hold_bytes=1)
    ballast = Ballast(folder, megabytes=0.3)
    for number in range(40):
        ledger.append(TABLE, **row(number))
    fill()
    failures = 0
    for number in range(40, 400):
        try:
            ledger.append(TABLE, **row(number))
        except DiskFull as error:
            assert str(folder) in str(error) and "machine" in str(error)
            failures += 1
        seen = check(follower.poll()[TABLE], seen)  # what a reader saw is never taken back
    assert failures > 0 and seen < 400 and ballast.held
    with pytest.raises(DiskFull):
        ledger.flush()
    with pytest.raises(DiskFull):
        write_status(folder, Status("failed", reason="x" * 10_000))
    assert ballast.release()
    ledger.append(TABLE, **row(400))
    ledger.close()
    write_status(folder, Status("failed", reason="disk full"))
    assert read_status(folder).reason == "disk full"
    assert check(follower.poll()[TABLE], seen) == 401 and check(read_table(folder, TABLE)) == 401
    with pytest.raises(DiskFull):
        Ballast(folder, megabytes=4)
    assert not ballast.held


def private_mounts() -> list[str] | None:
    "The command that gives a process mounts of its own, or None where the machine does not allow that."
    for prefix in (["unshare", "-m"], ["unshare", "-rm"]):
        tried = subprocess.run([*prefix, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True)
        if tried.returncode == 0:
            return prefix
    return None


def test_a_disk_that_is_full(tmp_path, script, monkeypatch):
    "On a file system of one megabyte; where none can be mounted, on a disk that claims to be full."
    prefix = private_mounts()
    if prefix:
        child = script(FULL, tmp_path, Path(__file__).parent, prefix=prefix)
        out, err = child.communicate(timeout=400)
        assert out == "recovered\n", err
        return
    write, allocate, release, room = os.write, os.posix_fallocate, Ballast.release, [10**9]

    def limited(file, data):
        room[0] -= (part := min(room[0], len(data)))
        if data and not part:
            raise OSError(errno.ENOSPC, "full")
        return write(file, bytes(data)[:part])

    def reserve(file, start, size):
        if size > room[0]:
            raise OSError(errno.ENOSPC, "full")
        allocate(file, start, size)

    monkeypatch.setattr(ledger_module.os, "write", limited)
    monkeypatch.setattr(ledger_module.os, "posix_fallocate", reserve)
    monkeypatch.setattr(Ballast, "release", lambda ballast: room.__setitem__(0, 300_000) or release(ballast))
    fill_and_recover(tmp_path / "run", lambda: room.__setitem__(0, 2_000))


def test_a_folder_that_cannot_be_written(script):
    "The error names the folder for runs, whoever asks."
    root = Path(mkdtemp())
    root.chmod(0o555)
    child = script(
        """
import os, sys
from rlbench.base.run_files import create_run_folder
if os.geteuid() == 0:
    os.seteuid(65534)
try:
    create_run_folder(sys.argv[1], "monday")
except PermissionError as error:
    print(error)
""",
        root,
        cwd="/",
    )
    out, err = child.communicate(timeout=400)
    assert "name another folder for runs" in out and str(root) in out, err
    root.rmdir()


def test_commands_from_many_processes(tmp_path, script):
    "Nothing is lost or read twice when several processes send while the run reads, and the order is that of sending."
    folder = create_run_folder(tmp_path, "monday")
    sender = (
        "import sys\n"
        "from rlbench.base.commands import send_command\n"
        "for n in range(100): send_command(sys.argv[1], sys.argv[2], 'temperature', n)"
    )
    children = [script(sender, folder, f"author {n}") for n in range(3)]
    taken, deadline = [], time.monotonic() + 120
    while len(taken) < 300 and time.monotonic() < deadline:
        for command in read_commands(folder):
            assert not command.error
            taken.append(command)
            mark_done(folder, command.id)
    assert len({command.id for command in taken}) == len(taken) == 300
    for n in range(3):
        assert [command.value for command in taken if command.author == f"author {n}"] == list(range(100))
    assert [child.wait(400) for child in children] == [0, 0, 0]
    assert len(list((folder / "commands" / "done").iterdir())) == 300 and read_commands(folder) == []


def test_strange_things_in_the_commands_folder(tmp_path):
    "A folder, bytes that are no text, an unreadable link: each is refused with a reason, the good one is read."
    folder = create_run_folder(tmp_path, "monday")
    (folder / "commands" / "a.json").mkdir()
    (folder / "commands" / "b.json").write_bytes(b"\xff\xfe")
    (folder / "commands" / "c.json").symlink_to("c.json")
    (folder / "commands" / "notes.txt").write_text("not a command")
    good = send_command(folder, "ada", "temperature", 0.8)
    read = {command.id: command for command in read_commands(folder)}
    assert set(read) == {"a", "b", "c", good} and all(
        bool(command.error) == (name != good) for name, command in read.items()
    )
    for name in read:
        mark_done(folder, name)
    assert read_commands(folder) == []


def test_a_disk_that_fills_up_in_the_middle_of_a_seal(tmp_path, monkeypatch):
    "The segment is there, the fresh tail is not: the old tail goes on, and its sealed rows are not sealed again."
    replace, refuse, follower = os.replace, [True], Follower(tmp_path, [TABLE])

    def once(aside, path):
        if Path(path).name == "tail.jsonl" and refuse[0]:
            refuse[0] = False
            raise OSError(errno.ENOSPC, "full")
        replace(aside, path)

    ledger = Ledger(tmp_path, 0)
    ledger.extend(TABLE, [row(n) for n in range(10)])
    ledger.flush()
    monkeypatch.setattr(ledger_module.os, "replace", once)
    with pytest.raises(DiskFull):
        ledger.seal(TABLE)
    assert check(follower.poll()[TABLE]) == 10
    ledger.extend(TABLE, [row(n) for n in range(10, 15)])
    ledger.seal(TABLE)
    assert check(follower.poll()[TABLE], 10) == 15 == check(read_table(tmp_path, TABLE))
    assert sorted(path.name for path in (tmp_path / "ledger" / TABLE).glob("*.parquet")) == [
        f"{0:012d}-{9:012d}.parquet",
        f"{10:012d}-{14:012d}.parquet",
    ]


def test_power_lost_after_a_seal(tmp_path):
    """Sealed rows are on the disk, the tail they came from had not got there:
    the next writer goes on behind the segment."""
    ledger = Ledger(tmp_path, 0)
    ledger.extend(TABLE, [row(n) for n in range(10)])
    ledger.flush()
    tail = tmp_path / "ledger" / TABLE / "tail.jsonl"
    lines = tail.read_bytes().splitlines(keepends=True)
    ledger.seal(TABLE)
    for kept in (0, 4, 10):
        tail.write_bytes(b"".join(lines[: 1 + kept]))
        assert check(read_table(tmp_path, TABLE)) == count_rows(tmp_path, TABLE) == 10
        again = Ledger(tmp_path, 1)
        again.append(TABLE, **row(10))
        again.flush()
        assert check(read_table(tmp_path, TABLE)) == count_rows(tmp_path, TABLE) == 11


def test_missing_segments_are_named(tmp_path):
    "A removed segment is an error for who reads the table, and holds a follower back; it is never a silent gap."
    ledger, follower = Ledger(tmp_path, 0), Follower(tmp_path, [TABLE])
    for start in (0, 10, 20):
        ledger.extend(TABLE, [row(start + i) for i in range(10)])
        ledger.seal(TABLE)
    middle = tmp_path / "ledger" / TABLE / "000000000010-000000000019.parquet"
    middle.rename(tmp_path / "away")
    with pytest.raises(ValueError, match="rows 10 to 19 of table rollouts are missing"):
        read_table(tmp_path, TABLE)
    assert check(follower.poll()[TABLE]) == 10 and follower.poll()[TABLE].is_empty()
    (tmp_path / "away").rename(middle)
    assert check(follower.poll()[TABLE], 10) == 30
    assert check(read_table(tmp_path, TABLE, since=9), 10) == 30


def test_older_segments_lack_columns(tmp_path):
    "A column that came later reads as null in rows written before it; columns that went away are left out."
    ledger = Ledger(tmp_path, 0)
    ledger.extend(TABLE, [row(n) for n in range(4)])
    ledger.close()
    segment = next((tmp_path / "ledger" / TABLE).glob("*.parquet"))
    pl.read_parquet(segment).drop("text").with_columns(gone=pl.lit(1)).write_parquet(segment)
    frame = read_table(tmp_path, TABLE, ["rollout", "text"])
    assert frame["text"].null_count() == 4 and frame["rollout"].to_list() == [0, 1, 2, 3]


def test_arrays_of_a_batch_are_read_back_as_numbers(tmp_path):
    """256 rollouts of 40 tokens: log-probabilities to 5e-6 in at most 12 characters each,
    token ids and masks as they were."""
    make, versions, mask = np.random.default_rng(0), np.full(40, 7, np.int32), np.ones(40, np.uint8)
    tokens = [
        {
            "at": 1.0,
            "rollout": n,
            "try": 0,
            "prompt_tokens": make.integers(0, 60, 12),
            "tokens": make.integers(0, 60, 40),
            "versions": versions,
            "mask": mask,
            "logprobs": -make.random(40).astype(np.float32),
            "advantage": 0.1,
        }
        for n in range(256)
    ]
    ledger = Ledger(tmp_path, 0)
    ledger.extend("tokens", tokens)
    ledger.extend(TABLE, [row(n) for n in range(256)])
    ledger.flush()
    first = read_table(tmp_path, "tokens").row(0, named=True)
    np.testing.assert_allclose(first["logprobs"], tokens[0]["logprobs"], rtol=5e-6)
    assert max(len(json.dumps(value)) for value in first["logprobs"]) <= 12
    assert first["tokens"] == tokens[0]["tokens"].tolist() and first["mask"] == [1] * 40
    ledger.close()


def test_reading_starts_no_heavy_import():
    "The writing half needs no polars until a table is sealed."
    text = (
        "import sys, tempfile\n"
        "from rlbench.base.ledger import Ledger\n"
        "l = Ledger(tempfile.mkdtemp(), 0)\n"
        "l.append('steps', at=0.0)\n"
        "l.flush()\n"
        "print('polars' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout == "False\n"


class Ends(psutil.Process):
    """A process that ends between two looks at it: it is there when asked whether it is,
    and killed before the next question."""

    def is_running(self):
        there = super().is_running()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        return there


def test_who_ends_while_it_is_looked_at_is_not_alive(script):
    "One that lives, one that ends during the look, one that has ended and is a zombie, one that is no more."
    lives, ends, zombie, gone = (psutil.Process(script("import time; time.sleep(300)").pid) for _ in range(4))
    ends = Ends(ends.pid)
    for each in (zombie, gone):
        each.kill()
    gone.wait()
    while zombie.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert living_processes([gone, zombie, ends, lives]) == [lives]
    assert [is_alive(each.pid) for each in (gone, zombie, ends, lives)] == [False, False, False, True]
    assert is_alive(lives.pid, time.time()) and not is_alive(lives.pid, lives.create_time() - 10)

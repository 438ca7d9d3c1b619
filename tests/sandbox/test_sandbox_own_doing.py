"""Whose failure it is: what an answer's own bytes, paths, values, sleep and leavings bring about is the answer's,
in both tiers, as root and as an ordinary user, and the workspace and the next program are well."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import polars as pl
import pytest
from attacks import LIMITS
from jailer import USERS
from sandbox_runs import ANSWER, Quick
from scripted import WITHOUT_MODEL

import rlbench as rl
from rlbench.base.ledger_reading import read_table
from rlbench.base.status import read_status
from rlbench.environments.code_verifier import CODE_REWARDS, CODE_VERIFIERS
from rlbench.environments.environment import EnvironmentActor
from rlbench.environments.episode import Done, SingleTurn
from rlbench.environments.judging_pool import JudgingPool
from rlbench.environments.scoring_messages import ScoreRequest
from rlbench.records import Outcome, Rollout, Task
from rlbench.reward import REWARDS, VERIFIERS, final_answer
from rlbench.sandbox import zygote_watch
from rlbench.sandbox.grade import grade
from rlbench.sandbox.grading_task import read_code_task
from rlbench.sandbox.hacks import PRETENDED_HACKS, hacked_task
from rlbench.sandbox.pool import AwaitableSandbox, stop_pool
from rlbench.sandbox.pool_rules import judge_lateness
from rlbench.sandbox.types import End, Execution, Program, SandboxLimits

PLACES = [(tier, user) for tier in ("bwrap-zygote", "landlock") for user in USERS]
SMALL = SandboxLimits(**LIMITS | {"wall_s": 4, "cpu_s": 1})
PATIENT = SandboxLimits(**LIMITS | {"wall_s": 30, "cpu_s": 1})  # for what does not sleep: a busy machine needs the time

# what a program may leave in a workspace
LEAVINGS = {
    "names that mean deleted": "for name in ('.wh.', '.wh...', '.wh..', '.wh.base.txt', '.wh..wh..opq', "
    "'folder/.wh.inner.txt'): open(name, 'w').write('x')",
    "folders that mean deleted": "for name in ('.wh.', '.wh...', '.wh.folder', '.wh..wh..opq'): "
    "os.makedirs(name + '/x')",
    "links that mean deleted": "for name in ('.wh.', '.wh...', '.wh.folder'): os.symlink('..', name)",
    "files with holes": "for i in range(30): open(f'h{i}', 'wb').truncate(15 << 20)",
    "a file with one large hole": "open('h', 'wb').truncate(1 << 40)",
    "three thousand folders in each other": "for i in range(3000): os.mkdir('d'); os.chdir('d')",
    "a hundred folders with long names": "for i in range(100): os.mkdir('d' * 250); os.chdir('d' * 250)",
    "its program is a folder": "os.unlink('solution.py'); os.makedirs('solution.py/x/y'); "
    "open('solution.py/x/y/z', 'w')",
    "its program is a closed folder": "os.unlink('solution.py'); os.mkdir('solution.py', 0)",
    "its program is a link to the system": "os.unlink('solution.py'); os.symlink('/etc/passwd', 'solution.py')",
    "its program is a link to itself": "os.unlink('solution.py'); os.symlink('solution.py', 'solution.py')",
    "its program is a pipe": "os.unlink('solution.py'); os.mkfifo('solution.py')",
    "its program is gone": "os.unlink('solution.py')",
    "its folder is closed": "os.chmod('.', 0)",
    "its folder cannot be listed": "os.chmod('.', 0o300)",
    "its folder cannot be written": "os.chmod('.', 0o500)",
    "folders nobody may enter": "os.makedirs('a/b', 0); os.mkdir('c', 0)\nos.chmod('folder', 0)",
    "files nobody may read": "os.close(os.open('secret', os.O_CREAT | os.O_WRONLY, 0)); os.chmod('base.txt', 0)",
    "names that are no text": "for name in (b'\\xff\\xfe', b'a\\nb', b'=\\n\\n=', b'x' * 255, ' ', "
    "'\\ud800'.encode('utf-8', 'surrogatepass')): open(name, 'w').write('x')",
    "times far away": "os.utime('solution.py', (1 << 40, 1 << 40)); os.utime('base.txt', (-(1 << 40), -(1 << 40)))",
    "too many files": "for i in range(5000): open(f'f{i}', 'w')",
    "a full disk": "open('x', 'wb').write(bytes(14 << 20)); open('y', 'wb').write(bytes(14 << 20))",
    "a base of links": "import shutil\n"
    "shutil.rmtree('folder'); os.symlink('..', 'folder'); os.unlink('base.txt'); "
    "os.symlink('/proc/self/environ', 'base.txt')",
    "links in a ring, and to each other": "os.symlink('b', 'a'); os.symlink('a', 'b'); "
    "os.link('solution.py', 'c'); os.link('c', 'd')",
    "renames its folder": "os.rename('folder', 'solution'); os.rename('.', 'x')",
    "a file where files are to be": "open('notes', 'w').write('x')",
    "sleep": "import time; time.sleep(60)",
    "its own end": "os.kill(os.getpid(), 9); os.abort()",
    "a lower limit": "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); "
    "open('x', 'w').write('x' * 9999)",
}


def of_model(said: str) -> bool:
    return said.split()[0] in ("done", "missing") or End(said.split()[0]).of_model


@pytest.mark.parametrize(
    "cell, name",
    [(place, name) for place in PLACES for name in LEAVINGS],
    ids=lambda each: each if isinstance(each, str) else "-".join(each),
    indirect=["cell"],
)
def test_what_a_program_leaves_is_its_own_doing(cell, name):
    """Whatever it left, nothing that follows is the machine's failure;
    the workspace can be put back, what was kept can be had again, and the next program is well."""
    told = cell.turns(
        Program("import os\n" + LEAVINGS[name], files={"solution.py": b"first"}), SMALL if name == "sleep" else PATIENT
    )
    assert all(map(of_model, told.values())), told
    assert told["back"] == told["close"] == "done" and told["after back"].startswith("exited 0"), told
    too_full = (
        cell.tier == "landlock" and name == "a full disk"
    )  # it has no disk of its own: a look ends whatever program it meets in a workspace that is too full
    assert (
        "next again" not in told
        or told["open again"] == "done"
        and told["next again"].startswith(("exited 0", "output_limit") if too_full else "exited 0")
    ), told
    assert cell.left() == 0
    after = cell.run(Program("print(6 * 7)"), SandboxLimits())
    assert (after.end, after.stdout) == (End.EXITED, b"42\n")


PROJECT = read_code_task(
    json.dumps(
        {
            "kind": "repository",
            "files": {
                "src/shapes.py": "def area(a, b):\n    return a + b\n",
                "tests/test_shapes.py": "from shapes import area\n\ndef test_area():\n    assert area(2, 3) == 6\n",
            },
            "editable": ["*"],
            "tests": ["tests/test_shapes.py::test_area"],
            "reference": "```python src/shapes.py\ndef area(a, b):\n    return a * b\n```\n",
        }
    )
)
PATHS = {
    "a path too long": {"x" * 300: ""},
    "a path longer than any": {"/".join(["x" * 200] * 30): ""},
    "too deep": {"d/" * 1500 + "x": ""},
    "a file that is a folder": {"src/shapes.py/x": "", "src": ""},
    "a folder that is a file": {"a": "", "a/b": "", "a/b/c": ""},
    "too many": {f"f{i}": "" for i in range(3000)},
    "too large": {"x": "1" * (20 << 20)},
    "half a surrogate in a name": {"a\ud800": "", "\udcff": ""},
    "half a surrogate in a file": {"src/shapes.py": "x = '\ud800'"},
    "names of the system": {"src/\n": "", "src/a=b": "", "a\n\nb": "", "-": ""},
    "its modules": {
        "src/os.py": "raise SystemExit",
        "os.py": "import sys; sys.exit(0)",
        "json.py": "",
        "shapes/__init__.py": "x",
    },
}


@pytest.mark.parametrize("cell", PLACES, ids="-".join, indirect=True)
def test_what_an_answer_consists_of_is_its_own_doing(cell):
    "Paths and files of a project, text that is none, and the right solution right after."
    for name, changes in PATHS.items():
        verdict = grade(cell, PROJECT, changes, PATIENT)
        assert verdict.score == 0 and End(verdict.ends[-1]).of_model, (name, verdict.ends, verdict.message)
        assert grade(cell, PROJECT, {"src/shapes.py": "def area(a, b):\n    return a * b\n"}, PATIENT).score == 1, name
    prints = read_code_task(json.dumps({"kind": "stdio", "tests": [{"stdin": "3", "stdout": "9"}]}))
    for code in (
        "print('\ud800')",
        "\udcff",
        "\0",
        "print(9)\0",
        "#" * (9 << 20),
        "(" * 9999,
        "print(" * 99 + ")" * 99,
    ):
        verdict = grade(cell, prints, code, PATIENT)
        assert verdict.score == 0 and End(verdict.ends[-1]).of_model, (code[:20], verdict.ends, verdict.message)


@pytest.mark.parametrize("cell", PLACES, ids="-".join, indirect=True)
def test_text_that_is_none_is_its_own_doing_in_an_agents_calls(cell):
    """Half a surrogate in a command, its input, its environment, in a file's name and content:
    never an error of the machine, nor of the caller."""

    class Box:
        def exec(self, program, limits):
            return cell.run(program, limits)

        def write(self, path, data):
            return written.append((path, data))

    written, asked = [], AwaitableSandbox(Box(), SandboxLimits(**LIMITS | {"processes": 1}))
    bad = "a\ud800b"
    for how in (
        {"cmd": ["cat"], "input": bad},
        {"cmd": ["echo", bad]},
        {"cmd": [bad]},
        {"cmd": ["env"], "env": {"X": bad}},
        {"cmd": ["cat", "a\0b"]},
    ):
        told = asyncio.run(asked.exec(**how))
        assert isinstance(told.returncode, int), how
    asyncio.run(asked.write_file("x", bad))
    assert written == [("x", bad.encode("utf-8", "surrogatepass"))]
    assert asyncio.run(asked.exec(["echo", "well"])).stdout == "well\n"


@pytest.mark.parametrize(
    "cell, name",
    [(place, hack.name) for place in PLACES for hack in PRETENDED_HACKS],
    ids=lambda each: each if isinstance(each, str) else "-".join(each),
    indirect=["cell"],
)
def test_nothing_is_gained_by_looking_like_a_broken_machine(cell, name):
    "Neither masked nor paid, and the next program is paid what it is worth."
    code = next(hack.code for hack in PRETENDED_HACKS if hack.name == name)
    verdict = grade(
        cell,
        hacked_task(),
        code,
        SandboxLimits(cpu_s=1.2, wall_s=20.0 if "lowers" in name or "eats" in name else 3.0, memory_mb=128),
    )
    assert (verdict.score, verdict.passed) == (0, False) and End(verdict.ends[-1]).of_model, (
        verdict.ends,
        verdict.message,
    )
    assert grade(cell, hacked_task(), hacked_task().reference, SandboxLimits()).score == 1


SPEND = (
    "import os, threading, time, zlib\n"
    "def spend(s, clock):\n"
    "    end = clock() + s\n"
    "    while clock() < end: zlib.crc32(bytes(1 << 16))\n"
)
FORK = (
    "for i in range({number}):\n"
    "    if not os.fork():\n"
    "        {work}\n"
    "        time.sleep(60); os._exit(0)\n"
    "time.sleep(60)\n"
)
PINNED = "os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
# late, each by its own doing: its processes and threads wait for each other, or for a disk
WAITERS = {
    "children that share a core": SPEND + PINNED + FORK.format(number=13, work="spend(0.01, time.process_time)"),
    "children that share the cores": SPEND + FORK.format(number=13, work="spend(0.01, time.process_time)"),
    "threads that compute": SPEND
    + "for i in range(13): threading.Thread(target=spend, args=(0.01, time.thread_time)).start()\ntime.sleep(60)\n",
    "threads on a core": SPEND
    + PINNED
    + "for i in range(13): threading.Thread(target=spend, args=(0.01, time.thread_time)).start()\ntime.sleep(60)\n",
    "a file that is written and synced": "import os\n"
    "file = os.open('x', os.O_CREAT | os.O_RDWR)\n"
    "while True: os.pwrite(file, bytes(4096), 0); os.fsync(file)\n",
    "a little work, a little sleep": SPEND
    + PINNED
    + "while True: spend(0.0005, time.process_time); time.sleep(0.05)\n",
}


@pytest.mark.parametrize("cell", PLACES, ids="-".join, indirect=True)
def test_waiting_for_its_own_kind_is_no_failure_of_the_machine(cell):
    "Without idle processors beside it, too: a known-good program in the same place is not late."
    limits = SandboxLimits(**LIMITS | {"cpu_s": 0.15, "wall_s": 1.5})
    for name, code in WAITERS.items():
        told = judge_lateness(cell.run(Program(code), limits), limits, cell.run)
        assert told.end.of_model, (name, told)


def test_the_wait_for_a_processor_is_that_of_one_thread():
    """However many wait for each other, none waits longer than the clock runs;
    one that keeps itself to a processor waits by its own choice."""
    began = time.monotonic()
    spin = (
        SPEND + "for i in range(13): threading.Thread(target=spend, args=(60, time.thread_time), "
        "daemon=True).start()\n"
        "time.sleep(60)\n"
    )
    for code, pinned in ((spin, False), (SPEND + PINNED + spin, True)):
        with subprocess.Popen([sys.executable, "-c", code]) as process:
            time.sleep(1)
            run, place = (
                SimpleNamespace(runnable=-1.0, pinned=False),
                SimpleNamespace(program_cores=os.sched_getaffinity(0)),
            )
            assert zygote_watch.measure_waiting(place, run, [(process.pid,)], time.monotonic())
            process.kill()
        assert 0 < run.runnable <= time.monotonic() - began and run.pinned == (pinned and len(place.program_cores) > 1)
    for run, cpu, expected in (
        (SimpleNamespace(runnable=0.7, pinned=False), 0.7, 3.3),
        (SimpleNamespace(runnable=3.0, pinned=False), 0.2, 1.0),
        (SimpleNamespace(runnable=3.0, pinned=True), 0.2, 3.8),
    ):
        assert zygote_watch.seconds_asleep(run, 10.0, 14.0, cpu) == pytest.approx(expected)


def test_a_late_program_is_compared_with_a_known_good_one():
    "In a workspace that cannot be had again: both late, and it is the machine; else it is the program."
    late, asked = Execution(End.WALL_TIMEOUT), []

    def place(end):
        return lambda program, limits: asked.append(program) or Execution(end)

    limits = SandboxLimits(cpu_s=1, wall_s=2)
    for end in End:
        told = judge_lateness(late, limits, place(end))
        assert told.end is (End.WALL_LIMIT if end.of_model and end is not End.WALL_LIMIT else End.WALL_TIMEOUT)
    assert all("0.8" in program.code for program in asked)
    assert judge_lateness(Execution(End.EXITED), limits, None).end is End.EXITED


@pytest.mark.parametrize("cell", PLACES, ids="-".join, indirect=True)
def test_a_sleeper_is_late_once_for_all_its_tests(cell):
    "Several tests, each with a wall limit; the program has one for all of its sleep."
    prints = read_code_task(
        json.dumps({"kind": "stdio", "tests": [{"id": str(n), "stdin": str(n), "stdout": str(n)} for n in range(6)]})
    )
    for code in (
        "import time\ntime.sleep(60)",
        "import time\nn = input()\nif n == '1': time.sleep(60)\nprint(n)",
        "import time\ntime.sleep(0.6)",
    ):
        verdict = grade(cell, prints, code, SandboxLimits(**LIMITS | {"cpu_s": 0.3, "wall_s": 1.0}))
        assert (
            verdict.score == 0
            and verdict.ends[-1] == "wall_limit"
            and verdict.ends.count("wall_limit") == 1
            and verdict.runs <= 3
        ), verdict


def test_waiting_for_a_canary_is_no_standstill():
    """The pool is taken by sleepers, and so the canary waits:
    the actor goes on, and what was doubted is told when the canary is back."""
    opened = threading.Event()

    class Taken(Quick):
        def run(self, program, limits, owner=""):
            if owner.endswith("canary"):
                assert opened.wait(400)
                return super().run(program, limits, owner)
            return Execution(
                End.WALL_LIMIT, answers=(None,) * len(program.calls), cpu_s=0.0, wall_s=limits.wall_s, tier="fake"
            )

    actor = EnvironmentActor(
        CODE_VERIFIERS["code"], CODE_REWARDS["tests"], judging_pool=JudgingPool(Taken(), 4, "monday")
    )
    actor.receive([ScoreRequest(Rollout(i, 0, 0, i, Task("a", "b", ANSWER), text="1 2")) for i in range(4)])
    turns, until = 0, time.monotonic() + 20
    while not actor.doubted and time.monotonic() < until:
        assert actor.work() == []
    for _ in range(20):
        assert actor.work(0.01) == [] and not actor.idle
        turns += 1
    assert turns == 20 and len(actor.waiting()) == 4 and not opened.is_set()
    actor.forget([(3, 0)])
    opened.set()
    done = {}
    while not actor.idle:
        done |= {
            said.key[0]: (said.judged.reward, said.judged.outcome) for said in actor.work() if hasattr(said, "judged")
        }
    assert done == dict.fromkeys(range(3), (0.0, Outcome.OK))


def judge_each(actor, rollouts, pause=0.0):
    "What an actor says of each rollout, one after the other."
    told = []
    for rollout in rollouts:
        actor.receive([ScoreRequest(rollout)])
        while not actor.idle:
            told += [said.judged for said in actor.work() if hasattr(said, "judged")]
        time.sleep(pause)
    return told


def test_who_is_masked_again_and_again_is_punished():
    "On every worker, while others and the canary get on: the third time it is zero, and a tripwire."

    class Fooled(Quick):
        fooled = 0

        def run(self, program, limits, owner=""):
            if "evil" not in program.code:
                return super().run(program, limits, owner)
            self.fooled += 1
            return Execution(End.HOST_OOM, tier="fake", worker=f"w{self.fooled % 2}", message="played")

    actor = EnvironmentActor(
        CODE_VERIFIERS["code"], CODE_REWARDS["tests"], judging_pool=JudgingPool(Fooled(), 4, "monday")
    )
    told = judge_each(
        actor,
        [
            Rollout(id, 0, 0, 0, Task("a", "b", ANSWER.replace("1 2 3", "1 2 3" + " " * (text == "evil"))), text=text)
            for id, text in enumerate(["1 2"] * 12 + ["evil"] * 4)
        ],
    )
    assert [each.reward for each in told] == [1.0] * 12 + [None, None, 0.0, 0.0]
    assert (
        "masked" in told[-1].verdict.tripwires
        and told[-1].correct is False
        and "verdicts of this program are missing" in told[-1].verdict.message
    )


class Brittle:
    "An episode that a word of the policy breaks, and a task that breaks it before."

    def start(self, task):
        if task.id == "broken":
            raise OSError("no such file")
        return task.prompt

    def advance(self, response):
        if "late" in response:
            raise TimeoutError("a tool has hung")
        return Done(response)


def slow(response, answer):
    "A verifier that a word of the policy makes wait."
    time.sleep(0.15 * ("late" in response))
    return response == answer


@pytest.mark.parametrize(
    "verifier, environment", [(slow, SingleTurn), (VERIFIERS["exact"], Brittle)], ids=["function", "episode"]
)
def test_episodes_and_functions_are_guarded_too(verifier, environment):
    "The third time an answer leaves them without a verdict, while others get theirs, it is zero."
    actor = EnvironmentActor(verifier, REWARDS["correct"], environment)
    answers = ["2"] * 12 + ["late"] * 4
    rollouts = [
        Rollout(id, 0, 0, 0, Task("a" if text == "2" else "b", "1+1=", "2"), text=text)
        for id, text in enumerate(answers)
    ]
    told = []
    for rollout in rollouts:
        actor.receive([ScoreRequest(rollout, deadline=0.05)])
        while not actor.idle:
            told += [said.judged for said in actor.work() if hasattr(said, "judged")]
        time.sleep(0.5 * (rollout.text == "late"))
    assert [each.reward for each in told] == [1.0] * 12 + [None, None, 0.0, 0.0], told
    assert told[-1].correct is False and told[-1].message.startswith("masked: 4 of 4 verdicts of this program")
    if environment is Brittle:
        broken = judge_each(
            actor, [Rollout(99 + n, 0, 0, 0, Task("broken", "1+1=", "2"), text="2") for n in range(4)], 0.4
        )
        assert {each.reward for each in broken} == {None}, "it fails before the policy has said anything"
    actor.close()


NAUGHTY = """import os, resource, time
def solve():
    n = sum(map(ord, "{answer}")) % 8
    if n == 0: time.sleep(60)
    if n == 3: os.kill(os.getpid(), 9); os.abort()
    if n == 6:
        resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
        while True: pass
    return len("{answer}") % 2
"""


def naughty(*, split="train", seed=0, count=64):
    from rlbench.records import Task

    return [Task(f"naughty/{split}/{i}", f"{i}=", NAUGHTY_ANSWER, 1, "naughty") for i in range(count)]


NAUGHTY_ANSWER = json.dumps(
    {
        "kind": "function",
        "function": "solve",
        "wrap": NAUGHTY,
        "tests": [{"id": str(n), "expected": 1} for n in range(3)],
        "reference": "1",
        "bad": "11",
    }
)


def assert_each_kind_failed_by_itself(verdicts, rollouts):
    """Sleepers, programs that kill themselves and programs that lower their limits:
    there are some of each, a third in all, and each has a verdict of 0."""
    texts = dict(rollouts.select("rollout", "text").iter_rows())
    ends = {kind: [] for kind in ("sleeps", "kills itself", "lowers its limit", "plain")}
    for rollout, score, last in verdicts.select("rollout", "score", pl.col("ends").list.last()).iter_rows():
        kind = {0: "sleeps", 3: "kills itself", 6: "lowers its limit"}.get(
            sum(map(ord, final_answer(texts[rollout]))) % 8, "plain"
        )
        ends[kind].append(last)
        assert kind == "plain" or score == 0.0, (kind, score, last)
    naughty = sum(len(ends[kind]) for kind in ends if kind != "plain")
    assert all(ends.values()) and naughty >= 0.25 * len(verdicts), {kind: len(found) for kind, found in ends.items()}
    assert set(ends["sleeps"]) == {"wall_limit"} and set(ends["lowers its limit"]) <= {"cpu_limit", "wall_limit"}, ends
    assert set(ends["kills itself"]) <= {"crashed", "cpu_limit"}, ends


@pytest.mark.parametrize("tier", ["landlock", "bwrap-zygote"])
def test_a_run_of_which_a_third_sleeps_or_kills_itself_trains_on(tmp_path, monkeypatch, tier):
    "Twenty steps, processes and sandboxes: books closed, and nothing masked."
    monkeypatch.chdir(tmp_path)
    pool = {
        "sandbox.folder": str(tmp_path / "pool"),
        "sandbox.tier": tier,
        "verifier.cpu_s": 0.3,
        "verifier.wall_s": 0.6,
    }
    try:
        run = rl.run(
            "tiny",
            name="naughty",
            steps=20,
            batch=8,
            group=4,
            preflight=0,
            eval=[],
            tasks=naughty,
            verifier="code",
            reward="tests",
            alerts=False,
            max_tokens=8,
            **WITHOUT_MODEL,
            **pool,
        )
        while run.state not in ("finished", "failed"):
            time.sleep(0.2)
        status, verdicts, rollouts = (
            read_status(Path(run.folder)),
            *(read_table(run.folder, table) for table in ("verdicts", "rollouts")),
        )
        assert run.state == "finished" and status.books_closed, (Path(run.folder) / "run.log").read_text()[-2000:]
        assert (
            len(read_table(run.folder, "steps")) == 20
            and verdicts["score"].null_count() == 0
            and not (rollouts["outcome"] == "environment_error").any()
        )
        assert_each_kind_failed_by_itself(verdicts, rollouts)
    finally:
        stop_pool(tmp_path / "pool")

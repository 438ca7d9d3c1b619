"""Runs whose verdicts come from a sandbox."""

import json
from ast import literal_eval
from hashlib import blake2b

from rlbench.sandbox.types import End, Execution, Fault, Layer

# The scripted generator writes numbers.
# What is asked of it is an even count of words, found out by running a program: half of the responses are right.
EVEN = {
    "kind": "function",
    "function": "solve",
    "wrap": 'def solve():\n    return len("{answer}".split()) % 2 == 0\n',
    "tests": [{"expected": True}],
    "reference": "1 2",
    "bad": "1 2 3",
}


SMALL = {
    "group": 4,
    "batch": 16,
    "steps": 3,
    "preflight": 0,
    "eval": [],
    "verifier": "code",
    "reward": "tests",
    "alerts": False,
}


def even(*, split="train", seed=0, count=40):
    from rlbench.records import Task

    return [Task(f"even/{split}/{i}", f"{i} words: ", ANSWER, 1, "even") for i in range(count)]


ANSWER = json.dumps(EVEN)


class Quick:
    """A pool that knows what the program would do, and fails as it is told:
    `fails(n)` gives the end of execution n, or None."""

    def __init__(self, fails=lambda n: None):
        self.fails, self.runs = fails, 0

    def run(self, program, limits, owner=""):
        self.runs += 1
        end = self.fails(self.runs - 1)
        if end == "raise":
            raise Fault(End.BACKEND_LOST, "played")
        if end is not None:
            return Execution(end, tier="fake", worker="w", message="played")
        words = program.code.rpartition('len("')[2].partition('"')[0].split()
        answers = tuple(
            json.dumps(["v", literal_eval(call)[0], ["b", "1" if len(words) % 2 == 0 else ""], ["l", []]])
            for call in program.calls
        )
        return Execution(
            End.EXITED,
            answers=answers,
            cpu_s=0.001,
            wall_s=0.002,
            tier="fake",
            worker="w",
            warm=True,
            phases=(("queued", 0.001), ("started", 0.002), ("ran", 0.002)),
        )

    def open(self, layer=None, limits=None, owner=""):
        "A sandbox in which nothing is kept but what it is called."
        return Box(self)


class Box:
    "A sandbox of `Quick`."

    def __init__(self, pool):
        self.pool, self.held = pool, b""

    def exec(self, program, limits):
        self.held = b"".join(program.files.values())
        return self.pool.run(program, limits)

    def snapshot(self, turn, version):
        return Layer(blake2b(self.held).hexdigest(), turn=turn, version=version)

    def submit_close(self):
        self.pool = None

"""Grading with real processes: every kind of task, ends of the model and of the machine,
and the same verdict the second time."""

import json
import random
from dataclasses import replace

import pytest
from local_runner import LocalRunner

from rlbench.sandbox.grade import GRADERS, grade
from rlbench.sandbox.grading_task import changes_in, read_code_task, stdio_program
from rlbench.sandbox.types import End, Execution, Fault, SandboxLimits
from rlbench.sandbox.verdict import (
    CheckedTest,
    MissingVerdicts,
    Sighting,
    Verdict,
    difference_between,
    punish_masked,
    run_canary,
    verdict_from_row,
    verdict_to_row,
)

LIMITS = SandboxLimits(cpu_s=1, wall_s=4, memory_mb=512)
SQUARE = "def solve(n):\n    return n * n\n"


def task(kind: str, **more):
    return read_code_task(json.dumps({"kind": kind, **more}))


def whys(verdict) -> list[str]:
    return [check.why for check in verdict.checks]


SQUARES = task(
    "function", function="solve", tests=[{"args": [n], "expected": n * n} for n in (0, 3, 12)], reference=SQUARE
)
SUMS = task(
    "stdio",
    tests=[{"stdin": "3 4\n", "stdout": "7"}, {"stdin": "10 -4\n", "stdout": "6\n"}],
    reference="print(sum(map(int, input().split())))",
)
ASSERTS = task(
    "asserts",
    function="f",
    tests=[
        "assert f(2) == 4",
        "assert f(f(2)) == 16",
        "l = [3, 1, 2]\nf(l)\nassert l == [1, 2, 3]",
        "try:\n    f('x')\n    assert False\nexcept ValueError:\n    pass",
        "import math\nassert math.isclose(f(1.5), 2.25)",
        "for n in range(5):\n    assert f(n) == n * n",
    ],
)
SORTS_AND_SQUARES = (
    "def f(x):\n"
    "    if isinstance(x, list):\n"
    "        x.sort()\n"
    "        return\n"
    "    if isinstance(x, str):\n"
    "        raise ValueError('no')\n"
    "    return x * x\n"
)
PROJECT = task(
    "repository",
    files={
        "src/shapes.py": "def area(a, b):\n    return a + b\n",
        "tests/test_shapes.py": "import unittest\n"
        "from shapes import area\n"
        "\n"
        "def test_area():\n"
        "    assert area(2, 3) == 6\n"
        "\n"
        "class Unit(unittest.TestCase):\n"
        "    def test_one(self):\n        self.assertEqual(area(1, 1), 1)\n",
    },
    editable=["src/*"],
    tests=["tests/test_shapes.py::test_area", "tests/test_shapes.py::Unit::test_one"],
    reference="```python src/shapes.py\ndef area(a, b):\n    return a * b\n```\n",
)


def test_function_tasks():
    "Each test has its own evidence, and a function that ends the process loses the tests after it."
    right = grade(LocalRunner(), SQUARES, SQUARE, LIMITS)
    assert (right.score, right.passed, whys(right), right.runs, right.tier, right.integrity) == (
        1.0,
        True,
        [""] * 3,
        1,
        "local",
        "data",
    )
    assert grade(LocalRunner(), SQUARES, SQUARE, LIMITS, fresh=True).runs == 3
    stops = "import os\ndef solve(n):\n    if n > 5:\n        os._exit(0)\n    return n * n\n"
    early = grade(LocalRunner(), SQUARES, stops, LIMITS, rule="rate")
    assert early.score == 2 / 3 and whys(early)[2] == "no answer (exited)" and "exit" in early.tripwires
    endless = grade(
        LocalRunner(), SQUARES, "def solve(n):\n    while n:\n        pass\n    return 0\n", LIMITS, rule="rate"
    )
    assert endless.score == 1 / 3 and endless.ends == ("cpu_limit",)
    for code, why in (
        ("solve = [", "raised SyntaxError"),
        ("x = 1", "raised AttributeError"),
        ("def solve(n):\n    return [1] * 10**10", "raised MemoryError"),
        ("def solve(n):\n    return n / 0", "raised ZeroDivisionError"),
    ):
        wrong = grade(LocalRunner(), SQUARES, code, LIMITS, rule="rate")
        assert wrong.score == 0 and all(each.startswith(why) for each in whys(wrong)), (code, whys(wrong))


def test_state_between_tests():
    "One process for all tests lets state leak from one to the next; a fresh one for each does not."
    counts = "calls = []\ndef solve(n):\n    calls.append(n)\n    return n * n if len(calls) == 1 else -1\n"
    assert (
        grade(LocalRunner(), SQUARES, counts, LIMITS, rule="rate").score == 1 / 3
        and grade(LocalRunner(), SQUARES, counts, LIMITS, rule="rate", fresh=True).score == 1
    )


def test_methods_arguments_and_exceptions():
    "A method of a class, what a call made of its argument, and an exception that was expected."
    method = task("function", function="Solution.double", tests=[{"args": [2], "expected": 4}])
    assert grade(
        LocalRunner(), method, "class Solution:\n    def double(self, n):\n        return 2 * n\n", LIMITS
    ).passed
    in_place = task(
        "function", function="order", observe="first argument", tests=[{"args": [[3, 1, 2]], "expected": [1, 2, 3]}]
    )
    assert (
        grade(LocalRunner(), in_place, "def order(l):\n    l.sort()\n", LIMITS).passed
        and not grade(LocalRunner(), in_place, "def order(l):\n    return sorted(l)\n", LIMITS).passed
    )
    refuses = task("function", function="root", tests=[{"args": [-1], "raises": "ValueError"}])
    assert (
        grade(LocalRunner(), refuses, "import math\nroot = math.sqrt\n", LIMITS).passed
        and not grade(LocalRunner(), refuses, "def root(n):\n    return 0\n", LIMITS).passed
    )


def test_a_checker_decides_in_a_sandbox_of_its_own():
    "Any order is right; the policy's code and the checker never meet."
    sorts = task(
        "function",
        function="f",
        checker="def check(args, answer):\n    return sorted(answer) == sorted(args[0])\n",
        tests=[{"args": [[3, 1]]}, {"args": [[1, 1]]}],
    )
    runner = LocalRunner()
    assert grade(runner, sorts, "def f(x):\n    return x[::-1]\n", LIMITS).passed and len(runner.programs) == 2
    assert not any("return x[::-1]" in program.code and "def check" in program.code for program in runner.programs)
    assert grade(LocalRunner(), sorts, "def f(x):\n    return 3\n", LIMITS).score == 0
    broken = {
        "function": "f",
        "checker": "def check(args, answer):\n    return sorte(answer)\n",
        "tests": [{"args": [[3, 1]]}],
    }
    lost = grade(
        LocalRunner(),
        task("function", reference="def f(x):\n    return sorted(x)\n", **broken),
        "def f(x):\n    return x\n",
        LIMITS,
    )
    assert lost.score is None and lost.ends[-1] == "grader_error" and "sorte" in lost.message
    untold = grade(LocalRunner(), task("function", **broken), "def f(x):\n    return x\n", LIMITS)
    assert untold.score == 0 and "NameError" in untold.checks[0].why, "without a solution it cannot be told, and counts"


def test_programs_that_print():
    "The whole output counts, and an exit status does not."
    assert grade(LocalRunner(), SUMS, SUMS.reference, LIMITS).score == 1
    assert grade(LocalRunner(), SUMS, "print(7)", LIMITS, rule="rate").score == 0.5
    assert grade(LocalRunner(), SUMS, SUMS.reference + "\nprint('and more')", LIMITS, rule="rate").score == 0
    assert grade(LocalRunner(), SUMS, SUMS.reference + "\nraise SystemExit(3)", LIMITS).score == 1
    assert grade(LocalRunner(), SUMS, "import os\nos._exit(0)", LIMITS, rule="rate").score == 0
    patient = replace(LIMITS, wall_s=60)  # a busy machine gives a second of its processor late
    late = grade(LocalRunner(), SUMS, SUMS.reference + "\nwhile True:\n    pass", patient, rule="rate")
    assert late.score == 0 and set(late.ends) == {"cpu_limit"}


def test_asserts_against_a_stand_in():
    """Calls of calls, arguments changed in place, expected exceptions and loops,
    with the tests in one sandbox and the function in another."""
    runner = LocalRunner()
    right = grade(runner, ASSERTS, SORTS_AND_SQUARES, LIMITS, rule="rate")
    assert right.score == 1, whys(right)
    assert not any(
        "isinstance(x, list)" in program.code and "assert f(2)" in program.code for program in runner.programs
    )
    assert [
        c.passed
        for c in grade(
            LocalRunner(), ASSERTS, "def f(x):\n    return x * x if x != 4 else 5\n", LIMITS, rule="rate"
        ).checks
    ] == [True, False, False, False, True, False]
    needs_objects = task("asserts", function="f", tests=["assert f(lambda n: n + 1) == 2"])
    told = grade(LocalRunner(), needs_objects, "def f(g):\n    return g(1)\n", LIMITS)
    assert told.score is None and "set weak = true" in told.message
    weak = task("asserts", function="f", weak=True, tests=["assert f(lambda n: n + 1) == 2"])
    assert (
        grade(LocalRunner(), weak, "def f(g):\n    return g(1)\n", LIMITS).passed,
        grade(LocalRunner(), weak, "def f(g):\n    return 0\n", LIMITS).passed,
    ) == (True, False)


def test_a_whole_test_function_as_in_humaneval():
    "def check(candidate), called at its end."
    human = task(
        "asserts",
        function="add",
        tests=[
            "def check(candidate):\n"
            "    assert candidate(1, 2) == 3\n"
            "    assert candidate(-1, 1) == 0\n"
            "    for n in range(4):\n"
            "        assert candidate(n, n) == 2 * n\n"
            "check(candidate)"
        ],
    )
    assert (
        grade(LocalRunner(), human, "def add(a, b):\n    return a + b\n", LIMITS).passed
        and not grade(LocalRunner(), human, "def add(a, b):\n    return 3\n", LIMITS).passed
    )


def test_projects_get_their_own_tests():
    "Only changes to files that may be edited count; tests, configuration and results that came with them do not."
    assert grade(LocalRunner(), PROJECT, changes_in(PROJECT.reference), LIMITS).score == 1
    assert grade(LocalRunner(), PROJECT, {}, LIMITS, rule="rate").score == 0
    cheat = {
        "tests/test_shapes.py": "def test_area():\n    pass\n",
        "conftest.py": "import os\nos._exit(0)\n",
        "src/../result.json": "{}",
        "src/unittest.py": "raise ImportError('mine')\n",
    }
    caught = grade(LocalRunner(), PROJECT, cheat, LIMITS, rule="rate")
    assert caught.score == 0 and "tests" in caught.tripwires and caught.integrity == "weak"
    assert grade(LocalRunner(), PROJECT, {**cheat, **changes_in(PROJECT.reference)}, LIMITS).score == 1
    for ends in ("import os\nos._exit(0)\n", "raise SystemExit(0)\n"):
        assert grade(LocalRunner(), PROJECT, {"src/shapes.py": ends}, LIMITS, rule="rate").score == 0


KINDS = {
    "function": (SQUARES, SQUARE),
    "stdio": (SUMS, SUMS.reference),
    "asserts": (ASSERTS, SORTS_AND_SQUARES),
    "repository": (PROJECT, changes_in(PROJECT.reference)),
}


@pytest.mark.parametrize("end", [end for end in End if not end.of_model])
@pytest.mark.parametrize("kind", KINDS)
def test_a_machine_that_fails_gives_no_verdict(kind, end):
    """Whichever execution it was, and however good or bad the code.

    Without a witness of its own, a failure is the machine's as long as a known-good program fails, too."""
    graded, code = KINDS[kind]
    runs = grade(LocalRunner(), graded, code, LIMITS).runs
    for number in range(min(runs, 2)):
        verdict = grade(
            LocalRunner(dict.fromkeys(range(number, number + 1 + end.needs_witness), end)), graded, code, LIMITS
        )
        assert (verdict.score, verdict.passed, verdict.ends[-1]) == (None, None, end)
        if end.needs_witness:
            assert grade(LocalRunner({number: end}), graded, code, LIMITS).score == 1, (
                "once is no more than a stumble of the machine"
            )


class Allergic(LocalRunner):
    "A machine that cannot stand one program, and everything else."

    def __init__(self, word: str, end: End):
        super().__init__()
        self.word, self.end, self.others = word, end, 0

    def run(self, program, limits=LIMITS, owner=""):
        if self.word in program.code:
            return Execution(self.end, message="played")
        self.others += 1
        return super().run(program, limits)


@pytest.mark.parametrize("end", [end for end in End if end.needs_witness])
def test_who_fails_where_a_known_good_program_gets_on_is_to_blame(end):
    "Nobody knows how it did it; it did it each time, between two others that did not."
    for kind in ("function", "stdio"):
        machine = Allergic("evil", end)
        verdict = grade(machine, KINDS[kind][0], "evil = 1\n" + KINDS[kind][1], LIMITS)
        assert (verdict.score, verdict.passed, verdict.ends[-1]) == (0, False, "unusable") and machine.others == 2


def test_all_sleep_of_a_program_together_has_one_wall_limit():
    "Five tests and a sleeper: it is late once. One that sleeps a little in each has no more."
    five = task("stdio", tests=[{"id": str(n), "stdout": "1"} for n in range(5)])
    limits = SandboxLimits(cpu_s=0.5, wall_s=1.5)
    for code, runs in (("import time\ntime.sleep(60)", 1), ("import time\ntime.sleep(1.2)", 2)):
        machine = Sleepy()
        verdict = grade(machine, five, code, limits, rule="rate")
        assert verdict.score == 0 and len(machine.programs) <= runs + 1 and machine.slept <= 1.5 + 0.5, verdict


class Sleepy(LocalRunner):
    "Plays sleep: the number in `time.sleep` passes at once."

    slept = 0.0

    def run(self, program, limits=LIMITS, owner=""):
        self.programs.append(program)
        wanted = float(program.code.partition("time.sleep(")[2].partition(")")[0])
        took = min(wanted, limits.wall_s)
        self.slept += took
        return Execution(End.WALL_LIMIT if wanted > limits.wall_s else End.EXITED, wall_s=took, slept_s=took)


@pytest.mark.parametrize(
    "value",
    [
        "None",
        "3",
        "b'x'",
        "'x'",
        "float('nan')",
        "[]",
        "{}",
        "lambda: 0",
        "object()",
        "type",
        "deep(58)",
        "deep(60)",
        "deep(10 ** 5)",
        "{1: deep(50)}",
        "'\\ud800'",
        "'x' * 10 ** 6",
        "list(range(10 ** 5))",
        "10 ** 9000",
        "float('inf')",
    ],
)
def test_no_value_makes_the_grader_stumble(value):
    """Whatever comes back where something else was expected:
    to a checker that expects a list, to tests that hand it on, to every rule."""
    code = (
        f"def deep(n):\n"
        f"    value = ()\n"
        f"    for _ in range(n):\n"
        f"        value = (value,)\n"
        f"    return value\n"
        f"def f(x):\n"
        f"    return {value}\n"
    )
    checked = task(
        "function",
        function="f",
        checker="def check(args, answer):\n    answer.sort()\n    return answer[0] == answer.pop() + 1 == undefined\n",
        tests=[{"args": [[3, 1]]}],
    )
    handed = task(
        "asserts",
        function="f",
        tests=["assert f([f(1), (f(2), {'a': f(3)})]) == 4", "assert f(f(f(0))).x == 1", "assert f({f(1)}) == 0"],
    )
    compared = [
        task(
            "function", function="f", compare=rule, loose=loose, tests=[{"args": [1], "expected": [1, [2.5, {"a": 1}]]}]
        )
        for rule, loose in (("exact", False), ("close", True), ("multiset", True), ("set", False))
    ]
    for graded in (checked, handed, *compared):
        verdict = grade(LocalRunner(), graded, code, LIMITS)
        assert verdict.score == 0 and End(verdict.ends[-1]).of_model, (verdict.ends, verdict.message)


def test_a_grader_that_stumbles_over_an_answer_blames_the_answer(monkeypatch):
    "Only what the task's own solution meets as well is the grader's."

    def stumbles(bench, task_, code):
        bench.run(stdio_program("pass", ""))
        if "evil" in code or task_.function == "broken":
            raise RecursionError("too deep")
        return [CheckedTest("0", True)]

    monkeypatch.setitem(GRADERS, "function", stumbles)
    graded = {
        name: task("function", function=name, tests=[{"args": [1], "expected": 1}], reference="def solve(n): return 1")
        for name in ("solve", "broken")
    }
    blamed = grade(LocalRunner(), graded["solve"], "evil", LIMITS)
    assert (blamed.score, blamed.ends[-1]) == (0, "unusable") and "stumble" in blamed.tripwires
    lost = grade(LocalRunner(), graded["broken"], "evil", LIMITS)
    assert (lost.score, lost.ends[-1]) == (None, "grader_error")


def test_a_machine_that_fails_while_the_grader_is_looked_into_blames_nobody(monkeypatch):
    "The grader stumbles over an answer, and the worker is lost while it grades the task's own solution."

    def stumbles(bench, task_, code):
        bench.run(stdio_program("pass", ""))
        if bench.known_good:
            raise Fault(End.BACKEND_LOST, "its worker is gone")
        raise RecursionError("too deep")

    monkeypatch.setitem(GRADERS, "function", stumbles)
    graded = task(
        "function", function="solve", tests=[{"args": [1], "expected": 1}], reference="def solve(n): return 1"
    )
    verdict = grade(LocalRunner(), graded, "evil", LIMITS)
    assert (verdict.score, verdict.ends[-1]) == (None, "backend_lost") and "stumble" not in verdict.tripwires


@pytest.mark.parametrize(("args", "reason"), [("5", "args is 5"), ("[1,", "args: "), ("{1: 2}", "args is {1: 2}")])
def test_arguments_as_text_are_refused_by_field(args, reason):
    "A text that is no list of Python, where the task says `literal`."
    with pytest.raises(ValueError, match=r"tests\[0\].*") as refused:
        task("function", function="f", literal=True, tests=[{"args": args, "expected": "1"}])
    assert reason in str(refused.value)


def play_minute(answers, canary_fails=lambda: False, worker=lambda n: f"w{(n + n // 20) % 4}", seconds=50.0):
    """Show the guard a minute of (task, program, masked), with a canary for each that it suspects;
    how many masked ones are blamed on the programs, and all of them."""
    masks, blamed, masked_in_all = MissingVerdicts(), 0, 0
    for n, (task_, program, masked) in enumerate(answers):
        sighting = Sighting(task_, program, 7, masked, seconds * n / len(answers), worker(n))
        masks.note(sighting)
        masked_in_all += masked
        if masks.suspects(sighting):
            masks.note_canary(not canary_fails(), sighting.at)
            blamed += bool(masks.blame(sighting))
    return blamed, masked_in_all


@pytest.mark.parametrize("seed", range(3))
def test_a_hack_that_is_learnt_broadly_is_seen_beside_the_canaries(seed):
    "40 % of all answers, half the tasks wholly, all answers: the others fail as well, the canaries do not."
    draw = random.Random(seed)
    some = [(f"t{n % 20}", f"p{n}", draw.random() < 0.4) for n in range(160)]
    half = [(f"t{n % 20}", f"p{n}", n % 2 == 0) for n in range(160)]
    for answers in (some, half, [(f"t{n % 20}", f"p{n}", True) for n in range(160)]):
        blamed, masked = play_minute(answers)
        assert blamed >= 0.4 * masked, (blamed, masked)
    one, masked = play_minute([(f"t{n % 20}", f"p{n}", n % 20 == 3) for n in range(160)])
    assert one >= masked - 4, "one task alone, from its fourth or fifth on"


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6, 1.0])
def test_a_machine_that_fails_masks_and_nobody_is_blamed(share):
    "Canaries fail as often as programs do, whoever runs there."
    draw, blamed, masked = random.Random(5), 0, 0
    for _ in range(8):
        found = play_minute(
            [(f"t{n % 20}", f"p{n}", draw.random() < share) for n in range(160)], lambda: draw.random() < share
        )
        blamed, masked = blamed + found[0], masked + found[1]
    assert blamed <= 0.05 * masked, (blamed, masked)


def test_only_who_is_masked_in_several_places_is_to_blame():
    """A worker that is broken masks all that comes to it, and canaries elsewhere are well.

    Where there is one worker, seconds take the place of workers."""
    answers = [(f"t{n % 5}", f"p{n}", n % 4 == 1) for n in range(160)]
    assert (
        play_minute(answers, worker=lambda n: f"w{n % 4}")[0] == 0
        and play_minute(answers, worker=lambda n: f"w{n % 3}")[0] > 10
    )
    for only in ("w0", ""):
        assert (
            play_minute(answers, worker=lambda n: only)[0] > 10
            and play_minute(answers, worker=lambda n: only, seconds=0.5)[0] == 0
        )


def test_masks_are_the_policys_where_others_get_their_verdicts():
    """A program that has no verdict again and again while others have theirs;
    not where all have none, nor after a minute."""
    evil = [Sighting("t", "evil", 7, True, float(n), f"w{n % 2}") for n in range(3)]
    good = [Sighting("t", f"p{n}", 7, False, 2.0, "w0") for n in range(12)]
    masks = MissingVerdicts()
    for each in evil:
        masks.note(each)
    assert masks.suspects(evil[2]) and not masks.blame(evil[2]), "nobody else was seen"
    for each in good:
        masks.note(each)
    assert "3 of 3 verdicts of this program" in masks.blame(evil[2]) and not masks.blame(good[0])
    assert not masks.blame(replace(evil[2], at=99.0)), "too long ago"
    everybody = MissingVerdicts()
    for each in (*evil, *(replace(each, masked=True) for each in good)):
        everybody.note(each)
    assert not everybody.blame(evil[2])
    zero = punish_masked(Verdict(None, None, code="c", tests="t", ends=("host_oom",)), "so")
    assert (zero.score, zero.passed, zero.ends[-1]) == (0, False, "unusable") and "masked" in zero.tripwires


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_verdict_again(kind):
    "From what a row of a table keeps."
    graded, code = KINDS[kind]
    first = grade(LocalRunner(), graded, code, LIMITS, seed=3, rule="rate")
    kept = verdict_from_row(json.loads(json.dumps(verdict_to_row(first))))
    assert difference_between(kept, grade(LocalRunner(), graded, code, kept.limits, kept.seed, kept.rule)) == ""
    other = {**code, "src/more.py": ""} if kind == "repository" else code + "\n"
    assert (
        difference_between(kept, grade(LocalRunner(), graded, other, kept.limits, kept.seed, kept.rule)) == "other code"
    )
    flipped = replace(kept, checks=(replace(kept.checks[0], passed=False), *kept.checks[1:]))
    assert difference_between(kept, flipped) == f"test {kept.checks[0].id}: passed before"


def test_canaries_blame_the_machine():
    "A reference that fails and a bad solution that passes are not the policy's doing."
    for graded, _ in (KINDS["function"], KINDS["stdio"]):
        assert run_canary(graded, lambda code: grade(LocalRunner(), graded, code, LIMITS)).ok
    assert run_canary(PROJECT, lambda code: grade(LocalRunner(), PROJECT, changes_in(code), LIMITS)).ok
    tight = run_canary(SQUARES, lambda code: grade(LocalRunner(), SQUARES, "import no_such_module\n" + code, LIMITS))
    assert not tight.ok and not tight.machine and "reference" in tight.message
    assert run_canary(SQUARES, lambda code: grade(LocalRunner({0: End.HOST_OOM}), SQUARES, code, LIMITS)).machine


def test_a_seed_makes_random_programs_repeat():
    "The random module begins with the verdict's seed."
    draws = "import random\ndef solve(n):\n    return random.randrange(10**6)\n"
    told = task(
        "function",
        function="solve",
        checker="def check(args, answer):\n    return answer % 2 == 0\n",
        tests=[{"args": [n]} for n in range(8)],
    )
    first, again, other = (grade(LocalRunner(), told, draws, LIMITS, seed=seed, rule="rate") for seed in (1, 1, 2))
    assert first.checks == again.checks != other.checks

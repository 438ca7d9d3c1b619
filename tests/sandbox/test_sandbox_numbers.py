"""Verdicts on numbers and formulas: nothing that a response writes makes a judge raise, takes it past its bound,
or leaves it without a verdict."""

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlbench.environments.judging import judge_rollout
from rlbench.records import Outcome, Rollout, Task
from rlbench.reward import VERIFIERS, correct, formula_excess
from rlbench.sandbox.answers import matches_expected, tree_of
from rlbench.sandbox.grade import prints_expected
from rlbench.sandbox.grading_task import code_blocks

LONG = "1" + "0" * 450
TASK = Task(id="t", prompt="1+1=", answer="2", level=1, set="test")
HUGE = {
    "tower": r"9^{9^{9}}",
    "tower without braces": "9^9^9",
    "tower of Python": "9**9**9",
    "negative tower": "10^{-10^8}",
    "tower of factorials": "9!^{9!}",
    "factorial": "1000000!",
    "factorials of factorials": "9!!!",
    "binomial": r"\binom{10^7}{5000000}",
    "sum": r"\sum_{i=1}^{1000000} i^2",
    "range from below": r"\sum_{i=-1000000}^{1} i",
    "scientific": "1e999999999",
    "power of a power": "(10^{100})^{100}",
    "brackets": "(" * 40 + "1" + ")" * 40,
    "fractions": r"\frac{1}{1+" * 40 + "1" + "}" * 40,
    "curly": "{" * 40 + "1" + "}" * 40,
    "terms": "1+" * 3000 + "1",
    "digits": "7" * 5000,
    "binomial between its numbers": r"{9999999 \choose 4999999}",
    "binomial without brackets": r"9999999 \choose 4999999",
    "factorial behind a percent sign": r"9999999\%!",
    "factorial behind a space": r"9999999\,!",
    "factorial behind a degree sign": "9999999\N{DEGREE SIGN}!",
    "factorial of a magnitude": "|9999999|!",
    "power of a sum": "(a+b+c+d)^{999}",
    "power of a difference": r"\left(x-y\right)^{999}",
    "power of a sum in a sum": "1+(a+(b-c)+d)^{30}",
}


@pytest.mark.parametrize("name", HUGE)
def test_a_formula_that_is_too_large_is_wrong_and_says_why(name):
    "Reward 0, and not none; nothing of it is evaluated."
    judged = judge_rollout(
        Rollout(id=0, attempt=0, group=0, k=0, task=TASK, text=f"\\boxed{{{HUGE[name]}}}"), VERIFIERS["math"], correct
    )
    assert (judged.correct, judged.reward, judged.outcome) == (False, 0.0, Outcome.OK) and judged.message.startswith(
        "the final answer h"
    ), judged


@pytest.mark.parametrize(
    "formula",
    [
        r"\frac{3}{4}\sqrt{2}",
        "x^2+3x^5+2x^7-4x^{10}+y^{12}",
        "2^{1000}",
        "100!",
        r"\binom{10}{3}",
        "e^{-x^2/2}",
        "2^{2^{3}}",
        "3.14159265358979",
        r"\sum_{i=1}^{100} i",
        "7" * 900,
        r"{10 \choose 3}",
        "(x+1)^{99}",
        "(a+b+c+d)^9",
        "(1+2+3)^{99}",
        r"50\%",
        "|-3|",
        r"5\,!",
    ],
)
def test_usual_answers_are_within_the_bound(formula):
    assert formula_excess(formula) == ""


@given(st.text(alphabet="0123456789^{}()[]!+-*/=,.e_\\$ ab\n#:\u0663\u00b2~`", max_size=300))
@settings(max_examples=300, deadline=None)
def test_no_judge_of_numbers_raises(text):
    "Whatever a response is made of."
    formula_excess(text)
    code_blocks(text)
    for name in ("exact", "numeric", "gsm8k"):
        assert VERIFIERS[name](text, "2") in (True, False)
    prints_expected(text.encode(), "1 2.5 nan", "close")


@pytest.mark.parametrize(
    "given, wanted, right",
    [
        ("nan", LONG, False),
        ("inf", "9" * 310, False),
        ("nan", "9" * 310, False),
        ("inf", "1e400", False),
        ("nan", "1" * 5000, False),
        ("inf", "1" * 5000, False),
        ("nan", "1", False),
        ("inf", "-inf", False),
        ("1e309", "9" * 310, False),
        (LONG, LONG, True),
        ("1" * 5000, "1" * 5000, True),
        ("nan", "nan", True),
        ("inf", "inf", True),
        ("1.0000001", "1", True),
        ("5.0", "5", True),
        ("-0.0", "0", True),
        ("1_000", "x", False),
    ],
)
def test_printed_numbers(given, wanted, right):
    "No number that is not finite is paid where another is wanted."
    assert prints_expected(given.encode(), wanted, "close") is right


NUMBERS = st.one_of(
    st.integers(),
    st.integers(min_value=10**300, max_value=10**2000),
    st.floats(allow_subnormal=False),
    st.booleans(),
    st.none(),
    st.text(max_size=3),
    st.complex_numbers(allow_subnormal=False),
)


@given(NUMBERS, NUMBERS)
@settings(max_examples=500, deadline=None)
def test_close_never_raises_and_pays_nothing_that_is_not_finite(a, b):
    "Alone and inside lists and dicts."
    found = matches_expected(tree_of(a), tree_of(b), "close")
    assert found == matches_expected(tree_of([{"x": a}]), tree_of([{"x": b}]), "close")
    if isinstance(a, float) and (a != a or a in (float("inf"), float("-inf"))):
        assert found == (isinstance(b, float) and (a == b or a != a and b != b))


@pytest.mark.parametrize("mark", ["~", "`", "    ~", "~ "])
def test_fences_take_time_in_proportion(mark):
    "A response of nothing but fences' marks; the time grew with its square."
    used = []
    for number in (20_000, 80_000):
        began = time.process_time()
        code_blocks(mark * (number // len(mark)))
        used.append(time.process_time() - began)
    assert used[1] < 1 + 10 * used[0]


def test_a_response_that_computes_past_the_deadline_is_wrong():
    """Where the task's own answer is judged in the same place;
    a judge that is late with everything, or only waits, gives no verdict."""

    def spins(response, answer):
        end = time.thread_time() + 0.4 * (response != answer)
        while time.thread_time() < end:
            pass
        return response == answer

    def spins_always(response, answer):
        return spins("other", answer)

    def waits(response, answer):
        time.sleep(0.4 * (response != answer))
        return response == answer

    rollout = Rollout(id=0, attempt=0, group=0, k=0, task=TASK, text="3")
    late = judge_rollout(rollout, spins, correct, deadline=0.2)
    if late.outcome is not Outcome.TIMEOUT:  # this machine gave it its processor
        assert (late.correct, late.reward, late.outcome) == (
            False,
            0.0,
            Outcome.OK,
        ) and "counts as wrong" in late.message
    assert judge_rollout(rollout, spins_always, correct, deadline=0.2).outcome is Outcome.TIMEOUT
    assert judge_rollout(rollout, waits, correct, deadline=0.2).reward is None
    assert judge_rollout(replace(rollout, text="2"), spins, correct, deadline=5.0).reward == 1.0

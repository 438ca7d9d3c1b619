"""Functions of cells in live runs: swapped, refused, put back; other tasks while a run lives."""

import json

import polars as pl
import pytest
from inline import inline_run
from patience import until
from real_runs import SMALL, assert_books, ended
from steered_runs import SCRIPTED, asked, journal, source_of

import rlbench as rl
from rlbench.base.ledger_reading import read_table
from rlbench.knobs import Captured, FileFunction, capture_function, save_function
from rlbench.loop.actions import Write
from rlbench.loop.commands import decide_command
from rlbench.loop.config import make_config
from rlbench.loop.config_files import captured_functions
from rlbench.loop.config_tables import FUNCTIONS
from rlbench.loop.events import Commanded, Scored
from rlbench.loop.functions import ERRORS_IN_A_ROW, count_failed_calls
from rlbench.loop.state import RolloutState, start_state
from rlbench.objective.loss import LossTerms
from rlbench.records import Outcome
from rlbench.runtime.steer import in_force

LONG = {**SMALL, "steps": 100_000, "eval": [], "staleness": 1, "correction": "tis"}
SETTLED = LONG["staleness"] + 3  # versions after which nothing is served any more that was scored before a change


def rows(run, **wanted) -> list[dict]:
    "Rows of the journal with these values, once there is one."
    return until(lambda: [r for r in run.commands.to_dicts() if all(r[k] == v for k, v in wanted.items())])


def plus_two(r: rl.Rollout, shift: rl.Knob(0, 5, unit="reward") = 2.0):
    return float(r.correct) + shift, {"shift": shift}


def crash(r: rl.Rollout):
    return [][r.length]


def crash_later(r: rl.Rollout):
    import pathlib

    return 1 / (not pathlib.Path(MARK).exists()) + float(r.correct)


def odd_loss(logprobs_RT, old_RT, advantages_RT):
    import pathlib

    if pathlib.Path(MARK).exists():
        raise MemoryError("too much for me")
    never_RT = logprobs_RT.new_zeros(logprobs_RT.shape, dtype=bool)
    return LossTerms(-advantages_RT * logprobs_RT, never_RT, never_RT)


MARK = ""


def test_a_live_run_takes_functions_swaps_them_and_puts_them_back(tmp_path, monkeypatch):
    """One real run: a reward by decorator, its knob at once, another one of the same name, a refusal,
    and a reward and a loss that fail later."""
    monkeypatch.setitem(globals(), "MARK", str(tmp_path / "mark"))
    run = rl.run("tiny", runs=tmp_path, placement="colocated", **LONG)
    until(lambda: run.status and run.status.version >= 1)
    assert run.reward(plus_two) is plus_two
    (asked,) = run.set({"reward.shift": 3.0}, author="test")  # perhaps before it is in force
    first = rows(run, knob="reward", status="applied")[0]
    assert (
        json.loads(first["value"]) == {"name": "plus_two", "shift": 2.0, "source": source_of(plus_two)}
        and first["apply"] == "version"
    )
    (applied,) = rows(run, command=asked)
    assert applied["status"] == "applied"
    until(lambda: run.status.version >= applied["version"] + SETTLED)
    assert run.steps.filter(pl.col("version") <= first["version"])["reward_max"].max() <= 1
    served = run.steps.drop_nulls("reward_mean")  # a batch may be taken before anything new was scored
    assert served["reward_min"][-1] >= 3 and served["reward_mean"][-1] > 3
    assert run.settings.reward["shift"] == 3.0 and run.rollouts["part_names"].to_list()[-1] == ["shift"]

    namespace = {"rl": rl, "__name__": "__main__"}
    text = "def plus_two(r: rl.Rollout, low: rl.Knob(-9, 0) = -7.0):\n    return low + r.correct\n"
    path = tmp_path / "cell.py"
    path.write_text(text)
    exec(compile(text, str(path), "exec"), namespace)
    other = namespace["plus_two"]
    with pytest.raises(ValueError, match="Traceback(.|\n)*\\[\\]\\[r.length\\](.|\n)*IndexError"):
        run.reward(crash)
    sent = len(list((run.folder / "commands" / "done").glob("*.json")))
    assert sent == 2 and not list((run.folder / "functions").glob("crash*"))
    seen = run.rescore(other, last=50)
    assert (
        len(seen) <= 50
        and set(seen["new"]) <= {-7.0, -6.0}
        and {"prompt", "text", "old", "difference", "message"} <= set(seen.columns)
    )
    (asked,) = run.set(reward=other, author="test")
    (applied,) = rows(run, command=asked)
    until(lambda: run.settings.reward.get("low") == -7.0)
    until(lambda: run.status.version >= applied["version"] + SETTLED)
    assert run.steps["reward_max"].drop_nulls()[-1] <= -6
    assert len(list((run.folder / "functions").glob("plus_two-*.py"))) == 2

    run.set(reward=crash_later, loss=odd_loss)
    until(lambda: (run.settings.reward["name"], run.settings.loss["name"]) == ("crash_later", "odd_loss"))
    version = run.status.version
    until(lambda: run.status.version >= version + 2)
    (tmp_path / "mark").touch()
    reward, loss = (rows(run, author="rlbench", knob=knob)[0] for knob in ("reward", "loss"))
    assert (
        json.loads(reward["value"]) == {"name": "plus_two", "low": -7.0, "source": source_of(other)}
        and "reward crash_later: raised ZeroDivisionError" in reward["reason"]
    )
    assert (
        json.loads(loss["value"])["name"] == "ppo"
        and loss["reason"] == "loss odd_loss: raised MemoryError: too much for me"
    )
    version = run.status.version
    until(lambda: run.status.version >= version + 2)
    run.stop()
    ended(run, "stopped")
    log = (run.folder / "run.log").read_text()
    assert "crash_later" in log and "Traceback" in log and 'raise MemoryError("too much for me")' in log
    assert run.rollouts.filter(pl.col("outcome") == "function_error")["message"].str.contains("crash_later").all()
    assert run.steps["version"].to_list() == list(range(1, run.status.version + 1))
    assert_books(run)


def far(curriculum, u, band, progress):
    return int(u[0] * 10**6) if progress > 0 else 0


def slow(curriculum, u, band, progress, *, seconds: rl.Knob(0, 60) = 30.0):
    import time

    time.sleep(seconds if progress else 0)
    return 0


def harder(*, split="train", seed=0, count=64, level: rl.Knob(7, 9) = 8):
    return [
        rl.Task(f"harder/{n}", f"{n}+{n}=", str(2 * n), level=level, set="harder")
        for n in range(10, 10 + count)
        if (n % 5 == 0) == (split == "held_out")
    ]


def nothing(*, split="train", seed=0, count=64):
    return [][:count]


def broken(*, split="train", seed=0, count=64):
    raise RuntimeError("the file is gone")


def test_a_sampler_that_fails_is_replaced_by_the_one_before(tmp_path):
    driver = asked(tmp_path, "a", {2: [("sampler", far)]})
    (row,) = journal(driver, author="rlbench")
    assert (
        json.loads(row["value"])["name"] == "band"
        and "sampler far: raised IndexError" in row["reason"]
        and driver.state.version == 12
    )
    assert [r["status"] for r in journal(driver, knob="sampler", author="test")] == [
        "applied"
    ] and driver.state.config.sampler["name"] == "band"


def test_a_sampler_that_takes_too_long_is_replaced_too(tmp_path, capfd):
    driver = asked(tmp_path, "a", {2: [("sampler", slow)]}, deadlines={"function": 0.02})
    (row,) = journal(driver, author="rlbench")
    assert "passed its deadline of 0.02 s" in row["reason"] and driver.state.phase == "done"
    assert capfd.readouterr().err.count("passed its deadline") == 1  # told once


def lopsided(rewards_R):
    return [1 / (len(set(rewards_R)) - 1)] * len(rewards_R)


def test_an_advantage_that_fails_is_replaced_at_once(tmp_path):
    "The group at which it raised is judged again, by the one before."
    driver = asked(tmp_path, "a", {2: [("advantage", lopsided)]})
    (row,) = journal(driver, author="rlbench")
    assert (
        json.loads(row["value"])["name"] == "grpo"
        and "advantage lopsided: raised ZeroDivisionError" in row["reason"]
        and driver.state.phase == "done"
    )


def test_a_run_with_a_sampler_of_its_own_that_fails_ends_and_names_it(tmp_path):
    run = ended(rl.run(SCRIPTED, runs=tmp_path, sampler=far), "failed", 60)
    assert "sampler far: raised IndexError" in run.status.reason
    assert_books(run)


def test_a_run_starts_with_functions_of_a_cell(tmp_path):
    "Sampler and task set; the evaluation set is the function's other split."
    run = ended(rl.run({**SCRIPTED, "filter": "none"}, runs=tmp_path, sampler=last, tasks=harder), seconds=60)
    rollouts = run.rollouts
    assert set(rollouts.filter(pl.col("set") == "harder")["task"]) == {"harder/73"} and rollouts[
        "level"
    ].unique().to_list() == [8]
    held_out = {int(task.split("/")[1]) for task in rollouts.filter(pl.col("set") == "held_out")["task"]}
    assert held_out and all(n % 5 == 0 for n in held_out)
    with pytest.raises(ValueError, match="the file is gone"):
        rl.run(SCRIPTED, runs=tmp_path, tasks=broken)


def last(curriculum, u, band, progress):
    return len(curriculum.levels) - 1


def test_other_tasks_in_a_live_run(tmp_path):
    """They are served from then on, groups alive keep theirs, the evaluation set stays;
    what cannot be made is refused with its reason."""
    plan = {
        2: [("tasks", nothing), ("tasks", broken)],
        4: [("tasks", harder), ("tasks.level", 9)],
        8: [("tasks", {"name": "addition", "low": 3})],
        10: [("tasks", "nonsense")],
    }
    driver = asked(tmp_path, "a", plan)
    commands = journal(driver, author="test")
    assert [(r["status"], r["reason"][:60]) for r in commands] == [
        ("refused", "tasks.nothing: its function returned no tasks; return at lea"),
        ("refused", "tasks broken: raised RuntimeError: the file is gone"),
        ("applied", ""),
        ("applied", ""),
        ("applied", ""),
        ("refused", commands[-1]["reason"][:60]),
    ] and "nonsense" in commands[-1]["reason"]
    groups = read_table(driver.folder, "groups")
    changes = [r["dispatched"] for r in commands if r["status"] == "applied"]
    sets = [
        set(groups.filter(pl.col("group").is_between(a, b - 1))["set"])
        for a, b in zip([0, *changes[1:]], [*changes[:1], changes[-1], 10**6])
    ]
    assert sets == [{"arithmetic"}, {"harder"}, {"addition"}]
    assert set(groups.filter(pl.col("set") == "harder")["level"]) == {9}
    late = groups.filter((pl.col("set") == "arithmetic") & (pl.col("fate") == "trained"))
    assert (
        len(late) >= 8
        and set(driver.state.dispatch.curriculum.levels) == {3, 4}
        and in_force(driver.folder).tasks == {"name": "addition", "low": 3, "high": 4}
    )
    evals = read_table(driver.folder, "rollouts").filter(pl.col("fate") == "evaluated")
    assert evals.group_by("dispatched").agg(pl.col("task").unique().sort())["task"].n_unique() == 1


def test_the_digest_tells_swaps_apart_and_repeats(tmp_path):
    "The same functions at the same places give the same digest; another function, or none, another one."
    told = [(150, "tasks.low_digits", 3, 0)]
    plans = {
        "one": {4: [("sampler", far)]},
        "two": {4: [("sampler", far)]},
        "other": {4: [("sampler", last)]},
        "none": {},
    }
    digests = {name: asked(tmp_path, name, plan, staleness=0).state.digest for name, plan in plans.items()}
    assert digests["one"] == digests["two"] and len(set(digests.values())) == 3
    refused = inline_run(tmp_path, "told", SCRIPTED, told)  # straight to the loop: nobody has made tasks
    assert [r["status"] for r in journal(refused, author="test")] == ["refused"]


def test_prompts_that_do_not_fit_are_refused_and_end_nobody(tmp_path):
    """A real generator: built for the prompts of the run, asked before longer ones come;
    one that comes all the same is not written."""
    run = rl.run("tiny", runs=tmp_path, placement="colocated", tasks={"name": "addition", "low": 2, "high": 2}, **LONG)
    until(lambda: run.status and run.status.version >= 1)
    run.set(tasks={"name": "addition", "low": 4, "high": 4})
    (row,) = rows(run, knob="tasks")
    assert row["status"] == "refused" and "were built for 1 to" in row["reason"]
    run.set(tasks={"name": "sums", "low": 2, "high": 3})
    assert rows(run, knob="tasks", status="applied")
    until(lambda: "sums" in run.groups["set"])
    run.stop()
    ended(run, "stopped")
    assert_books(run)


def test_a_function_of_a_file_with_postponed_annotations_keeps_its_knobs(tmp_path, monkeypatch):
    "`from __future__ import annotations` makes strings of annotations; the captured text is read without it."
    (tmp_path / "own_rewards.py").write_text(
        "from __future__ import annotations\n"
        "import rlbench as rl\n"
        "PRICE = 0.5\n"
        "\n"
        "\n"
        "def own(r: rl.Rollout, w: rl.Knob(0, 1) = .1) -> float:\n"
        "    return w * PRICE\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from own_rewards import own

    folder = tmp_path / "a"
    save_function(capture_function(own), folder / "functions")
    config = make_config({"reward": {"name": "own", "source": source_of(own), "w": 0.3}}, captured_functions(folder))
    assert (
        config.reward["w"] == 0.3
        and captured_functions(folder)["reward"][capture_function(own).stem](None, w=0.5) == 0.25
    )
    with pytest.raises(ValueError, match="reward.w"):
        make_config({"reward": {"name": "own", "source": source_of(own), "w": 3}}, captured_functions(folder))


def test_what_a_replaced_reward_still_says_is_not_held_against_the_one_before():
    """Responses that were with the environment when a reward was put back may fail by the old one:
    one put-back, not two."""
    functions = {
        own.stem: FileFunction(own, f"functions/{own.stem}.py")
        for own in (
            Captured("good", "def good(r):\n    return 1.0\n"),
            Captured("bad", "def bad(r):\n    raise KeyError(1)\n"),
        )
    }
    state, actions = start_state(make_config({"preflight": 0}), [1] * 8, {}, dict.fromkeys(FUNCTIONS, functions)), []
    for key in functions:
        state.commands.waiting.append(
            Commanded(key, "anna", "reward", {"name": key.partition("-")[0], "source": f"functions/{key}.py"})
        )
        decide_command(state, actions)
    state.rollouts = {i: RolloutState(i, 0, i, status="scoring") for i in range(2 * ERRORS_IN_A_ROW)}
    for i in state.rollouts:
        count_failed_calls(
            state, Scored(i, 0, None, True, Outcome.FUNCTION_ERROR, 0.0, "reward bad: raised KeyError"), actions
        )
    assert (
        state.config.reward["name"] == "good"
        and [a.row.author for a in actions if isinstance(a, Write)].count("rlbench") == 1
    )


def test_several_knobs_are_asked_for_together_or_not_at_all(tmp_path):
    """One that would be refused keeps the others back; two that are right only together are sent in their order;
    what cannot ramp is refused here."""
    run = rl.run({**SCRIPTED, "group": 8, "batch": 64, "steps": 1_000_000, "eval": []}, runs=tmp_path)
    until(lambda: run.status and run.status.state == "running")
    for wrong in (
        {"temperature": 0.77, "learning_rate": -1.0},
        {"temperature": None},
        {"temperature": 0.77, "sampler": "uniform", "over": 5},
    ):
        with pytest.raises(ValueError):
            run.set(**wrong)
    run.set(group=12, batch=48)  # 12 is no part of the 64 that are in force
    until(lambda: run.settings.group == 12 and run.settings.batch == 48)
    assert run.settings.temperature == 1.0
    run.stop()
    run.wait(400)

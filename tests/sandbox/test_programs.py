"""Small programs from examples: the installed policy writes them, sandboxes judge them,
and what they are paid for is what they do."""

import json
import time
from pathlib import Path

import rlbench as rl
from rlbench.base.ledger_reading import read_table
from rlbench.environments.code_datasets import read_code
from rlbench.environments.programs import programs
from rlbench.sandbox.grading_task import read_code_task, wrapped_code
from rlbench.sandbox.pool import stop_pool

ROOT = Path(__file__).parents[2]


def does(answer: str, body: str) -> bool:
    "Whether a body returns what all tests of a task ask, executed here."
    scope: dict = {}
    try:
        exec(wrapped_code(read_code_task(answer), body, ""), scope)
        return all(scope["f"](*test["args"]) == test["expected"] for test in json.loads(answer)["tests"])
    except Exception:
        return False


def test_tables_of_what_is_shown_are_wrong_and_solutions_right():
    for task in programs(count=400, seed=5):
        read = read_code_task(task.answer)
        assert does(task.answer, read.reference) and not does(task.answer, read.bad)
        shown = {
            **json.loads(task.answer),
            "tests": [test for test in json.loads(task.answer)["tests"] if test["id"].startswith("shown")],
        }
        assert does(json.dumps(shown), read.bad)


def test_the_exam_in_a_file_is_the_exam():
    "data/code/programs.jsonl, for tools that read files, holds what the set makes."
    kept = {task.id: task for task in read_code(ROOT / "data" / "code" / "programs.jsonl")}
    made = programs(split="held_out", seed=1, count=256)
    assert list(kept) == [task.id for task in made]
    assert all(
        (kept[t.id].prompt, kept[t.id].level, json.loads(kept[t.id].answer))
        == (t.prompt, t.level, json.loads(t.answer))
        for t in made
    )


def test_the_installed_policy_is_paid_for_what_its_programs_do(tmp_path, monkeypatch):
    """Two versions of tiny-code, its canaries first; every verdict of the sandbox is what the program does when it is
    simply executed."""
    monkeypatch.chdir(tmp_path)
    config = {
        "steps": 2,
        "batch": 64,
        "group": 8,
        "preflight": 4,
        "preflight_k": 4,
        "eval": [],
        "sandbox.folder": str(tmp_path / "pool"),
    }
    try:
        run = rl.run("tiny-code", name="coded", **config)
        while run.state not in ("finished", "failed"):
            time.sleep(0.2)
        assert run.state == "finished", (Path(run.folder) / "run.log").read_text()[-2000:]
        answers = {task.id: task.answer for task in programs(seed=run.config.seed)}
        judged = read_table(run.folder, "rollouts").filter(~read_table(run.folder, "rollouts")["correct"].is_null())
        assert len(judged) >= 128 and 0.05 < judged["correct"].mean() < 0.6
        assert all(does(answers[row["task"]], row["text"]) == row["correct"] for row in judged.to_dicts())
        assert (
            any("{" in text for text in judged["text"])
            and not judged.filter(judged["text"].str.contains("{", literal=True))["correct"].any()
        )
    finally:
        stop_pool(tmp_path / "pool")

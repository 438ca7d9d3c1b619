"""Code in several turns, in real sandboxes: what the policy is told, the states it goes on in,
and whole runs in which episodes wait, are taken up again and are given up."""

import json
import time
from dataclasses import replace

import polars as pl
import pytest
from inline import check_books, inline_run
from patience import until
from turn_tables import by_turn

import rlbench.environments.code_episodes
from rlbench.base.ledger_reading import read_table
from rlbench.environments.code_datasets import read_code
from rlbench.environments.code_episodes import PROGRAM, CodeEpisode, code, find_snapshot
from rlbench.environments.code_verifier import CODE_VERIFIERS
from rlbench.environments.environment import take_turn
from rlbench.environments.episode import Done, Observation, State, advance_episode
from rlbench.environments.event_loop import EpisodeLoop
from rlbench.environments.judging_pool import Owned
from rlbench.environments.programs import programs
from rlbench.environments.scoring_messages import ScoreRequest, ScoringWork
from rlbench.records import Rollout, Task, observation_segment, prompt_segment, response_segment
from rlbench.sandbox.grading_task import read_code_task, wrapped_code
from rlbench.sandbox.pool import PoolClient, stop_pool
from rlbench.sandbox.workspace import content_of, read_file
from rlbench.views.report_tables import evaluation_table
from rlbench.views.run_summary import read_summary

DOUBLE = Task(
    "double",
    "Write f(x).",
    json.dumps(
        {
            "kind": "function",
            "function": "f",
            "tests": [
                {"id": "shown-1", "args": [5], "expected": 10},
                {"id": "shown-2", "args": [0], "expected": 0},
                {"id": "hidden-1", "args": [3], "expected": 6},
            ],
        }
    ),
)
APPENDS = (
    "with open('log', 'a') as file: file.write('once more\\n')\n"
    "import os\n"
    "os.makedirs('sub', exist_ok=True)\n"
    "open(f'sub/{len(open(\"log\").read())}', 'w').close()\n"
)


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fix") / "pool"
    with PoolClient.connect(folder) as made:
        yield made
    stop_pool(folder)


@pytest.fixture(scope="module")
def turn():
    "A turn of an episode, waited for."
    loop = EpisodeLoop()
    yield lambda episode, text, version=-1: loop.run_to_end(advance_episode(episode, text, version))
    loop.stop()


def begun(pool, **how) -> CodeEpisode:
    episode = code(pool=Owned(pool, "test"), **{"shown": 0, **how})
    episode.start(DOUBLE)
    return episode


def layers_of(layer) -> tuple[str, ...]:
    "All of a snapshot's layers, oldest first."
    return (*filter(None, (layer.base,)), *layer.below, layer.digest)


def files(pool, layer) -> dict[str, bytes]:
    "What a program finds in a workspace, by a look inside."
    look = (
        "import json, os, sys\n"
        "json.dump({os.path.relpath(os.path.join(a, n)): open(os.path.join(a, n)).read() for a, _, names in "
        "os.walk('.') for n in names}, sys.stdout)"
    )
    from rlbench.sandbox.types import Program

    with pool.open(layer=layer) as box:
        return json.loads(box.exec(Program(code=look)).stdout)


@pytest.mark.parametrize(
    "program, came",
    [
        ("def f(x): return x + 4", "wanted 10, got 9"),
        ("def f(x): return y", "wanted 10, raised NameError: name 'y' is not defined"),
        ("def f(x) return x", "wanted 10, raised SyntaxError: "),
        ("1 / 0", "wanted 10, raised ZeroDivisionError: division by zero"),
        ("def f(x):\n    while True: pass", "wanted 10, no answer (cpu limit)"),
        ("import os\nos._exit(0)", "wanted 10, no answer (exited)"),
        ("def f(x): return 'x' * 10**4", "wanted 10, got '" + "x" * 30),
        ("def f(x): return object()", "wanted 10, an object of type object"),
        ("def f(x): return 10", "f(0): wanted 0, got 10"),
    ],
)
def test_the_policy_is_told_what_a_person_would_see(pool, turn, program, came):
    "Input, what was wanted, and what came or why nothing did, for the first shown test that fails."
    heard = turn(begun(pool, most=60, cpu_s=0.2), program, 0)
    assert (
        isinstance(heard, Observation)
        and came in heard.text
        and heard.text.startswith("\nf(")
        and heard.text.endswith("\n")
        and len(heard.text) < 120
    )
    assert "f(3)" not in heard.text


def test_a_state_is_the_content_of_the_workspace(pool, turn):
    """Whether played in one go, played again later or restored in between:
    the same name for the same files, and other ones for others."""
    programs = [APPENDS + f"def f(x): return {n}" for n in (1, 2, 2, 3)]
    first, names = begun(pool), []
    for version, program in enumerate(programs):
        assert isinstance(turn(first, program, version), Observation)
        names.append((first.state.id, first.state.writer))
    assert len({name for name, _ in names}) == 4 and [writer for _, writer in names] == [0, 1, 2, 3]
    there = files(pool, first.layer)
    assert (
        there.pop(PROGRAM) == programs[-1]
        and there.pop("log") == "once more\n" * 4
        and set(there) == {f"sub/{10 * n}" for n in (1, 2, 3, 4)}
    )
    time.sleep(1.1)  # times in a layer are in seconds
    again, restored = begun(pool), None
    for version, program in enumerate(programs):
        if version == 2:
            restored = begun(pool)
            assert restored.restore(State(*names[1]), 2) and len(restored.layer.below) == len(again.layer.below)
        for episode in filter(None, (again, restored)):
            turn(episode, program, version)
            assert (episode.state.id, episode.state.writer) == names[version]
    assert (
        again.layer.digest != first.layer.digest and content_of(pool.store, layers_of(again.layer)) == first.state.id
    ), "other times, the same content"
    assert not begun(pool).restore(State("0" * 16, 0), 1), "a state that nobody kept"


def test_a_program_that_changes_nothing_leaves_the_state_and_its_writer(pool, turn):
    episode = begun(pool)
    turn(episode, "def f(x): return 1", 3)
    before = episode.state
    turn(episode, "def f(x): return 1", 5)
    assert episode.state == before and before.writer == 3
    turn(episode, "def f(x): return 2", 5)
    assert episode.state.writer == 5 and episode.state.id != before.id


def test_an_episode_that_draws_lots_is_restored_and_not_played_again(pool, turn):
    "Its state cannot be had by playing it again; it is taken from the snapshot, and the turns before are not run."
    lots = (
        "import random, time\n"
        "random.seed(time.time_ns())\n"
        "open('lot', 'w').write(str(random.random()))\n"
        "def f(x): return 1"
    )
    episode = begun(pool)
    heard = turn(episode, lots, 1)

    def response(text, turn):
        return replace(response_segment([1], [0.0], [1], turn=turn), text=text)

    seen = observation_segment(heard.text, 1, episode.state.id, episode.state.writer)
    rollout = Rollout(
        7,
        0,
        0,
        0,
        DOUBLE,
        segments=(prompt_segment([1]), response(lots, 0), seen, response("def f(x): return 2", 1)),
        text="def f(x): return 2",
    )
    loop, under, code_in = (
        EpisodeLoop(),
        ScoringWork(ScoreRequest(rollout, last=False)),
        lambda: code(pool=Owned(pool, "test"), shown=0),
    )
    assert (
        isinstance(loop.run_to_end(take_turn(under, code_in)), Observation)
        and under.live.taken == 2
        and under.live.episode.calls == 1
    )
    assert files(pool, under.live.episode.layer) == {
        PROGRAM: "def f(x): return 2",
        "lot": files(pool, find_snapshot(pool, seen.state))["lot"],
    }
    gone = replace(rollout, segments=(*rollout.segments[:2], replace(seen, state="f" * 16), rollout.segments[3]))
    with pytest.raises(ValueError, match="function of its task"):
        loop.run_to_end(take_turn(ScoringWork(ScoreRequest(gone, last=False)), code_in))
    loop.stop()


def test_nothing_is_held_between_turns(pool, turn):
    "Many episodes wait, and no sandbox is open for them; one whose machine fails has closed its own."
    episodes = [begun(pool) for _ in range(20)]
    for n, episode in enumerate(episodes):
        turn(episode, f"def f(x): return {n + 100}", 0)
    until(lambda: pool.status().sessions == 0, 10)
    assert len({e.state.id for e in episodes}) == 20
    assert all(isinstance(turn(e, "def f(x): return 2 * x", 1), Done) for e in episodes)


def test_a_workspace_may_be_kept_again_as_it_was(pool, turn):
    "Snapshots in which nothing changed, or the same was written once more, lie on each other."
    episode = begun(pool)
    for n in (1, 1, 2, 1, 1, 2):
        turn(episode, f"def f(x): return {n}", n)
        assert files(pool, episode.layer) == {PROGRAM: f"def f(x): return {n}"}
    layer = None
    for _ in range(3):
        with pool.open(layer=layer) as box:
            layer = box.snapshot()
    assert files(pool, layer) == {}


RUN = {
    "model": "tiny-fix",
    "tasks": "programs",
    "environment": {"name": "code", "shown": 0, "most": 40},
    "max_turns": 3,
    "observation_tokens": 112,
    "verifier": "code",
    "reward": "early",
    "max_tokens": 96,
    "generator": "torch",
    "placement": "split",
    "stragglers": "partial",
    "straggler_unit": "rollout",
    "staleness": 6,
    "group": 2,
    "batch": 8,
    "steps": 9,
    "concurrency": 40,
    "preflight": 0,
    "eval": [],
    "checkpoint_every": 0,
    "filter": "none",
    "sampler": "uniform",
    "sandbox": {"canaries": 0},
    "virtual": {"train": 0.0001},
}


@pytest.mark.parametrize("rule", ["continue", "rewind", "restart"])
def test_a_rollout_that_waited_wakes_in_the_state_that_its_rule_says(rule, tmp_path, pool, monkeypatch):
    """Programs of the installed policy in a real pool, stopped and taken up again while versions move:
    every program was run where the turn before it, as the run's table has it, had left its own."""
    woke: dict[tuple[str, str], set] = {}
    run = rlbench.environments.code_episodes.grade_in_workspace

    def noting(sandbox, task, response, limits):
        try:
            before = sandbox.read(PROGRAM).decode()
        except FileNotFoundError:
            before = ""
        woke.setdefault((task.digest, response), set()).add(before)
        return run(sandbox, task, response, limits)

    monkeypatch.setattr("rlbench.environments.code_episodes.grade_in_workspace", noting)
    driver = inline_run(
        tmp_path,
        "waits",
        RUN | {"on_resume": rule, "max_state_lag": 1, "sandbox": {"canaries": 0, "folder": str(pool.folder)}},
    )
    check_books(driver)
    rollouts, tokens = (read_table(driver.folder, table) for table in ("rollouts", "tokens"))
    answers = {task.id: read_code_task(task.answer) for task in programs(seed=driver.state.config.seed)}
    several = rollouts.filter((pl.col("turns") > 1) & (pl.col("fate") == "trained")).join(
        tokens.drop("seq", "attempt", "at"), on=["rollout", "try"]
    )
    assert len(several) > 20 and max(map(max, several["versions"])) > 4, "versions moved"
    waits = []
    for row in several.to_dicts():
        task, said, versions = answers[row["task"]], row["said"][::2], by_turn(row["versions"], row["turn"])
        held = [wrapped_code(task, text, "") for text in said]
        assert (row["states"][0], row["writers"][0]) == ("", -1)
        for turn in range(1, len(said)):
            assert held[turn - 1] in woke[task.digest, said[turn]], "it was run where the program before it lay"
            assert (
                read_file(pool.store, layers_of(find_snapshot(pool, row["states"][turn])), PROGRAM).decode()
                == held[turn - 1]
            )
            same = turn > 1 and row["states"][turn] == row["states"][turn - 1]
            assert row["writers"][turn] == (row["writers"][turn - 1] if same else versions[turn - 1][-1])
            waits.append(versions[turn][0] - row["writers"][turn])
    undone = rollouts.filter(pl.col("fate") == "rewound")
    assert max(waits) >= 2 if rule == "continue" else max(waits) <= 1, "versions between a state and who goes on in it"
    assert bool(len(undone)) == (rule != "continue") and (undone["trained_at"] == -1).all()
    if rule == "restart":
        assert (
            rollouts.filter(
                (pl.col("fate") == "trained")
                & (pl.col("try") > 0)
                & pl.col("rollout").is_in(undone["rollout"].implode())
            ).height
            > 0
        )
    assert pool.status().sessions == 0, "aborted, rewound, stale: nothing is left open"


def test_the_second_turn_reads_what_was_written_and_what_was_told(tmp_path, pool, monkeypatch):
    """Two turns of the installed policy: the generator reads the tokens of prompt,
    response and observation as they are; limits, reasons, states and the rate by turn."""
    from rlbench.engines.torch import TorchGenerator
    from rlbench.models.model import encode_observation, load_policy

    asked: dict[tuple, list] = {}
    submit = TorchGenerator.submit

    def noting(self, requests):
        requests = list(requests)
        for request in requests:
            asked.setdefault(request.key, []).append((request.prompt.tolist(), request.sampling.max_tokens))
        submit(self, requests)

    monkeypatch.setattr(TorchGenerator, "submit", noting)
    once = {
        "staleness": 0,
        "stragglers": "in_flight",
        "max_turns": 2,
        "steps": 2,
        "batch": 32,
        "group": 4,
        "eval": [{"name": "held_out", "count": 24, "k": 2}],
        "sandbox": {"canaries": 1, "folder": str(pool.folder)},
    }
    driver = inline_run(tmp_path, "fix", RUN | once)
    check_books(driver)
    rows, rollouts, policy = (
        read_table(driver.folder, "tokens"),
        read_table(driver.folder, "rollouts"),
        load_policy("tiny-fix"),
    )
    several = rows.filter(pl.col("turn").list.n_unique() > 1).join(
        rollouts.select("rollout", "try", "said", "states", "writers", "reason", "correct", "reward"),
        on=["rollout", "try"],
    )
    assert len(several) > len(rows) // 4
    for row in several.to_dicts():
        first, second = by_turn(row["tokens"], row["turn"])
        (_, whole), (read, left) = asked[row["rollout"], row["try"]]
        assert read == row["prompt_tokens"] + first + row["observed"] and (whole, left) == (96, 96 - len(first))
        assert (
            row["observed"] == encode_observation(policy, row["said"][1]).tolist()
            and policy.tokenizer.unk_token_id not in row["observed"]
        )
        assert (
            ": wanted " in row["said"][1]
            and len(row["states"][1]) == 16
            and row["writers"] == [-1, 0]
            or row["writers"][1] > 0
        )
        assert row["reason"] != "turns" or (row["correct"], row["reward"]) == (False, 0.0)
    assert (
        set(several["reward"]) == {0.0, 0.5}
        and {"stop", "turns"} <= set(several["reason"]) <= {"stop", "length", "turns"}
        and rollouts["turns"].max() == 2
    )
    (seen,) = read_table(driver.folder, "evals").filter(pl.col("version") == 2).to_dicts()
    assert read_summary(driver.folder).by_turn.startswith(
        f"{seen['turn_rates'][0]:.3f} after turn 1, "
    ) and "Solved by turn" in evaluation_table(read_table(driver.folder, "evals"))


SETS = (
    {
        "task_id": 1,
        "text": "Write a function that doubles.",
        "code": "def twice(n):\n    return 2 * n",
        "test_list": ["assert twice(3) == 6", "assert twice(-1) == -2", "assert twice(0) == 0"],
        "test_setup_code": "",
    },
    {
        "task_id": "HumanEval/0",
        "prompt": 'def twice(n):\n    """Double."""\n',
        "entry_point": "twice",
        "canonical_solution": "    return 2 * n\n",
        "test": "def check(candidate):\n    assert candidate(3) == 6\n    assert candidate(-1) == -2\n",
    },
)


def test_known_shapes_of_task_files_in_two_turns(pool, turn, tmp_path):
    "Rows of MBPP and HumanEval: loaded, tried in a workspace, told in words, and graded by all their tests."
    (tmp_path / "sets.jsonl").write_text("\n".join(map(json.dumps, SETS)))
    for task in read_code(tmp_path / "sets.jsonl"):
        episode = code(pool=Owned(pool, "test"), shown=1)
        assert "twice" in episode.start(task)
        heard = turn(episode, "def twice(n):\n    return n + 2", 4)
        assert isinstance(heard, Observation) and ", got twice(3) = 5" in heard.text and episode.state.writer == 4, (
            heard
        )
        right = "```python\ndef twice(n):\n    return n + n\n```"
        assert turn(episode, right, 5) == Done(right)
        assert (
            CODE_VERIFIERS["code"](right, task.answer, pool=pool).passed
            and CODE_VERIFIERS["code"]("def twice(n): return n + 2", task.answer, pool=pool).passed is False
        )

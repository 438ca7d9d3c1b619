"""The same verdicts wherever programs run: in both tiers, as root and as an ordinary user,
on somebody else's machine by either interface."""

import json
import os
import subprocess
import sys
import tempfile
from base64 import b64decode
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import polars
import pytest
from inline import inline_run
from jailer import NOBODY, USERS, become
from remote_sandboxes import TOKEN, Plain, run_code
from sandbox_runs import SMALL, even

from rlbench.base.ledger_reading import read_table
from rlbench.environments.code_datasets import read_code
from rlbench.environments.code_verifier import code
from rlbench.sandbox import controller, pool
from rlbench.sandbox.filters import PROFILES, load_filter
from rlbench.sandbox.grading_task import read_code_task
from rlbench.sandbox.jail import Jail
from rlbench.sandbox.jail_start import zygote_source
from rlbench.sandbox.pool import PoolClient, stop_pool
from rlbench.sandbox.pool_rules import PoolSpec
from rlbench.sandbox.types import End, Program, Tier
from rlbench.sandbox.verdict import known_bad

NOTHING = "this is no Python"


def one_of_each() -> list:
    "Tasks of the packaged set: three of each kind."
    found: dict = {}
    for task in read_code():
        each = read_code_task(task.answer)
        found.setdefault(each.kind, []).append((task, each))
    assert {"function", "stdio", "asserts"} <= found.keys()
    return [each for some in found.values() for each in some[:3]]


def verdicts(runner) -> list[tuple]:
    """(task, solution, score, test by test, how its executions ended) of each task's reference, a wrong solution,
    and a text that is none."""
    asked = [
        (task, name, text)
        for task, each in one_of_each()
        for name, text in (("reference", each.reference), ("bad", known_bad(each)), ("nothing", NOTHING))
    ]
    with ThreadPoolExecutor(4) as threads:
        judged = list(threads.map(lambda each: code(each[2], each[0].answer, pool=runner), asked))
    return [
        (task.id, name, v.score, tuple(c.passed for c in v.checks), v.ends) for (task, name, _), v in zip(asked, judged)
    ]


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[tuple]:
    "The verdicts under the strongest tier."
    folder = tmp_path_factory.mktemp("strongest") / "pool"
    with PoolClient.connect(folder, PoolSpec(Tier.BWRAP)) as runner:
        found = verdicts(runner)
    stop_pool(folder)
    assert {(name, score) for _, name, score, *_ in found} == {("reference", 1.0), ("bad", 0.0), ("nothing", 0.0)}, (
        found
    )
    return found


def elsewhere(tier: str) -> None:
    """In a process of its own, which becomes an ordinary user's, with a pool of that user's: print the verdicts.

    What the project's folder holds is read before."""
    for profile in PROFILES:
        load_filter(profile)
    zygote_source(), one_of_each(), polars.DataFrame
    become(NOBODY)

    def start(folder: Path, patience: float) -> None:
        pid = os.fork()
        if not pid:
            os._exit(controller.main(folder))
        assert os.waitpid(pid, 0)[1] == 0

    pool.start_controller = start
    folder = Path(tempfile.mkdtemp()) / "pool"
    with PoolClient.connect(folder, PoolSpec(tier)) as runner:
        assert os.stat(folder / "socket").st_uid == NOBODY
        found = verdicts(runner)
    stop_pool(folder)
    print(json.dumps(found))


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("tier", [Tier.BWRAP, Tier.LANDLOCK])
def test_verdicts_are_the_same_in_every_tier_for_every_user(expected, tmp_path, tier, user):
    "A pool of its own each time; an ordinary user's has an ordinary user's controller."
    if user == "root":
        with PoolClient.connect(tmp_path / "pool", PoolSpec(tier)) as runner:
            assert verdicts(runner) == expected
            refused = runner.run(Program(argv=("sh", "-c", "true")))
            assert (refused.end is End.GRADER_ERROR and "give processes = 1" in refused.message) == (
                tier == Tier.LANDLOCK
            )
        stop_pool(tmp_path / "pool")
        return
    script = (
        f"import sys; sys.path[:0] = "
        f"{[str(Path(__file__).parent), str(Path(__file__).parents[1] / 'helpers')]!r}\n"
        f"from test_sandbox_tiers import elsewhere\n"
        f"elsewhere({str(tier)!r})"
    )
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300
    )  # none that was forked from this one, whose threads would be missing there
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout.splitlines()[-1]) == json.loads(json.dumps(expected))


def run_with_files(path: str, body: bytes, head) -> tuple[int, bytes]:
    "SandboxFusion's interface, where a program finds its files beside it."
    asked = json.loads(body)
    with tempfile.TemporaryDirectory() as folder:
        for name, data in asked.get("files", {}).items():
            (place := Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(b64decode(data))
        there = f"import os; os.chdir({folder!r})\n"
        return run_code(path, json.dumps({**asked, "code": there + asked["code"]}).encode(), head)


@pytest.fixture
def server(serve, request):  # noqa: F811
    """A server of either interface that really runs programs:
    a jail behind the plain one, this Python behind SandboxFusion's."""
    if request.param == "sandboxfusion":
        yield serve(run_with_files)
        return
    plain = Plain()
    plain.worker = Jail("far", None)
    yield serve(plain)
    plain.worker.close()


@pytest.mark.parametrize(
    "server, api",
    [("http", "http"), ("sandboxfusion", "sandboxfusion")],
    indirect=["server"],
    ids=["http", "sandboxfusion"],
)
def test_verdicts_are_the_same_far_away(expected, tmp_path, server, api):
    "Over the network with calls one at a time, and in a run whose every verdict comes from there."
    table = {
        "tier": "remote",
        "url": server,
        "api": api,
        "token": f"${TOKEN}",
        "folder": str(tmp_path / "pool"),
        "canaries": 1,
    }
    near = inline_run(
        tmp_path / "near",
        "near",
        {**SMALL, "tasks": even, "steps": 1, "sandbox": {"folder": str(tmp_path / "near-pool"), "canaries": 1}},
    )
    far = inline_run(tmp_path / "far", "far", {**SMALL, "tasks": even, "steps": 1, "sandbox": table})
    assert far.state.phase == "done" and far.state.digest == near.state.digest
    told = read_table(far.folder, "verdicts")
    assert len(told) >= 16 and (set(told["tier"]) == {"remote"} or api == "http") and told["score"].null_count() == 0
    with PoolClient.connect(tmp_path / "pool") as runner:
        assert [each[:4] for each in verdicts(runner)] == [each[:4] for each in expected]
    stop_pool(tmp_path / "pool")
    stop_pool(tmp_path / "near-pool")


def test_a_run_without_namespaces_is_the_same_run(tmp_path):
    "Tier landlock under a whole run."
    made = {
        tier: inline_run(
            tmp_path,
            str(tier),
            {
                **SMALL,
                "tasks": even,
                "steps": 1,
                "sandbox": {"tier": str(tier), "folder": str(tmp_path / f"pool-{tier}")},
            },
        )
        for tier in (Tier.BWRAP, Tier.LANDLOCK)
    }
    for tier, driver in made.items():
        assert set(read_table(driver.folder, "verdicts")["tier"]) == {tier}
        stop_pool(tmp_path / f"pool-{tier}")
    assert made[Tier.BWRAP].state.digest == made[Tier.LANDLOCK].state.digest

"""Remote sandboxes against servers that are nowhere near:
a server of the plain interface, one of SandboxFusion's, and what they do on a bad day."""

import json
import os
import threading
import time

import pytest
from patience import until
from remote_sandboxes import TOKEN, Plain, run_code

from rlbench.sandbox.pool import PoolClient, stop_pool
from rlbench.sandbox.pool_rules import PoolRules, PoolSpec
from rlbench.sandbox.remote import account_of
from rlbench.sandbox.types import End, Fault, Program, SandboxLimits

QUICK = PoolRules(quota_s=0.05, start_s=5, hedge_floor_s=30, wait_s=5)


@pytest.fixture
def pool_at(tmp_path):
    "Connects to a pool of one remote server."
    made = []

    def at(url: str, **options) -> PoolClient:
        made.append(
            PoolClient.connect(
                tmp_path / f"pool-{len(made)}",
                PoolSpec("remote", url=url, **{"token": f"${TOKEN}", "policy": QUICK, **options}),
            )
        )
        return made[-1]

    yield at
    for pool in made:
        pool.close()
        stop_pool(pool.folder)


def test_the_plain_interface_does_all_that_a_sandbox_does(serve, pool_at):
    "Programs, files, snapshots, restore and branch; the result says that it was remote."
    pool = pool_at(serve(Plain()))
    e = pool.run(Program("# fake: say=far status=2", calls=("1", "2")))
    assert (e.end, e.status, e.stdout, e.answers, e.tier) == (End.EXITED, 2, b"far", ("1", "2"), "remote")
    with pool.open(owner="monday/1") as box:
        box.write("a/b", b"\x00one")
        layer = box.snapshot(turn=2, version=5)
        assert box.exec(Program("# fake: write=c")).ok and box.read("c") == b"x"
        box.restore(layer)
        assert box.read("a/b") == b"\x00one" and (layer.owner, layer.turn, layer.version) == ("monday/1", 2, 5)
        with pytest.raises(FileNotFoundError, match="'c' is not in the workspace"):
            box.read("c")
        with pool.open(layer=layer) as branch:
            assert branch.read("a/b") == b"\x00one"


@pytest.mark.parametrize(
    "status, body, end",
    [
        (429, b"slow down", End.QUOTA),
        (402, b"no credit", End.QUOTA),
        (403, b"not yours", End.AUTH),
        (500, b"oops", End.BACKEND_LOST),
        (507, b"", End.HOST_DISK_FULL),
        (200, b"<html>", End.PROTOCOL_ERROR),
        (200, b'{"execution": {"end": "perfect"}}', End.PROTOCOL_ERROR),
    ],
)
def test_every_refusal_is_of_the_machine(serve, pool_at, status, body, end):
    "Each is tried again (but a refused key is not), and told as what it is; once it is over, the next attempt is well."
    plain = Plain()
    plain.bad = lambda kind, count: (status, body) if kind == "exec" and count <= 3 else None
    pool = pool_at(serve(plain))
    e = pool.run(Program("# fake: say=well"))
    assert e.end is end and not e.end.of_model and e.tries == (1 if end is End.AUTH else 3)
    plain.seen.clear()
    plain.bad = lambda kind, count: (status, body) if count == 1 else None
    again = pool.run(Program("# fake: say=well"))
    assert (again.stdout, again.tries) == ((b"", 1) if end is End.AUTH else (b"well", 2))


def test_no_answer_in_time(serve, pool_at, monkeypatch):
    "A server that looks alive and does not answer: the program is given up, and whoever asked is told."
    plain, silence = Plain(), threading.Event()
    plain.bad = lambda kind, count: silence.wait(60) and (500, b"") if kind == "exec" else None
    pool = pool_at(serve(plain), policy=PoolRules(hedge_floor_s=0.2, grace_s=0.5, retries=1))
    began = time.monotonic()
    e = pool.run(Program("pass"), SandboxLimits(cpu_s=0.5, wall_s=0.5))
    silence.set()
    assert e.end is End.BACKEND_LOST and "no answer" in e.message and e.tries == 2 and time.monotonic() - began < 20


def test_a_refused_key_and_a_wrong_address_are_said_at_once(serve, pool_at, monkeypatch):
    "Nobody waits a minute for a worker that cannot come."
    monkeypatch.setenv(TOKEN, "wrong")
    refused = pool_at(serve(Plain()), policy=PoolRules(failures=2))
    e = refused.run(Program("pass"))
    assert e.end is End.AUTH and "no such key" in e.message
    nobody = pool_at("http://127.0.0.1:1", policy=PoolRules(failures=2))
    assert nobody.run(Program("pass")).end is End.BACKEND_LOST and "refused" in nobody.status().trouble


def test_what_the_account_allows(serve, monkeypatch):
    "Asked of the server, and unknown where there is nobody to ask."
    url = serve(Plain())
    found = account_of(PoolSpec("remote", url=url, token=f"${TOKEN}"))
    assert (found.concurrent, found.create_rate, found.credit, found.open) == (8, 5.0, 120, 3)
    assert account_of(PoolSpec("remote", url=serve(lambda *_: (404, b"")), token="")).concurrent is None
    assert account_of(PoolSpec("remote", url=url, api="sandboxfusion")).credit is None
    with pytest.raises(Fault, match="auth"):
        account_of(PoolSpec("remote", url=url))


def test_sandboxfusion(serve, pool_at):
    """Calls are fed one at a time, CPU time is measured, a sleeper is late twice before it counts;
    there are no sessions."""
    pool = pool_at(serve(run_code), api="sandboxfusion")
    echo = (
        "import os\n"
        "for line in os.fdopen(3):\n"
        "    print('seen', line.strip(), flush=True)\n"
        "    os.write(4, (str(int(line) ** 2) + chr(10)).encode())"
    )
    e = pool.run(Program(echo, calls=("3", "4"), files={"data/x": b"1"}))
    assert (e.end, e.answers, e.stdout, e.tier) == (
        End.EXITED,
        ("9", "16"),
        b"seen 3\nseen 4\n",
        "remote",
    ) and e.cpu_s > 0
    assert pool.run(Program("while True: pass"), SandboxLimits(cpu_s=1)).end is End.CPU_LIMIT
    late = pool.run(Program("import time; time.sleep(30)"), SandboxLimits(cpu_s=0.5, wall_s=1))
    assert late.end is End.WALL_LIMIT and late.tries == 2
    with pytest.raises(Fault, match="no sessions"):
        pool.open()


def test_sandboxfusion_in_trouble(serve, pool_at):
    "Its own errors, and answers that are none, are of the machine."
    said = iter([])

    def answer(path, body, head):
        return 200, next(
            said,
            json.dumps(
                {
                    "status": "Success",
                    "run_result": {"status": "Finished", "return_code": 0, "stdout": "", "stderr": ""},
                }
            ).encode(),
        )

    pool = pool_at(serve(answer), api="sandboxfusion", policy=PoolRules(retries=0, hedge_floor_s=30))
    until(lambda: pool.status().workers, 10)
    for body, end in (
        (b'{"status": "SandboxError", "message": "no cgroup"}', End.BACKEND_LOST),
        (b"[]", End.PROTOCOL_ERROR),
        (b'{"status": "Success", "run_result": 7}', End.PROTOCOL_ERROR),
        (b'{"status": "Failed", "run_result": {"status": "Error", "stderr": "no pod"}}', End.BACKEND_LOST),
    ):
        said = iter([body])
        assert pool.run(Program("pass")).end is end
    forged = pool.run(Program("pass"))  # nothing from the runner: that is the program's doing
    assert forged.end is End.EXITED and "meddled" in forged.message and os.environ[TOKEN] == "s3cret"

"""One jail for a test, as the user that runs the tests or as an ordinary one."""

import json
import os
import select
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from rlbench.base.status import is_alive
from rlbench.sandbox.filters import PROFILES, load_filter
from rlbench.sandbox.jail import Jail
from rlbench.sandbox.jail_start import self_test, zygote_source
from rlbench.sandbox.types import MARK, Execution, Layer, Order, Program, Reply, SandboxLimits, from_json, to_json
from rlbench.sandbox.workspace import put_files

USERS = ("root", "ordinary") if os.geteuid() == 0 else ("ordinary",)
NOBODY = 65534


def ask(jail: Jail, *orders: Order, seconds: float = 30.0) -> list[Reply]:
    "Give orders, and wait for the answers to all."
    for order in orders:
        jail.submit(order)
    found, end = {}, time.monotonic() + seconds
    while not all(order.ticket in found for order in orders):
        assert time.monotonic() < end, f"no answer within {seconds} s"
        select.select([jail], [], [], 0.2)
        found |= {reply.ticket: reply for reply in jail.poll()}
    return [found[order.ticket] for order in orders]


def below(pid: int) -> set[int]:
    "Processes below one, itself included; zombies are none."
    found, todo = set(), [pid]
    while todo:
        here = todo.pop()
        if is_alive(here):
            found.add(here)
            paths = []
            with suppress(OSError):  # a process, or one of its threads, may end while it is looked at
                paths += Path(f"/proc/{here}/task").glob("*/children")
            for path in paths:
                with suppress(OSError):
                    todo += map(int, path.read_text().split())
    return found


class Prison:
    "A jail that runs one program after the other."

    def __init__(self, tier: str):
        os.environ["RLBENCH_JUDGE_KEY"] = "sesame"  # which no program may see
        os.environ[MARK] = "mark-of-a-pool"  # nor this
        self.jail, self.ticket = Jail("prison", tempfile.mkdtemp(prefix="layers-"), tier, found=self_test()), 0
        self.base = put_files(self.jail.store, {"base.txt": b"base", "folder/inner.txt": b"inner"})
        assert self.run(Program("print(1)"), SandboxLimits()).ok
        self.all = below(self.jail.pid)

    def run(self, program: Program, limits: SandboxLimits, beside: Program | None = None) -> Execution:
        "The execution of a program; `beside`: another that is under way meanwhile."
        self.ticket += 2
        if beside:
            self.jail.submit(Order(self.ticket + 1, "exec", program=beside))
            time.sleep(0.15)
        orders = [Order(self.ticket, "exec", program=program, limits=limits)]
        reply = ask(self.jail, *orders)[0]
        if beside:
            self.jail.submit(Order(self.ticket + 1, "kill"))
            time.sleep(0.05)
            self.jail.poll()
        return reply.value or Execution(reply.fault.end, message=reply.fault.message)

    def turns(self, program: Program, limits: SandboxLimits) -> dict[str, str]:
        """A program in a workspace, what is kept of it, another program in its place,
        and one where the workspace begins again with what was kept: how each of it ended."""
        good, told = (
            Program(
                "import sys; print(open('solution.py').read()); sys.exit(not open('solution.py').read() == 'good')",
                files={"solution.py": b"good"},
            ),
            {},
        )
        told["open"], _ = self._turn("open", "a", limits=limits, base=self.base)
        told["program"], _ = self._turn("exec", "a", program=program, limits=limits)
        told["keep"], layer = self._turn("snapshot", "a")
        told["read"], _ = self._turn("read", "a", path="base.txt")
        told["write"], _ = self._turn("write", "a", path="notes/new.txt", data=b"new")
        told["next"], _ = self._turn("exec", "a", program=good, limits=limits)
        told["keep again"], _ = self._turn("snapshot", "a")
        told["back"], _ = self._turn("restore", "a", base=self.base)
        told["after back"], _ = self._turn("exec", "a", program=good, limits=limits)
        told["close"], _ = self._turn("close", "a")
        if layer:
            told["open again"], _ = self._turn(
                "open", "b", limits=limits, base=self.base, layers=(*layer.below, layer.digest)
            )
            told["next again"], _ = self._turn("exec", "b", program=good, limits=limits)
            told["close again"], _ = self._turn("close", "b")
        return told

    def _turn(self, kind: str, session: str, **fields) -> tuple[str, Layer | None]:
        self.ticket += 2
        reply = ask(self.jail, Order(self.ticket, kind, session, **fields))[0]
        if isinstance(reply.value, Execution):
            return (
                f"{reply.value.end} {reply.value.status} "
                f"{reply.value.message}{reply.value.stderr[-200:].decode(errors='replace')}".strip(),
                None,
            )
        return (
            f"{reply.fault.end} {reply.fault.message}" if reply.fault else "missing" if reply.missing else "done",
            reply.value if isinstance(reply.value, Layer) else None,
        )

    def left(self) -> int:
        "Processes that should be gone."
        end = time.monotonic() + 2
        while (found := below(self.jail.pid) - self.all) and time.monotonic() < end:
            time.sleep(0.01)
        return len(found)

    def close(self) -> int:
        "End it; how many processes outlive it."
        self.jail.close()
        end = time.monotonic() + 5
        while (found := [pid for pid in self.all if is_alive(pid)]) and time.monotonic() < end:
            time.sleep(0.01)
        return len(found)


def become(uid: int) -> None:
    "Go on as an ordinary user. What is read from the project's folder must have been read before."
    os.chdir("/")
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    self_test.cache_clear()


class Elsewhere:
    "A prison in a process of an ordinary user."

    def __init__(self, tier: str):
        for profile in PROFILES:
            load_filter(profile)
        zygote_source()
        self.line, theirs = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            status = 1
            try:
                self.line.close()
                become(NOBODY)
                serve(Prison(tier), theirs)
                status = 0
            except BaseException as error:
                theirs.sendall(json.dumps({"broken": repr(error)}).encode() + b"\n")
            finally:
                os._exit(status)
        theirs.close()
        self.file = self.line.makefile("rwb")

    def _ask(self, question: dict) -> dict:
        self.file.write(json.dumps(question).encode() + b"\n")
        self.file.flush()
        told = json.loads(self.file.readline() or b'{"broken": "its process ended"}')
        assert "broken" not in told, told["broken"]
        return told

    def run(self, program: Program, limits: SandboxLimits, beside: Program | None = None) -> Execution:
        return from_json(
            Execution,
            self._ask({"run": to_json(program), "limits": to_json(limits), "beside": beside and to_json(beside)}),
        )

    def turns(self, program: Program, limits: SandboxLimits) -> dict[str, str]:
        return self._ask({"turns": to_json(program), "limits": to_json(limits)})

    def left(self) -> int:
        return self._ask({"left": 1})["left"]

    def close(self) -> int:
        found = self._ask({"close": 1})["left"]
        self.file.close()
        self.line.close()
        assert os.waitpid(self.pid, 0)[1] == 0
        return found


def serve(prison: Prison, line: socket.socket) -> None:
    "Do what is asked over a socket, until the prison is to close."
    file = line.makefile("rwb")
    while question := file.readline():
        asked = json.loads(question)
        if "run" in asked:
            told = to_json(
                prison.run(
                    from_json(Program, asked["run"]),
                    from_json(SandboxLimits, asked["limits"]),
                    asked["beside"] and from_json(Program, asked["beside"]),
                )
            )
        elif "turns" in asked:
            told = prison.turns(from_json(Program, asked["turns"]), from_json(SandboxLimits, asked["limits"]))
        else:
            told = {"left": prison.close() if "close" in asked else prison.left()}
        file.write(json.dumps(told).encode() + b"\n")
        file.flush()
        if (
            "close" in asked
        ):  # a prison that was made later may hold the other end, so the socket need not be at its end
            return


def prison(tier: str, user: str) -> "Prison | Elsewhere":
    "A prison of a tier, as a user."
    return Elsewhere(tier) if user == "ordinary" and os.geteuid() == 0 else Prison(tier)

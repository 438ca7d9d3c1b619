"""The smallest place that runs programs by the sandbox's protocol: a process with limits, and no jail.

For tests of what is above it; what it runs here was written for these tests."""

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rlbench.sandbox.types import End, Execution, Program, SandboxLimits

BOOT = """
import fcntl, os, resource, sys
read, write, cpu, memory = map(int, sys.argv[1:5])
# whatever numbers they have, neither is overwritten
aside = [fcntl.fcntl(end, fcntl.F_DUPFD, 200) for end in (read, write)]
os.dup2(aside[0], 3), os.dup2(aside[1], 4), os.closerange(5, 1024)
resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
with open(sys.argv[5], encoding="utf-8", errors="surrogatepass") as file:
    code = file.read()
os.unlink(sys.argv[5])
del aside, read, write, cpu, memory, fcntl, file, resource
exec(compile(code, "program.py", "exec"), {"__name__": "__main__"})
"""
LINE = 1 << 21  # bytes of an answer that are read at most


class LocalRunner:
    """Runs each program in a process and a folder of its own.

    `ends`: ends to play before anything is run, by number of the run."""

    def __init__(self, ends: dict[int, End] | None = None):
        self.ends, self.programs = ends or {}, []

    def run(self, program: Program, limits: SandboxLimits = SandboxLimits(), owner: str = "") -> Execution:
        "One execution."
        self.programs.append(program)
        if (end := self.ends.get(len(self.programs) - 1)) is not None:
            return Execution(end, tier="local", message="played")
        with tempfile.TemporaryDirectory() as folder:
            return _run(program, limits, Path(folder))

    def close(self) -> None:
        "Nothing is kept."


def _start(program: Program, limits: SandboxLimits, folder: Path) -> tuple[subprocess.Popen, int, int]:
    "The process, and our ends of the pipes to its descriptors 3 and 4."
    work = folder / "work"
    for path, data in {".": None, **program.files}.items():
        (work / path).parent.mkdir(parents=True, exist_ok=True) if data is not None else work.mkdir()
        (work / path).write_bytes(data) if data is not None else None
    (folder / "program.py").write_text(program.code, encoding="utf-8", errors="surrogatepass")
    theirs_in, ours_in = os.pipe()
    ours_out, theirs_out = os.pipe()
    command = program.argv or (
        sys.executable,
        "-I",
        "-S",
        "-E",
        "-c",
        BOOT,
        str(theirs_in),
        str(theirs_out),
        str(max(1, round(limits.cpu_s))),
        str(limits.memory_mb << 20),
        str(folder / "program.py"),
    )
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=work,
        env={"PATH": "/usr/bin:/bin", **program.environ},
        pass_fds=(theirs_in, theirs_out),
        start_new_session=True,
    )
    os.close(theirs_in), os.close(theirs_out)
    return process, ours_in, ours_out


def _run(program: Program, limits: SandboxLimits, folder: Path) -> Execution:
    began = time.monotonic()
    process, feed, heard = _start(program, limits, folder)
    outputs = {process.stdout.fileno(): b"", process.stderr.fileno(): b"", heard: b""}
    waiting, answers, end = set(outputs), [], None
    process.stdin.write(program.stdin) if len(program.stdin) < 60_000 else None
    process.stdin.close()
    sent = _say(feed, program.calls, 0)
    while end is None and process.poll() is None:
        for source in select.select(list(waiting), [], [], 0.01)[0]:
            data = os.read(source, 1 << 16)
            outputs[source] += data
            waiting -= set() if data else {source}
        while len(answers) < sent and b"\n" in outputs[heard]:
            line, _, outputs[heard] = outputs[heard].partition(b"\n")
            answers.append(line.decode("utf-8", "replace"))
            sent = _say(feed, program.calls, sent)
        if sent and sent == len(program.calls) == len(answers):
            break  # all was said
        if len(outputs[heard]) > LINE or sum(map(len, outputs.values())) > LINE + limits.output_kb * 1024:
            end = End.OUTPUT_LIMIT
        elif time.monotonic() - began > limits.wall_s:
            end = End.WALL_LIMIT
    if end is None and process.poll() is not None:
        for source in waiting - {heard}:  # a second writer may hold the last one open
            while select.select([source], [], [], 0)[0] and (data := os.read(source, 1 << 16)):
                outputs[source] += data
        while select.select([heard], [], [], 0)[0] and (data := os.read(heard, 1 << 16)) and len(outputs[heard]) < LINE:
            outputs[heard] += data
        answers += [line.decode("utf-8", "replace") for line in outputs[heard].split(b"\n")[:-1]][: sent - len(answers)]
    return _ended(process, end, outputs, answers, program, began, (feed, heard))


def _say(feed: int, calls: tuple[str, ...], sent: int) -> int:
    "Hand over the next call; how many were."
    if sent < len(calls):
        try:
            os.write(feed, calls[sent].encode() + b"\n")
        except BrokenPipeError:
            return sent
        return sent + 1
    return sent


def _ended(
    process: subprocess.Popen,
    end: End | None,
    outputs: dict,
    answers: list,
    program: Program,
    began: float,
    ours: tuple[int, int],
) -> Execution:
    for each in ours:
        os.close(each)
    if process.poll() is None:
        try:
            process.wait(0.05 if end is None else 0)  # all answers are there: its end says nothing any more
        except subprocess.TimeoutExpired:
            pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    before = os.times()
    code = process.wait()
    out, err = (outputs[stream.fileno()] for stream in (process.stdout, process.stderr))
    process.stdout.close(), process.stderr.close()
    whole = len(answers) == len(program.calls) > 0
    end = end or (
        End.EXITED
        if code >= 0 or whole
        else End.CPU_LIMIT
        if -code in (signal.SIGXCPU,)
        else End.MEMORY_LIMIT
        if b"MemoryError" in err
        else End.CRASHED
    )
    return Execution(
        end,
        abs(code),
        out,
        err,
        (*answers, *[None] * (len(program.calls) - len(answers))),
        cpu_s=max(0.0, os.times().children_user - before.children_user),
        wall_s=time.monotonic() - began,
        phases=(("ran", time.monotonic() - began),),
        tier="local",
        worker="local",
    )

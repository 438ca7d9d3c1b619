"""A driver in a simulated host that runs what a test sends it, and answers in JSON."""

import json
import subprocess
import sys
from queue import Empty, Queue
from threading import Thread

from rlbench.bench.host_namespaces import NamespaceHost

LOOP = """
import json, sys, time, traceback
names = {}
for line in sys.stdin:
    try:
        code, expression = json.loads(line)
        exec(code, names)
        answer = {"value": eval(expression, names)}
    except BaseException as error:
        answer = {"error": type(error).__name__, "text": traceback.format_exc()}
    sys.stdout.write("\\nanswer " + json.dumps(answer) + "\\n")
    sys.stdout.flush()
"""


class HostDriver:
    "A Python process in a host; names stay from one `ask` to the next."

    def __init__(self, host: NamespaceHost) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = host.popen([sys.executable, "-u", "-W", "ignore", "-c", LOOP], **pipes)
        self.lines: Queue[str] = Queue()
        Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        "Keep what the process prints."
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def ask(self, code: str, expression: str = "None", timeout_s: float = 60):
        "Run code, then the value of an expression. AssertionError with the traceback if one of them fails."
        self.process.stdin.write(json.dumps([code, expression]) + "\n")
        self.process.stdin.flush()
        printed = []
        while True:
            try:
                line = self.lines.get(timeout=timeout_s)
            except Empty:
                raise AssertionError(
                    f"no answer within {timeout_s} s to {code or expression}: {printed[-20:]}"
                ) from None
            assert line, f"the driver ended: {''.join(printed[-30:])}"
            if line.startswith("answer "):
                break
            printed.append(line)
        answer = json.loads(line.removeprefix("answer "))
        assert "error" not in answer, answer["text"]
        return answer["value"]

    def close(self) -> None:
        "End the process."
        self.process.kill()
        self.process.wait()

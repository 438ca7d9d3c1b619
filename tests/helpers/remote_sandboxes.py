"""A server of sandboxes for tests."""

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rlbench.sandbox.faults import FakeWorker
from rlbench.sandbox.pool_folder import order_of, reply_json
from rlbench.sandbox.types import Reply

TOKEN = "RLBENCH_TEST_TOKEN"


class Plain:
    "The plain interface round a fake worker: what any provider's server would be."

    def __init__(self):
        self.worker, self.lock, self.ticket, self.said, self.seen = (
            FakeWorker("far", start_s=0.0),
            threading.Lock(),
            0,
            {},
            Counter(),
        )
        self.bad = lambda kind, count: None
        self.limits = {"concurrent": 8, "create_rate": 5.0, "credit": 120, "open": 3, "owner": "nobody"}

    def __call__(self, path: str, body: bytes, head) -> tuple[int, bytes]:
        kind = path.strip("/")
        if head.get("Authorization") != "Bearer s3cret":
            return 401, b"no such key"
        if kind == "limits":
            return 200, json.dumps(self.limits).encode()
        self.seen[kind] += 1
        if bad := self.bad(kind, self.seen[kind]):
            return bad
        with self.lock:
            self.ticket += 1
            mine = self.ticket
            order = order_of({**json.loads(body), "ticket": mine})
            assert order.kind == kind
            self.worker.poll(), self.worker.submit(order)
        while True:
            with self.lock:
                self.said |= {reply.ticket: reply for reply in self.worker.poll()}
                if mine in self.said:
                    return 200, json.dumps(
                        reply_json(Reply(mine, self.said[mine].value, self.said[mine].fault, self.said[mine].missing))
                    ).encode()
            time.sleep(0.005)


def run_code(path: str, body: bytes, head) -> tuple[int, bytes]:
    "SandboxFusion's interface, with the Python at hand and no sandbox."
    asked = json.loads(body)
    assert path == "/run_code" and asked["language"] == "python"
    done = subprocess.run(
        [sys.executable, "-I", "-c", asked["code"]], capture_output=True, text=True, timeout=asked["run_timeout"]
    )
    result = {
        "status": "Finished",
        "return_code": done.returncode,
        "execution_time": 0.1,
        "stdout": done.stdout,
        "stderr": done.stderr,
    }
    return 200, json.dumps(
        {"status": "Failed" if done.returncode else "Success", "message": "", "run_result": result}
    ).encode()


@pytest.fixture
def serve(monkeypatch):
    "Starts servers that answer with a function of (path, body, headers)."
    monkeypatch.setenv(TOKEN, "s3cret")
    servers = []

    def start(answer) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                status, body = answer(
                    self.path, self.rfile.read(int(self.headers.get("Content-Length", 0))), self.headers
                )
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        server.handle_error = lambda *_: None  # clients that hang up
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()

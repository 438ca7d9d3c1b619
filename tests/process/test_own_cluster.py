"""The Ray cluster that a run starts for itself."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
OWN = """
import json, os, psutil
from rlbench.loop.config_tables import ClusterConfig
from rlbench.runtime.cluster import connect_ray
ray = connect_ray(ClusterConfig(), "test", 1.0)

@ray.remote(num_cpus=0)
def seen():
    import sys
    return "lark" in sys.modules, os.environ["RAY_AUTH_TOKEN"]

has_grammar, token = ray.get(seen.remote())
ours = [psutil.Process(), *psutil.Process().children(recursive=True)]
listening = [c.laddr.ip for each in ours for c in each.net_connections("tcp") if c.status == "LISTEN"]
print(json.dumps([listening, has_grammar, token, ray.get_runtime_context().gcs_address]), flush=True)
input()
"""
JOIN = "import sys, ray; ray.init(address=sys.argv[1], logging_level='ERROR'); print('came in')"


@pytest.fixture(scope="module")
def own():
    "What a process with a cluster of its own says, and the process, which lives until the tests are done."
    users = {**os.environ, "RAY_AUTH_TOKEN": "f" * 64, "RAY_ADDRESS": "127.0.0.1:1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = subprocess.Popen([sys.executable, "-W", "ignore", "-c", OWN], env=users, **pipes)
    line = next((each for each in started.stdout if each.startswith("[[")), "null")
    yield json.loads(line)
    started.communicate("\n", timeout=400)


def test_a_cluster_of_a_run_listens_on_this_machine_alone_and_wants_its_token(own):
    listening, _, token, address = own
    assert len(listening) >= 4
    assert {each.removeprefix("::ffff:") for each in listening} == {"127.0.0.1"}
    assert token != "f" * 64 and len(token) == 64
    on_loopback = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # else Ray replaces 127.0.0.1 by the address of this host
    environment = {**os.environ, **on_loopback, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 64}
    command = [sys.executable, "-W", "ignore", "-c", JOIN, address]
    stranger = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert stranger.returncode != 0 and "came in" not in stranger.stdout
    assert "token" in stranger.stderr.lower() or "Failed to connect" in stranger.stderr
    environment["RAY_AUTH_TOKEN"] = token
    friend = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert "came in" in friend.stdout


def test_its_processes_leave_out_what_takes_a_second_to_import(own):
    assert own[1] is False

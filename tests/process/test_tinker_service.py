"""A training service in real processes: the official client, hostile requests beside it,
and processes that are killed."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import tinker
from patience import until
from service_world import train_body
from tinker import types
from tinker_clients import ADAM, PROMPT, RawClient, fixed_data, odd_request, open_client, train_step

from rlbench.service.service_events import ResultKept
from rlbench.service.service_journal import read_entries
from rlbench.service.tinker_service import TinkerService, serve_tinker

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
HOSTILE = 300


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    "A service with two tenants, shared by the tests of this file."
    folder = tmp_path_factory.mktemp("service")
    (folder / "keys.toml").write_text("[alice]\n[bob]\nmodels = 3\n")
    with serve_tinker(
        "tiny", runs=folder, name="shared", keys=folder / "keys.toml", aliases=["Qwen/Qwen3-8B"]
    ) as started:
        yield started


@pytest.fixture
def alice(service):
    "The official client of the first tenant."
    with open_client(service.url, service.keys["alice"]) as client:
        yield client


def saved_digest(service: TinkerService, tenant: str, address: str) -> str:
    "The digest of weights that were saved under an address, from the journal."
    name = address.rpartition("/")[2]
    model = address.removeprefix("tinker://").partition("/")[0]
    found = [
        entry.entry
        for entry in read_entries(service.folder / "tenants" / tenant / "journal.log")
        if isinstance(entry.entry, ResultKept) and entry.entry.model == model and entry.entry.kind == "save_weights"
    ]
    assert found and name, address
    return found[-1].digest


def read_if_there(path: Path) -> str:
    "The text of a file; empty while there is none."
    return path.read_text() if path.exists() else ""


def pids_of(service: TinkerService) -> dict[str, int]:
    "Processes of a service by name: server, trainer, generator."
    ready = json.loads(until(lambda: read_if_there(service.folder / "ready.json"), 120))
    found = {"server": ready["server"]}
    for process in psutil.Process(service.pid).children(recursive=True):
        kinds = [kind for kind in ("trainer", "generator") if process.name() == f"rlbench-{kind}"[:15]]
        found |= dict.fromkeys(kinds, process.pid)
    return found


def test_the_official_client_trains_saves_resumes_and_samples(service, alice):
    """What the cookbook's loops ask for: info, three steps, a state that is loaded with its optimizer,
    a sampler from a path."""
    model = alice.create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=4).result()
    info = model.get_info()
    assert (info.is_lora, info.lora_rank, info.model_name) == (True, 4, "tiny")
    tokenizer = model.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("3+4=7")) == "3+4=7"
    told = [train_step(model, step) for step in range(3)]
    assert all(len(each["sequences"]) == 16 for each in told)
    state = model.save_state("000003").result().path
    sampled = model.save_weights_for_sampler("final").result().path
    again = alice.create_training_client_from_state_with_optimizer(state).result()
    data = fixed_data(99)
    first, second = (
        each.forward_backward(data, "importance_sampling").result().metrics["loss:sum"] for each in (model, again)
    )
    assert first == second
    steps = [each.optim_step(ADAM).result().metrics["optimizer_steps:max"] for each in (model, again)]
    assert steps[0] == 4.0
    digests = [saved_digest(service, "alice", each.save_state("end").result().path) for each in (model, again)]
    assert digests[0] == digests[1]
    sampler = alice.create_sampling_client(model_path=sampled).result()
    logprobs = sampler.compute_logprobs(PROMPT).result()
    assert logprobs[0] is None and all(value < 0 for value in logprobs[1:])


def test_errors_of_a_client_are_told_in_words_and_the_model_goes_on(alice):
    "A loss that is not published, a token that does not exist: an error with a remedy; the next request works."
    model = alice.create_lora_training_client(base_model="tiny", rank=2).result()
    with pytest.raises(tinker.BadRequestError, match="use loss_fn='importance_sampling'"):
        model.forward_backward(fixed_data(1), "stable_reinforce").result()
    bad = types.Datum(
        model_input=types.ModelInput.from_ints([3, 100_000]),
        loss_fn_inputs={"target_tokens": [4, 5], "weights": [1.0, 1.0]},
    )
    with pytest.raises(tinker.BadRequestError, match="token 100000 is not in the vocabulary"):
        model.forward_backward([bad], "cross_entropy").result()
    assert model.forward_backward(fixed_data(1), "importance_sampling").result().metrics["tokens:sum"] == 44


def test_a_custom_loss_is_computed_by_the_client(alice):
    "forward_backward_custom: log-probabilities come here, gradients of the client's own loss go back."
    model = alice.create_lora_training_client(base_model="tiny", rank=2).result()

    def loss(data, logprobs):
        total = sum(each.sum() for each in logprobs)
        return -total, {"total": float(total)}

    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints([3, 4, 5]),
            loss_fn_inputs={"target_tokens": [4, 5, 6], "weights": [1.0, 1.0, 1.0]},
        )
    ]
    before = model.forward_backward_custom(data, loss).result().metrics["total"]
    model.optim_step(ADAM).result()
    assert model.forward_backward_custom(data, loss).result().metrics["total"] > before


def test_hostile_requests_are_refused_in_words_and_disturb_nobody(service, alice):
    """300 malformed or hostile requests of one tenant, drawn from a seed, while another tenant trains: each gets a 4xx
    with words, the server is the same process, and the other tenant's losses are those of a quiet hour."""
    quiet = alice.create_lora_training_client(base_model="tiny", rank=4, seed=7).result()
    expected = [train_step(quiet, step)["losses"] for step in range(4)]
    busy = alice.create_lora_training_client(base_model="tiny", rank=4, seed=7).result()
    server = pids_of(service)["server"]
    told: list = []

    def train() -> None:
        told.extend(train_step(busy, step)["losses"] for step in range(4))

    bob = RawClient(service.url, service.keys["bob"])
    _, session = bob.post("create_session", {})
    create = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2}}
    _, made = bob.post("create_model", create)
    model = made["model_id"]
    sampling = {"session_id": session["session_id"], "sampling_session_seq_id": 0, "base_model": "tiny"}
    _, sampler = bob.post("create_sampling_session", sampling)
    good = {
        "create_model": {**create, "model_seq_id": 1},
        "optim_step": {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 0.1, "beta1": 0.9}},
        "save_weights": {"model_id": model, "seq_id": 1, "path": "x"},
        "save_weights_for_sampler": {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 3, "kind": "snapshot"},
        "load_weights": {"model_id": model, "seq_id": 1, "path": f"tinker://{model}/weights/x", "optimizer": True},
        "asample": {
            "sampling_session_id": sampler["sampling_session_id"],
            "seq_id": 0,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [3, 4]}]},
            "sampling_params": {
                "max_tokens": 2,
                "temperature": 1.0,
                "stop": None,
                "seed": 1,
                "top_k": -1,
                "top_p": 1.0,
            },
        },
        "retrieve_future": {"request_id": "nothing"},
        "weights_info": {"tinker_path": f"tinker://{model}/weights/none"},
        "get_info": {"model_id": "nobody"},
    }
    drawn = random.Random(20261127)
    training = threading.Thread(target=train)
    training.start()
    refused = 0
    accepted = 0
    while refused < HOSTILE:
        method, path, body, headers = odd_request(drawn, good, train_body(model, 1, [3, 4, 5]))
        status, text = bob.send(method, path, body, headers)
        assert status < 500, (status, text, method, path, body[:300])
        if status < 400:  # the odd value was one that is allowed
            accepted += 1
            continue
        refused += 1
        words = json.loads(text)["detail"] if text.startswith("{") else text
        assert len(words) >= 9 and len(words) < 900, (status, text, path)
    training.join(120)
    assert told == expected
    assert bob.send("GET", "healthz")[0] == 200 and pids_of(service)["server"] == server
    assert accepted < HOSTILE


KILLS = [
    ("server", "training"),
    ("trainer", "training"),
    ("generator", "sampling"),
    ("server", "sampling"),
    ("trainer", "saving"),
]


def loop_with_kills(service: TinkerService, tenant: str, kills: list[tuple[str, str]], steps: int) -> tuple[list, str]:
    """What a client is told by a loop in which processes are killed, one a step from the first;
    and the digest at its end."""
    told = []
    with open_client(service.url, service.keys[tenant]) as client:
        model = client.create_lora_training_client(base_model="tiny", rank=4, seed=3).result()
        for step in range(steps):

            def between(phase: str, step: int = step) -> None:
                if step < len(kills) and kills[step][1] == phase:
                    os.kill(until(lambda: pids_of(service).get(kills[step][0])), signal.SIGKILL)

            told.append(train_step(model, step, between))
        return told, saved_digest(service, tenant, model.save_state("end").result().path)


def test_kills_lose_nothing_and_apply_no_gradient_twice(service):
    """Server, trainer and generator are killed in the middle of sampling, training and saving:
    the client's loop goes on by itself, hears the losses of an undisturbed loop, and ends with the same weights.
    RLBENCH_TINKER_KILLS=20 does twenty."""
    count = int(os.environ.get("RLBENCH_TINKER_KILLS", len(KILLS)))
    pairs = [
        (victim, phase) for phase in ("sampling", "training", "saving") for victim in ("server", "trainer", "generator")
    ]
    kills = KILLS if count == len(KILLS) else [pairs[index % len(pairs)] for index in range(count)]
    steps = len(kills) + 1
    expected = loop_with_kills(service, "alice", [], steps)
    told = loop_with_kills(service, "alice", kills, steps)
    for step in range(steps):
        assert told[0][step]["losses"] == expected[0][step]["losses"], (step, kills[step - 1 : step + 1])
    assert told[1] == expected[1]


def test_a_service_that_was_stopped_goes_on_under_its_name(tmp_path):
    "Stop and start again: the same key, the same model, and a state that was saved before is loaded."
    with serve_tinker("tiny", runs=tmp_path, name="mine") as service:
        with open_client(service.url, service.key) as client:
            model = client.create_lora_training_client(base_model="tiny", rank=2).result()
            train_step(model, 0)
            path = model.save_state("first").result().path
        key = service.key
        with pytest.raises(ValueError, match="'mine' is running"):
            serve_tinker("tiny", runs=tmp_path, name="mine")
    assert not service.is_running()
    with serve_tinker("tiny", runs=tmp_path, name="mine") as service:
        assert service.key == key
        with open_client(service.url, service.key) as client:
            again = client.create_training_client_from_state_with_optimizer(path).result()
            assert again.optim_step(ADAM).result().metrics["optimizer_steps:max"] >= 1.0


def test_what_cannot_be_served_is_refused_before_or_in_words(tmp_path):
    "A policy that is not there, a key that the client would not send, a port that is taken."
    with pytest.raises(ValueError, match="the service did not start: .*no-such-policy"):
        serve_tinker("no-such-policy", runs=tmp_path)
    with pytest.raises(ValueError, match="key: a key begins with 'tml-'"):
        serve_tinker("tiny", runs=tmp_path, key="secret")
    command = [sys.executable, "-m", "rlbench.cli.main", "tinker", "--key", "secret", "--runs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 2 and "a key begins with 'tml-'" in done.stderr


def test_the_server_imports_no_torch():
    "The process that answers clients never imports what can take it down."
    script = (
        "import sys; from rlbench.service import tinker_asgi, tinker_service; "
        "print(*{'torch', 'transformers', 'tinker', 'polars'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=400)
    assert done.stdout.split() == []


def test_the_verb_serves_until_it_is_asked_to_end(tmp_path):
    "`rlbench tinker --json` prints address and keys, answers, and ends with its workers at SIGTERM."
    command = [sys.executable, "-m", "rlbench.cli.main", "tinker", "--port", "0", "--runs", str(tmp_path), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    facts = json.loads(process.stdout.readline())
    assert RawClient(facts["url"], facts["keys"]["tenant-1"]).send("GET", "healthz")[0] == 200
    assert oct(Path(facts["folder"], "keys.toml").stat().st_mode & 0o777) == "0o600"
    process.send_signal(signal.SIGTERM)
    assert process.wait(400) == 143
    until(lambda: not Path(f"/proc/{facts['pid']}").exists(), 30)
    assert facts["keys"]["tenant-1"] not in Path(facts["folder"], "service.log").read_text()

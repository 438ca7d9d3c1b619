"""A training service without processes: the real driver, rules and journals,
and workers that are objects on a virtual clock."""

import hashlib
import json
import random
import shutil
from collections import deque
from pathlib import Path

import numpy as np

from rlbench.runtime.actors import ActorWork, Gone
from rlbench.service import service_records as records
from rlbench.service.service_driver import ServiceDriver
from rlbench.service.service_journal import TenantJournal
from rlbench.service.service_rules import new_service
from rlbench.service.service_state import Quota, ServiceRules
from rlbench.service.tinker_protobuf import write_bytes, write_integer

VOCABULARY, CONTEXT = 50, 64


def mix(*parts) -> str:
    "A short hash: what the scripted trainer computes with."
    return hashlib.blake2b(repr(parts).encode(), digest_size=6).hexdigest()


class ScriptedTrainer:
    "Models whose weights are a hash of everything that was done to them."

    def __init__(self):
        self.models: dict[str, dict] = {}
        self.done: list = []  # orders that changed something

    def answer(self, order):
        "Carry one order out."
        value = None
        match order:
            case records.CreateModel():
                self.models[order.model] = {"weights": mix("base", order.lora), "gradient": "", "steps": 0}
                value = records.SavedWeights("made")
            case records.LoadModel():
                stored = json.loads((Path(order.path) / "model.json").read_text())
                self.models[order.model] = {**stored, "gradient": ""}
                value = records.SavedWeights("loaded")
            case records.UnloadModel():
                del self.models[order.model]
            case records.ForwardBackward():
                model = self.models[order.model]
                if order.data[0].tokens[0] == 13:
                    return records.OrderFailed(order.order, "thirteen is refused", "user")
                tokens = [datum.tokens.tolist() for datum in order.data]
                if not order.forward_only:
                    model["gradient"] = mix(model["gradient"], tokens)
                logprobs = tuple(np.zeros(len(each), np.float32) for each in tokens)
                value = records.ForwardBackwardOutput(logprobs, {"loss:sum": float(sum(map(sum, tokens)))})
            case records.OptimStep():
                model = self.models[order.model]
                model["weights"] = mix(model["weights"], model["gradient"], order.adam.learning_rate)
                model["gradient"] = ""
                model["steps"] += 1
                value = records.OptimOutput({"steps:max": float(model["steps"])})
            case records.SaveModel() | records.ExportAdapter():
                model = self.models[order.model]
                assert not ("checkpoint" in order.path and model["gradient"]), "a checkpoint lacks a gradient"
                Path(order.path).mkdir(parents=True, exist_ok=True)
                (Path(order.path) / "model.json").write_text(json.dumps(model))
                value = records.SavedWeights(model["weights"], size_bytes=1000)
        return records.OrderDone(order.order, value, 0.01)


class ScriptedGenerator:
    "Samples that say which weights and which seed drew them."

    def __init__(self):
        self.adapters: dict[str, str] = {}

    def answer(self, order):
        "Carry one order out."
        match order:
            case records.LoadAdapter():
                weights = "base"
                if order.path:
                    weights = json.loads((Path(order.path) / "model.json").read_text())["weights"]
                self.adapters[order.sampler] = weights
                return records.OrderDone(order.order)
            case records.DropAdapter():
                del self.adapters[order.sampler]
                return records.OrderDone(order.order)
            case records.CancelSample():
                return None
        drawn = int(mix(self.adapters[order.sampler], order.params.seed), 16) % VOCABULARY
        tokens = np.full(2, drawn, np.int32)
        one = records.SampledSequence(tokens, np.zeros(2, np.float32), np.zeros(2, np.int32), "length")
        return records.OrderDone(order.order, records.SampleOutput((one,) * order.samples), 0.01)


class ScriptedHandle:
    "The handle of a worker that is an object: it says what it has done when the world lets it."

    connection = None

    def __init__(self, name: str):
        self.actor = ScriptedTrainer() if name == "trainer" else ScriptedGenerator()
        self.orders: deque = deque()
        self.said: list = [ActorWork((records.ServiceWorkerReady((name,), VOCABULARY, CONTEXT, (0,), "none", 4),))]
        self.lost = False
        self.heard_at = 0.0
        self.moved_at = 0.0
        self.process = self  # that can be killed
        self.hangs = False  # it lives and does nothing more

    def kill(self) -> None:
        self.die()

    def submit(self, order, now: float) -> None:
        self.orders.append(order)

    def work(self) -> None:
        "Do the first order."
        if self.orders and not self.lost and not self.hangs:
            answer = self.actor.answer(self.orders.popleft())
            if answer is not None:
                self.said.append(ActorWork((answer,)))

    def die(self) -> None:
        "End in the middle of things; what was not heard is lost."
        self.said = [Gone("killed")]
        self.lost = True
        self.orders.clear()

    def poll(self, now: float) -> list:
        said, self.said = self.said, []
        self.heard_at = now
        return said

    def hang_up(self) -> None:
        self.lost = True

    def close(self, patience: float = 0.0) -> None:
        pass


class ServiceWorld:
    "A service and its clients, on a virtual clock."

    def __init__(self, folder: Path, quotas=None, rules: ServiceRules = ServiceRules(), seed: int = 0):
        self.folder = folder
        self.quotas = quotas or {"a": Quota(), "b": Quota()}
        self.rules = rules
        self.random = random.Random(seed)
        self.now = 0.0
        self.facts: list = []
        self.starts = 0
        self.start_server()

    def start_server(self) -> None:
        "Start the server's process: everything that it knows comes from the folder."
        state = new_service(
            self.rules,
            str(self.folder),
            "tiny",
            ("Known/Name",),
            self.quotas,
            {"trainer": ("trainer",), "generator": ("generator",)},
        )
        self.journals = {name: TenantJournal(self.folder / "tenants" / name / "journal.log") for name in self.quotas}
        self.driver = ServiceDriver(state, self.journals, ScriptedHandle, (self,), lambda: self.now)
        self.driver.start()
        self.starts += 1
        self.hear()

    def kill_server(self) -> None:
        "End the server and its workers without a word, and start it again."
        for journal in self.journals.values():
            journal.close()
        self.start_server()

    def note(self, tenant: str, fact) -> None:
        self.facts.append(fact)

    def beat(self, now: float) -> None:
        pass

    def close(self) -> None:
        pass

    def hear(self) -> None:
        "Take what the workers have said."
        for name in list(self.driver.workers.handles):
            self.driver.hear(name)

    def work(self) -> None:
        "Let each worker do one order, and hear it."
        for handle in list(self.driver.workers.handles.values()):
            handle.work()
        self.hear()

    def pass_time(self, seconds: float) -> None:
        "Let the clock go forward, with a beat at the end."
        self.now += seconds
        for handle in self.driver.workers.handles.values():
            handle.heard_at = self.now
            if not handle.hangs:
                handle.moved_at = self.now
        self.driver.beat()
        self.hear()

    def settle(self, most: int = 10_000) -> None:
        "Work until nothing is left to do."
        for _ in range(most):
            self.work()
            if not any(handle.orders or handle.said for handle in self.driver.workers.handles.values()):
                if not self.driver.workers.starts:
                    return
                self.pass_time(1.0)
        raise AssertionError("the service does not come to rest")

    def call(self, tenant: str, endpoint: str, body: dict | bytes) -> "Call":
        "Send a request."
        call = Call()
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        call.number = self.driver.call(tenant, endpoint, data, f"{self.starts}x{self.driver.calls}", call.take)
        return call

    def open_session(self, tenant: str) -> str:
        "A new session."
        return self.call(tenant, "create_session", {"sdk_version": "0.38.0"}).json["session_id"]

    def fetch(self, tenant: str, promise: str) -> "Call":
        "Ask for a result."
        return self.call(tenant, "retrieve_future", {"request_id": promise})

    def remove(self) -> None:
        "Delete the folder."
        shutil.rmtree(self.folder, ignore_errors=True)


class Call:
    "A request and its answer, once it is there."

    def __init__(self):
        self.status = 0
        self.result = None
        self.answers = 0

    def take(self, status: int, result) -> None:
        self.status = status
        self.result = result
        self.answers += 1

    @property
    def json(self) -> dict:
        return json.loads(self.result.body)


def train_body(model: str, seq: int, tokens: list[int], forward_only: bool = False) -> bytes:
    "A forward_backward request with one sequence."
    raw = np.array(tokens, "<i4").tobytes()
    weights = np.ones(len(tokens), "<f4").tobytes()

    def tensor(name: str, data: bytes, dtype: int) -> bytes:
        inner = write_bytes(1, data) + write_integer(3, dtype) + write_integer(4, len(tokens))
        return write_bytes(2, write_bytes(1, name) + write_bytes(2, inner))

    chunk = write_bytes(1, write_bytes(1, write_bytes(1, raw)))
    datum = chunk + tensor("target_tokens", raw, 3) + tensor("weights", weights, 1)
    head = write_bytes(1, model) + write_integer(2, seq) + write_bytes(3, datum) + write_bytes(4, "cross_entropy")
    return head + write_integer(6, int(forward_only))


def step_body(model: str, seq: int, rate: float = 0.5) -> dict:
    "An optim_step request."
    return {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": rate}}


def sample_body(sampler: str, seq: int, samples: int = 1, max_tokens: int = 2) -> dict:
    "An asample request."
    return {
        "sampling_session_id": sampler,
        "seq_id": seq,
        "num_samples": samples,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": max_tokens},
    }


def make_model(world: ServiceWorld, tenant: str = "a", session: str = "", number: int = 0) -> str:
    "A model with an adapter, ready to train."
    session = session or world.open_session(tenant)
    body = {"session_id": session, "model_seq_id": number, "base_model": "tiny", "lora_config": {"rank": 4}}
    promised = world.call(tenant, "create_model", body)
    assert promised.status == 200 and promised.json["model_id"] == f"{session}:train:{number}"
    world.settle()
    assert world.fetch(tenant, promised.json["request_id"]).json["model_id"] == promised.json["model_id"]
    return promised.json["model_id"]


def weights_of(world: ServiceWorld, model: str) -> dict:
    "What the scripted trainer has of a model."
    return world.driver.workers.handles["trainer"].actor.models[model]

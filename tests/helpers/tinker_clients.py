"""Clients of a training service for tests: the official one with a small loop,
and one that sends what nobody should."""

import json
import random
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import tinker
from tinker import types

VOCABULARY = 64  # more than the tiny policy knows, less than it would matter


@contextmanager
def open_client(url: str, key: str) -> Iterator[tinker.ServiceClient]:
    "The official client. It is closed at the end: else its heartbeats would go on for half an hour."
    client = tinker.ServiceClient(base_url=url, api_key=key)
    try:
        yield client
    finally:
        client.close("success").result()


def fixed_data(step: int, sequences: int = 4, length: int = 12) -> list[types.Datum]:
    "Training data that depends on the step only, so that a loop can be done again."
    drawn = np.random.default_rng(step)
    data = []
    for _ in range(sequences):
        tokens = drawn.integers(3, 15, length)
        data.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
                loss_fn_inputs={
                    "target_tokens": tokens[1:],
                    "logprobs": drawn.uniform(-2, -0.5, length - 1).astype(np.float32),
                    "advantages": drawn.normal(0, 1, length - 1).astype(np.float32),
                },
            )
        )
    return data


ADAM = types.AdamParams(learning_rate=1e-3)
SAMPLING = types.SamplingParams(max_tokens=16, temperature=1.0)
PROMPT = types.ModelInput.from_ints([3, 4, 5, 6])


def train_step(model, step: int, between=None) -> dict:
    """One step of a loop: sample, train, save for the sampler. `between(phase)` is called with a request of that phase
    under way. Returns what the client was told."""
    between = between or (lambda phase: None)
    saved = model.save_weights_and_get_sampling_client()
    between("saving")
    sampler = saved.result()
    samples = [sampler.sample(PROMPT, 4, SAMPLING) for _ in range(4)]
    between("sampling")
    sequences = [list(sequence.tokens) for sample in samples for sequence in sample.result().sequences]
    trained = [model.forward_backward(fixed_data(10 * step + part), "importance_sampling") for part in range(2)]
    stepped = model.optim_step(ADAM)
    between("training")
    losses = [each.result().metrics["loss:sum"] for each in trained]
    return {"losses": losses, "metrics": stepped.result().metrics, "sequences": sequences}


class RawClient:
    "HTTP without a client library: sends any bytes anywhere."

    def __init__(self, url: str, key: str):
        self.url = url
        self.key = key

    def send(self, method: str, path: str, body: bytes = b"", headers: dict | None = None) -> tuple[int, str]:
        "(status, text) of an answer."
        headers = {"X-API-Key": self.key, "Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(f"{self.url}/api/v1/{path}", body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=400) as answer:
                return answer.status, answer.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")

    def post(self, endpoint: str, body: dict) -> tuple[int, dict]:
        "(status, JSON) of a JSON request."
        status, text = self.send("POST", endpoint, json.dumps(body).encode())
        return status, json.loads(text)


ODD_VALUES = (
    None, True, -1, 0, 1 << 40, 1 << 70, 1.5, 1e308, "", "x", "../../etc/passwd", "a/b", "\x00", "tinker://x",
    [], {}, [[]],
    ["a", 1], {"a": {"b": []}}, "\u202e" * 9, "9" * 600, [1] * 5000, float("nan"), float("inf"),
)  # fmt: skip


def odd_request(drawn: random.Random, good: dict[str, dict], train: bytes) -> tuple[str, str, bytes, dict]:
    "(method, path, body, headers) of a request that is wrong in one of many ways. `good`: endpoint -> a right body."
    kind = drawn.choice(
        (
            "field",
            "field",
            "field",
            "field",
            "missing",
            "bytes",
            "protobuf",
            "protobuf",
            "protobuf",
            "key",
            "path",
            "zstd",
            "encoding",
            "deep",
        )
    )
    endpoint = drawn.choice(sorted(good))
    body = json.loads(json.dumps(good[endpoint]))
    match kind:
        case "field":
            place = body
            while True:
                name = drawn.choice(sorted(place))
                if not isinstance(place[name], dict) or drawn.random() < 0.3:
                    break
                place = place[name]
            place[name] = drawn.choice(ODD_VALUES)
        case "missing":
            body = {}
        case "bytes":
            return "POST", endpoint, drawn.randbytes(drawn.randint(1, 400)), {}
        case "protobuf":
            damaged = bytearray(train)
            for _ in range(drawn.randint(1, 6)):
                damaged[drawn.randrange(len(damaged))] = drawn.randrange(256)
            cut = drawn.randint(1, len(damaged)) if drawn.random() < 0.4 else len(damaged)
            return "POST", "forward_backward", bytes(damaged[:cut]), {"Content-Type": "application/x-protobuf"}
        case "key":
            return (
                "POST",
                endpoint,
                json.dumps(body).encode(),
                {"X-API-Key": drawn.choice(("", "tml-wrong", "x" * 5000, "tml-\u00e9".encode().decode("latin-1")))},
            )
        case "path":
            path = drawn.choice(
                (
                    "nothing",
                    "../healthz",
                    "samplers/../../x",
                    "sessions//finish",
                    "%00",
                    "asample/x",
                    "a" * 3000,
                    "samplers/" + "s" * 500,
                )
            )
            return drawn.choice(("POST", "GET", "PUT", "DELETE")), path, b"{}", {}
        case "zstd":
            import zstandard

            bomb = (
                zstandard.ZstdCompressor().compress(b"\0" * (80 << 20)) if drawn.random() < 0.3 else drawn.randbytes(60)
            )
            return "POST", "forward_backward", bomb, {"Content-Encoding": "zstd"}
        case "encoding":
            return (
                "POST",
                endpoint,
                json.dumps(body).encode(),
                {"Content-Encoding": drawn.choice(("gzip", "br", "zstd, zstd"))},
            )
        case "deep":
            return "POST", endpoint, b"[" * drawn.randint(1000, 100_000), {}
    return "POST", endpoint, json.dumps(body).encode(), {}

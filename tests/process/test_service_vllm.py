"""The service's generator on vLLM: the tokens of the torch engine, new weights in flight, and refusals in words."""

import time

import numpy as np
import pytest
import torch

from rlbench.models.lora import B
from rlbench.models.model import decode_response, encode_prompt, load_policy
from rlbench.runtime.actors import ActorWork, ProcessHandle
from rlbench.service.service_records import (
    CancelSample,
    LoadAdapter,
    LoraShape,
    OrderDone,
    Sample,
    SampleParams,
    ServiceWorkerReady,
)
from rlbench.service.service_worker import ServiceWorker, WorkerSettings, service_worker_main
from rlbench.service.tenant_adapters import AdapterBase, write_adapter

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cpu_for_vllm")]


def collect(handle: ProcessHandle, count: int, seconds: float = 300.0) -> list:
    "So many results of a worker."
    found, limit = [], time.monotonic() + seconds
    while len(found) < count and time.monotonic() < limit:
        for message in handle.poll(time.monotonic()):
            assert isinstance(message, ActorWork), message
            found += message.results
        time.sleep(0.01)
    assert len(found) == count, found
    return found


def test_vllm_serves_adapters_with_the_tokens_of_the_torch_engine(tmp_path):
    torch.set_num_threads(1)
    base = AdapterBase(load_policy("tiny"))
    policy, prompt = base.policy, encode_prompt(base.policy, "17+25=")
    for name, shape in (
        ("one", LoraShape(8, 1)),
        ("two", LoraShape(4, 2, attention=False)),
        ("head", LoraShape(4, 3, unembed=True)),
    ):
        adapter = base.new_adapter(shape)
        for key, tensor in adapter.weights.items():
            if key.endswith(B):
                tensor.normal_(0, 0.05, generator=torch.Generator().manual_seed(shape.seed))
        write_adapter(adapter, "tiny", tmp_path / name)

    def sample(order: int, sampler: str, samples: int = 4, **params) -> Sample:
        params = SampleParams(**{"max_tokens": 24, "seed": 5, "stop_ids": policy.stop_ids, **params})
        return Sample(order, sampler, prompt, samples, params)

    handle = ProcessHandle(
        "service-vllm", service_worker_main, (WorkerSettings(actors=("generator",), slots=16, engine="vllm"),)
    )
    try:
        (ready,) = collect(handle, 1)
        assert isinstance(ready, ServiceWorkerReady) and ready.slots == 16
        ours = ServiceWorker(WorkerSettings(actors=("generator",), slots=16)).generator
        orders = [LoadAdapter(1, "base", None, 0)]
        orders += [LoadAdapter(2 + i, name, str(tmp_path / name), 7) for i, name in enumerate(("one", "two"))]
        orders += [sample(10, "base"), sample(11, "one", temperature=0.7), sample(12, "two")]
        for order in orders:
            handle.submit(order, 0.0)
        theirs = {answer.order: answer for answer in collect(handle, len(orders))}
        answers = [answer for order in orders for answer in ours.receive(order)]
        while not ours.idle:
            answers += ours.step()
        for answer in answers:
            assert isinstance(answer, OrderDone) and isinstance(theirs[answer.order], OrderDone), theirs[answer.order]
            for one, other in zip(
                getattr(answer.value, "sequences", ()),
                getattr(theirs[answer.order].value, "sequences", ()),
                strict=True,
            ):
                assert one.tokens.tolist() == other.tokens.tolist() and one.stop == other.stop
                assert np.abs(one.logprobs - other.logprobs).max() < 1e-3
                assert one.versions.tolist() == other.versions.tolist()
        text = decode_response(policy, theirs[10].value.sequences[0].tokens)[0]
        refused = [
            LoadAdapter(20, "head", str(tmp_path / "head"), 1),
            Sample(21, "base", prompt, 1, SampleParams(4, 0), prompt_logprobs=True),
            sample(22, "nobody"),
            sample(25, "head"),
        ]
        for order in (*refused, sample(23, "base", 1, stop_texts=(text,)), sample(24, "one", 40), CancelSample(24)):
            handle.submit(order, 0.0)
        last = {answer.order: answer for answer in collect(handle, 6)}
        assert "train_unembed" in last[20].message and "samples with vLLM" in last[21].message
        assert last[25].message == last[20].message  # whoever samples from what was refused hears why
        assert last[22].fault == "server" and last[24].fault == "user"
        stopped = last[23].value.sequences[0]
        assert stopped.stop == "stop" and decode_response(policy, stopped.tokens).endswith(text)
    finally:
        handle.close()

"""Trainer and generator of the service in one process: what is trained is what is sampled, whoever shares the batch."""

from pathlib import Path

import numpy as np
import pytest
import torch
from loss_data import some_data

from rlbench.models.model import encode_prompt
from rlbench.service.service_records import (
    AdamParams,
    CancelSample,
    CreateModel,
    Datum,
    DropAdapter,
    ExportAdapter,
    ForwardBackward,
    LoadAdapter,
    LoadModel,
    LoraShape,
    OptimStep,
    OrderDone,
    OrderFailed,
    Sample,
    SampleParams,
    SaveModel,
)
from rlbench.service.service_worker import ServiceWorker, WorkerSettings

MODELS = {
    "all": LoraShape(rank=8, seed=1, unembed=True),
    "mlp": LoraShape(rank=4, seed=2, attention=False),
    "head": LoraShape(rank=2, seed=3, attention=False, mlp=False, unembed=True),
    "whole": None,
}


@pytest.fixture(scope="module")
def worker():
    "A worker with both actors and four models, each two steps from the base."
    torch.set_num_threads(1)
    worker = ServiceWorker(WorkerSettings(slots=32))
    for name, shape in MODELS.items():
        values(worker, CreateModel(0, name, shape))
        for step in range(2):
            data = some_data(worker.trainer.policy, step)
            values(worker, ForwardBackward(1, name, data, "cross_entropy", {}))
            values(worker, OptimStep(2, name, AdamParams(learning_rate=3e-3)))
    return worker


@pytest.fixture
def served(worker, tmp_path):
    "The worker with all models loaded as samplers of the same names."
    for name in MODELS:
        values(worker, ExportAdapter(3, name, str(tmp_path / name)))
        values(worker, LoadAdapter(4, name, str(tmp_path / name), 2))
    values(worker, LoadAdapter(4, "base", None, 0))
    yield worker
    for name in (*MODELS, "base"):
        values(worker, DropAdapter(5, name))


def answers_to(worker, *orders) -> list:
    "The answers to some orders, after all of them are carried out."
    for order in orders:
        worker.receive(order)
    found = list(worker.work().results)
    while not worker.idle:
        found += worker.work().results
    return [each for each in found if isinstance(each, (OrderDone, OrderFailed))]


def values(worker, *orders) -> list:
    "The values of the answers, in the order in which they came."
    answers = answers_to(worker, *orders)
    assert len(answers) == len(orders) and all(isinstance(each, OrderDone) for each in answers), answers
    return [each.value for each in answers]


def sample_order(worker, order: int, name: str, samples: int = 4, **params) -> Sample:
    "A sample order for one prompt."
    policy = worker.trainer.policy
    params = SampleParams(**{"max_tokens": 40, "seed": 11, "stop_ids": policy.stop_ids, **params})
    return Sample(order, name, encode_prompt(policy, "17+25="), samples, params, prompt_logprobs=True)


def as_datum(prompt: np.ndarray, tokens: np.ndarray) -> Datum:
    "Prompt and response as one datum."
    whole = np.concatenate([prompt, tokens])
    counts = (np.arange(len(whole) - 1) >= len(prompt) - 1).astype(np.float32)
    return Datum(whole[:-1], {"target_tokens": whole[1:], "weights": counts})


@pytest.mark.parametrize("name", MODELS)
def test_sampled_logprobs_are_those_that_the_trainer_computes(served, name):
    order = sample_order(served, 10, name, temperature=0.8)
    (output,) = values(served, order)
    data = tuple(as_datum(order.prompt, sequence.tokens) for sequence in output.sequences)
    (trained,) = values(served, ForwardBackward(11, name, data, "cross_entropy", {}, True))
    for sequence, logprobs in zip(output.sequences, trained.logprobs, strict=True):
        behind = len(order.prompt) - 1
        assert np.abs(sequence.logprobs - logprobs[behind:]).max() < 1e-4
        assert np.abs(output.prompt_logprobs[1:] - logprobs[:behind]).max() < 1e-4
        assert set(sequence.versions.tolist()) == {2}


def test_a_tenants_tokens_do_not_depend_on_who_shares_the_batch(served):
    orders = [sample_order(served, 20 + i, name) for i, name in enumerate((*MODELS, "base"))]
    together = {answer.order: answer.value for answer in answers_to(served, *orders)}
    for order in orders:
        (alone,) = values(served, order)
        for one, other in zip(alone.sequences, together[order.order].sequences, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert np.abs(one.logprobs - other.logprobs).max() < 1e-5


def test_a_seed_gives_the_same_tokens_again_and_another_seed_others(served):
    first, again, other = (
        [
            sequence.tokens.tolist()
            for sequence in values(served, sample_order(served, 30, "all", 8, seed=seed))[0].sequences
        ]
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_new_weights_reach_a_response_under_way_and_its_versions_say_where(served, tmp_path):
    values(served, ExportAdapter(40, "mlp", str(tmp_path / "next")))
    served.receive(sample_order(served, 41, "mlp", 2, stop_ids=()))
    early = list(served.work().results)
    answers = early + answers_to(served, LoadAdapter(42, "mlp", str(tmp_path / "next"), 3))
    sampled = next(each for each in answers if each.order == 41)
    for sequence in sampled.value.sequences:
        versions = sequence.versions.tolist()
        assert versions == sorted(versions) and set(versions) == {2, 3}


def test_a_cancelled_sample_answers_once_and_leaves_nothing_behind(served):
    served.receive(sample_order(served, 50, "all", 100, stop_ids=()))
    served.work()
    (failed,) = answers_to(served, CancelSample(50))
    assert failed.order == 50 and failed.fault == "user"
    assert served.generator.idle and not served.generator.shelf.base.keys


def test_a_bad_order_fails_alone(served):
    good = sample_order(served, 60, "all")
    hostile = [
        Sample(61, "nobody", good.prompt, 1, good.params),
        Sample(62, "all", np.array([99], np.int32), 1, good.params),
        Sample(63, "all", good.prompt, 1, SampleParams(0, 0)),
        Sample(64, "all", good.prompt, 1, SampleParams(4, 0, temperature=float("nan"))),
        LoadAdapter(65, "x", "/nowhere", 1),
        ForwardBackward(66, "all", (), "cross_entropy", {}),
        LoadModel(67, "all", "/nowhere", True),
    ]
    answers = {answer.order: answer for answer in answers_to(served, good, *hostile)}
    assert isinstance(answers[60], OrderDone)
    assert all(isinstance(answers[order.order], OrderFailed) for order in hostile)
    assert {answers[number].fault for number in (62, 63, 64, 66, 67)} == {"user"}


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_continues_to_the_bit_in_another_worker(worker, tmp_path, name):
    data = some_data(worker.trainer.policy, 7)
    orders = (
        ForwardBackward(70, "again", data[4:], "cross_entropy", {}),
        OptimStep(71, "again", AdamParams(learning_rate=1e-3)),
        ForwardBackward(72, "again", data, "cross_entropy", {}),
        OptimStep(73, "again", AdamParams(learning_rate=1e-3)),
        SaveModel(74, "again", str(tmp_path / "end"), True),
    )
    values(worker, ForwardBackward(75, name, data[:4], "cross_entropy", {}))  # gradients that wait are saved too
    values(worker, SaveModel(76, name, str(tmp_path / "saved"), True))
    digests = []
    for _ in range(2):
        other = ServiceWorker(WorkerSettings(actors=("trainer",)))
        values(other, LoadModel(77, "again", str(tmp_path / "saved"), True))
        digests.append(values(other, *orders)[-1].digest)
    here = [ForwardBackward(70, name, data[4:], "cross_entropy", {}), *orders[1:]]
    renamed = [type(each)(each.order, name, *[getattr(each, key) for key in each.__slots__[2:]]) for each in here]
    digests.append(values(worker, *renamed)[-1].digest)
    assert len(set(digests)) == 1
    assert not list(Path(tmp_path).glob("*.part"))

"""The subjects of `rlbench gpu-check`, each broken on purpose.

`python broken_checks.py NAME FOLDER [whole]` runs one check in a process of its own and prints its verdict:
a process has one team of ranks and one engine of vLLM."""

import sys
from dataclasses import replace
from functools import partial

import torch

from rlbench.bench import gpu_check, gpu_engine_checks, gpu_run_checks, gpu_shapes, gpu_training_checks
from rlbench.bench.engine_draws import DrawBench
from rlbench.bench.gpu_check import wanted_checks
from rlbench.bench.gpu_records import CheckContext, run_check
from rlbench.bench.gpu_subjects import CHECK_SHAPE
from rlbench.engines import conformance
from rlbench.engines.torch import PromptStore, TorchGenerator
from rlbench.engines.vllm_weights import WeightLoader
from rlbench.training import trainer
from rlbench.training.data_parallel import Team
from rlbench.training.weight_transport import WeightsBuffers
from rlbench.workbench.handle import Run

APART = ("ranks", "swap-vllm")  # broken in processes of their own
ON_VLLM = ("engine-rate", "swap-vllm")
RUNS = ("tiny-run", "resume", "split", "mismatch", "qwen3-0.6b-run")


def ask_for_vllm(name: str, request) -> None:
    "Skip what starts vLLM where no CPU build of it runs. `request`: pytest's."
    if name in ON_VLLM:
        request.getfixturevalue("cpu_for_vllm")


def nothing(*arguments, **named):
    "Does nothing."


def alter_byte(patch):
    "A transport that changes one number on the way."
    write = WeightsBuffers.write

    def write_and_alter(self, version, named):
        write(self, version, named)
        newest = int(self._head[1:3].argmax())
        next(iter(self._buffers[newest].values())).view(-1)[5] += 1

    patch.setattr(WeightsBuffers, "write", write_and_alter)


def leak_each_turn(patch):
    "A generator that keeps a megabyte of every load."
    kept = []
    renew = TorchGenerator.renew_caches

    def renew_and_keep(self, rebuild):
        renew(self, rebuild)
        kept.append(torch.ones(250_000))

    patch.setattr(TorchGenerator, "renew_caches", renew_and_keep)


def heat_packed_rows(patch):
    "A trainer that takes rows end to end to be sampled at another temperature."
    packed = trainer.packed_logprobs

    def heated(model, tokens_RT, lengths_R, temperature_R, *more, **named):
        return packed(model, tokens_RT, lengths_R, 1.5 * temperature_R, *more, **named)

    patch.setattr(trainer, "packed_logprobs", heated)


def load_once(patch):
    "A vLLM that keeps its first weights."
    load = WeightLoader.load
    loaded = []

    def load_first(self, engine, weights):
        if not loaded:
            load(self, engine, weights)
        loaded.append(1)

    patch.setattr(WeightLoader, "load", load_first)


def gather_wrongly(patch):
    "A first rank that puts tensors together from their parts wrongly."
    whole = Team.whole
    patch.setattr(Team, "whole", lambda self, tensor: 1.01 * whole(self, tensor))


def half_rate(vocabulary, folder, repetitions, sequences, tokens) -> DrawBench:
    "A bench that finds vLLM behind rlbench at half its own rate."
    words = str(vocabulary[0])
    rates = {words: {"raw_logprobs": 1000.0, "counter": 500.0, "engine": 500.0}}
    return DrawBench({words: {"counter": 0.5, "engine": 0.5}}, rates, sequences, tokens)


def small_gpu(patch):
    "A GPU of 8 GB in place of the machine's."
    from rlbench.runtime.memory_plan import Machine, MemoryPlace

    machine = Machine((MemoryPlace("GPU 0, small", 8e9),), MemoryPlace("host", 64e9))
    patch.setattr(gpu_shapes, "machine_here", lambda device: machine)


def one_layer_more(patch):
    "A table of models that counts one parameter too many."
    shape_of = gpu_shapes.shape_of_preset

    def wrong_shape(config):
        shape = shape_of(config)
        return replace(shape, parameters=shape.parameters + 1)

    patch.setattr(gpu_shapes, "shape_of_preset", wrong_shape)


def few_rules(patch):
    "The two rules of the protocol that are quick to check."
    patch.setattr(conformance, "CHECKS", (conformance.check_endings, conformance.check_abort))


def small_shape(patch):
    "The embedded policy's size in place of a model with a vocabulary of 151,936."
    cut = gpu_shapes.cut_for_cpu

    def cut_further(config, shape):
        knobs, _ = cut(config, shape)
        return knobs, replace(CHECK_SHAPE, vocab=256)

    patch.setattr(gpu_shapes, "cut_for_cpu", cut_further)


def replaced(owner, name: str, value):
    "A break that puts something else into a place."
    return lambda patch: patch.setattr(owner, name, value)


def changed_call(module, name: str, **settings):
    "A break, or a shorter form, of a check that is called with other settings."
    return lambda patch: patch.setattr(module, name, partial(getattr(module, name), **settings))


QUICK = {  # what makes a check cheap; it passes then
    "conformance-torch": few_rules,
    "turns-torch": changed_call(gpu_training_checks, "see_turns", turns=8),
    "mismatch": changed_call(gpu_run_checks, "see_mismatch", steps=3, arms={"control": gpu_run_checks.RESTING}),
    "qwen3-0.6b-run": small_shape,
}
BROKEN = {  # check -> what breaks its subject
    "conformance-torch": replaced(TorchGenerator, "abort_running", lambda self, keys: []),
    "swap-torch": replaced(TorchGenerator, "renew_caches", nothing),
    "swap-vllm": load_once,
    "prefix-torch": replaced(PromptStore, "clear", nothing),
    "sleep-torch": replaced(TorchGenerator, "give_memory", nothing),
    "engine-rate": changed_call(gpu_check, "see_engine_rate", measure=half_rate),
    "transport-file": alter_byte,
    "transport-nccl": alter_byte,
    "turns-torch": leak_each_turn,
    "ranks": gather_wrongly,
    "checkpoint": replaced(gpu_training_checks, "read_trainer", nothing),
    "attention": heat_packed_rows,
    "optimizers": replaced(gpu_training_checks, "read_trainer", nothing),
    "memory-plan": changed_call(gpu_training_checks, "see_memory_plan", take=nothing),
    "trainer-speed": changed_call(gpu_training_checks, "see_trainer_speed", measure=lambda context, size: 1.0),
    "tiny-run": changed_call(gpu_run_checks, "see_tiny_run", steps=1, batch=64, learning_rate=0.0),
    "resume": replaced(Run, "resume", nothing),
    "split": changed_call(gpu_run_checks, "see_split", publish_every=9, staleness=8),
    "mismatch": changed_call(
        gpu_run_checks, "see_mismatch", steps=3, arms={"control": {"staleness": 2, "learning_rate": 5e-3}}
    ),
    "model-run": nothing,  # the folder that is given holds no model
    "qwen3-0.6b-parameters": one_layer_more,
    "qwen3-0.6b-memory": small_gpu,
    "qwen3-0.6b-run": replaced(gpu_shapes, "QWEN3_CONTEXT", 16),
}
SEEN_BY = {  # check -> module and function that sees it, looked up again after a break
    "conformance-torch": (gpu_engine_checks, "see_conformance"),
    "engine-rate": (gpu_check, "see_engine_rate"),
    "turns-torch": (gpu_training_checks, "see_turns"),
    "memory-plan": (gpu_training_checks, "see_memory_plan"),
    "trainer-speed": (gpu_training_checks, "see_trainer_speed"),
    "tiny-run": (gpu_run_checks, "see_tiny_run"),
    "split": (gpu_run_checks, "see_split"),
    "mismatch": (gpu_run_checks, "see_mismatch"),
}


def result_of(name: str, folder, patch, broken: bool, **context):
    "The result of a check in this process, quick, and broken if asked."
    for change in (QUICK.get(name), BROKEN[name] if broken else None):
        if change:
            change(patch)
    (check,) = wanted_checks([name], ["qwen3-0.6b"])
    if name in SEEN_BY:
        module, function = SEEN_BY[name]
        settings = getattr(check.see, "keywords", {})
        check = replace(check, see=partial(getattr(module, function), **settings))
    return run_check(check, CheckContext(str(folder), **{"device": "cpu", **context}))


if __name__ == "__main__":
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        print(result_of(sys.argv[1], sys.argv[2], patch, broken=sys.argv[3:] != ["whole"]).verdict)

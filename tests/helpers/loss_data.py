"""Data for the losses of the training service, the same in every test that trains on it, and orders to its trainer."""

import numpy as np

from rlbench.models.model import encode_prompt, encode_response
from rlbench.service.service_records import AdamParams, Datum, OrderDone

STEPS = 5
# AdamW moves a weight by the sign of its gradient wherever that is larger than eps, so a small eps would turn the
# rounding of a gradient of 0 into a whole step. This eps lies between rounding and the usual gradient.
ADAM = AdamParams(learning_rate=2e-3, beta1=0.9, beta2=0.95, eps=1e-3, weight_decay=0.01, grad_clip_norm=1.0)
CONFIG = {"ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}, "dro": {"beta": 0.1}}
ANSWERS = ("7+5=2c1;1+2=4c0:42", ":42", ":52", "7+5=2c1:42")


def some_data(policy, seed: int) -> tuple[Datum, ...]:
    "Two groups of four responses, with log-probabilities that no policy gave and advantages of both signs."
    draws = np.random.default_rng(seed)
    data = []
    for text in ("17+25=", "3+4="):
        prompt = encode_prompt(policy, text)
        for answer in ANSWERS:
            tokens = np.concatenate([prompt, encode_response(policy, answer)])
            counts = np.arange(len(tokens) - 1) >= len(prompt) - 1
            inputs = {
                "target_tokens": tokens[1:],
                "weights": (counts * draws.uniform(0.5, 2)).astype(np.float32),
                "logprobs": (counts * draws.uniform(-3, -0.05, len(counts))).astype(np.float32),
                "advantages": (counts * draws.normal()).astype(np.float32),
                "sequence_ratio_mask": counts.astype(np.float32),
            }
            data.append(Datum(tokens[:-1], inputs))
    return tuple(data)


def carry_out(trainer, order) -> object:
    "The value of an order's answer."
    answer = trainer.answer(order)
    assert isinstance(answer, OrderDone), answer
    return answer.value

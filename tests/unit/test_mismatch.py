"The control of the mismatch bench, live: weights at rest, and a generator that serves exactly them."

import pytest

from rlbench.bench.mismatch import ARMS, bench_mismatch


@pytest.mark.slow
def test_the_control_is_close_and_kept(tmp_path):
    "Every token's log-probability is the trainer's, a generator in 16 bits is told apart, and a second call takes what is there."
    arms = {
        "control": ARMS["control"] | {"batch": 64},
        "bf16 sampler": {"staleness": 0, "learning_rate": 0.0, "rollout_dtype": "bfloat16", "batch": 64},
    }
    done = bench_mismatch(tmp_path, 3, ("torch",), arms)
    exact, rounded = done.arms
    assert done.logprob_max_diff == {"torch": exact.worst} and exact.worst < 2e-3 < rounded.worst
    assert len(exact.ess) == 3 and min(exact.ess) > 0.9999 and exact.worst > 0
    said = []
    assert bench_mismatch(tmp_path, 3, ("torch",), arms, say=said.append).arms == done.arms and len(said) == 2

"The control of the mismatch bench, live: weights at rest, and a generator that serves exactly them."

import numpy as np
import pytest

from rlbench.bench.mismatch import ARMS, bench_mismatch
from rlbench.records import pack_masks
from rlbench.views.loss_batch import read_batch, with_policy


@pytest.mark.slow
def test_the_control_is_close_and_kept(tmp_path):
    """Every token's log-probability is the trainer's, a generator in 16 bits is told apart,
    and a second call takes what is there."""
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


@pytest.mark.slow
def test_a_live_control_stays_at_rounding_under_top_p(tmp_path):
    """Weights at rest and top_p = 0.8: every token's log-probability is the trainer's,
    and a stored rollout's is that of the saved policy."""
    done = bench_mismatch(
        tmp_path,
        3,
        ("torch",),
        {"control": ARMS["control"] | {"batch": 64, "reference": "start", "kl": "k3", "kl_weight": 0.1}},
        top_p=0.8,
    )
    (control,) = done.arms
    assert (
        done.top_p == 0.8
        and control.worst < 1e-3
        and done.control_mean_diff["torch"] < 1e-5
        and min(control.ess) > 0.9999
    )
    (folder,) = (tmp_path / "runs").iterdir()
    batch = read_batch(folder, 0)
    for before, after in zip(batch.rollouts, with_policy(batch).rollouts):
        assert before.rollout.sampling_mask is not None and pack_masks(before.rollout.sampling_mask.sets) is not None
        assert np.nanmax(np.abs(before.start_N - after.start_N)) < 1e-3

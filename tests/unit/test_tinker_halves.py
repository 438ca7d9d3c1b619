"""A trainer on a server that speaks Tinker's protocol: what a change of the configuration reaches."""

from types import SimpleNamespace

import rlbench as rl
from rlbench.loop.config_files import Functions
from rlbench.runtime.tinker_halves import configure_on_server
from rlbench.training.trainer import TrainerExtras


def test_replay_can_be_turned_on_in_a_run_that_began_without():
    "The groups that are kept and the share of a batch change together; off again, none is kept."
    extras = TrainerExtras()
    trainer = SimpleNamespace(extras=extras, set=lambda *settings: None)
    for share, kept in ((0.25, 64), (0.0, 0)):
        config = rl.load_config("tiny", {"replay_share": share, "replay_size": 64})
        configure_on_server(trainer, Functions(), config)
        assert (extras.replay.share, extras.replay.size) == (share, kept)

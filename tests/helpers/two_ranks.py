"""In a script of its own, since a process belongs to one team for good:
a trainer of one process, then one of two that goes on from its checkpoint, then one again.
`python two_ranks.py FOLDER` writes FOLDER/told.pt and kills itself."""

import multiprocessing
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import torch
from small_trainers import made_groups, small_model

from rlbench.base.safe_call import FunctionFailed, guarded
from rlbench.objective.objective import make_objective
from rlbench.runtime.checkpoint import read_trainer, read_weights, write_trainer
from rlbench.training.data_parallel import start_ranks, whole_weights
from rlbench.training.trainer import ALONE, Trainer, TrainerConfig

GOAL = make_objective("reinforce", "ppo", "tis")


class Raises:
    "An aggregation that raises at one width: where the longest row is, so in one rank only."

    def __init__(self, width: int):
        self.width = width

    def __call__(self, mask_RT, totals):
        if mask_RT.shape[1] == self.width:
            raise ZeroDivisionError("the longest row")
        return mask_RT / totals.tokens


def build(team, start):
    "A trainer, and what it does when it is configured."
    torch.set_num_threads(1)
    model = small_model()
    if start:
        read_weights(start, model)
    trainer = Trainer(
        model,
        TrainerConfig(
            device="cpu",
            micro_tokens=200,
            learning_rate=1e-3,
            optimizer_steps=3,
            gradient_checkpointing=team is not ALONE,
        ),
        GOAL,
        team=team,
    )
    if start:
        read_trainer(start, trainer)
    return trainer, lambda width: trainer.set(
        replace(GOAL, aggregation=guarded("aggregation", Raises(width))) if width else GOAL
    )


def trained(trainer, batches) -> list[dict]:
    "The metrics of each batch."
    return [vars(trainer.train(groups, version).metrics) for version, groups in enumerate(batches)]


def refused(trainer, configure, groups) -> tuple[str, bool]:
    "What a batch with the raising aggregation says, and whether the weights are as before."
    before = {name: tensor.clone() for name, tensor in whole_weights(trainer).items()}
    told, longest = "", max(sum(len(s) for s in r.segments) for g in groups for r in g.rollouts)
    for width in (longest, 0):
        trainer.team.tell("configure", width)
        configure(width)
        try:
            trainer.train(groups, 9) if width else None
        except FunctionFailed as error:
            told = f"{error.field}: {'the longest row' in str(error)}"
    return told, all(torch.equal(before[name], tensor) for name, tensor in whole_weights(trainer).items())


def saved(folder: Path, trainer) -> dict:
    "A checkpoint's folder and the weights."
    folder.mkdir()
    write_trainer(folder, trainer)
    return {name: tensor.clone() for name, tensor in whole_weights(trainer).items()}


if __name__ == "__main__":
    folder, told = Path(sys.argv[1]), {}
    batches = [made_groups(4, 4, noise=0.3, seed=1), made_groups(1, 1, seed=2), made_groups(3, 4, noise=0.3, seed=3)]
    one, _ = build(ALONE, "")
    told["first"] = trained(one, batches[:1])
    saved(folder / "one", one)
    told["one"] = trained(one, batches)
    two, configure = build(start_ranks(2, "cpu", build, (folder / "one",)), folder / "one")
    told["two"] = trained(two, batches)
    told["weights"] = saved(folder / "a", one), saved(folder / "b", two)
    told["refused"] = refused(two, configure, batches[0])
    back, _ = build(ALONE, folder / "b")
    told["after"] = trained(two, batches[:1]), trained(back, batches[:1])
    told["weights after"] = whole_weights(two), whole_weights(back)
    told["held"] = [
        sum(p.to_local().numel() if each is two else p.numel() for p in each.model.parameters()) for each in (one, two)
    ]
    (told["rank"],) = [child.pid for child in multiprocessing.active_children()]
    torch.save(told, folder / "told.pt")
    os.kill(os.getpid(), signal.SIGKILL)

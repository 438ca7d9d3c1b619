"""rlbench: a workbench, inside JupyterLab, for reinforcement-learning post-training of language models."""

__version__ = "0.1.0"

from rlbench.ablation import ablate
from rlbench.compare import compare
from rlbench.config import ConfigError, RunConfig, load_config
from rlbench.knobs import Knob
from rlbench.records import Fate, Outcome, Rollout, Task
from rlbench.run import Run, attach, run
from rlbench.runs_table import runs

__all__ = ["ConfigError", "Fate", "Knob", "Outcome", "Rollout", "Run", "RunConfig", "Task", "ablate", "attach", "compare", "load_config", "run", "runs"]


def __dir__() -> list[str]:
    "What is public, and no module that happens to be imported."
    return [*__all__, "__all__", "__doc__", "__version__"]

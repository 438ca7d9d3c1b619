"""rlbench: a workbench, inside JupyterLab, for reinforcement-learning post-training of language models."""

__version__ = "0.1.0"

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what editors and type checkers read; at run time a name is imported when it is first used
    from rlbench.knobs import Knob
    from rlbench.loop.config import RunConfig
    from rlbench.loop.config_files import load_config
    from rlbench.loop.config_tables import ConfigError
    from rlbench.records import Fate, Outcome, Rollout, Task
    from rlbench.service.tinker_service import serve_tinker  # noqa: F401
    from rlbench.views.comparison import compare
    from rlbench.workbench.ablation import ablate
    from rlbench.workbench.handle import Run, attach, run
    from rlbench.workbench.opened_run import open_run as open  # noqa: F401
    from rlbench.workbench.runs_table import runs

__all__ = [
    "ConfigError",
    "Fate",
    "Knob",
    "Outcome",
    "Rollout",
    "Run",
    "RunConfig",
    "Task",
    "ablate",
    "attach",
    "compare",
    "load_config",
    "run",
    "runs",
]
_HOMES = {
    "ConfigError": "rlbench.loop.config_tables",
    "Fate": "rlbench.records",
    "Knob": "rlbench.knobs",
    "Outcome": "rlbench.records",
    "Rollout": "rlbench.records",
    "Run": "rlbench.workbench.handle",
    "RunConfig": "rlbench.loop.config",
    "Task": "rlbench.records",
    "ablate": "rlbench.workbench.ablation",
    "attach": "rlbench.workbench.handle",
    "compare": "rlbench.views.comparison",
    "load_config": "rlbench.loop.config_files",
    "open": "rlbench.workbench.opened_run:open_run",  # not in __all__: a star import must not hide Python's own
    "run": "rlbench.workbench.handle",
    "runs": "rlbench.workbench.runs_table",
    "serve_tinker": "rlbench.service.tinker_service",  # not in __all__: fourteen names are enough for a star import
}


def __getattr__(name: str):
    "Import a public name when it is first used. AttributeError for any other name."
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    value = getattr(import_module(module), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    "The public names, without the modules that happen to be imported."
    return [*_HOMES, "__all__", "__doc__", "__version__"]

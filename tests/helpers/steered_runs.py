"""What was asked of a run, and its journal."""

from inline import check_books

from rlbench.base.commands import send_command
from rlbench.base.ledger_reading import read_table
from rlbench.base.run_files import create_run_folder
from rlbench.knobs import capture_function, save_function
from rlbench.loop.config import make_config
from rlbench.loop.config_files import to_toml
from rlbench.runtime.driver import Driver, drive
from rlbench.runtime.prompts import make_pools


def source_of(function) -> str:
    return f"functions/{capture_function(function).stem}.py"


SCRIPTED = {
    "clock": "virtual",
    "generator": "scripted",
    "group": 4,
    "batch": 16,
    "steps": 12,
    "staleness": 1,
    "preflight": 0,
    "eval": [{"count": 6, "every": 6}],
}


class Asked(Driver):
    "A driver into whose folder commands are put once a version is there: version -> [(knob, function or value)]."

    def flush(self) -> None:
        super().flush()
        for version in [v for v in self.plan if v <= self.state.version]:
            for knob, value in self.plan.pop(version):
                if callable(value):
                    save_function(capture_function(value), self.folder / "functions")
                    value = {"name": value.__name__, "source": source_of(value)}
                send_command(self.folder, "test", knob, value)
            self.commands.looked_at = 0.0


def asked(root, name: str, plan: dict, **changes) -> Asked:
    "The finished driver of a scripted run."
    folder, config = create_run_folder(root, name), make_config(SCRIPTED | changes)
    (folder / "config.toml").write_text(to_toml(config))
    driver = Asked(folder, config, make_pools(config))
    driver.plan = {version: list(commands) for version, commands in plan.items()}
    drive(driver)
    check_books(driver)
    return driver


def journal(driver: Driver, **wanted) -> list[dict]:
    return read_table(driver.folder, "commands").filter(**wanted).to_dicts()

"""A run's tables in TensorBoard, W&B and trackio: read back with their own readers, followed, broken off, refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import run_verb
from inline import inline_run
from patience import until
from tensorboard_files import from_tensorboard

import rlbench as rl
from rlbench.base.ledger import Ledger
from rlbench.base.ledger_reading import read_table
from rlbench.base.run_files import create_run_folder
from rlbench.base.status import Status, read_status, write_status
from rlbench.base.tables import TABLES
from rlbench.loop.config_files import read_config
from rlbench.loop.config_tables import SINK_NAMES
from rlbench.views.sinks import command_note, start_sinks

ROOT = Path(__file__).parents[2]
every_sink = pytest.mark.parametrize("sink", SINK_NAMES)
SMALL = {"steps": 6, "batch": 32, "group": 4, "preflight": 8, "eval": [{"name": "held_out", "count": 16, "every": 3}]}
TOLD = [(60, "temperature", 1.2, 2), (90, "learning_rate", 5.0, 0)]


@pytest.fixture
def environment(tmp_path, monkeypatch) -> dict[str, str]:
    "Variables for children: trackio's store is in the test's folder, nobody is asked anything."
    for name in ("WANDB_MODE", "WANDB_PROJECT", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]).strip(os.pathsep),
    )
    return dict(os.environ)


def python(environment: dict, *arguments, code: int = 0, cwd=None) -> str:
    "Output of a Python program."
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=400,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + (done.stderr if code else "")


def from_wandb(folder: Path, environment: dict):
    "The same, from the only offline run that is there."
    (log,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    records = [
        json.loads(line) for line in python(environment, "-m", "wandb", "leet", "inspect", "--json", log).splitlines()
    ]
    numbers, notes = {}, []
    for item in (record["history"]["item"] for record in records if record["type"] == "history"):
        version = item.pop("version")
        notes += [(version, item.pop("commands"))] if "commands" in item else []
        for name in item:
            if not name.startswith("_"):
                numbers.setdefault(name, []).append((version, item[name]))
    return numbers, notes


TRACKIO = """
import json, trackio
from trackio.sqlite_storage import SQLiteStorage
(run,) = trackio.Api().runs("rlbench")
logs = SQLiteStorage.get_logs("rlbench", run.name, run_id=run.id)
alerts = [(a["step"], a["title"]) for a in run.alerts()]
print(json.dumps([logs, alerts, run.config]))
"""


def from_trackio(folder: Path, environment: dict):
    "The same, from the only run of the store."
    logs, alerts, config = json.loads(python(environment, "-c", TRACKIO))
    assert config["loss.name"] == "ppo" and config["id"].startswith(folder.name)
    numbers = {}
    for row in logs:
        for name in row.keys() - {"step", "timestamp"}:
            numbers.setdefault(name, []).append((row["step"], row[name]))
    return numbers, [tuple(alert) for alert in alerts]


READ = {"tensorboard": from_tensorboard, "wandb": from_wandb, "trackio": from_trackio}


def in_the_tables(folder: Path):
    "What a sink should hold, straight from the ledger."
    numbers = {}
    for table, prefix in (("steps", lambda row: "steps"), ("evals", lambda row: f"eval/{row['eval']}")):
        columns = [
            c.name for c in TABLES[table] if c.dtype in ("int", "float") and c.name not in ("seq", "attempt", "version")
        ]
        for row in read_table(folder, table).iter_rows(named=True):
            for name in columns:
                if row[name] is not None:
                    numbers.setdefault(f"{prefix(row)}/{name}", []).append((row["version"], row[name]))
    return numbers, [
        (row["version"], command_note(row)) for row in read_table(folder, "commands").iter_rows(named=True)
    ]


def assert_holds(sink: str, folder: Path, environment: dict) -> None:
    "The sink holds what the tables hold, each row once."
    (numbers, notes), (expected, told) = READ[sink](folder, environment), in_the_tables(folder)
    assert sorted(notes) == sorted(told) and numbers.keys() == expected.keys()
    for name, values in expected.items():
        (versions, found), (wanted, written) = zip(*sorted(numbers[name])), zip(*sorted(values))
        assert versions == wanted and found == pytest.approx(written, rel=1e-6), name


EXPORT = """
import sys
from rlbench.views.sinks import export_run
for folder in sys.argv[2:]:
    print(export_run(folder, sys.argv[1]).rows)
assert not {"torch", "transformers", "plotly", "tensorflow"} & set(sys.modules)
"""


def assert_configured(sink: str, folder: Path, environment: dict) -> None:
    """The configuration went along, as hyperparameters, where the trackers show them.

    Trackio's is looked at where its numbers are read."""
    if sink == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.plugins.hparams import metadata

        plugin = (
            EventAccumulator(str(folder / "tensorboard"))
            .Reload()
            .SummaryMetadata(metadata.SESSION_START_INFO_TAG)
            .plugin_data.content
        )
        settings = metadata.parse_session_start_info_plugin_data(plugin).hparams
        assert settings["loss.name"].string_value == "ppo" and settings["batch"].number_value == 32
    if sink == "wandb":
        (log,) = (folder / "wandb").glob("offline-run-*/*.wandb")
        (run,) = [
            json.loads(line)["run"]
            for line in python(environment, "-m", "wandb", "leet", "inspect", "--json", log).splitlines()
            if '"type":"run"' in line
        ]
        assert (
            run["config"]["update"]["loss.name"] == "ppo"
            and run["display_name"] == "monday"
            and run["project"] == "rlbench"
        )


@every_sink
def test_a_sink_holds_what_the_tables_hold(sink, tmp_path, environment):
    "Every number and every command is there, after a second export, too; the process stays small."
    folder = inline_run(tmp_path / "runs", "monday", SMALL, TOLD).folder
    python(environment, "-c", EXPORT, sink, folder)
    assert_holds(sink, folder, environment)
    assert_configured(sink, folder, environment)
    told = json.loads(
        python(environment, "-m", "rlbench.cli.main", "export", folder, "--to", sink, "--json").splitlines()[-1]
    )
    assert told["rows"] == {"steps": 6, "evals": 4, "commands": 2}
    assert_holds(sink, folder, environment)
    numbers, notes = in_the_tables(folder)
    assert (
        len(numbers["steps/loss"]) == 6
        and "steps/solve_rates" not in numbers
        and len(numbers["eval/held_out/avg"]) == 3
    )
    applied, refused = (text for _, text in notes)
    assert (
        refused.startswith("learning_rate = 5.0 (test, refused): ")
        and applied == "temperature = 1.2 over 2 versions (test)"
    )


def test_runs_of_one_name_stay_apart(tmp_path, environment):
    """In a store that is shared, an export replaces only the run it is of;
    in a folder that is named, each run has its own."""
    folders = [inline_run(tmp_path / root, "monday", SMALL).folder for root in ("a", "b")]
    python(environment, "-c", EXPORT, "trackio", *folders, folders[0])
    count = "import trackio; print(sorted(len(run.config) for run in trackio.Api().runs('rlbench')))"
    assert len(json.loads(python(environment, "-c", count))) == 2
    other = inline_run(tmp_path / "a", "tuesday", SMALL).folder
    for folder in (folders[0], other):
        run_verb(tmp_path, "export", folder, tmp_path / "board", "--to", "tensorboard")
    assert (
        sorted(path.name for path in (tmp_path / "board").iterdir()) == ["monday", "tuesday"]
        and not (other / "tensorboard").exists()
    )
    assert "TRACKIO_DIR" in run_verb(tmp_path, "export", other, tmp_path / "board", "--to", "trackio", code=2).stderr


def row(version: int) -> dict:
    "A row of the steps table."
    return {"at": 2.0 * version, "version": version, "loss": 0.1 * version, "solve_rate": None}


@pytest.fixture
def beside():
    "Processes that are ended with the test."
    started = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_a_growing_folder_is_followed(tmp_path, environment, beside):
    """Rows arrive while the run lives; an interrupt changes nothing;
    when the run has ended, so do they, with everything."""
    folder = create_run_folder(tmp_path, "monday")
    (folder / "config.toml").write_text('loss = {name = "ppo"}\n')
    beside += start_sinks(folder, SINK_NAMES)  # before the run has said a word
    ledger, mine = Ledger(folder, 0), Status("running", pid=os.getpid(), host=os.uname().nodename)
    write_status(folder, mine)
    ledger.extend("steps", [row(1), row(2)])
    ledger.flush()
    until(
        lambda: (
            (folder / "tensorboard").exists() and from_tensorboard(folder, environment)[0].get("steps/loss", [])[1:]
        ),
        60,
    )
    for process in beside:
        process.send_signal(signal.SIGINT)
    ledger.seal("steps")
    ledger.extend("steps", [row(3)])
    ledger.append(
        "commands",
        at=5.0,
        command="c",
        author="ada",
        knob="pause",
        value="null",
        over=0,
        status="applied",
        reason="",
        version=2,
    )
    ledger.flush()
    until(lambda: len(from_tensorboard(folder, environment)[0]["steps/loss"]) == 3, 30)
    assert [process.poll() for process in beside] == [None, None, None]
    ledger.extend("steps", [row(4)])
    ledger.close()
    write_status(folder, Status("finished", version=4, pid=os.getpid(), host=os.uname().nodename))
    assert [process.wait(400) for process in beside] == [0, 0, 0], (folder / "sinks.log").read_text()
    for sink in SINK_NAMES:
        assert_holds(sink, folder, environment)


def test_a_killed_run_ends_its_sinks(tmp_path, environment, beside):
    "A run process that is gone leaves no sink behind, and what it had written is there."
    run = rl.run(
        {"clock": "virtual", "generator": "scripted", **SMALL, "steps": 1_000_000, "eval": []},
        runs=tmp_path,
        name="monday",
    )
    pid = until(lambda: run.state == "running" and run.status.pid, 60)
    beside += start_sinks(run.folder, ["tensorboard"], pid)
    until(lambda: (run.folder / "tensorboard").exists() and from_tensorboard(run.folder, environment)[0], 30)
    os.kill(pid, signal.SIGKILL)
    assert [process.wait(400) for process in beside] == [0]
    assert run.wait(400) == "failed" and "run process lost" in run.status.reason
    assert_holds("tensorboard", run.folder, environment)


def test_an_older_status_ends_nothing(tmp_path, environment, beside, script):
    "What an earlier process of the folder said does not count; that the present one is gone does."
    folder = inline_run(tmp_path, "monday", SMALL).folder
    lives = script("input()", stdin=subprocess.PIPE)
    beside += start_sinks(folder, ["tensorboard"], lives.pid)
    until(lambda: (folder / "tensorboard").exists() and from_tensorboard(folder, environment)[0], 30)
    time.sleep(1.5)
    assert beside[0].poll() is None
    lives.communicate("\n")
    assert beside[0].wait(400) == 0


def test_a_sink_that_is_told_to_end_keeps_what_it_has(tmp_path, environment, beside, script):
    "SIGTERM is an end like any other: the rows that are there by then are handed on."
    folder, lives = inline_run(tmp_path, "monday", SMALL, TOLD).folder, script("input()", stdin=subprocess.PIPE)
    beside += start_sinks(folder, ["wandb"], lives.pid)
    until(lambda: [*folder.glob("wandb/offline-run-*/*.wandb")], 60)
    assert beside[0].poll() is None
    beside[0].terminate()
    assert beside[0].wait(400) == 0
    assert_holds("wandb", folder, environment)


def test_failures_are_in_the_log(tmp_path, environment, beside):
    "A sink that cannot write says so in sinks.log, and ends."
    folder = inline_run(tmp_path, "monday", SMALL).folder
    (folder / "tensorboard").write_text("in the way")
    beside += start_sinks(folder, ["tensorboard"])
    assert beside[0].wait(400) == 1
    assert "tensorboard: " in (folder / "sinks.log").read_text() and "exists" in (folder / "sinks.log").read_text()


def test_a_live_run_is_not_exported_beside_its_own_sink(tmp_path):
    "To another folder it is; and when the run has ended, to the same place."
    folder = inline_run(tmp_path, "monday", {**SMALL, "sinks": ["tensorboard"]}).folder

    def export(*more, code=0):
        return run_verb(tmp_path, "export", folder, *more, "--to", "tensorboard", code=code)

    ended = read_status(folder)
    write_status(folder, Status("running", pid=os.getpid(), host=os.uname().nodename))
    assert (
        "writes tensorboard itself while it is running" in export(code=2).stderr
        and not (folder / "tensorboard").exists()
    )
    export(tmp_path / "board")
    write_status(folder, ended)
    export()
    assert (tmp_path / "board/monday").is_dir() and (folder / "tensorboard").is_dir()


def test_a_removed_run_ends_its_sinks(tmp_path, environment, beside, script):
    "Nothing is left to follow, so nothing follows; the folder does not come back."
    folder, lives = inline_run(tmp_path, "monday", SMALL).folder, script("input()", stdin=subprocess.PIPE)
    beside += start_sinks(folder, ["tensorboard"], lives.pid)
    until(lambda: list(folder.glob("tensorboard/*")), 60)
    until(
        lambda: shutil.rmtree(folder, ignore_errors=True) or not folder.exists(), 30
    )  # once more if a file came meanwhile
    beside[0].wait(400)  # whether a read was cut short is its own affair
    assert not folder.exists()


def without(package: str, to: Path) -> str:
    "A search path with rlbench and everything that is installed here but one package."
    (to / "rlbench").mkdir(parents=True)
    for entry in (
        *(entry for entry in ROOT.glob("rlbench/*") if entry.name not in ("data", "__pycache__")),
        ROOT / "data",
    ):
        (to / "rlbench" / entry.name).symlink_to(entry)
    for place in {Path(p) for p in sys.path if any(Path(p).glob("*.dist-info"))}:
        for entry in place.iterdir():
            if not entry.name.lower().startswith(package) and not (to / entry.name).exists():
                (to / entry.name).symlink_to(entry)
    return str(to)


def test_a_missing_library_is_told_before_the_run(tmp_path, environment):
    "No folder is made, the remedy is named; a run that was made elsewhere can still be looked at."
    bare = {**environment, "PYTHONPATH": without("tensorboard", tmp_path / "site")}

    def call(*arguments, code):
        return python(bare, "-S", "-m", "rlbench.cli.main", *arguments, code=code, cwd=tmp_path)

    small = ["--set=generator=scripted", "--set=clock=virtual", "--set=steps=2", "--set=preflight=0", "--set=eval=[]"]
    refused = call("run", "tiny", *small, "--set=sinks=tensorboard", code=2)
    assert "pip install tensorboard" in refused and not list(tmp_path.glob("runs/*"))
    folder = inline_run(tmp_path / "runs", "monday", {**SMALL, "sinks": ["tensorboard"]}).folder
    assert read_config(folder).sinks == ("tensorboard",)
    assert "finished" in call("show", "monday", code=0)
    assert "pip install tensorboard" in call("export", "monday", "--to", "tensorboard", code=2)


def test_a_run_that_names_a_sink_fills_it_while_it_lives(tmp_path):
    import rlbench as rl

    run = rl.run(
        {
            "generator": "scripted",
            "clock": "virtual",
            "steps": 5,
            "group": 4,
            "batch": 32,
            "preflight": 0,
            "eval": [],
            "sinks": "tensorboard",
        },
        runs=tmp_path,
        name="told",
    )
    assert run.wait(400) == "finished", (run.folder / "run.log").read_text()
    assert (run.folder / "report.html").exists() and "sink" not in (run.folder / "run.log").read_text(), (
        "its sink did not leave by itself"
    )
    assert not (run.folder / "sinks.log").read_text()
    numbers, _ = from_tensorboard(run.folder, {})
    assert [version for version, _ in numbers["steps/trained_rollouts"]] == run.steps["version"].to_list()

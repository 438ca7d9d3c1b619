"The settings in force at a version are those that the loop had."

import json

import polars as pl
from inline import inline_run

from rlbench.base.ledger_reading import read_table
from rlbench.loop.config import make_config
from rlbench.planning.fit_reading import config_at
from rlbench.runtime.setting_history import changes_in_force
from rlbench.views.run_data import read_run_data, setting_history

START = {"loss": {"name": "ppo", "high": 0.2}, "batch": 16, "temperature": 1.0, "band": [0.2, 0.8]}


def journal(*commands):
    "The table of commands: (knob, value, version, over)."
    rows = []
    for knob, value, version, over in commands:
        row = {"knob": knob, "status": "applied", "value": json.dumps(value), "version": version, "over": over}
        rows.append(row)
    return pl.DataFrame(rows)


def values_at(commands, versions, field="batch", check=None):
    return [(START | changes_in_force(START, commands, v, START, check))[field] for v in versions]


def test_a_ramp_is_where_the_loop_had_it():
    assert values_at(journal(("batch", 32, 2, 4)), range(8)) == [16, 16, 16, 20, 24, 28, 32, 32]
    band = values_at(journal(("band", [0.4, 1], 1, 2)), (1, 2, 3), "band")
    assert [tuple(round(value, 6) for value in each) for each in band] == [(0.2, 0.8), (0.3, 0.9), (0.4, 1.0)]


def test_another_command_ends_a_ramp():
    "One for the knob, and one for the whole field; a second ramp begins where the first one was."
    assert values_at(journal(("batch", 32, 2, 4), ("batch", 8, 4, 0)), (3, 4, 5, 9)) == [20, 8, 8, 8]
    assert values_at(journal(("batch", 32, 2, 4), ("batch", 8, 4, 4)), (4, 6, 8)) == [24, 16, 8]
    replaced = values_at(journal(("loss.high", 0.6, 2, 4), ("loss", "gspo", 4, 0)), (3, 4, 7), "loss")
    assert round(replaced[0]["high"], 6) == 0.3 and replaced[1:] == ["gspo", "gspo"]


def test_a_ramp_of_a_number_that_json_writes_as_a_whole_one():
    assert values_at(journal(("temperature", 2, 0, 4)), (1, 2, 4), "temperature") == [1.25, 1.5, 2.0]


def test_a_ramp_skips_what_the_loop_refuses():
    def check(settings):
        if settings["batch"] % 8:
            raise ValueError("batch")

    assert values_at(journal(("batch", 32, 0, 4)), range(6), check=check) == [16, 16, 24, 24, 32, 32]


def test_commands_that_change_no_setting():
    "Refused ones, verbs, values that are no JSON, and fields that nobody asks for."
    commands = journal(("batch", 8, 1, 0), ("eval", None, 1, 0), ("group", 2, 1, 0), ("loss", "gspo", 1, 0))
    commands = commands.with_columns(
        status=pl.Series(["refused", "applied", "applied", "applied"]),
        value=pl.Series(["8", "null", "2", "gspo"]),
    )
    assert changes_in_force(START, commands, 5, START) == {}


def test_a_run_reads_back_what_it_had(tmp_path):
    "The replay and the loop agree at every version; the fit and the report read the same values."
    table = {
        "clock": "virtual",
        "generator": "scripted",
        "placement": "colocated",
        "steps": 8,
        "group": 4,
        "batch": 16,
        "filter": "none",
        "preflight": 0,
        "eval": [],
        "alerts": False,
    }
    folder = inline_run(tmp_path, "ramped", table, [(30, "batch", 32, 5)]).folder
    commands = read_table(folder, "commands")
    ((since, over),) = commands.select("version", "over").rows()
    start = make_config(table).model_dump()
    trained = read_table(folder, "rollouts").filter(pl.col("fate") == "trained")
    assert over == 5 and 0 <= since < 7
    for version in range(since + 1, 9):
        config = config_at(folder, version)
        changes = changes_in_force(start, commands, version - 1, start)
        assert config.batch % 4 == 0 and 16 <= config.batch <= 32
        assert len(trained.filter(pl.col("trained_at") == version)) == config.batch, (version, changes)
    history = setting_history(read_run_data(folder), "batch")
    assert history[0] == (0.0, 16) and [value for _, value in history] == sorted(value for _, value in history)

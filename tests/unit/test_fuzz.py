"""Drawn configurations and commands: each is refused by name or runs to its end with closed books;
and what the drawing has found.

More of them by hand: `python tests/helpers/fuzz.py 2000` (about ten minutes), which prints how many were refused,
ran and do not hold.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fuzz import BASE, Case, cases, run_case, say
from hypothesis import HealthCheck, Phase, given, settings
from inline import check_books, inline_run

from rlbench.base.commands import read_commands, send_command
from rlbench.base.ledger_reading import read_table
from rlbench.generator import Request, ScriptedGenerator, drain
from rlbench.knobs import Knob, knobs_of, resolve_named
from rlbench.loop.config import RunConfig, make_config
from rlbench.loop.config_tables import (
    FUNCTIONS,
    BalanceConfig,
    ConfigError,
    Deadlines,
    EvalConfig,
    JudgeConfig,
    LoraConfig,
    SandboxConfig,
    VirtualCosts,
    knobs_in,
)
from rlbench.records import MAX_VERSIONS, Sampling, StopReason

FEW = settings(
    max_examples=24,
    phases=[Phase.generate],
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
def ended(tmp_path_factory):
    "How the drawn cases ended; some of each kind are among them."
    ends: list[str] = []
    yield lambda case: ends.append(run_case(case, tmp_path_factory.mktemp("case")))
    assert {"done", "refused"} <= set(ends), ends


@pytest.mark.slow
def test_drawn_configurations(ended):
    FEW(given(cases(0))(ended))()


@pytest.mark.slow
def test_drawn_commands(ended):
    FEW(given(cases(8))(ended))()


def test_every_number_has_two_ends_that_a_column_holds():
    "Of the configuration, its tables and the parameters of every built-in function."
    models = RunConfig, EvalConfig, VirtualCosts, Deadlines, BalanceConfig, LoraConfig, SandboxConfig, JudgeConfig
    knobs = {f"{model.__name__}.{name}": each for model in models for name, each in knobs_in(model).items()}
    knobs |= {
        f"{field}.{key}.{name}": each
        for field, known in FUNCTIONS.items()
        for key, function in known.items()
        for name, each in knobs_of(function).items()
    }
    bare = [
        f"{model.__name__}.{name}"
        for model in models
        for name, info in model.model_fields.items()
        if info.annotation in (int, float) and name not in knobs_in(model)
    ]
    open_ended = [
        name
        for name, (knob, default) in knobs.items()
        if type(default) in (int, float)
        and not knob.choices
        and (None in (knob.low, knob.high) or not -(2**63) <= knob.low <= knob.high < 2**63)
    ]
    assert len(knobs) > 150 and not bare and not open_ended


def test_a_number_that_no_column_holds_is_refused_by_name():
    "Whatever the range of a function's own knob says."

    def reward(r, w: Knob() = 0.1, n: Knob() = 1):
        return 0.0

    for name, value in (
        ("n", 2**63),
        ("n", -(2**63) - 1),
        ("n", 10**400),
        ("w", 10**400),
        ("w", math.inf),
        ("w", 1e308),
    ):
        with pytest.raises(ValueError, match=f"^reward.{name}: "):
            resolve_named("reward", {"mine": reward}, {"name": "mine", name: value})
    with pytest.raises(ConfigError, match="^temperature: 10"):
        make_config({"temperature": 10**400})
    with pytest.raises(ConfigError, match="^advantage.source: .* is no path"):
        make_config({"advantage": {"name": "grpo", "source": [1]}})


@pytest.mark.parametrize("over", [2**63, 10**400, MAX_VERSIONS + 1, -1])
def test_a_ramp_longer_than_any_run_is_refused_and_the_run_goes_on(tmp_path, over):
    "Said to the loop itself, and in a file of the run's folder."
    driver = inline_run(
        tmp_path,
        "a",
        {"steps": 3, "batch": 16, "group": 4, "preflight": 0, "eval": []},
        [(10, "temperature", 0.5, over), (12, "pause", None, over), (14, "temperature", 0.7, MAX_VERSIONS)],
    )
    check_books(driver)
    rows = read_table(driver.folder, "commands").sort("command").select("status", "over", "reason").rows()
    assert (
        driver.state.version == 3
        and [row[0] for row in rows] == ["refused", "refused", "applied"]
        and all(0 <= row[1] <= MAX_VERSIONS for row in rows)
    )
    assert all(row[2].startswith(f"over: {over} versions; use 0 to") for row in rows[:2])
    (driver.folder / "commands" / "x.json").write_bytes(say("temperature", 0.5, over))
    (command,) = read_commands(driver.folder)
    assert command.error.startswith(f"over: {over} versions; use 0 to")
    with pytest.raises(ValueError, match="^over: "):
        send_command(driver.folder, "me", "temperature", 0.5, over)


def test_whatever_is_in_a_command_it_is_refused_and_the_run_goes_on(tmp_path):
    "Values of every kind, nested deeper than can be written, and times that are none."
    deep = json.dumps({"knob": "loss"})[:-1] + ', "value": ' + "[" * 200 + "]" * 200 + "}"
    texts = [
        deep.encode(),
        b'{"knob": "go", "at": NaN}',
        b'{"knob": "go", "at": 1' + b"0" * 400 + b"}",
        b"[]",
        say("advantage.source", [1], 0),
        say("loss", {"name": "ppo", "source": 7}, 0),
        say("temperature", 10**400, 0),
        say("tasks", "sums", 3),
    ]
    assert run_case(Case({**BASE, "steps": 4}, [(5 * n, text) for n, text in enumerate(texts)]), tmp_path) == "done"
    rows = read_table(tmp_path / "case-0", "commands")
    assert len(rows) == len(texts) and set(rows["status"]) == {"refused"}


def test_a_partial_longer_than_its_new_script_ends_with_the_next_token():
    "Another version writes shorter responses; a resumed one keeps what it has."
    generator = ScriptedGenerator(mean=60, tail=0, slots=2)
    request = Request((0, 0), np.arange(3, dtype=np.int32), Sampling(1.0, 1.0, 0, 200), 7, (0,))
    generator.submit([request])
    generator.step(35)
    (partial,) = generator.abort([(0, 0)])
    shorter = ScriptedGenerator(mean=33, tail=0, slots=2, version=1)
    shorter.submit(
        [Request((0, 1), request.prompt, request.sampling, request.stream, request.stop, partial=partial.segment)]
    )
    (result,) = drain(shorter)
    assert (
        len(partial.segment) == 35
        and result.segment.tokens[:35].tolist() == partial.segment.tokens.tolist()
        and result.segment.versions.tolist() == [0] * 35 + [1]
    )
    assert result.reason is StopReason.STOP and result.segment.tokens[-1] == 0 and result.decode_tokens == 1


@pytest.mark.slow
def test_responses_that_get_shorter_while_partials_wait(tmp_path):
    "The whole run that ended with an error of shapes."
    assert (
        run_case(
            Case(
                {
                    **BASE,
                    "steps": 20,
                    "batch": 32,
                    "group": 8,
                    "oversample": 0.6,
                    "stragglers": "partial",
                    "old_tokens": "mask",
                    "virtual": {"scripted_growth": 0.1},
                }
            ),
            Path(tmp_path),
        )
        == "done"
    )


def test_a_scripted_generator_sleeps_while_the_trainer_trains(tmp_path):
    assert run_case(Case({**BASE, "placement": "colocated", "sleep": True}), tmp_path) == "done"


def test_growth_keeps_the_other_costs_of_a_script():
    "Harder tasks stay longer when lengths grow."
    from rlbench.runtime.halves import scripted_generator_half

    writer = scripted_generator_half(
        make_config(
            {
                "generator": "scripted",
                "clock": "virtual",
                "steps": 10,
                "virtual": {"scripted_growth": 2.0, "scripted_hardship": 3.0, "scripted_tail": 0},
            }
        )
    )
    writer.load(10, "keep")
    request = Request((0, 0), np.arange(3, dtype=np.int32), Sampling(1.0, 1.0, 0, 10_000), 7, (0,))
    lengths = [len(writer.generator.script(replace(request, level=level)).tokens) for level in (1, 2, 10**6)]
    assert lengths == [48, 144, 10_000]

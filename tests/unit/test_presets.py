"""Every preset that comes with the package loads, and its memory plan fits the hardware that its first line names."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlbench.cli.main import app
from rlbench.loop.config import FUNCTIONS, RunConfig, knob_of_field
from rlbench.loop.config_files import load_config, presets
from rlbench.loop.config_knobs import ACTS_ON
from rlbench.loop.config_notes import notes_on
from rlbench.loop.config_tables import ConfigError, knobs_in
from rlbench.models.hardware import MODELS
from rlbench.runtime.memory_plan import facts_of, machine_named, memory_plan, plan_of

PRESETS = Path(__file__).parents[2] / "data" / "presets"
LARGE = sorted(name for name in presets() if "Hardware:" in (PRESETS / f"{name}.toml").read_text().partition("\n")[0])


def hardware(name: str) -> str:
    "The hardware that a preset's first line names."
    return re.search(r"Hardware: (.+)", (PRESETS / f"{name}.toml").read_text().partition("\n")[0])[1].strip()


def test_every_live_field_says_what_it_acts_on():
    "The panel and `rlbench knobs` group by it; a new field is added to `ACTS_ON` (nbs/loop/07_config_knobs)."
    live = {name for name, (knob, _) in knobs_in(RunConfig).items() if knob.live}
    live |= {name for name in FUNCTIONS if knob_of_field(name).live}
    listed = [name for names in ACTS_ON.values() for name in names]
    assert live - set(listed) == set() and set(listed) - live == set() and len(listed) == len(set(listed))


def test_there_are_some():
    assert {"qwen3-0.6b", "qwen3-4b", "two-gpus"} <= set(LARGE) and "tiny" in presets()


@pytest.mark.parametrize("name", LARGE)
def test_preset_fits_its_hardware(name):
    "And is no smaller than it need be: it uses most of the machine, and not one card less would do."
    config = load_config(name)
    facts, shape, machine = facts_of(config), MODELS[config.model.rpartition("/")[2]], machine_named([hardware(name)])
    plan = plan_of(facts, shape, machine)
    assert plan.fits, str(plan)
    assert plan.average >= config.concurrency, str(plan)
    assert max(plan.needed(place) / place.free for place in machine.gpus) > 0.7, str(plan)
    assert (
        f'--on "{hardware(name)}"' in (text := (PRESETS / f"{name}.toml").read_text())
        or f"--on {hardware(name)}" in text
    )


def test_a_smaller_machine_is_refused_in_words():
    plan = plan_of(facts_of(load_config("qwen3-4b")), MODELS["Qwen3-4B"], machine_named(["H100"]))
    assert not plan.fits and "does not fit on GPU 0, H100" in str(plan)


@pytest.mark.parametrize("name", [name for name in presets() if name not in LARGE])
def test_small_presets_fit_here(name):
    assert memory_plan(load_config(name)).fits


def test_a_dry_run_starts_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("rlbench.runtime.model_shapes.hub_answers", lambda model: False)
    monkeypatch.chdir(tmp_path)

    def dry(*arguments: str, code: int) -> str:
        done = CliRunner().invoke(app, ["run", *arguments])
        assert done.exit_code == code, done.output
        return done.stdout if code < 2 else done.stderr

    told = dry("two-gpus", "--dry-run", "--on", "A100 x 2", code=0)
    assert (
        "GPU 0, A100" in told and "GPU 1, A100" in told and "It fits." in told and "as the Hub does not answer" in told
    )
    plan = json.loads(dry("qwen3-4b", "--dry-run", "--on", "RTX 4090", "--on", "L4", "--json", code=1))
    assert (
        plan["fits"] is False
        and plan["places"][0]["place"] == "GPU 0, RTX 4090"
        and plan["parameters"] == 4_022_468_096
    )
    assert "did you mean 'H100'" in dry("tiny", "--dry-run", "--on", "H10", code=2)
    assert "add --dry-run" in dry("tiny", "--on", "H100", code=2)
    assert "It fits." in dry("tiny", "--dry-run", code=0)
    assert (
        'note: critic: advantage "grpo" does not ask' in dry("tiny", "--dry-run", "--set", "critic=true", code=0)
        and json.loads(dry("tiny", "--dry-run", "--set", "optimizer_steps=2", "--json", code=0))["notes"] == []
    )
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_whose_tokens_are_of_another_policy_is_told():
    """Older tokens that nothing weighs, and tokens left out by `top_p` or `top_k` where the generator does not say
    which. No preset does either."""

    def told(**table):
        return [note.fields for note in notes_on(load_config("tiny", {"optimizer_steps": 2, **table}))]

    scripted = {"generator": "scripted", "clock": "virtual"}
    assert (
        told(staleness=2, correction="none")
        == [("staleness", "correction")]
        == told(staleness=8, correction="none", loss="reinforce")[-1:]
    )
    assert (
        not told(staleness=1, correction="none")
        and not told(staleness=2)
        and not told(staleness=2, correction="none", old="sampler")
        and not told(staleness=2, correction="none", loss="dppo_tv")
    )
    assert told(**scripted, top_p=0.8) == [("top_p", "correction")] and told(**scripted, top_k=5, top_p=0.8) == [
        ("top_p", "top_k", "correction")
    ]
    assert not told(top_p=0.8, top_k=5) and not told(**scripted, top_p=0.8, correction="none")
    about = {field for name in presets() for note in notes_on(load_config(name)) for field in note.fields}
    assert not about & {"staleness", "top_p", "top_k"}


def test_a_field_inside_a_list_of_tables_is_refused_by_name():
    "`eval` is a list, and a number in a dotted name is no place in it."
    with pytest.raises(ConfigError, match=r"^eval\.0\.count: eval is a list of tables; .* eval=\[\{count = 16\}\]$"):
        load_config("tiny", {"eval.0.count": 16})

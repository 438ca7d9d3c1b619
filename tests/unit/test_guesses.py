"""Wrong guesses: names of other trainers, unknown fields, folders in place of configurations;
and how a refusal looks."""

import pytest
from fake_run import fake_run
from IPython.core.interactiveshell import InteractiveShell
from typer.testing import CliRunner

import rlbench as rl
from rlbench.cli.main import app
from rlbench.loop.config import other_names, value_of


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"num_generations": 8}, "TRL's num_generations is group here"),
        ({"lr": 1e-5}, "TRL's lr is learning_rate here"),
        ({"beta": 0.1}, "is kl_weight here"),
        ({"epsilon": 0.2}, "is loss.low here"),
        ({"max_completion_length": 99}, "is max_tokens here"),
        ({"max_steps": 9}, "is steps here"),
        ({"rollout": {"n": 8}}, "verl's rollout.n is group here"),
        ({"actor_rollout_ref": {"actor": {"optim": {"lr": 1e-5}}}}, "verl's actor.optim.lr is learning_rate here"),
        ({"kl_coef": 0.1}, "verl's kl_coef is kl_weight here"),
        ({"n_samples_per_prompt": 8}, "OpenRLHF's n_samples_per_prompt is group here"),
        ({"max_async_level": 2}, "prime-rl's max_async_level is staleness here"),
    ],
)
def test_a_name_of_another_trainer_is_answered_with_ours(table, words):
    with pytest.raises(rl.ConfigError) as error:
        rl.load_config(table)
    assert words in str(error.value)


def test_every_name_leads_to_a_field():
    default = rl.load_config({})
    assert len(other_names()) > 80
    for other in other_names().values():
        assert (
            "." in other.field
            and value_of(default, other.field) is not None
            or other.field in rl.RunConfig.model_fields
        ), other


def test_an_unknown_field_names_three_and_not_all():
    with pytest.raises(rl.ConfigError, match="; the nearest: ") as error:
        rl.load_config({"zzzzqqq": 1})
    assert len(str(error.value)) < 160 and str(error.value).count(",") == 2


def test_a_folder_in_place_of_a_configuration(tmp_path):
    "A run, a model and anything else are told apart, with what to do."
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for folder, words in (
        (fake_run(tmp_path, "monday", batches=1, rollouts=0), "rlbench resume"),
        (tmp_path / "model", "--set model="),
        (tmp_path, "neither a run nor a model"),
    ):
        done = CliRunner().invoke(app, ["run", str(folder), "--runs", str(tmp_path / "runs")])
        assert done.exit_code == 2 and words in done.output and not (tmp_path / "runs").exists(), done.output


def test_a_refusal_in_a_notebook_is_one_line(tmp_path):
    "As IPython prints it; an error of another kind keeps its frames."
    shell, shown = InteractiveShell.instance(), []
    shell._showtraceback = lambda kind, error, lines: shown.append("\n".join(lines))
    shell.user_ns |= {"rl": rl, "runs": tmp_path / "runs"}
    for line in (
        'rl.run("tiny", runs=runs, stalenes=1)',
        'rl.attach("nobody", runs=runs)',
        'rl.load_config({"lr": 1})',
        'rl.run("tiny", runs=runs, device="gpu")',
        "rl.attach(None)",
    ):
        shell.run_cell(line)
    InteractiveShell.clear_instance()
    assert [text.count("\n") for text in shown[:4]] == [0] * 4, shown
    assert shown[0].startswith("ConfigError: stalenes: unknown field 'stalenes'; did you mean 'staleness'?")
    assert shown[1].startswith("FileNotFoundError: run: unknown name 'nobody'") and "is learning_rate here" in shown[2]
    assert "TypeError" in shown[4] and shown[4].count("\n") > 5

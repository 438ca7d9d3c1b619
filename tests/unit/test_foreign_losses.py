"The loss on the card of another system's run: that of its settings where they name one."

import json
from pathlib import Path

import pytest
from opened_runs import copy_made_up

import rlbench as rl

pytestmark = pytest.mark.usefixtures("cache")


def first_trained(run: rl.Run) -> int:
    return run.rollouts.filter(run.rollouts["fate"] == "trained")["rollout"][0]


def with_settings(place: Path, text: str) -> rl.Run:
    "The autumn run of prime-rl with more in its configuration."
    folder = place / "autumn" / "configs"
    folder.mkdir(exist_ok=True)
    (folder / "rl.toml").write_text(text)
    return rl.open(place / "autumn")


def test_settings_of_prime_rl_name_the_loss(tmp_path):
    place = copy_made_up("prime_rl", tmp_path)
    run = with_settings(place, "[trainer.loss]\ndppo_mask_low = 0.1\ndppo_mask_high = 0.3\nkl_tau = 0.002\n")
    card = run.rollout(first_trained(run)).card()
    assert "dppo_tv (low 0.1, high 0.3, spring 0.002)" in card.text()
    assert (
        "The loss is that of the settings of prime-rl: dppo_tv, from `trainer.loss.dppo_mask_low` = 0.1" in card.text()
    )
    assert "is not known" not in card.text()
    assert run.cards([first_trained(run)]).summary["objective"].to_list() == ["as configured"]


@pytest.mark.parametrize(
    "text", ["", "[trainer.loss]\ntype = 'custom'\ndppo_mask_low = 0.1\n", "[trainer.loss]\nadv_tau = 2.0\n"]
)
def test_settings_that_name_none_leave_the_default(tmp_path, text):
    run = with_settings(copy_made_up("prime_rl", tmp_path), text)
    card = run.rollout(first_trained(run)).card()
    assert "What is not swapped of the objective is the default here: the loss of prime-rl is not known" in card.text()
    assert run.cards([first_trained(run)]).summary["objective"].to_list() == ["default"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"advantage_estimator": "gspo", "eps_clip": 0.0003, "eps_clip_high": 0.0004},
            "gspo (low 0.0003, high 0.0004)",
        ),
        ({"advantage_estimator": "grpo", "eps_clip": 0.1}, "ppo (low 0.1, high 0.1)"),
        ({"advantage_estimator": "grpo", "eps_clip": 0.2, "eps_clip_c": 3.5}, "dual_clip (low 0.2, high 0.2, cap 3.5)"),
        ({"advantage_estimator": "grpo", "use_tis": True, "tis_clip": 2.5}, "correction tis (cap 2.5)"),
        ({"advantage_estimator": "grpo", "loss_type": "custom_loss"}, "is not known"),
    ],
)
def test_arguments_of_miles_name_the_loss(tmp_path, arguments, words):
    place = copy_made_up("miles", tmp_path)
    (meta,) = place.rglob("meta.json")
    facts = json.loads(meta.read_text())
    meta.write_text(json.dumps(facts | {"args": facts["args"] | arguments}))
    run = rl.open(place)
    assert words in " ".join(run.rollout(first_trained(run)).card().text().split())


def test_a_loss_that_is_swapped_in_stays_possible(tmp_path):
    run = with_settings(copy_made_up("prime_rl", tmp_path), "[trainer.loss]\ndppo_mask_low = 0.1\n")
    assert "cispo" in run.rollout(first_trained(run)).card(loss="cispo").text()

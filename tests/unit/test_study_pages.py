"""The stored studies: complete rows, recipes whose runs give the record, the page of claims, and the verb."""

import json

import pytest
from command_line import run_verb, verb_facts
from opened_runs import MADE_UP
from papers import claim_row, papers_notebook
from rooms import ROOT

import rlbench as rl
from rlbench.planning.learning_laws import (
    LAW_WARNING,
    EntropyLaw,
    SigmoidLaw,
    fit_entropy_law,
    fit_sigmoid,
    forecast_entropy_law,
    forecast_sigmoid,
)
from rlbench.studies.study_recipe import StudyRun, find_recipe, run_of_folder, runs_of_ablation, stored_runs
from rlbench.studies.study_record import VERDICTS, check_stored, is_null, stored_studies, stored_study, study_row
from rlbench.studies.study_template import write_study_page
from rlbench.workbench.ablation_result import Ablation, Arm
from rlbench.workbench.trials import Trial

RECORDS = {record.name: record for record in stored_studies()}
OLDER = (  # the studies that stood before there was a form
    "code_policy dapo_switches difficulty distillation fix_policy group_size in_flight kl_estimators length_bias "
    "mismatch_corrections over_optimisation process_rewards published_runs rare_token sandbox_quota solved_groups "
    "staleness_table stragglers tenancy tiny_policy tool_drift"
).split()
NEW = ("entropy_law", "scaling_sigmoid", "signed_answers", "truncated_sampling", "replay_or_band", "staleness_speed")


def recipe_names() -> list[str]:
    "The stored studies that have a recipe."
    found = []
    for name in RECORDS:
        if name not in OLDER:
            found.append(find_recipe(name).name)
    return found


@pytest.mark.parametrize("name", RECORDS)
def test_a_stored_record_is_complete(name):
    "Question, claim, source, what was measured there and here, a page that is there and shows this record, a command."
    record = RECORDS[name]
    row = study_row(record)
    words = (record.question, record.claim, record.source.title, record.measured_there, record.measured_here)
    assert all(words) and record.reading and record.against and record.command and record.question.endswith("?")
    assert row["verdict"] in VERDICTS and row["reason"] and len(row["interval"]) == 2 and row["arms"]
    assert (2022 <= record.source.year <= 2026) and record.tests
    page = json.loads((ROOT / "nbs" / record.page).read_text(encoding="utf-8"))
    code = "".join("".join(cell["source"]) for cell in page["cells"] if cell["cell_type"] == "code")
    assert "check_stored(" in code
    json.dumps(row)


def test_every_study_has_its_record():
    "Those that stood before and the new ones."
    assert set(OLDER) | set(NEW) <= set(RECORDS)


@pytest.mark.parametrize("name", recipe_names())
def test_stored_runs_give_the_stored_record(name):
    "By the recipe's own function; the null arm is null, and every arm has all seeds."
    recipe = find_recipe(name)
    runs = stored_runs("entropy_law" if name == "scaling_sigmoid" else name)
    record = check_stored(recipe.record(runs))
    assert record.null and all(map(is_null, record.null))
    assert set(recipe.arms) <= set(runs.arms) and record.seeds >= 5
    assert all(len(runs.of_arm(arm)) == recipe.seeds for arm in recipe.arms)
    assert runs.machine["date"] and runs.machine["processor"]


def test_the_page_of_claims_is_made_of_the_records():
    "nbs/papers.ipynb is what `make readme` writes, and has a row for each record."
    text = (ROOT / "nbs/papers.ipynb").read_text(encoding="utf-8")
    assert text == papers_notebook(), "run: make readme"
    source = "".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    assert all(claim_row(record) in source for record in RECORDS.values())


def test_the_verb_lists_all_studies(tmp_path):
    "As rows of JSON, and as a table; a folder of other records in their place."
    rows = verb_facts(tmp_path, "study", "--list")["studies"]
    assert {row["name"] for row in rows} == set(RECORDS)
    assert all(row["paper"]["title"] and row["claim"] and row["verdict"] in VERDICTS for row in rows)
    assert "group_size" in run_verb(tmp_path, "study").output
    assert verb_facts(tmp_path, "study", "--list", "--records", tmp_path)["studies"] == []


def test_the_verb_makes_a_study_again(tmp_path):
    "Runs are made and kept, and agree with the stored record; a second call makes none."
    found = verb_facts(tmp_path, "study", "signed_answers", "--seeds", "6", code=None)
    kept = list((tmp_path / "bench-study").iterdir())
    assert len(kept) == 6 * len(find_recipe("signed_answers").arms) and found["seeds"] == 6
    assert found["agreement"][0]["agrees"] and found["null"]
    before = {path: path.stat().st_mtime_ns for path in kept}
    verb_facts(tmp_path, "study", "signed_answers", "--seeds", "6", code=None)
    assert before == {path: path.stat().st_mtime_ns for path in kept}


def test_what_the_verb_refuses(tmp_path):
    "A name that is not there, more than one, a list with a name, a page that is there."
    for words in (["nothing_here"], ["a", "b"], ["--list", "group_size"], ["new"], ["new", "no-name"]):
        run_verb(tmp_path, "study", *words, code=2)
    assert "rlbench bench study group_size" in run_verb(tmp_path, "study", "group_size", "--stored").output
    assert verb_facts(tmp_path, "study", "new", "my_claim")["page"] == "studies/my_claim.ipynb"
    run_verb(tmp_path, "study", "new", "my_claim", code=2)


def test_a_new_page_is_code_that_compiles(tmp_path):
    "And carries its name through."
    page = json.loads(write_study_page("my_claim", tmp_path).read_text())
    code = [cell for cell in page["cells"] if cell["cell_type"] == "code"]
    for cell in code:
        compile("".join(cell["source"]), cell["id"], "exec")
    assert len({cell["id"] for cell in page["cells"]}) == len(page["cells"])
    assert "my_claim-runs" in "".join("".join(cell["source"]) for cell in code)


def trial(arm: str, seed: int, rate: float, again: bool = False, state: str = "finished") -> Trial:
    "A made-up trial."
    plain = dict(run="r", reason="", digest="d", versions=(0, 10), spent=(0, 100), at=(0, 1), tokens=100, seconds=1.0)
    return Trial(arm, seed, again, state=state, rates=(0.3, rate), means={}, curve={"ess": (0.9, None)}, **plain)


def test_trials_of_an_ablation_are_runs():
    "With the number that was measured; the null arm is the base again, and what did not finish is left out."
    trials = [trial(arm, seed, rate + seed / 100) for arm, rate in (("base", 0.5), ("wide", 0.6)) for seed in range(3)]
    trials += [trial("base", seed, 0.5 + seed / 100, again=True) for seed in range(3)] + [
        trial("wide", 3, 0.9, state="failed")
    ]
    arms = (Arm("base", {}, "base"), Arm("wide", {}, "wide"))
    runs = runs_of_ablation("mine", Ablation(arms, tuple(trials), {"name": "held_out"}, exact=True))
    assert runs.arms == ("base", "wide", "base again") and len(runs.of_arm("wide")) == 3
    assert runs.by_seed("wide", "measure") == pytest.approx({0: 0.6, 1: 0.61, 2: 0.62})
    assert runs.of_arm("base")[0].curves["ess"] == (0.9, None)


def test_another_systems_run_is_a_run(tmp_path, monkeypatch):
    "Its steps as curves; a column that it does not have is refused by name."
    monkeypatch.setenv("RLBENCH_CACHE", str(tmp_path))
    opened = rl.open(MADE_UP / "slime")
    run = run_of_folder("theirs", 0, opened, ["reward_mean"])
    assert run == StudyRun("theirs", 0, {}, {"reward_mean": (0.75, 0.5, 0.625)})
    with pytest.raises(ValueError, match="nothing_here"):
        run_of_folder("theirs", 0, opened, ["nothing_here"])


def test_laws_give_back_what_follows_them_and_need_points():
    "Exact curves, a band that holds them, and None for too few points."
    versions = list(range(1, 31))
    truth = SigmoidLaw(0.3, 0.9, 2.0, 10.0)
    rates = truth.rate(versions)
    assert fit_sigmoid(versions, rates, 0.3).rate(60) == pytest.approx(truth.rate(60), abs=0.02)
    forecast = forecast_sigmoid(versions, rates, 0.3, 60)
    assert forecast.versions[-1] == 60 and forecast.fitted == 30 and "at version 60" in str(forecast)
    entropy = [0.4 - 0.01 * version for version in versions]
    law = EntropyLaw(-1.0, 1.9)
    assert fit_entropy_law(entropy, law.rate(entropy)).ceiling == pytest.approx(0.9)
    assert forecast_entropy_law(versions, entropy, law.rate(entropy)).ceiling[0] == pytest.approx(0.9)
    assert fit_sigmoid(versions[:5], rates[:5], 0.3) is None and fit_entropy_law(entropy[:5], rates[:5]) is None
    assert fit_entropy_law([0.3] * 9, rates[:9]) is None and "learns nothing" in LAW_WARNING


def test_records_are_read_by_name():
    "An unknown name tells the known ones."
    with pytest.raises(ValueError, match="group_size"):
        stored_study("group_sizes")

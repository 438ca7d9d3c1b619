"""A run of another system, opened: tables, what is missing, live growth, advice, prediction, and what is refused."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from opened_runs import rewrite_lines

import rlbench as rl
from rlbench.foreign.opening import cached_folder, find_or_open, opened_table
from rlbench.foreign.registry import find_foreign_runs
from rlbench.foreign.source import read_source
from rlbench.foreign.source_files import ForeignError
from rlbench.runtime.live_view import LiveView
from rlbench.views.card_html import run_card_html, still_cards_html
from rlbench.views.cards import CARDS
from rlbench.views.light import run_light
from rlbench.views.sinks import export_run, read_exported_run
from rlbench.workbench.opened_run import OpenedRun, OpenedRuns

pytestmark = pytest.mark.usefixtures("cache")

FOREIGN = Path(__file__).parents[1] / "foreign"
VERL = FOREIGN / "verl"
VERIFIERS = FOREIGN / "verifiers"
CARDS_OF = {
    "areal": "AReaL writes text, and no token ids",
    "art": "",
    "miles": "",
    "nemo_rl": "",
    "open_instruct": "",
    "skyrl": "",
    "slime": "",
}  # samples of one run: why its rollouts have no loss card, empty where they have one


@pytest.fixture
def theirs(tmp_path) -> Path:
    "A copy of a run of verl."
    return Path(shutil.copytree(VERL / "v1", tmp_path / "theirs"))


def files_in(folder: Path) -> dict[str, bytes]:
    "Every file below a folder with its content."
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_is_a_read_only_handle(theirs):
    before = files_in(theirs)
    run = rl.open(theirs)
    assert isinstance(run, rl.Run) and run.source.system == "verl"
    assert run.steps["step"].to_list() == [1, 2, 3]
    assert run.steps["reward_mean"].to_list() == [0.75, 0.5, 0.625]
    assert run.groups["size"].to_list() == [4] * 6
    for verb in ("set", "stop", "fork", "resume", "pause", "guard", "wait"):
        with pytest.raises(ValueError, match=f"{verb}: theirs was made by verl and is only read"):
            getattr(run, verb)()
    with pytest.raises(ValueError, match=r"run\.settings"):
        _ = run.config
    assert files_in(theirs) == before


def test_a_column_that_is_not_there_is_absent_and_says_what_would_record_it(theirs):
    run = rl.open(theirs)
    assert "dispatched" not in run.rollouts.columns and not len(run.tokens)
    with pytest.raises(ValueError, match=r"rollouts\.dispatched: verl did not record it here \(verl writes"):
        run.table("rollouts", ["step", "dispatched"])
    assert "missing: tokens" in repr(run)


def test_several_runs_are_listed():
    found = rl.open(VERL)
    assert isinstance(found, OpenedRuns) and [run.name for run in found] == ["v0", "v1"]
    assert repr(found).startswith("2 runs; take one by its number:")
    with pytest.raises(ForeignError, match="2 runs of other systems; name one of them"):
        find_or_open(VERL)


def test_nothing_recognised_is_refused_in_words(tmp_path):
    with pytest.raises(ForeignError, match="there is no .*; give a folder"):
        rl.open(tmp_path / "nowhere")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("hello")
    with pytest.raises(ForeignError, match=r"no run of .*verl.*\(a\.txt"):
        rl.open(tmp_path / "notes")
    with pytest.raises(ValueError, match="kind: unknown name 'ferl'"):
        rl.open(VERL, kind="ferl")


def test_a_run_that_is_still_written_is_followed(theirs):
    run = rl.open(theirs)
    responses = theirs / "rollout_data" / "4.jsonl"
    line = (theirs / "rollout_data" / "3.jsonl").read_text().splitlines()[0]
    row = json.loads(line) | {"step": 4, "score": 1.0, "uid": "later_0_0"}
    with open(responses, "w") as file:
        file.write(json.dumps(row) + "\n" + line[:20])
    assert run.steps["step"].to_list() == [1, 2, 3, 4]
    with open(responses, "a") as file:
        file.write(line[20:].replace('"step": 3', '"step": 4') + "\n")
    assert run.steps["rollouts"].to_list()[-1] == 2
    assert run.state == "running"


def test_cards_show_what_is_there_and_name_what_would_record_the_rest(theirs):
    run = rl.open(theirs)
    snapshot = LiveView(run.folder).poll()
    light = run_light(snapshot)
    assert light.word == "read-only" and "verl" in light.reason
    cards = {key: str(run_card_html(key, snapshot)) for key in CARDS}
    assert "<svg" in cards["reward"] and "target" not in cards["solve"]  # no band is known, so none is drawn
    assert "not recorded by verl" in cards["ribbons"] and "token ids" in cards["ribbons"]
    assert "bound" not in cards["queue"]
    page = str(still_cards_html(snapshot, light))
    assert "rl-card-ribbons" not in page and "rl-card-reward" in page


def test_the_panel_follows_and_has_no_controls(theirs):
    panel = rl.open(theirs).panel()
    assert panel.knobs is None and panel.buttons is None and panel.trace == ""
    assert panel.snapshot.version == 3
    row = {"input": "1+1=", "output": "2", "gts": "2", "score": 1.0, "step": 4, "uid": "x_0_0"}
    (theirs / "rollout_data" / "4.jsonl").write_text(json.dumps(row) + "\n")
    panel.frame()
    assert panel.snapshot.version == 4 and panel.trace == ""


def test_why_speaks_of_the_systems_settings(theirs):
    found = rl.open(theirs).why()
    assert found.limit == "generator" and "`actor_rollout_ref.rollout.max_num_seqs`" in found.text
    assert found.figures["trainer_waits"] == pytest.approx(1 - 3.9 / 11.9)


def test_the_planner_is_fitted_to_its_seconds(theirs):
    run = rl.open(theirs)
    found = run.predict(staleness=2)
    assert 0 <= found.simulated.wait <= 1 and found.simulated.rate > 0
    with pytest.raises(ValueError, match=r"do not have steps\.seconds.*trainer\.logger"):
        rl.open(VERL / "v0").predict()


def test_ours_and_theirs_are_compared(theirs, tmp_path):
    from rlbench.workbench.handle import example_run

    ours = example_run(tmp_path / "runs")
    page = rl.compare(ours, rl.open(theirs))
    assert "theirs" in str(page) and "example" in str(page)


@pytest.mark.filterwarnings("error::UserWarning")
def test_two_evaluations_without_versions_are_compared():
    evaluations = [VERIFIERS / "sums--tiny--bash--1a2b3c4d", VERIFIERS / "evals", VERL.parent / "inspect" / "sums.json"]
    found = rl.compare(*map(rl.open, evaluations))
    for end in found.endings:
        assert (end.solve_rate_start, end.solve_rate_end, end.tokens) == (None, 0.5, None)
    assert "tokens generated" not in repr(found) and "held-out, start" not in repr(found)
    assert "rl-compare" in found._repr_html_() and found.frame()["tokens"].is_nan().all()
    pair = rl.compare(*map(rl.open, evaluations[:2]))
    assert [end.difference for end in pair.endings] == [None, 0.0] and "at temperature" not in repr(pair)


def test_what_no_length_tells_is_not_shown_as_zero(theirs):
    found = rl.compare(rl.open(theirs), rl.open(VERL.parent / "slime" / "dump"))
    assert [end.tokens for end in found.endings] == [None, 204]
    assert [end.tokens_per_s for end in found.endings] == [None, None]
    assert [end.solve_rate_start for end in found.endings] == [None, None]  # its only evaluation was the last step's
    assert "0" not in next(line for line in repr(found).splitlines() if "tokens generated" in line).replace("204", "")


def test_runs_of_one_name_are_compared_under_their_own_paths(tmp_path):
    paths = [shutil.copytree(VERL / "v1", tmp_path / parent / "same") for parent in ("a", "b")]
    found = rl.compare(*map(rl.open, paths))
    assert [run.name for run in found.compared] == list(map(str, paths))


def test_two_runs_of_one_name_stay_apart(tmp_path):
    for parent in ("a", "b"):
        shutil.copytree(VERL / "v1", tmp_path / parent / "same")
    folders = {cached_folder(find_foreign_runs(tmp_path / parent / "same")[0]) for parent in ("a", "b")}
    assert len(folders) == 2


def test_a_rollout_opens_in_the_inspector(theirs):
    run = rl.open(theirs)
    rollout = run.rollout(3)
    assert rollout.prompt and rollout.text
    with pytest.raises(ValueError, match="its files hold no tokens, so there is nothing to put a loss on"):
        run.cards([3], loss="gspo")
    assert len(OpenedRun(run.folder).browse().rows) == 27
    assert read_source(run.folder).guesses
    assert opened_table(run.folder, "nothing").is_empty()


def trained_rollouts(run: OpenedRun) -> list[int]:
    "Ids of the rollouts that a run was trained on; of one that trained nothing, all."
    rollouts = run.rollouts
    trained = rollouts.filter(rollouts["fate"] == "trained")["rollout"].to_list()
    return trained or rollouts["rollout"].to_list()


@pytest.mark.parametrize("sample", sorted(path.name for path in FOREIGN.iterdir()))
def test_a_card_shows_a_rollout_or_says_what_is_missing(sample):
    opened = rl.open(FOREIGN / sample)
    for run in [opened] if isinstance(opened, OpenedRun) else opened:
        rollout = trained_rollouts(run)[0]
        assert run.rollout(rollout)._repr_html_()
        try:
            summary = run.cards([rollout]).summary
        except ValueError as error:
            assert str(error).startswith(f"rollout: {rollout}") and "checkpoint" not in str(error)
        else:
            assert len(summary) == 1 and summary["tokens"][0] > 0
            assert run.rollout(rollout).card().text()


@pytest.mark.parametrize(("sample", "missing"), CARDS_OF.items())
def test_which_samples_have_cards(sample, missing):
    run = rl.open(FOREIGN / sample)
    rollout = trained_rollouts(run)[0]
    if missing:
        with pytest.raises(ValueError, match=missing):
            run.rollout(rollout).card()
        return
    card = run.rollout(rollout).card()
    assert card.frame["advantage"].null_count() == 0 and card.has_gradient
    assert card.frame["start"].null_count() == 0


def test_cards_without_log_probabilities_of_the_trainer_say_so():
    card = rl.open(FOREIGN / "open_instruct").rollout(0).card()
    assert "Log-probabilities of the trainer are not in the files of open-instruct" in card.text()
    assert "the loss of open-instruct is not known" in card.text()
    assert card.frame["token"][0] == f"[{card.frame['id'][0]}]"  # no tokenizer is known
    again = rl.open(FOREIGN / "miles").rollout(0).card()
    assert "Advantages were computed again from the rewards" in again.text()


def test_a_rollout_that_an_opened_run_does_not_have(theirs):
    run = rl.open(theirs)
    with pytest.raises(ValueError, match="rollout: 999 is not in"):
        run.cards([999])
    with pytest.raises(ValueError, match="rollout: 999 is not in"):
        run.rollout(999)
    with pytest.raises(ValueError, match="policy: .* was made by slime, whose weights are not read here"):
        rl.open(FOREIGN / "slime").cards([0], policy=True)


def age_files(folder: Path, seconds: float) -> None:
    "Make the files of a folder as old as this."
    then = time.time() - seconds
    for path in folder.rglob("*"):
        os.utime(path, (then, then))


def test_what_is_known_of_the_end_is_said(tmp_path):
    "Files of equal age are a copy; one file that is newer is a run that may go on; steps that were asked for end it."
    place = shutil.copytree(VERL / "v0", tmp_path / "copied", copy_function=shutil.copy)
    age_files(place, 100)
    run = rl.open(place)
    assert run.state == "finished" and "a copy: its" in repr(run) and "running" not in repr(run)
    newest = place / "rollout_data" / "3.jsonl"
    os.utime(newest)
    assert run.look() and run.state == "running" and ", last written 0 s ago," in repr(run).replace("1 s", "0 s")
    age_files(place, 3600)
    os.utime(newest, (time.time() - 1800,) * 2)
    assert run.look() and run.state == "finished" and "UTC" in repr(run).splitlines()[0]


def test_a_run_that_is_no_longer_written_is_finished(theirs, monkeypatch):
    run = rl.open(theirs)
    newest = theirs / "rollout_data" / "3.jsonl"
    os.utime(newest)
    assert run.look() and run.state == "running"
    later = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: later)
    assert not run.look() and run.state == "finished"


def test_marks_of_the_end(tmp_path):
    log = Path(shutil.copy(FOREIGN / "inspect" / "sums.json", tmp_path))
    os.utime(log)
    assert ", finished: `status` is success," in repr(rl.open(log))
    log.write_text(log.read_text().replace('"success"', '"started"'))
    assert ", a copy: its newest record is of 2026-09-21 " in repr(rl.open(log))
    trl = shutil.copytree(FOREIGN / "trl" / "monday", tmp_path / "trl")
    (state,) = trl.rglob("trainer_state.json")
    facts = json.loads(state.read_text())
    for last, word in ((3, "finished"), (4, "running")):
        state.write_text(json.dumps(facts | {"max_steps": last}))
        assert rl.open(trl).state == word


def test_an_old_run_that_was_copied_today_does_not_go_on(tmp_path):
    place = shutil.copytree(FOREIGN / "prime_rl" / "autumn", tmp_path / "copied", copy_function=shutil.copy)
    first, *_ = sorted(path for path in place.rglob("*") if path.is_file())
    os.utime(first, (time.time() - 60,) * 2)
    run = rl.open(place)
    assert run.state == "finished" and "a copy: its newest record is of 2026-" in repr(run)


def test_an_evaluation_that_is_compared_does_not_run(tmp_path):
    logs = [Path(shutil.copy(FOREIGN / "inspect" / name, tmp_path)) for name in ("sums.json", "sums.eval")]
    logs[0].write_text(logs[0].read_text().replace('"success"', '"started"'))
    found = repr(rl.compare(*map(rl.open, logs)))
    assert "an evaluation" in found and "running" not in found and "up to now" not in found
    place = shutil.copytree(VERL / "v1", tmp_path / "theirs")
    os.utime(place / "rollout_data" / "3.jsonl")
    found = repr(rl.compare(rl.open(place), rl.open(FOREIGN / "slime" / "dump")))
    assert "theirs was last written " in " ".join(found.split()) and "its figures are those up to now" in found


def test_the_id_of_an_opened_run_in_a_tracker_stays(theirs):
    run = rl.open(theirs)
    before = read_exported_run(run.folder)
    with open(theirs / "rollout_data" / "3.jsonl", "a") as file:
        file.write("\n")
    assert run.look()
    after = read_exported_run(run.folder)
    assert (after.id, after.born) == (before.id, before.born)
    twin = rl.open(shutil.copytree(theirs, theirs.parent / "other" / "theirs"))
    assert read_exported_run(twin.folder).id != before.id


def test_an_export_of_an_opened_run_needs_a_folder(theirs, tmp_path):
    run = rl.open(theirs)
    with pytest.raises(
        ValueError, match=r"folder: 'theirs' was made by verl .*rlbench export .*theirs .*--to tensorboard"
    ):
        export_run(run.folder, "tensorboard")
    assert not (run.folder / "tensorboard").exists()
    exported = export_run(run.folder, "tensorboard", tmp_path / "out")
    assert exported.place == tmp_path / "out" / "theirs" and list(exported.place.iterdir())


def segment_inodes(run: OpenedRun) -> dict[str, int]:
    "File of a segment of rollouts and tokens -> its inode."
    tables = [run.folder / "ledger" / name for name in ("rollouts", "tokens")]
    return {f"{table.name}/{path.name}": path.stat().st_ino for table in tables for path in table.glob("*.parquet")}


def long_answers(record: dict) -> dict:
    "An episode of prime-rl of about 200 KiB."
    for node in record["traces"][0]["nodes"]:
        node["message"]["content"] += " and so on" * 10_000
    return record


def test_only_what_is_new_is_made_again(tmp_path, monkeypatch):
    """A step that arrives leaves the segments of the steps before it as they are,
    and the tables are those of a new look."""
    place = tmp_path / "july"
    shutil.copytree(FOREIGN / "prime_rl" / "july", place)
    for path in (place / "rollouts").rglob("traces.jsonl"):
        rewrite_lines(path, long_answers)
    last = tmp_path / "step_3"
    shutil.move(place / "rollouts" / "step_3", last)
    run = rl.open(place)
    before, rollouts = segment_inodes(run), run.rollouts
    assert len(before) > 2
    shutil.move(last, place / "rollouts" / "step_3")
    assert run.look() and len(run.rollouts) > len(rollouts)
    after = segment_inodes(run)
    kept = [name for name, inode in before.items() if after.get(name) == inode]
    assert len(kept) >= len(before) - 1 and run.rollouts.head(len(rollouts))["key"].equals(rollouts["key"])
    columns = run.rollouts.columns
    monkeypatch.setenv("RLBENCH_CACHE", str(tmp_path / "another cache"))
    fresh = rl.open(place)
    for name in ("rollouts", "tokens", "steps", "groups", "evals"):
        assert run.table(name).equals(fresh.table(name)), name
    assert fresh.rollouts.columns == columns


def test_a_value_that_changed_is_made_again(theirs):
    run = rl.open(theirs)
    assert run.rollouts["reward"][0] != 0.25
    path = theirs / "rollout_data" / "1.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(json.loads(lines[0]) | {"score": 0.25}), *lines[1:]]) + "\n")
    assert run.look() and run.rollouts["reward"][0] == 0.25

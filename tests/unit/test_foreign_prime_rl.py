"""Runs of prime-rl in its four layouts, as it writes them and mutated, through the tables that everybody reads."""

import io
import json
import shutil
from pathlib import Path

import pytest
import zstandard
from opened_runs import MADE_UP, Tables, copy_made_up, kinds_under, lines_of, rewrite_lines, tear_last_line

import rlbench as rl
from rlbench.foreign import opening
from rlbench.foreign.episodes import NodeRecord, branch_to, leaves_of, response_positions, written_values
from rlbench.foreign.opening import refresh
from rlbench.foreign.registry import find_foreign_runs

pytestmark = pytest.mark.usefixtures("cache")

STEPS = [0.75, 0.5, 0.625]
STREAM = "monitors/file/traces"


@pytest.fixture
def copy(tmp_path):
    "A copy of one of the runs that may be changed."

    def copied(layout: str) -> Path:
        return Path(shutil.copytree(MADE_UP / "prime_rl" / layout, tmp_path / "tuesday"))

    return copied


def by_step(tables: Tables, column: str) -> list:
    return tables.column("steps", column)


@pytest.fixture
def september(copy) -> Path:
    "The run of autumn as the layout before it kept it: a folder for each step."
    run = copy("autumn")
    traces = run / STREAM
    packed = zstandard.ZstdDecompressor().stream_reader((traces / "stream/00000.jsonl.zst").read_bytes())
    lines = io.TextIOWrapper(packed).read() + (traces / "stream/00001.jsonl").read_text()
    shutil.copy(run / "monitors/file/metrics.jsonl", run / "metrics.jsonl")
    step_of = {}
    for line in lines.splitlines():
        (trace,) = json.loads(line)["traces"]
        step_of[trace["id"]] = trace["info"].pop("arrival")["step"]
        append(run / f"traces/step_{step_of[trace['id']]}/train/traces.jsonl", line)
    for producer in ("orchestrator", "trainer"):
        for update in lines_of(traces / f"annotations/{producer}/00000.jsonl"):
            folder = run / f"traces/step_{step_of[update['trace_id']]}/train/annotations"
            append(folder / f"{producer}.jsonl", json.dumps(update))
    shutil.rmtree(run / "monitors")
    return run


def append(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.write(line + "\n")


@pytest.mark.parametrize("layout", ["april", "july", "autumn"])
def test_means_and_groups_of_each_layout(layout):
    tables = Tables(MADE_UP / "prime_rl" / layout)
    assert tables.found.kind == f"prime-rl-{layout}" and by_step(tables, "reward_mean") == STEPS
    groups = tables["groups"].filter(tables["groups"]["step"].is_not_null())
    assert groups["reward_mean"].to_list() == [0.5, 1.0, 0.25, 0.75, 0.75, 0.5]
    assert groups["solved"].to_list() == [2, 4, 1, 3, 3, 2]
    assert not tables.source.damaged and not tables.source.unreadable


def test_april_has_no_versions_advantages_or_tokens():
    tables = Tables(MADE_UP / "prime_rl/april")
    assert not {"dispatched", "staleness", "advantage", "length"} & set(tables["rollouts"].columns)
    assert tables["tokens"].is_empty() and tables["evals"].is_empty()
    assert {"tokens", "rollouts.dispatched", "rollouts.advantage", "evals"} <= set(tables.source.missing)


@pytest.mark.parametrize("layout", ["july", "autumn"])
def test_staleness_fates_and_advantages(layout):
    tables = Tables(MADE_UP / "prime_rl" / layout)
    groups = tables["groups"]
    groups = groups.filter(groups["step"].is_not_null())
    assert groups["fate"].to_list() == ["trained", "filtered", *["trained"] * 4]
    assert groups["staleness"].to_list() == [0, None, 1, 0, 2, 0]
    assert by_step(tables, "lag_trajectory") == [0.0, 0.5, 1.0] and by_step(tables, "lag_max") == [0, 1, 2]
    rollouts = tables["rollouts"]
    assert rollouts["fate"].value_counts(sort=True).rows()[:2] == [("trained", 20), ("filtered", 4)]
    assert rollouts.filter(rollouts["fate"] == "trained")["advantage"].abs().sum() > 0
    failed = rollouts.filter(rollouts["fate"] == "environment_error")
    assert failed["reward"].to_list() == [None] and failed["message"].item()


def test_july_has_an_evaluation_settings_and_phases():
    tables = Tables(MADE_UP / "prime_rl/july")
    assert tables["evals"].select("step", "eval", "k", "tasks", "avg").rows() == [(3, "sums", 1, 3, 1.0)]
    assert ("orchestrator.group_size", "4") in tables["settings"].rows()
    assert {"step", "wait_for_batch", "broadcast_weights"} <= set(tables.column("phases", "name"))
    assert "start_logprobs" not in tables["tokens"].columns
    assert tables.source.missing["tokens.start_logprobs"]


def test_token_lists_are_aligned():
    tokens = Tables(MADE_UP / "prime_rl/autumn")["tokens"]
    trained = tokens.filter(tokens["advantages"].is_not_null())
    assert len(trained) == 20
    for name in ("logprobs", "advantages", "start_logprobs"):
        assert (trained[name].list.len() == trained["tokens"].list.len()).all()
        assert not trained[name].explode().is_null().any()


def test_live_rollouts_have_no_step():
    rollouts = Tables(MADE_UP / "prime_rl/autumn")["rollouts"]
    live = rollouts.filter(rollouts["fate"].is_null())
    assert live["step"].to_list() == [None, None] and live["dispatched"].to_list() == [3, 3]
    assert "7+5=12;" in live["text"].to_list()


def test_september_is_read_like_autumn(september):
    tables = Tables(september)
    assert tables.found.kind == "prime-rl-september" and by_step(tables, "reward_mean") == STEPS
    assert by_step(tables, "lag_max") == [0, 1, 2] and by_step(tables, "trained_rollouts") == [4, 8, 8]
    assert tables["tokens"]["start_logprobs"].is_not_null().sum() == 20


def test_another_run_of_july_opens(copy):
    "Other steps, fewer responses, unknown and missing fields, fields of another type, and a torn line."
    run = copy("july")
    for step in (3, 2, 1):
        (run / f"rollouts/step_{step}").rename(run / f"rollouts/step_{step + 9}")

    def change(record: dict) -> dict | None:
        trace = record["traces"][0]
        trace["nodes"][0]["surprise"] = {"deep": [1]}
        trace["timing"] = "soon"
        record["group"]["id"] = 7 + int(record["group"]["id"][-2:])
        del record["task"]
        return None if trace["id"].endswith("3") else record

    for path in run.glob("rollouts/*/train/*/*.jsonl"):
        rewrite_lines(path, change)
    tear_last_line(run / "rollouts/step_12/train/all/traces.jsonl")
    (run / "metrics.jsonl").unlink()
    tables = Tables(run)
    assert tables.column("steps", "step") == [10, 11, 12]
    assert by_step(tables, "reward_mean") == pytest.approx([4 / 6, 3 / 6, 5 / 6])
    assert by_step(tables, "trained_rollouts") == [3, 6, 6]
    assert tables["rollouts"].filter(tables["rollouts"]["fate"] == "trained")["seconds"].is_null().all()
    assert "metrics" in tables.source.missing


def test_annotations_are_cut_where_tools_answer(copy):
    "Of an episode of two turns, an annotation is cut to the tokens that the model wrote."
    run = copy("autumn")

    def change(record: dict) -> dict:
        trace = record["traces"][0]
        if trace["id"] == "trace0400":
            written = trace["nodes"][1]
            tool = {"parent": 1, "message": {"role": "tool", "content": "56"}, "token_ids": [5, 6], "mask": [False] * 2}
            again = {**written, "parent": 2, "token_ids": [9, 0], "mask": [False, True], "logprobs": [-0.5]}
            trace["nodes"] += [tool, again]
        return record

    rewrite_lines(run / STREAM / "stream/00001.jsonl", change)

    def annotate(record: dict) -> dict:
        if record["trace_id"] == "trace0400":
            record["branches"][0]["advantages"] = [0.0] * 4 + [0.25] * 10 + [0.0] * 3 + [0.75]
        return record

    rewrite_lines(run / STREAM / "annotations/orchestrator/00000.jsonl", annotate)
    tables = Tables(run)
    rollouts, tokens = tables["rollouts"], tables["tokens"]
    two_turns = rollouts.filter(rollouts["turns"] == 2)
    (row,) = tokens.filter(tokens["rollout"].is_in(two_turns["rollout"].to_list())).to_dicts()
    assert row["advantages"] == [0.25] * 10 + [0.75] and row["turn"] == [0] * 10 + [1] and len(row["tokens"]) == 11
    assert two_turns["said"].item()[1] == "56"


def test_a_waiting_response_is_trained_or_filtered_later(copy):
    "What arrived in the newest step waits, until that step, or a later one, was trained."
    run = copy("july")
    (run / "rollouts/step_3/train/effective/traces.jsonl").unlink()
    tables = Tables(run)
    rollouts = tables["rollouts"]
    newest = rollouts.filter(rollouts["step"] == 3, rollouts["reward"].is_not_null(), rollouts["group"] >= 0)
    assert newest["fate"].to_list() == [None] * 8
    shutil.copy(
        MADE_UP / "prime_rl/july/rollouts/step_3/train/effective/traces.jsonl", run / "rollouts/step_3/train/effective"
    )
    assert refresh(tables.found)
    rollouts = tables["rollouts"].filter(tables["rollouts"]["step"] == 3)
    assert rollouts["fate"].value_counts(sort=True).rows() == [("trained", 8), ("evaluated", 3)]


def test_metrics_alone_are_a_run(tmp_path):
    shutil.copy(MADE_UP / "prime_rl/july/metrics.jsonl", tmp_path / "figures.jsonl")
    tables = Tables(tmp_path)
    assert by_step(tables, "reward_mean") == STEPS and "rollouts" in tables.source.missing


def test_a_folder_inside_and_a_parent_of_several_runs_open():
    runs = MADE_UP / "prime_rl"
    assert kinds_under(runs) == ["prime-rl-april", "prime-rl-autumn", "prime-rl-july"]
    assert by_step(Tables(runs / "july/rollouts/step_2"), "reward_mean") == [0.5]
    assert by_step(Tables(runs / "july/rollouts/step_2/train/effective/traces.jsonl"), "reward_mean") == [0.5]


def test_the_last_branch_and_its_positions():
    "A compacted conversation: the second root begins another branch. A parent that is none ends the walk."
    nodes = [NodeRecord(token_ids=[1]), NodeRecord(parent=0, sampled=True, token_ids=[2], mask=[True])]
    nodes += [NodeRecord(token_ids=[3]), NodeRecord(parent=2, sampled=True, token_ids=[4, 5], mask=[True, True])]
    branch = branch_to([*nodes, NodeRecord(parent=3, token_ids=[6])], len(nodes))
    assert leaves_of([NodeRecord(), NodeRecord(parent=0), NodeRecord(parent=0)]) == [1, 2]
    assert [node.token_ids for node in branch] == [[3], [4, 5], [6]] and response_positions(branch) == [1, 2]
    assert len(branch_to([NodeRecord(parent=0), NodeRecord(parent=1)], 1)) == 2
    assert written_values(NodeRecord(token_ids=[1, 2], mask=[False, True]), ["a"]) == ["a"]
    assert written_values(NodeRecord(token_ids=[1, 2], mask=[True, True]), ["a"]) is None


def test_a_first_look_takes_the_same_parts_of_each_stream(copy, monkeypatch):
    "With files of metrics whole, and the last part of every stream. Small files are read together."
    monkeypatch.setattr(opening, "PIECE_BYTES", 110_000)
    run = copy("july")
    for step in range(4, 44):
        shutil.copytree(run / "rollouts/step_2", run / f"rollouts/step_{step}")
    (found,) = find_foreign_runs(run)
    pieces = opening.pieces_of(found)
    chosen = opening.first_pieces(pieces, 900_000)
    assert len(pieces) < 30 and "metrics.jsonl" in [piece.file.path.name for piece in chosen]
    steps: dict[str, set[str]] = {"all": set(), "effective": set()}
    for piece in chosen:
        for file in (*piece.small_files, piece.file):
            if "train" in file.path.parts:
                steps[file.path.parts[-2]].add(file.path.parts[-4])
    assert "step_43" in steps["all"] & steps["effective"]
    assert 8 <= len(steps["all"] & steps["effective"]) < 40


def test_a_piece_of_small_files_is_read_again_when_one_of_them_changes(copy):
    run = copy("july")
    tables = Tables(run)
    before = tables.source.keys
    with open(run / "rollouts/step_1/train/effective/traces.jsonl", "a") as file:
        file.write("torn")
    assert opening.refresh(tables.found)
    assert len(set(tables.source.keys) - set(before)) == 1 and by_step(tables, "reward_mean") == STEPS


def test_all_branches_of_an_episode_are_there(tmp_path):
    "An episode that was tried twice and then compacted: the last branch is the response, the others stand beside it."
    place = copy_made_up("prime_rl", tmp_path) / "july"
    paths = sorted((place / "rollouts").rglob("traces.jsonl"))
    key = next(lines_of(paths[0]))["traces"][0]["id"]

    def change(record: dict) -> dict:
        trace = record["traces"][0]
        if trace["id"] != key:
            return record
        first, answer = trace["nodes"][0], trace["nodes"][-1]
        other = answer | {"message": answer["message"] | {"content": "another way"}}
        root = {
            "message": {"role": "user", "content": "what was said so far"},
            "token_ids": [7, 7],
            "mask": [False] * 2,
        }
        last = answer | {"parent": len(trace["nodes"]) + 1, "message": {"role": "assistant", "content": "the end"}}
        trace["nodes"] += [other, root, last]
        trace.pop("num_output_tokens", None)
        assert first["message"]["role"] != "assistant"
        return record

    for path in paths:
        rewrite_lines(path, change)
    run = rl.open(place)
    (row,) = run.rollouts.filter(run.rollouts["key"] == key).to_dicts()
    assert row["branches"] == 3 and row["text"] == "the end" and run.rollouts["branches"].drop_nulls().len() == 1
    branches = run.branches.to_dicts()
    assert [(branch["rollout"], branch["branch"]) for branch in branches] == [(row["rollout"], 0), (row["rollout"], 1)]
    assert branches[1]["text"] == "another way" and branches[0]["prompt"] == branches[1]["prompt"]
    assert len(branches[0]["tokens"]) == len(branches[0]["logprobs"])
    assert row["length"] == 3 * len(branches[0]["tokens"])
    shown = run.rollout(row["rollout"])
    page = shown._repr_html_()
    assert "the last of 3 branches" in repr(shown) and "branch 2 of 3" in page and "another way" in page
    assert "<small>temperature</small>" not in page and "<small>level</small>" not in page  # neither was recorded

"Event files of OpenRLHF and of other systems, and the reader of event files against the package of TensorBoard."

import shutil
from pathlib import Path

import pytest

from rlbench.foreign.event_files import file_values
from rlbench.foreign.opening import cached_folder, opened_table, refresh
from rlbench.foreign.registry import find_foreign_runs
from rlbench.foreign.source import read_source


@pytest.fixture
def run(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    "A copy of a made-up run."
    monkeypatch.setenv("RLBENCH_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(root / "tests/foreign/openrlhf/monday", tmp_path / "some run"))


def open_only(path: Path, kind: str) -> Path:
    "The cached folder of the only run under a path."
    (found,) = find_foreign_runs(path)
    assert found.kind == kind
    refresh(found)
    return cached_folder(found)


def write_scalars(folder: Path, scalars: dict[str, float], step: int) -> Path:
    "An event file that the package writes."
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    for name, value in scalars.items():
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
        writer.add_event(Event(wall_time=1.5e9 + step, step=step, summary=summary))
    writer.close()
    return next(folder.glob("*tfevents*"))


def test_tables(run: Path) -> None:
    folder = open_only(run, "openrlhf")
    steps = opened_table(folder, "steps")
    assert steps["reward_mean"].to_list() == [0.75, 0.5, 0.625]
    assert steps["loss"].to_list() == pytest.approx([-0.01, -0.02, -0.03])
    assert steps["seconds"].to_list() == pytest.approx([11.9] * 3)
    rollouts = opened_table(folder, "rollouts")
    assert rollouts["text"][0] == "17+25=7+5=12:42" and rollouts["reward"].to_list() == [1.0, 0.0, 1.0]
    metrics = opened_table(folder, "metrics")
    assert metrics.filter(name="eval/sums/pass1")["value"].to_list() == [1.0]
    source = read_source(folder)
    absent = ("steps.solve_rate", "groups", "tokens", "evals", "rollouts.prompt", "rollouts.staleness")
    assert not any(source.has(name) for name in absent)


def test_values_as_the_package_reads_them(run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (path,) = run.glob("*tfevents*")
    package = EventAccumulator(str(run), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    theirs = [
        (tag, event.step, event.wall_time, event.value)
        for tag in package.Tags()["scalars"]
        for event in package.Scalars(tag)
    ]
    ours = [(each.tag, each.step, each.at, each.number) for each in file_values(path) if each.number is not None]
    assert sorted(ours) == sorted(theirs) and len(ours) > 50
    texts = {(each.tag, each.step): each.text for each in file_values(path) if each.text is not None}
    for tag in package.Tags()["tensors"]:
        for event in package.Tensors(tag):
            assert texts[tag, event.step] == event.tensor_proto.string_val[0].decode()


def test_newer_writers_put_scalars_into_tensors(tmp_path: Path) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    tensors = [TensorProto(dtype=1, float_val=[0.5]), TensorProto(dtype=2, tensor_content=b"\0\0\0\0\0\0\xe0?")]
    writer = EventFileWriter(str(tmp_path))
    for step, tensor in enumerate(tensors):
        value = Summary.Value(tag="reward", tensor=tensor)
        writer.add_event(Event(wall_time=1.0, step=step, summary=Summary(value=[value])))
    writer.close()
    (path,) = tmp_path.glob("*tfevents*")
    assert [(each.step, each.number) for each in file_values(path)] == [(0, 0.5), (1, 0.5)]


def test_any_other_event_files(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "logs/other"
    write_scalars(folder, {"critic/score/mean": 0.25, "perf/mfu": 0.5}, 7)
    opened = open_only(tmp_path / "logs", "tensorboard")
    assert opened_table(opened, "steps").select("step", "reward_mean").rows() == [(7, 0.25)]
    assert "perf/mfu" in opened_table(opened, "metrics")["name"].to_list()


def test_changed_copy(run: Path) -> None:
    (path,) = run.glob("*tfevents*")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    folder = open_only(run, "openrlhf")
    assert opened_table(folder, "steps")["reward_mean"].to_list()[:2] == [0.75, 0.5]
    broken = bytearray(data)
    broken[len(data) // 2] ^= 0xFF
    path.write_bytes(broken)
    assert len(opened_table(open_only(run, "openrlhf"), "steps"))

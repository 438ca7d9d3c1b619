"""What the sink tensorboard has written."""

from pathlib import Path


def from_tensorboard(folder: Path, environment: dict | None = None) -> tuple[dict, list]:
    "Numbers as name -> [(version, value)], notes as [(version, text)]. No variable of `environment` is needed for it."
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    numbers = {tag: [(e.step, e.value) for e in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
    notes = (
        [(e.step, e.tensor_proto.string_val[0].decode()) for e in board.Tensors("commands")]
        if "commands" in board.Tags()["tensors"]
        else []
    )
    return numbers, notes

"""Files in zstd's seekable format are read frame by frame, and each line once."""

import struct
from pathlib import Path

import pytest
import zstandard

from rlbench.foreign import opening
from rlbench.foreign.formats import LinesFile
from rlbench.foreign.rows import Metric
from rlbench.foreign.source_files import packed_frames, zstd_lines

LINES = [b'{"n": %d, "pad": "%s"}\n' % (number, b"x" * (number * 7 % 40)) for number in range(60)]


def write_seekable(path: Path, frame_bytes: int, checksums: bool = False) -> None:
    "The lines in frames of so many bytes, which end within lines, and the table of the frames."
    text = b"".join(LINES)
    table, packed = b"", b""
    for start in range(0, len(text), frame_bytes):
        part = text[start : start + frame_bytes]
        frame = zstandard.ZstdCompressor().compress(part)
        packed += frame
        table += struct.pack("<II", len(frame), len(part)) + (b"\0" * 4 if checksums else b"")
    count = -(-len(text) // frame_bytes)
    table += struct.pack("<IBI", count, 0x80 if checksums else 0, 0x8F92EAB1)
    path.write_bytes(packed + struct.pack("<II", 0x184D2A5E, len(table)) + table)


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("frame_bytes", [25, 100, 333, 100_000])
def test_each_line_is_read_in_one_part(tmp_path, frame_bytes, checksums):
    path = tmp_path / "00000.jsonl.zst"
    write_seekable(path, frame_bytes, checksums)
    frames = packed_frames(path)
    assert sum(frame.unpacked_bytes for frame in frames) == sum(map(len, LINES)) and list(zstd_lines(path)) == LINES
    parts = [list(zstd_lines(path, frame.start, frame.start + frame.size)) for frame in frames]
    assert [line for part in parts for line in part] == LINES


def read_number(record: dict):
    yield Metric(name="n", value=record["n"])


def test_pieces_of_a_packed_file(tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "PIECE_BYTES", 300)
    monkeypatch.setattr(opening, "BATCH_ROWS", 4)
    path = tmp_path / "00000.jsonl.zst"
    write_seekable(path, 100)
    pieces = opening.cut_pieces([LinesFile(path, read_number, is_zstd=True)])
    assert len(pieces) > 3 and sum(piece.size for piece in pieces) == sum(map(len, LINES))
    values = [
        value for piece in pieces for value in opening.read_piece(piece)[0].get("metrics", {"value": []})["value"]
    ]
    assert values == list(range(60))


def test_a_file_without_a_table_of_frames_is_one_piece(tmp_path):
    path = tmp_path / "00000.jsonl.zst"
    path.write_bytes(zstandard.ZstdCompressor().compress(b"".join(LINES)))
    assert packed_frames(path) == [] and list(zstd_lines(path)) == LINES
    (piece,) = opening.cut_pieces([LinesFile(path, read_number, is_zstd=True)])
    assert len(opening.read_piece(piece)[0]["metrics"]) == 60


def test_a_wrong_table_is_not_believed(tmp_path):
    path = tmp_path / "00000.jsonl.zst"
    write_seekable(path, 100)
    content = path.read_bytes()
    path.write_bytes(content[:-9] + struct.pack("<IBI", 10**6, 0, 0x8F92EAB1))
    assert packed_frames(path) == [] and list(zstd_lines(path)) == LINES

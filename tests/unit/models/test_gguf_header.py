"""Hostile and damaged headers: always a ModelFileError, at once, with little memory."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import pytest

from services.models.errors import ModelFileError
from services.models.gguf_header import MAX_FIELDS, MAX_TENSORS, read_header
from tests.models.tiny import Tiny, write_gguf

U32, ARRAY, STRING = 4, 9, 8


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def head(num_tensors: int = 0, num_fields: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_fields)


def field(key: bytes, type_id: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", type_id) + value


def tensor(name: bytes, dims: list[int], type_id: int, offset: int) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + shape + struct.pack("<IQ", type_id, offset)


HOSTILE = {
    "empty": (b"", "cannot be read"),
    "short": (b"GG", "magic"),
    "other format": (b"PK\x03\x04" + bytes(100), "magic"),
    "only magic": (b"GGUF", "truncated"),
    "version 1": (head(version=1), "version 1"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "too many tensors": (head(num_tensors=2**63), "tensors"),
    "tensors past the limit": (head(num_tensors=MAX_TENSORS + 1), "tensors"),
    "too many fields": (head(num_fields=MAX_FIELDS + 1), "fields"),
    "missing fields": (head(num_fields=7), "truncated"),
    "long key": (head(num_fields=1) + struct.pack("<Q", 2**62), "key"),
    "key past the end": (head(num_fields=1) + struct.pack("<Q", 100) + b"abc", "truncated"),
    "array of 2^40": (
        head(num_fields=1) + field(b"a", ARRAY, struct.pack("<IQ", U32, 2**40)),
        "elements",
    ),
    "array past the end": (
        head(num_fields=1) + field(b"a", ARRAY, struct.pack("<IQ", U32, 2**20)),
        "truncated",
    ),
    "many strings": (
        head(num_fields=1) + field(b"a", ARRAY, struct.pack("<IQ", STRING, 2**20)) + bytes(160),
        "truncated",
    ),
    "nested array": (
        head(num_fields=1) + field(b"a", ARRAY, struct.pack("<IQ", ARRAY, 1)) + bytes(40),
        "type 9",
    ),
    "unknown value type": (head(num_fields=1) + field(b"a", 99, bytes(8)), "type 99"),
    "string not UTF-8": (head(num_fields=1) + field(b"a", STRING, text(b"\xff\xfe")), "UTF-8"),
    "key twice": (head(num_fields=2) + field(b"a", U32, bytes(4)) * 2, "twice"),
    "alignment 0": (
        head(num_fields=1) + field(b"general.alignment", U32, struct.pack("<I", 0)),
        "alignment",
    ),
    "alignment 12": (
        head(num_fields=1) + field(b"general.alignment", U32, struct.pack("<I", 12)),
        "alignment",
    ),
    "alignment text": (
        head(num_fields=1) + field(b"general.alignment", STRING, text(b"x")),
        "alignment",
    ),
    "no dimensions": (head(num_tensors=1) + tensor(b"t", [], 0, 0), "dimensions"),
    "dimensions overflow": (head(num_tensors=1) + tensor(b"t", [2**63] * 4, 0, 0), "shape"),
    "zero dimension": (head(num_tensors=1) + tensor(b"t", [0], 0, 0), "shape"),
    "partial quant block": (head(num_tensors=1) + tensor(b"t", [33], 2, 0), "shape"),
    "unsupported type": (head(num_tensors=1) + tensor(b"t", [256], 16, 0), "type 16"),
    "tensor past the end": (head(num_tensors=1) + tensor(b"t", [4], 0, 0), "truncated"),
    "offset past the end": (
        head(num_tensors=1) + tensor(b"t", [1], 0, 2**64 - 32) + bytes(64),
        "truncated",
    ),
    "offset not aligned": (head(num_tensors=1) + tensor(b"t", [1], 0, 4) + bytes(64), "truncated"),
    "tensor twice": (head(num_tensors=2) + tensor(b"t", [1], 0, 0) * 2 + bytes(64), "twice"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_header(tmp_path: Path, name: str) -> None:
    content, problem = HOSTILE[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError, match=problem) as caught:
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(ModelFileError, match=path.name):
            read_header(path)


def test_truncation_anywhere_is_noticed(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "tiny.gguf", Tiny()).read_bytes()
    path = tmp_path / "cut.gguf"
    generator = random.Random(5)
    # The writer pads the end of the file to the alignment, so the last 32 bytes may be unused.
    for _ in range(60):
        path.write_bytes(whole[: generator.randrange(len(whole) - 32)])
        with pytest.raises(ModelFileError):
            read_header(path)


def test_flipped_bytes_never_give_another_exception(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "tiny.gguf", Tiny()).read_bytes()
    path = tmp_path / "flipped.gguf"
    generator = random.Random(6)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(generator.randrange(1, 4)):
            damaged[generator.randrange(4000)] = generator.randrange(256)
        path.write_bytes(damaged)
        try:
            header = read_header(path)
        except ModelFileError:
            continue
        assert all(info.offset + info.num_bytes <= len(whole) for info in header.tensors.values())

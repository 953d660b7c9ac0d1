"""Weights as the kernels want them, kept in the user's cache, so that a second start only reads.

A file is in the safetensors format, with what it was made from and a checksum in its metadata.

Invariants: a file is read only where its key, its sizes and its checksum are right, and a key names
everything that shaped the weights; a half-written file is never visible; nothing is read from a
directory that others can write to; the files together take at most MAX_TOTAL_BYTES, the least
lately used go first.

Shell: reads and writes the cache directory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import torch

from kernels.huge_pages import zeros_in_huge_pages

MAX_TOTAL_BYTES: Final = 4 << 30
MAX_HEADER_BYTES: Final = 4 << 20
CHUNK_BYTES: Final = 1 << 20
"""Read and summed at once: what stays in the second-level cache."""
WHOLE_LINE: Final = 64
SUFFIX: Final = ".safetensors"

DTYPES: Final = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "I8": torch.int8,
}
NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


class DamagedFileError(Exception):
    """A file of prepared weights that cannot be used; the text says why."""


class _Place(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def key_of(model: Path, made_by: Sequence[Path], *settings: object) -> str:
    """A digest of what shapes prepared weights.

    model:    a file, or a directory whose files count; they go by name, size and time of change
    made_by:  source files of the code that prepares
    settings: whatever else has a say
    """
    digest = hashlib.sha256(repr(settings).encode())
    files = (
        sorted(path for path in model.iterdir() if path.is_file()) if model.is_dir() else [model]
    )
    for path in files:
        status = path.stat()
        digest.update(repr((str(path.resolve()), status.st_size, status.st_mtime_ns)).encode())
    for path in made_by:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


class PreparedWeights:
    """The files of one directory, by key."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def load(self, key: str) -> dict[str, torch.Tensor] | None:
        """The tensors that were saved, or None; raises DamagedFileError, OSError.

        They share one piece of memory, in large pages where the system has them.
        """
        path = self._path(key)
        if not path.exists():
            return None
        _require_private(self._directory)
        with path.open("rb") as file:
            header = _read_header(file, key, path.stat().st_size)
            num_bytes = max(place.end for place in header.places.values())
            memory = zeros_in_huge_pages((num_bytes,), torch.uint8)
            if _fill(memory, file, header.begin) != header.checksum:
                raise DamagedFileError(f"{path}: its checksum is wrong")
        os.utime(path)
        return {
            name: memory[place.start : place.end].view(place.dtype).view(place.shape)
            for name, place in header.places.items()
        }

    def save(self, key: str, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether they were kept: False where they would fill the cache or the disk.

        tensors: contiguous, on the CPU, of the dtypes of DTYPES
        """
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_private(self._directory)
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        # As much again stays free: the cache is a convenience, a full disk is none.
        if num_bytes > MAX_TOTAL_BYTES or 2 * num_bytes > shutil.disk_usage(self._directory).free:
            return False
        self._make_room(MAX_TOTAL_BYTES - num_bytes)
        with tempfile.TemporaryDirectory(dir=self._directory) as folder:
            written = Path(folder) / "weights"
            with written.open("wb") as file:
                _write(file, key, tensors)
            written.replace(self._path(key))
        return True

    def _path(self, key: str) -> Path:
        return self._directory / f"{key}{SUFFIX}"

    def _make_room(self, limit: int) -> None:
        """Drop the least lately used files until the others take at most `limit` bytes."""
        files = [(path.stat(), path) for path in self._directory.glob(f"*{SUFFIX}")]
        files.sort(key=lambda entry: entry[0].st_mtime_ns, reverse=True)
        total = 0
        for status, path in files:
            total += status.st_size
            if total > limit:
                path.unlink(missing_ok=True)


def _require_private(directory: Path) -> None:
    status = directory.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise DamagedFileError(f"others can write to {directory}; make it the user's own")


def _write(file: BinaryIO, key: str, tensors: Mapping[str, torch.Tensor]) -> None:
    # Whole lines first, so that every large tensor begins with one.
    names = sorted(tensors, key=lambda name: (tensors[name].nbytes % WHOLE_LINE != 0, name))
    entries: dict[str, Any] = {}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        entries[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": shape,
            "data_offsets": [start, end],
        }
    checksum = _checksum_of(entries)
    for name in names:
        checksum = zlib.crc32(_bytes_of(tensors[name]), checksum)
    entries["__metadata__"] = {"key": key, "crc32": str(checksum)}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    file.write(len(header).to_bytes(8, "little") + header)
    for name in names:
        file.write(_bytes_of(tensors[name]))


def _checksum_of(entries: dict[str, Any]) -> int:
    """What the checksum of the data begins with, so that it covers the header as well."""
    return zlib.crc32(json.dumps(entries, sort_keys=True).encode())


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    assert tensor.is_contiguous(), "a tensor that is one run of memory"
    raw: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(raw)


class _Header(NamedTuple):
    """Where each tensor is in the data that follows, what the checksum begins with, and what it
    has to come to.
    """

    places: dict[str, _Place]
    begin: int
    checksum: int


def _read_header(file: BinaryIO, key: str, size: int) -> _Header:
    length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise DamagedFileError(f"{file.name}: a header of {length:,} bytes")
    try:
        entries = json.loads(file.read(length))
        metadata = entries.pop("__metadata__")
        places = {
            name: _Place(DTYPES[entry["dtype"]], tuple(entry["shape"]), *entry["data_offsets"])
            for name, entry in entries.items()
        }
        found, checksum = metadata["key"], int(metadata["crc32"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFileError(f"{file.name}: its header is not readable: {error!r}") from error
    if found != key:
        raise DamagedFileError(f"{file.name}: was made from something else")
    end = 0
    for place in sorted(places.values(), key=lambda place: place.start):
        sound = place.start == end and place.end - end == math.prod(place.shape) * (
            place.dtype.itemsize
        )
        if not sound:
            raise DamagedFileError(f"{file.name}: its tensors do not follow each other")
        end = place.end
    if end == 0 or size != 8 + length + end:
        raise DamagedFileError(f"{file.name}: is {size:,} bytes long, should be {8 + length + end}")
    return _Header(places, _checksum_of(entries), checksum)


def _fill(memory: torch.Tensor, file: BinaryIO, checksum: int) -> int:
    """Read the rest of the file; returns the checksum that began before it."""
    view = _bytes_of(memory)
    done = 0
    while done < len(view):
        count = file.readinto(view[done : done + CHUNK_BYTES])  # type: ignore[attr-defined]
        if not count:
            raise DamagedFileError(f"{file.name}: ends too early")
        checksum = zlib.crc32(view[done : done + count], checksum)
        done += count
    return checksum

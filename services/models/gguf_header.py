"""Reading the header of a GGUF file without trusting it.

Invariants: no length in the file is believed before it is compared with a limit and with what is
left of the file, so memory and time are bounded by the file's own size; every tensor lies inside
the file. Anything else is a ModelFileError.

Shell: reads one file. Format: the GGUF specification of the ggml project, versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from services.models.errors import ModelFileError

MAGIC: Final = b"GGUF"
SUPPORTED_VERSIONS: Final = (2, 3)
DEFAULT_ALIGNMENT: Final = 32

MAX_TENSORS: Final = 1 << 16
MAX_FIELDS: Final = 1 << 12
MAX_KEY_BYTES: Final = 1 << 16
MAX_STRING_BYTES: Final = 1 << 22
MAX_ARRAY_LENGTH: Final = 1 << 21
MAX_DIMENSIONS: Final = 4
MAX_ELEMENTS: Final = 1 << 40
MAX_ALIGNMENT: Final = 1 << 20
"""Several times what the largest published files need."""

TYPE_STRING: Final = 8
TYPE_ARRAY: Final = 9
SCALARS: Final[dict[int, str]] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}

QUANT_BLOCKS: Final[dict[int, tuple[str, int, int]]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
"""Tensor types that can be loaded: id in the file -> (name, elements and bytes of a block)."""

SUPPORTED_TYPES: Final = ", ".join(name for name, _, _ in QUANT_BLOCKS.values())

Value: TypeAlias = int | float | bool | str | list[str] | npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: shape slowest axis first, bytes [offset, offset + num_bytes)."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata fields by key, and tensors by name."""

    fields: dict[str, Value]
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> GgufHeader:
    """Parse and check the header; raises ModelFileError for anything but a sound GGUF file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _HeaderParser(path, data).parse()
    except FileNotFoundError:
        raise ModelFileError(path, "the file does not exist") from None
    except (OSError, ValueError) as error:
        # mmap refuses an empty file with ValueError.
        raise ModelFileError(path, f"cannot be read: {error}") from error


class _HeaderParser:
    """A cursor over the file; every read checks that the bytes are there."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 0

    def parse(self) -> GgufHeader:
        num_tensors, num_fields = self._preamble()
        fields: dict[str, Value] = {}
        for _ in range(num_fields):
            key = self._string("a metadata key", MAX_KEY_BYTES)
            if key in fields:
                raise self._error(f"metadata key {key!r} occurs twice")
            fields[key] = self._value(key)
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = fields.get("general.alignment", DEFAULT_ALIGNMENT)
        if (
            not isinstance(alignment, int)
            or not 1 <= alignment <= MAX_ALIGNMENT
            or alignment & (alignment - 1)
        ):
            raise self._error(f"general.alignment is {alignment!r}, not a power of two")
        start = -(-self._at // alignment) * alignment
        return GgufHeader(fields, self._place(infos, start, alignment))

    def _preamble(self) -> tuple[int, int]:
        if self._size < len(MAGIC) or self._data[: len(MAGIC)] != MAGIC:
            raise self._error("not a GGUF file (wrong magic)", "GGUF version 2 and 3")
        self._at = len(MAGIC)
        version = self._number("<I", "the version")
        if version not in SUPPORTED_VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            order = " (big-endian)" if swapped in SUPPORTED_VERSIONS else ""
            shown = swapped if order else version
            raise self._error(f"GGUF version {shown}{order}", "little-endian GGUF version 2 and 3")
        num_tensors = self._count("tensors", MAX_TENSORS)
        return num_tensors, self._count("metadata fields", MAX_FIELDS)

    def _error(self, problem: str, supported: str = "") -> ModelFileError:
        return ModelFileError(self._path, problem, supported)

    def _take(self, num_bytes: int, what: str) -> int:
        """Advance over num_bytes that must be there; returns where they start."""
        start = self._at
        if num_bytes > self._size - start:
            raise self._error(
                f"truncated or damaged: {what} needs {num_bytes} bytes at {start}, "
                f"the file has {self._size}"
            )
        self._at = start + num_bytes
        return start

    def _number(self, layout: str, what: str) -> int:
        start = self._take(struct.calcsize(layout), what)
        return int(struct.unpack_from(layout, self._data, start)[0])

    def _count(self, what: str, limit: int) -> int:
        count = self._number("<Q", f"the number of {what}")
        if count > limit:
            raise self._error(f"{count} {what}", f"at most {limit}")
        return count

    def _string(self, what: str, limit: int = MAX_STRING_BYTES) -> str:
        length = self._number("<Q", what)
        if length > limit:
            raise self._error(f"{what} is {length} bytes long", f"at most {limit}")
        start = self._take(length, what)
        try:
            return self._data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise self._error(f"{what} is not UTF-8") from None

    def _value(self, key: str) -> Value:
        type_id = self._number("<I", f"the type of {key!r}")
        if type_id == TYPE_STRING:
            return self._string(f"the value of {key!r}")
        if type_id == TYPE_ARRAY:
            return self._array(key)
        value: int | float | bool = self._scalars(type_id, 1, key)[0].item()
        return value

    def _array(self, key: str) -> Value:
        type_id = self._number("<I", f"the element type of {key!r}")
        length = self._count(f"elements of {key!r}", MAX_ARRAY_LENGTH)
        if type_id == TYPE_STRING:
            what = f"an element of {key!r}"
            return [self._string(what) for _ in range(length)]
        return self._scalars(type_id, length, key)

    def _scalars(self, type_id: int, length: int, key: str) -> npt.NDArray[np.generic]:
        layout = SCALARS.get(type_id)
        if layout is None:
            raise self._error(f"{key!r} has the unknown value type {type_id}")
        kind = np.dtype(layout)
        start = self._take(kind.itemsize * length, f"the value of {key!r}")
        # A copy: the map is closed when the header has been read.
        return np.frombuffer(self._data[start : self._at], dtype=kind)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("a tensor name", MAX_KEY_BYTES)
        num_dimensions = self._number("<I", f"the dimensions of {name!r}")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._error(
                f"tensor {name!r} has {num_dimensions} dimensions", f"1 to {MAX_DIMENSIONS}"
            )
        lengths = [self._number("<Q", f"the shape of {name!r}") for _ in range(num_dimensions)]
        type_id = self._number("<I", f"the type of {name!r}")
        offset = self._number("<Q", f"the offset of {name!r}")
        return name, tuple(reversed(lengths)), type_id, offset

    def _place(
        self, infos: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int
    ) -> dict[str, TensorInfo]:
        """Check each tensor's extent, and make its offset absolute."""
        tensors: dict[str, TensorInfo] = {}
        for name, shape, type_id, offset in infos:
            if name in tensors:
                raise self._error(f"tensor {name!r} occurs twice")
            if type_id not in QUANT_BLOCKS:
                raise self._error(f"tensor {name!r} has type {type_id}", SUPPORTED_TYPES)
            type_name, block_elements, block_bytes = QUANT_BLOCKS[type_id]
            num_elements = math.prod(shape)
            if not 1 <= num_elements <= MAX_ELEMENTS or shape[-1] % block_elements:
                raise self._error(f"tensor {name!r} has shape {shape}, wrong for {type_name}")
            num_bytes = num_elements // block_elements * block_bytes
            if offset % alignment or start + offset + num_bytes > self._size:
                raise self._error(
                    f"truncated or damaged: tensor {name!r} needs bytes {start + offset} to "
                    f"{start + offset + num_bytes}, the file has {self._size}"
                )
            tensors[name] = TensorInfo(name, shape, type_id, start + offset, num_bytes)
        return tensors

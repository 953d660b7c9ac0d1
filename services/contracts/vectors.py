"""Integer vectors on the wire: raw little-endian int32 buffers.

A MessagePack list of 256 ints costs two orders of magnitude more than its buffer.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from .errors import WireError

Int32Array: TypeAlias = npt.NDArray[np.int32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

INT32_LE = np.dtype("<i4")

EMPTY = b""

MAX_VECTOR_BYTES = 4 * 1024 * 1024
Vector = Annotated[bytes, msgspec.Meta(max_length=MAX_VECTOR_BYTES)]


def pack(values: Iterable[int] | Int32Array) -> bytes:
    """`values`: int32 [n] (or ints in range) -> 4 n bytes. 3, -1 -> 03000000 ffffffff."""
    if isinstance(values, np.ndarray):
        return values.astype(INT32_LE, copy=False).tobytes()
    if isinstance(values, list) and not values:
        return EMPTY
    return np.fromiter(values, dtype=INT32_LE).tobytes()


def unpack(buffer: bytes) -> Int32Array:
    """4 n bytes -> read-only int32 [n]. Raises WireError where the length is no multiple of 4."""
    if len(buffer) % 4:
        raise WireError(f"an int32 vector has {len(buffer)} bytes, which is no multiple of 4")
    return np.frombuffer(buffer, dtype=INT32_LE)

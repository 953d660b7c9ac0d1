from __future__ import annotations

import numpy as np
import pytest

from services.contracts.errors import WireError
from services.contracts.vectors import EMPTY, pack, unpack


@pytest.mark.parametrize(
    ("values", "buffer"),
    [
        ([], ""),
        ([3, -1], "03000000ffffffff"),
        ([2**31 - 1, -(2**31)], "ffffff7f00000080"),
        (np.array([1, 2], dtype=np.int64), "0100000002000000"),
        (np.array([258], dtype=">i4"), "02010000"),
    ],
)
def test_vectors_are_little_endian_int32(values: list[int], buffer: str) -> None:
    assert pack(values).hex() == buffer
    assert unpack(bytes.fromhex(buffer)).tolist() == list(values)


def test_generators_and_views_pack_too() -> None:
    assert pack(i for i in range(3)) == pack([0, 1, 2])
    assert pack({4: "a", 5: "b"}.keys()) == pack([4, 5])
    assert pack(np.arange(6, dtype=np.int32)[::2]) == pack([0, 2, 4])


def test_an_unpacked_vector_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        unpack(pack([1]))[0] = 2


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_torn_vector_is_refused(length: int) -> None:
    with pytest.raises(WireError, match="multiple of 4"):
        unpack(bytes(length))


def test_empty_is_empty() -> None:
    assert len(unpack(EMPTY)) == 0

from __future__ import annotations

import numpy as np
import pytest

from kernels.uniform import philox4x32, uniform

# From the known-answer file of the Random123 library, "philox4x32 10": counter, key, result.
KNOWN_ANSWERS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text: str) -> np.ndarray:
    return np.array([[int(word, 16) for word in text.split()]], dtype=np.uint32)


@pytest.mark.parametrize("counter, key, expected", KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, expected: str) -> None:
    assert np.array_equal(philox4x32(words(counter), words(key)), words(expected))


def test_open_interval_and_even_spread() -> None:
    positions = np.arange(20000, dtype=np.uint64)
    draws = uniform(np.full(20000, 42, dtype=np.uint64), positions)
    assert draws.dtype == np.float32
    assert float(draws.min()) > 0.0 and float(draws.max()) < 1.0
    counts, _ = np.histogram(draws, bins=20, range=(0, 1))
    # Chi-square with 19 degrees of freedom: 43.8 is passed once in a thousand.
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8


def test_extreme_words_stay_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    one = np.ones(1, dtype=np.uint64)
    for word in (0, 2**32 - 1):
        monkeypatch.setattr(
            "kernels.uniform.philox4x32",
            lambda counter, key, word=word: np.full((1, 4), word, dtype=np.uint32),
        )
        assert 0.0 < float(uniform(one, one)[0]) < 1.0


def test_depends_on_seed_and_position_alone() -> None:
    seeds = np.array([1, 2, 2**64 - 1, 1], dtype=np.uint64)
    positions = np.array([10, 10, 2**40, 11], dtype=np.uint64)
    together = uniform(seeds, positions)
    assert len(set(together.tolist())) == 4
    for row in range(4):
        assert uniform(seeds[row : row + 1], positions[row : row + 1])[0] == together[row]

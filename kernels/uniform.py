"""One uniform number for each (seed, position): the counter-based generator Philox4x32-10.

Invariant: the number depends on the seed and the position alone, never on the batch, the step, the
process or the device, so a restarted request draws the same tokens again.

Pure: numpy only. Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; the
known-answer vectors of the Random123 library are in the tests.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt32s = npt.NDArray[np.uint32]
UInt64s = npt.NDArray[np.uint64]

NUM_ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL_INCREMENTS = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))
LOW_WORD = np.uint64(0xFFFFFFFF)
WORD_BITS = np.uint64(32)
FLOAT32_FRACTION_BITS = 23


def philox4x32(counter: UInt32s, key: UInt32s) -> UInt32s:
    """Philox4x32-10 of each row.

    counter: (n, 4) uint32; key: (n, 2) uint32; returns (n, 4) uint32
    """
    c0, c1, c2, c3 = (counter[:, word].copy() for word in range(4))
    k0, k1 = key[:, 0].copy(), key[:, 1].copy()
    for _ in range(NUM_ROUNDS):
        product0 = c0.astype(np.uint64) * MULTIPLIERS[0]
        product1 = c2.astype(np.uint64) * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            _high(product1) ^ c1 ^ k0,
            _low(product1),
            _high(product0) ^ c3 ^ k1,
            _low(product0),
        )
        k0 = k0 + WEYL_INCREMENTS[0]
        k1 = k1 + WEYL_INCREMENTS[1]
    return np.stack((c0, c1, c2, c3), axis=1)


def uniform(seeds: UInt64s, positions: UInt64s) -> npt.NDArray[np.float32]:
    """One number in the open interval (0, 1) for each (seed, position).

    seeds, positions: (n) uint64; returns (n) float32

    The seed is the key and the position the counter. The top 23 bits b of the first word give
    (b + 1/2) / 2^23, which float32 holds exactly and which is never 0 or 1.
    """
    counter = np.zeros((positions.shape[0], 4), dtype=np.uint32)
    counter[:, 0], counter[:, 1] = _low(positions), _high(positions)
    key = np.stack((_low(seeds), _high(seeds)), axis=1)
    top_bits = philox4x32(counter, key)[:, 0] >> np.uint32(32 - FLOAT32_FRACTION_BITS)
    halves = top_bits.astype(np.float64) + 0.5
    return (halves / float(1 << FLOAT32_FRACTION_BITS)).astype(np.float32)


def _low(words: UInt64s) -> UInt32s:
    return (words & LOW_WORD).astype(np.uint32)


def _high(words: UInt64s) -> UInt32s:
    return (words >> WORD_BITS).astype(np.uint32)

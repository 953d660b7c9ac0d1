"""Can a sequence ever run, and may it start now?

Pure: numpy only.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from services.contracts.vectors import Int32Array

WATERMARK: Final = 0.01


def never_fits(max_total_tokens: int, block_size: int, num_usable: int) -> bool:
    """True where the sequence alone would outgrow the pool; its last token needs no slot."""
    return -(-(max_total_tokens - 1) // block_size) > num_usable


def watermark_blocks(num_usable: int, num_running: int) -> int:
    """Blocks that must stay free after an admission, so that running sequences can grow.

    One for every two running sequences, at least 1 % of the pool; nothing where nothing runs, or no
    sequence that needs the whole pool would ever start.
    """
    if num_running == 0:
        return 0
    return max(-(-num_running // 2), -(-num_usable // round(1 / WATERMARK)))


def peak_tokens(tokens: Int32Array, more: Int32Array) -> int:
    """Most tokens that sequences hold at once, if each grows as expected and then leaves.

    tokens, more: int32 [n], what each has and is expected to add. All grow by one a step, so the
    peak is just before one leaves: when the one with r to go ends, those with as much or more to go
    have grown by r (the estimate of LightLLM's past-future scheduler). tokens [10, 5], more [1, 8]:
    max(5 + 8, 15 + 2 * 1) = 17.
    """
    order = np.argsort(-more, kind="stable")
    held = np.cumsum(tokens[order], dtype=np.int64)
    grown = np.arange(1, len(order) + 1) * more[order]
    return int((held + grown).max(initial=0))

"""Can a sequence ever run, and may it start now? Admitting without a margin preempts all the time:
thrashing, where recomputation eats the device.

Pure.
"""

from __future__ import annotations

from math import ceil


def never_fits(max_total_tokens: int, block_size: int, num_usable: int) -> bool:
    """True where the sequence alone would outgrow the pool; its last token needs no slot."""
    return -(-(max_total_tokens - 1) // block_size) > num_usable


def watermark_blocks(num_usable: int, num_running: int, share: float) -> int:
    """Blocks that must stay free after an admission, so that running sequences can grow.

    One for every two running sequences, at least `share` of the pool; nothing where nothing runs,
    or no sequence that needs the whole pool would ever start.
    """
    if num_running == 0:
        return 0
    return max(-(-num_running // 2), ceil(num_usable * share))

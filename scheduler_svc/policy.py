"""Which waiting sequence joins, and which running one gives way: small pure functions over plain
numbers.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from .sequence import Sequence

WATERMARK: Final = 0.01


def margin_blocks(num_usable: int, num_running: int) -> int:
    """Blocks that must stay free after an admission, so that running sequences can grow without a
    preemption.

    One block for each running sequence, at least 1 % of the pool; nothing where nothing runs, or no
    sequence that needs the whole pool would ever start.
    """
    if num_running == 0:
        return 0
    return max(num_running, -(-num_usable // round(1 / WATERMARK)))


def may_join(num_needed: int, num_free: int, num_usable: int, num_running: int) -> bool:
    """True where `num_needed` more blocks leave the margin in `num_free`."""
    return num_needed + margin_blocks(num_usable, num_running) <= num_free


def never_fits(max_total_tokens: int, block_size: int, num_usable: int) -> bool:
    """True where the sequence alone would outgrow the pool; its last token needs no slot."""
    return -(-(max_total_tokens - 1) // block_size) > num_usable


def victim(running: Iterable[Sequence]) -> Sequence:
    """The newest of the lowest priority (largest number)."""
    return max(running, key=lambda seq: seq.order)

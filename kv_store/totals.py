"""What a pool has done so far, for reports.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PoolTotals:
    """Since the pool was opened; queries and hits in blocks."""

    lookups: int = 0
    query_blocks: int = 0
    hit_blocks: int = 0
    host_hit_blocks: int = 0
    evictions: int = 0
    quota_evictions: int = 0
    forgotten: int = 0
    copies_out: int = 0
    copies_in: int = 0

"""What the scheduler has done since its start, for beats.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Totals:
    """num_step_seqs: lanes that computed, summed over steps. Prefix queries and hits in tokens."""

    num_preemptions: int = 0
    num_steps: int = 0
    num_step_seqs: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0

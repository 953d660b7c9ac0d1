"""What the scheduler may decide in more than one way: one small pure function per choice, by name.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

Batching: TypeAlias = Literal["continuous", "dynamic", "static"]
StepKind: TypeAlias = Literal["mixed", "separate"]
Queue: TypeAlias = Literal["first-come", "fit", "fair"]
Margin: TypeAlias = Literal["watermark", "learned"]

CHOICES: Final = {
    "batching": get_args(Batching),
    "step_kind": get_args(StepKind),
    "queue": get_args(Queue),
    "margin": get_args(Margin),
}


@dataclass(frozen=True, slots=True)
class Policies:
    """The choices of one scheduler.

    batching: when waiting sequences may join (batching.py). step_kind: what a step may hold
    (step_kind.py). queue: who is next (queueing.py; a lower priority number always goes first).
    margin: how much of the pool an admission must leave (margin.py); watermark: the share that it
    leaves at least (fit.py). itl_target_ms: 0 for a fixed
    token budget, else the inter-token time that the budget is fitted to (token_budget.py).
    batch_size, max_delay_ms: of static and dynamic groups; 0 for the batch size means all lanes.
    prefill_attempt_interval, prefill_any_attempt_interval: decode steps between prefill attempts of
    the separate kind, by an ALL and an ANY vote of the data-parallel group; cache_watermark: the
    share of the pool above which it wants none.
    """

    batching: Batching = "continuous"
    step_kind: StepKind = "mixed"
    queue: Queue = "first-come"
    margin: Margin = "learned"
    watermark: float = 0.01
    itl_target_ms: float = 0.0
    batch_size: int = 0
    max_delay_ms: float = 50.0
    prefill_attempt_interval: int = 70
    prefill_any_attempt_interval: int = 100
    cache_watermark: float = 0.90

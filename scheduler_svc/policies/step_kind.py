"""What may one step hold? Mixed steps (Sarathi-Serve), or prefill and decode kept apart
(DeepInfer).

Pure.
"""

from __future__ import annotations

from typing import NamedTuple

from . import Policies


class Kind(NamedTuple):
    """decode: lanes one token behind advance. prefill: others catch up, and new ones join."""

    decode: bool
    prefill: bool


MIXED = Kind(True, True)
DECODE = Kind(True, False)
PREFILL = Kind(False, True)


class Ballot(NamedTuple):
    """num_decode_steps: since the last prefill step. wants: this scheduler's own vote. votes: those
    of the other schedulers of its data-parallel group, as far as they are known.
    """

    has_decodes: bool
    has_prefills: bool
    num_decode_steps: int
    wants: bool
    votes: tuple[bool, ...]


def wants_prefill(policies: Policies, has_prefills: bool, cache_usage: float) -> bool:
    """This scheduler's vote: prompts wait, and the cache is not too full to begin them."""
    return has_prefills and cache_usage <= policies.cache_watermark


def choose_kind(policies: Policies, ballot: Ballot) -> Kind:
    """Kind of the next step.

    separate: decode, but for attempts: every prefill_any_attempt_interval decode steps a prefill
    runs if anyone wants it, every prefill_attempt_interval if all do. A missing vote is a no, and
    a step never waits for one. With nothing to decode there is nothing to wait for.
    """
    if policies.step_kind == "mixed":
        return MIXED
    if not ballot.has_decodes:
        return PREFILL
    if not ballot.has_prefills:
        return DECODE
    steps = ballot.num_decode_steps
    if steps and steps % policies.prefill_any_attempt_interval == 0:
        return PREFILL if ballot.wants or any(ballot.votes) else DECODE
    if steps % policies.prefill_attempt_interval == 0:
        return PREFILL if ballot.wants and all(ballot.votes) else DECODE
    return DECODE

"""What may one step hold? Mixed steps (Sarathi-Serve), or prefill and decode kept apart
(DeepInfer).

Pure.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from . import Policies

# While something decodes, so many prefill steps run in a row at most: a flood of prompts must not
# stop the answers that have begun.
MAX_PREFILL_RUN: Final = 4


class Kind(NamedTuple):
    """decode: lanes one token behind advance. prefill: others catch up; join: and new ones
    begin.
    """

    decode: bool
    prefill: bool
    join: bool


MIXED = Kind(True, True, True)
DECODE = Kind(True, False, False)
PREFILL = Kind(False, True, True)
CONTINUE = Kind(False, True, False)


class Ballot(NamedTuple):
    """What the next step may turn on.

    has_begun: a prompt is half done. num_decode_steps: in a row, since the last prefill step;
    num_prefill_steps: in a row until now. wants: this scheduler's own vote. votes: those of the
    other schedulers of its data-parallel group, a missing one being a no.
    """

    has_decodes: bool
    has_begun: bool
    has_waiting: bool
    num_decode_steps: int
    num_prefill_steps: int
    wants: bool
    votes: tuple[bool, ...]


def wants_prefill(policies: Policies, has_prefills: bool, cache_usage: float) -> bool:
    """This scheduler's vote: prompts wait, and the cache is not too full to begin them."""
    return has_prefills and cache_usage <= policies.cache_watermark


def choose_kind(policies: Policies, ballot: Ballot) -> Kind:
    """Kind of the next step.

    separate: decode, but for attempts: every prefill_any_attempt_interval decode steps a prefill
    begins if anyone wants it, every prefill_attempt_interval if all do. What has begun goes on,
    with a decode step after every MAX_PREFILL_RUN. A step never waits for a vote. With nothing to
    decode there is nothing to wait for.
    """
    if policies.step_kind == "mixed":
        return MIXED
    if not ballot.has_decodes:
        return PREFILL
    if ballot.has_begun:
        return CONTINUE if ballot.num_prefill_steps < MAX_PREFILL_RUN else DECODE
    steps = ballot.num_decode_steps
    if not ballot.has_waiting or steps == 0:
        return DECODE
    if steps % policies.prefill_any_attempt_interval == 0:
        return PREFILL if ballot.wants or any(ballot.votes) else DECODE
    if steps % policies.prefill_attempt_interval == 0:
        return PREFILL if ballot.wants and all(ballot.votes) else DECODE
    return DECODE

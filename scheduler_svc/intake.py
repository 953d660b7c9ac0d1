"""May a new sequence be taken? Refused at once, with the numbers, where it can never run or nobody
may wait.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.contracts.errors import ErrorCode
from services.contracts.sequences import SubmitSequence

from .policies.fit import never_fits


@dataclass(frozen=True, slots=True)
class Refusal:
    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Of the attached engine, in tokens and blocks."""

    max_model_len: int
    block_size: int
    num_usable_blocks: int
    max_waiting_seqs: int


def refuse(message: SubmitSequence, limits: EngineLimits, num_waiting: int) -> Refusal | None:
    """Why `message` cannot be taken, or None."""
    num_prompt, num_accepted = len(message.prompt) // 4, len(message.accepted) // 4
    total = num_prompt + message.max_tokens
    asked = f"prompt ({num_prompt}) + max_tokens ({message.max_tokens})"
    if num_prompt == 0 or message.max_tokens == 0 or num_accepted > message.max_tokens:
        return Refusal(ErrorCode.INVALID_REQUEST, "there is nothing to compute")
    if total > limits.max_model_len:
        return Refusal(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"{asked} = {total} tokens; the engine's max_model_len is {limits.max_model_len}",
        )
    if never_fits(total, limits.block_size, limits.num_usable_blocks):
        pool = f"{limits.num_usable_blocks} blocks of {limits.block_size} tokens"
        return Refusal(
            ErrorCode.NEVER_FITS, f"{asked} = {total} tokens; the whole KV pool is {pool}"
        )
    if num_waiting >= limits.max_waiting_seqs:
        return Refusal(
            ErrorCode.QUEUE_FULL,
            f"{num_waiting} sequences wait already (max_waiting_seqs {limits.max_waiting_seqs})",
        )
    return None

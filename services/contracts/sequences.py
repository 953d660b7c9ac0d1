"""Between admission and scheduler: sequences in, accepted tokens out.

A submission is idempotent by `seq_id`, and is also how an admission repairs a gap: submitting a
known sequence with the tokens it has makes the scheduler send everything after them again.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from . import limits
from .codec import Message
from .errors import ErrorCode, WireError
from .ids import Id
from .public import FinishReason
from .sampling import SamplingParams
from .vectors import EMPTY, Vector

_Tag = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Text = Annotated[str, Meta(max_length=limits.MAX_ERROR_CHARS)]
Float32s = Annotated[bytes, Meta(max_length=4 * limits.MAX_PROMPT_TOKENS)]


class Logprobs(Message, frozen=True):
    """Of consecutive tokens: `chosen` float32 [n]; `top_ids` int32 and `top_values` float32 [n *
    k].
    """

    chosen: Float32s
    top_ids: Vector = EMPTY
    top_values: Float32s = b""

    @property
    def num_bytes(self) -> int:
        return len(self.chosen) + len(self.top_ids) + len(self.top_values)


def join_logprobs(entries: Sequence[Logprobs]) -> Logprobs:
    """Of tokens that follow each other."""
    return Logprobs(
        b"".join([entry.chosen for entry in entries]),
        b"".join([entry.top_ids for entry in entries]),
        b"".join([entry.top_values for entry in entries]),
    )


def split_logprobs(logprobs: Logprobs) -> list[Logprobs]:
    """One for each token. Raises WireError where the lengths do not agree."""
    count = len(logprobs.chosen) // 4
    width = len(logprobs.top_ids) // max(count, 1)
    parts = (logprobs.chosen, logprobs.top_ids, logprobs.top_values)
    if tuple(map(len, parts)) != (4 * count, width * count, width * count) or width % 4:
        raise WireError("log-probabilities whose columns differ in length")
    return [
        Logprobs(
            logprobs.chosen[4 * at : 4 * at + 4],
            logprobs.top_ids[width * at : width * (at + 1)],
            logprobs.top_values[width * at : width * (at + 1)],
        )
        for at in range(count)
    ]


class SubmitSequence(Message, frozen=True, tag="submit", kw_only=True):
    """admission -> scheduler, acknowledged by SubmitReply.

    tag: the admission's own small number for the sequence, echoed in its updates.
    prompt, accepted: int32 vectors; `accepted` holds the output tokens that the admission already
    has.
    accepted_logprobs: of the first of them, where the client asked for some, so that they outlive a
    scheduler and then this admission; nothing where they make more than MAX_RESENT_LOGPROB_BYTES.
    max_tokens: output tokens in all, `accepted` included. stop_token_ids: sorted, end-of-sequence
    included.
    salt: root of the sequence's prefix-cache namespace. deadline_ms: left, or 0 for none.
    envelope: what another admission needs to adopt the request; opaque to the scheduler.
    """

    seq_id: Id
    admission_id: Id
    tag: _Tag
    prompt: Vector
    accepted: Vector = EMPTY
    accepted_logprobs: Logprobs | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=limits.MAX_OUTPUT_TOKENS)]
    sampling: SamplingParams
    stop_token_ids: Vector = EMPTY
    salt: Annotated[bytes, Meta(max_length=64)] = b""
    priority: int = 0
    deadline_ms: Annotated[int, Meta(ge=0, le=limits.MAX_DEADLINE_MS)] = 0
    envelope: Annotated[bytes, Meta(max_length=limits.MAX_ENVELOPE_BYTES)] = b""
    traceparent: Annotated[str, Meta(max_length=limits.MAX_TRACE_CHARS)] = ""


class SubmitReply(Message, frozen=True, tag="submit_reply"):
    """code: None where the sequence is the scheduler's now.

    owned_elsewhere: another admission that lives has it; its client hears from that one. is_same:
    and it is that client's very request, not another one with its id.
    """

    seq_id: Id
    epoch: int
    code: ErrorCode | None = None
    message: _Text = ""
    owned_elsewhere: bool = False
    is_same: bool = False


class AdoptSequences(Message, frozen=True, tag="adopt"):
    """scheduler -> any one admission: sequences whose own is suspect or leaving.

    Each as it was submitted, without the tokens it has by now; who takes it submits it, and gets
    them. Repeated until somebody does.
    """

    engine: Id
    sequences: Annotated[list[SubmitSequence], Meta(max_length=limits.MAX_LANES)]


class AbortSequences(Message, frozen=True, tag="abort"):
    """admission -> scheduler, acknowledged. Live ones stop; finished ones leave the token log."""

    admission_id: Id
    seq_ids: Annotated[list[Id], Meta(max_length=limits.MAX_LANES)]


class AbortReply(Message, frozen=True, tag="abort_reply"):
    epoch: int


class SequenceLogprobs(Message, frozen=True):
    tag: _Tag
    offset: int
    logprobs: Logprobs


class PromptLogprobs(Message, frozen=True):
    """Of prompt tokens first .. first + n - 1 (the first token of a prompt has none)."""

    tag: _Tag
    first: int
    logprobs: Logprobs


class SequenceStarted(Message, frozen=True):
    """The sequence runs for the first time; num_cached_tokens of its prompt came from the prefix
    cache.
    """

    tag: _Tag
    num_cached_tokens: int


class SequenceFinished(Message, frozen=True):
    """num_output_tokens: how many the sequence has in all."""

    tag: _Tag
    reason: FinishReason
    num_output_tokens: int
    code: ErrorCode | None = None
    message: _Text = ""


class SequenceUpdates(Message, frozen=True, tag="updates"):
    """scheduler -> one admission, at most one per step, numbered per (scheduler epoch, admission).

    tags, offsets, counts: int32 [n]; empty `counts` means one token each. token_ids: int32 [sum of
    counts]. Started entries count before, finished ones after all tokens of the same message.
    moved: int32 vector, tags of sequences that another admission has now.
    """

    engine: Id
    generation: int
    epoch: int
    number: int
    tags: Vector = EMPTY
    offsets: Vector = EMPTY
    counts: Vector = EMPTY
    token_ids: Vector = EMPTY
    logprobs: Annotated[list[SequenceLogprobs], Meta(max_length=limits.MAX_ENTRIES)] = []
    prompt_logprobs: Annotated[list[PromptLogprobs], Meta(max_length=limits.MAX_ENTRIES)] = []
    started: Annotated[list[SequenceStarted], Meta(max_length=limits.MAX_ENTRIES)] = []
    finished: Annotated[list[SequenceFinished], Meta(max_length=limits.MAX_ENTRIES)] = []
    moved: Vector = EMPTY

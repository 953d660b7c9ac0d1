"""One accepted request, from its submission to its terminal frame: tokens in, frames out.

Invariants: tokens are taken in order and once, by offset; a frame's `offset` is the number of
tokens in frames before it; after the last frame there is nothing.

Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Final, Protocol

import numpy as np

from services.contracts.errors import ErrorCode
from services.contracts.limits import MAX_FRAME_TOKENS, MAX_RESENT_LOGPROB_BYTES
from services.contracts.public import (
    Encoding,
    ErrorBody,
    FinishReason,
    Frame,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from services.contracts.sampling import SamplingParams
from services.contracts.sequences import (
    Logprobs,
    SequenceFinished,
    SubmitSequence,
    join_logprobs,
)
from services.contracts.vectors import pack, unpack

from .detokenizer import Detokenizer
from .stop import StopMatcher

LISTENING: Final = -1

# What a kept request costs, roughly: a token in a list; each log-probability of a prompt token; of
# the others three buffers beside what is in them.
_TOKEN_BYTES: Final = 40
_LOGPROB_BYTES: Final = 300
_RAW_BYTES: Final = 250

LOGPROBS_LOST: Final = (
    "the log-probabilities of its first tokens were lost with a scheduler and an admission that "
    "died one after the other; send the request again under another request_id"
)


class Vocabulary(Protocol):
    """What turning tokens into text needs of a tokenizer."""

    @property
    def token_bytes(self) -> Sequence[bytes]: ...

    def token_text(self, token_id: int) -> str: ...


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request that has passed every check and is tokenised; what the core is asked to serve."""

    request_id: str
    model: str
    reply: str
    encoding: Encoding
    prompt_token_ids: Sequence[int]
    max_tokens: int
    sampling: SamplingParams
    stop_token_ids: Sequence[int]
    stop_strings: Sequence[str]
    include_stop: bool
    stream: bool
    salt: bytes
    priority: int
    deadline_ms: int
    retry: bool
    traceparent: str = ""


@dataclass(slots=True, eq=False)
class OpenRequest:
    """submitted: the last submission is acknowledged; accepted: one was. num_submissions: so far.

    has_more: the last frame was full, and tokens are left for another one.
    withheld: shows nothing until it is known whose it is.
    unheard_ns: since when nobody listens.
    token_ids: accepted, shown or not. num_taken: tokens that became text; num_shown: in frames.
    """

    ticket: Ticket
    vocabulary: Vocabulary
    arrival_ns: int
    tag: int = 0
    engine_id: str = ""
    envelope: bytes = b""
    submitted: bool = False
    accepted: bool = False
    num_submissions: int = 0
    submit_at_ns: int = 0
    give_up_ns: int = 0
    withheld: bool = False
    unheard_ns: int = LISTENING
    # Four bytes a token, where a list has nine times as many.
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    num_taken: int = 0
    num_shown: int = 0
    has_more: bool = False
    num_cached_tokens: int = 0
    finished: SequenceFinished | None = None
    _detokenizer: Detokenizer = field(init=False)
    _stop: StopMatcher = field(init=False)
    _logprobs: dict[int, Logprobs] = field(default_factory=dict)
    _prompt_logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    _text: list[str] = field(default_factory=list)
    _stop_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.vocabulary.token_bytes, self.ticket.prompt_token_ids)
        self._stop = StopMatcher(self.ticket.stop_strings, include=self.ticket.include_stop)
        self._stop_ids = frozenset(self.ticket.stop_token_ids)

    @property
    def request_id(self) -> str:
        return self.ticket.request_id

    def submission(self, admission_id: str, now_ns: int) -> SubmitSequence:
        """The sequence with all that is accepted so far: first submission and every later one
        alike.
        """
        ticket = self.ticket
        deadline_ms = ticket.deadline_ms
        if deadline_ms:
            deadline_ms = max(1, deadline_ms - (now_ns - self.arrival_ns) // 1_000_000)
        return SubmitSequence(
            seq_id=ticket.request_id,
            admission_id=admission_id,
            tag=self.tag,
            prompt=pack(ticket.prompt_token_ids),
            accepted=pack(self.token_ids),
            accepted_logprobs=self._known_logprobs(),
            max_tokens=ticket.max_tokens,
            sampling=ticket.sampling,
            stop_token_ids=pack(ticket.stop_token_ids),
            salt=ticket.salt,
            priority=ticket.priority,
            deadline_ms=deadline_ms,
            envelope=self.envelope,
            traceparent=ticket.traceparent,
        )

    # ---- what the scheduler says

    def accept(self, offset: int, token_ids: Sequence[int]) -> bool:
        """Output tokens from `offset` on; known ones are skipped -> False where some before them
        are missing.
        """
        known = len(self.token_ids)
        if offset > known:
            return False
        self.token_ids.extend(token_ids[known - offset :])
        return True

    def accept_logprobs(self, offset: int, logprobs: Logprobs) -> None:
        # After a gap the token itself may be missing; the resubmission brings both.
        if offset < len(self.token_ids):
            self._logprobs.setdefault(offset, logprobs)

    def accept_prompt_logprobs(self, first: int, logprobs: Logprobs) -> None:
        for index in range(len(logprobs.chosen) // 4):
            token_id = self.ticket.prompt_token_ids[first + index]
            self._prompt_logprobs[first + index] = self._entry(token_id, logprobs, index)

    # ---- what the client hears

    @property
    def has_news(self) -> bool:
        return self.finished is not None or self.num_taken < len(self.token_ids)

    def frame(self) -> Frame | None:
        """Everything not yet shown; the terminal frame where the sequence has ended or a stop
        string has matched.

        None where there is nothing to show yet: a non-streaming request, or text held back for a
        stop or a character. A stream shows at most MAX_FRAME_TOKENS at once: `has_more` then says
        that the next frame is there already.
        """
        end = len(self.token_ids)
        if end - self.num_shown > MAX_FRAME_TOKENS and self.ticket.stream:
            end = self.num_shown + MAX_FRAME_TOKENS
        matched = self._take(end)
        if self._lacks_logprobs():
            return self.error_frame(ErrorCode.LOGPROBS_LOST, LOGPROBS_LOST)
        if matched:
            return self._frame(FinishReason.STOP)
        finished = self.finished
        if finished is not None and not self.has_more:
            if finished.reason is FinishReason.ERROR:
                return self.error_frame(finished.code or ErrorCode.INTERNAL, finished.message)
            self._text.append(self._ending())
            return self._frame(finished.reason)
        if not self.ticket.stream or self.num_taken == self.num_shown:
            return None
        return self._frame(None)

    def abort_frame(self) -> Frame:
        """The terminal frame of a cancelled request: no token that was not shown before."""
        return Frame(
            request_id=self.request_id,
            offset=self.num_shown,
            finish_reason=FinishReason.ABORT,
            usage=self._usage(self.num_shown),
        )

    def error_frame(self, code: ErrorCode, message: str) -> Frame:
        return Frame(
            request_id=self.request_id,
            offset=self.num_shown,
            finish_reason=FinishReason.ERROR,
            error=ErrorBody(code, message),
        )

    def answer_to(self, ticket: Ticket) -> None:
        """Where the client that asks again wants its frames."""
        self.ticket = replace(
            self.ticket, reply=ticket.reply, encoding=ticket.encoding, stream=ticket.stream
        )

    def rewind(self, offset: int) -> None:
        """Show again from output token `offset` on, of those that are shown."""
        self._text.clear()
        self.__post_init__()
        for token_id in self.token_ids[:offset]:
            self._stop.push(self._detokenizer.push(token_id))
        self.num_taken = self.num_shown = offset

    def shown_frames(self, start: int, end: int) -> Iterator[Frame]:
        """Frames of a request that has ended: its tokens from `start` to `end` once more."""
        self.rewind(start)
        while self.num_shown < end:
            self._take(min(end, self.num_shown + MAX_FRAME_TOKENS))
            yield self._frame(None)

    @property
    def num_bytes(self) -> int:
        """What keeping it costs in memory, roughly."""
        num_tokens = len(self.ticket.prompt_token_ids) + len(self.token_ids)
        width = 2 + max(0, self.ticket.sampling.num_prompt_logprobs)
        return (
            _TOKEN_BYTES * num_tokens
            + sum(_RAW_BYTES + entry.num_bytes for entry in self._logprobs.values())
            + _LOGPROB_BYTES * width * len(self._prompt_logprobs)
        )

    def _take(self, end: int) -> bool:
        """Turn the tokens before `end` into text -> True where a stop string has matched."""
        self.has_more = False
        fresh = self.token_ids[self.num_taken : end].tolist()
        ends = not self._stop_ids.isdisjoint(fresh)
        if ends:
            # A stop token ends the sequence and is not part of the answer, nor of its usage.
            fresh = list(takewhile(lambda token_id: token_id not in self._stop_ids, fresh))
        if self._stop.waits_for_nothing:
            self.num_taken += len(fresh)
            self._text.append(self._detokenizer.push(*fresh))
            fresh = []
        for token_id in fresh:
            self.num_taken += 1
            step = self._stop.push(self._detokenizer.push(token_id))
            self._text.append(step.text)
            if step.matched:
                return True
        self.has_more = not ends and self.num_taken < len(self.token_ids)
        return False

    def _ending(self) -> str:
        step = self._stop.push(self._detokenizer.flush())
        return step.text if step.matched else step.text + self._stop.flush()

    def _frame(self, reason: FinishReason | None) -> Frame:
        """Tokens taken and not yet shown; the terminal frame where `reason` says why it ends."""
        offset, self.num_shown = self.num_shown, self.num_taken
        text = "".join(self._text)
        self._text.clear()
        return Frame(
            request_id=self.request_id,
            offset=offset,
            text=text,
            token_ids=self.token_ids[offset : self.num_taken].tolist(),
            logprobs=self._entries(offset, self.num_taken),
            prompt_logprobs=self._prompt_entries() if offset == 0 else None,
            finish_reason=reason,
            usage=self._usage(self.num_shown) if reason is not None else None,
        )

    def _lacks_logprobs(self) -> bool:
        if self.ticket.sampling.num_logprobs < 0:
            return False
        return any(at not in self._logprobs for at in range(self.num_shown, self.num_taken))

    def _entries(self, start: int, end: int) -> list[TokenLogprob] | None:
        if self.ticket.sampling.num_logprobs < 0:
            return None
        return [self._entry(self.token_ids[at], self._logprobs[at], 0) for at in range(start, end)]

    def _known_logprobs(self) -> Logprobs | None:
        """Of the first tokens, as far as they are here and not too many to send once more."""
        entries: list[Logprobs] = []
        while (entry := self._logprobs.get(len(entries))) is not None:
            entries.append(entry)
        is_small = sum(entry.num_bytes for entry in entries) <= MAX_RESENT_LOGPROB_BYTES
        return join_logprobs(entries) if entries and is_small else None

    def _usage(self, completion_tokens: int) -> Usage:
        prompt_tokens = len(self.ticket.prompt_token_ids)
        # Of a resubmitted sequence a hit may cover output too.
        return Usage(prompt_tokens, completion_tokens, min(prompt_tokens, self.num_cached_tokens))

    def _entry(self, token_id: int, logprobs: Logprobs, index: int) -> TokenLogprob:
        chosen = np.frombuffer(logprobs.chosen, dtype="<f4")
        ids = unpack(logprobs.top_ids)
        values = np.frombuffer(logprobs.top_values, dtype="<f4")
        width = len(ids) // len(chosen)
        top = [
            TopLogprob(int(top_id), self.vocabulary.token_text(int(top_id)), float(value))
            for top_id, value in zip(
                ids[index * width : (index + 1) * width],
                values[index * width : (index + 1) * width],
                strict=True,
            )
        ]
        return TokenLogprob(
            token_id, self.vocabulary.token_text(token_id), float(chosen[index]), top
        )

    def _prompt_entries(self) -> list[TokenLogprob | None] | None:
        if self.ticket.sampling.num_prompt_logprobs < 0:
            return None
        return [self._prompt_logprobs.get(at) for at in range(len(self.ticket.prompt_token_ids))]

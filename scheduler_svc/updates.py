"""What the admissions hear: one numbered, batched message per step and admission.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from services.contracts.errors import ErrorCode
from services.contracts.public import FinishReason
from services.contracts.sequences import (
    Logprobs,
    PromptLogprobs,
    SequenceFinished,
    SequenceLogprobs,
    SequenceStarted,
    SequenceUpdates,
)
from services.contracts.vectors import EMPTY, Int32Array, pack

from .events import SendUpdates
from .sequence import Sequence

_ONE = pack([1])


@dataclass(slots=True)
class _Outbox:
    """For one admission: packed columns of rows; `counts` stays empty while each row has one
    token.
    """

    number: int = 0
    tags: bytes = EMPTY
    offsets: bytes = EMPTY
    counts: bytes = EMPTY
    token_ids: bytes = EMPTY
    logprobs: list[SequenceLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    started: list[SequenceStarted] = field(default_factory=list)
    finished: list[SequenceFinished] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        news = self.tags or self.started or self.finished or self.prompt_logprobs or self.moved
        return not news

    def put(self, tags: bytes, offsets: bytes, counts: bytes, token_ids: bytes) -> None:
        """More rows; `counts` empty means one token each."""
        if counts or self.counts:
            self.counts = (self.counts or _ones(self.tags)) + (counts or _ones(tags))
        self.tags += tags
        self.offsets += offsets
        self.token_ids += token_ids


def _ones(column: bytes) -> bytes:
    return _ONE * (len(column) // len(_ONE))


class UpdateLog:
    """Collects a step's news per admission and numbers the messages.

    An admission's index is used again once it is forgotten. Numbers of a new one go on above all
    forgotten ones: should one of these come back after all, it finds a gap, not old news.
    """

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.index: dict[str, int] = {}
        self._boxes: list[_Outbox] = []
        self._ids: list[str] = []
        self._free: list[int] = []
        self._floor = 0

    def admission_index(self, admission_id: str) -> int:
        """Small number of an admission, for the lane column."""
        known = self.index.get(admission_id)
        if known is None:
            if not self._free:
                self._free.append(len(self._ids))
                self._ids.append("")
                self._boxes.append(_Outbox())
            known = self.index[admission_id] = self._free.pop()
            self._ids[known] = admission_id
            self._boxes[known] = _Outbox(number=self._floor)
        return known

    def forget(self, admission_id: str) -> None:
        """It is gone, and has no sequence any more."""
        known = self.index.pop(admission_id, None)
        if known is not None:
            self._floor = max(self._floor, self._boxes[known].number)
            self._boxes[known] = _Outbox()
            self._free.append(known)

    def last_numbers(self) -> Iterator[tuple[str, int]]:
        """(admission, last number sent), for beats."""
        for admission_id, index in self.index.items():
            yield admission_id, self._boxes[index].number

    def add_column(
        self, admissions: Int32Array, tags: Int32Array, offsets: Int32Array, token_ids: Int32Array
    ) -> None:
        """One token for each of n sequences: int32 [n] each."""
        if not len(tags):
            return
        if len(self._boxes) == 1:
            self._boxes[0].put(pack(tags), pack(offsets), EMPTY, pack(token_ids))
            return
        for index in np.bincount(admissions).nonzero()[0].tolist():
            mine = admissions == index
            self._boxes[index].put(
                pack(tags[mine]), pack(offsets[mine]), EMPTY, pack(token_ids[mine])
            )

    def add_tokens(self, seq: Sequence, offset: int, token_ids: Int32Array) -> None:
        """Output tokens of `seq` from `offset` on."""
        if len(token_ids):
            self._box(seq).put(
                pack([seq.tag]), pack([offset]), pack([len(token_ids)]), pack(token_ids)
            )

    def add_logprobs(self, seq: Sequence, offset: int, logprobs: Logprobs) -> None:
        seq.logprobs.append((offset, logprobs))
        self._box(seq).logprobs.append(SequenceLogprobs(seq.tag, offset, logprobs))

    def add_prompt_logprobs(self, seq: Sequence, first: int, logprobs: Logprobs) -> None:
        seq.prompt_logprobs.append((first, logprobs))
        self._box(seq).prompt_logprobs.append(PromptLogprobs(seq.tag, first, logprobs))

    def resend(self, seq: Sequence, offset: int, output: Int32Array) -> None:
        """Everything of `seq` from output token `offset` on; `output` int32, all its output so
        far.
        """
        if seq.num_cached_tokens >= 0:
            self.add_started(seq)
        self.add_tokens(seq, offset, output[offset:])
        box = self._box(seq)
        box.logprobs.extend(
            SequenceLogprobs(seq.tag, at, logprobs) for at, logprobs in seq.logprobs if at >= offset
        )
        if offset == 0:
            box.prompt_logprobs.extend(
                PromptLogprobs(seq.tag, first, logprobs) for first, logprobs in seq.prompt_logprobs
            )

    def add_started(self, seq: Sequence) -> None:
        self._box(seq).started.append(SequenceStarted(seq.tag, seq.num_cached_tokens))

    def add_finished(
        self, seq: Sequence, reason: FinishReason, code: ErrorCode | None = None, message: str = ""
    ) -> None:
        self._box(seq).finished.append(
            SequenceFinished(
                tag=seq.tag,
                reason=reason,
                num_output_tokens=seq.num_output_tokens,
                code=code,
                message=message,
            )
        )

    def add_moved(self, seq: Sequence) -> None:
        """Before `seq` gets another owner: the present one is to hear of it."""
        self._box(seq).moved.append(seq.tag)

    def flush(self, generation: int, epoch: int) -> Iterator[SendUpdates]:
        """The messages of this step; boxes are empty after it."""
        for index, box in enumerate(self._boxes):
            if box.empty:
                continue
            number = box.number + 1
            updates = SequenceUpdates(
                engine=self.engine,
                generation=generation,
                epoch=epoch,
                number=number,
                tags=box.tags,
                offsets=box.offsets,
                counts=box.counts,
                token_ids=box.token_ids,
                logprobs=box.logprobs,
                prompt_logprobs=box.prompt_logprobs,
                started=box.started,
                finished=box.finished,
                moved=pack(box.moved),
            )
            self._boxes[index] = _Outbox(number=number)
            yield SendUpdates(self._ids[index], updates)

    def _box(self, seq: Sequence) -> _Outbox:
        return self._boxes[self.admission_index(seq.admission_id)]

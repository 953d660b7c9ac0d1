"""Every sequence the scheduler knows, live or finished, and the log of those whose end is not yet
acknowledged.

Pure.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from services.contracts.errors import ErrorCode
from services.contracts.limits import FINISHED_LOG_ENTRIES, FINISHED_LOG_SECONDS
from services.contracts.public import FinishReason
from services.contracts.sequences import SubmitSequence, split_logprobs
from services.contracts.vectors import INT32_LE, unpack

from .sequence import Sequence, SequenceStatus
from .times import NEVER_NS

Ending: TypeAlias = tuple[FinishReason, ErrorCode | None, str]


class Roster:
    """By `seq_id`. Overflow of the log drops its oldest entry: a later resubmission of it runs
    anew.
    """

    def __init__(self) -> None:
        self._live: dict[str, Sequence] = {}
        self._log: OrderedDict[str, tuple[Sequence, Ending]] = OrderedDict()
        self._log_times: OrderedDict[str, int] = OrderedDict()
        self._deadlines: list[tuple[int, int, str]] = []
        self._next_uid = 1
        self._now_ns = 0

    def live(self) -> Iterator[Sequence]:
        return iter(list(self._live.values()))

    def logged(self) -> Iterator[Sequence]:
        return (seq for seq, _ in list(self._log.values()))

    def find(self, seq_id: str) -> Sequence | None:
        logged = self._log.get(seq_id)
        return logged[0] if logged is not None else self._live.get(seq_id)

    def ending(self, seq: Sequence) -> Ending | None:
        logged = self._log.get(seq.seq_id)
        return logged[1] if logged is not None else None

    def admit(self, message: SubmitSequence, now_ns: int) -> Sequence:
        """A new sequence, waiting. Raises WireError where its columns are none."""
        prompt, accepted = unpack(message.prompt), unpack(message.accepted)
        known = message.accepted_logprobs
        logprobs = [] if known is None else split_logprobs(known)[: len(accepted)]
        total = len(prompt) + message.max_tokens
        token_ids = np.zeros(total, dtype=INT32_LE)
        token_ids[: len(prompt)] = prompt
        token_ids[len(prompt) : len(prompt) + len(accepted)] = accepted
        deadline_ns = now_ns + message.deadline_ms * 1_000_000 if message.deadline_ms else NEVER_NS
        seq = Sequence(
            uid=self._next_uid,
            seq_id=message.seq_id,
            admission_id=message.admission_id,
            tag=message.tag,
            token_ids=token_ids,
            num_prompt_tokens=len(prompt),
            num_tokens=len(prompt) + len(accepted),
            max_total_tokens=total,
            sampling=message.sampling,
            stop_token_ids=unpack(message.stop_token_ids),
            salt=message.salt,
            priority=message.priority,
            deadline_ns=deadline_ns,
            arrival_ns=now_ns,
            envelope=message.envelope,
            traceparent=message.traceparent,
            logprobs=list(enumerate(logprobs)),
        )
        self._next_uid += 1
        self._live[seq.seq_id] = seq
        if deadline_ns < NEVER_NS:
            heapq.heappush(self._deadlines, (deadline_ns, seq.uid, seq.seq_id))
        return seq

    def finish(self, seq: Sequence, ending: Ending) -> None:
        del self._live[seq.seq_id]
        self._log[seq.seq_id] = (seq, ending)
        self._log_times[seq.seq_id] = self._now_ns
        if len(self._log) > FINISHED_LOG_ENTRIES:
            self._log.popitem(last=False)
            self._log_times.popitem(last=False)

    def forget(self, seq: Sequence) -> None:
        """Its admission knows the end."""
        self._log.pop(seq.seq_id, None)
        self._log_times.pop(seq.seq_id, None)

    def see_time(self, now_ns: int) -> None:
        """Ends are stamped with the last time seen."""
        self._now_ns = now_ns

    def forget_old(self, now_ns: int) -> None:
        self._now_ns = now_ns
        horizon_ns = now_ns - FINISHED_LOG_SECONDS * 1_000_000_000
        while self._log_times and next(iter(self._log_times.values())) < horizon_ns:
            seq_id, _ = self._log_times.popitem(last=False)
            del self._log[seq_id]

    @property
    def next_deadline_ns(self) -> int:
        return self._deadlines[0][0] if self._deadlines else NEVER_NS

    def expired(self, now_ns: int) -> list[Sequence]:
        """Live sequences whose deadline has passed."""
        late: list[Sequence] = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            _, uid, seq_id = heapq.heappop(self._deadlines)
            seq = self._live.get(seq_id)
            if seq is not None and seq.uid == uid and seq.status is not SequenceStatus.FINISHED:
                late.append(seq)
        return late

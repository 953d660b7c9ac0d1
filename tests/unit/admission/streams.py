"""An AdmissionCore with one engine, and the engine's side of the conversation by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from services.admission.core import AdmissionCore
from services.admission.events import Abort, Cancelled, Flush, SendFrame, Submit
from services.admission.open_request import Ticket
from services.contracts.beats import Beat, EngineLoad, ServiceKind, StreamMark
from services.contracts.errors import ErrorCode
from services.contracts.public import Encoding, FinishReason, Frame
from services.contracts.sampling import SamplingParams
from services.contracts.sequences import (
    Logprobs,
    SequenceFinished,
    SequenceLogprobs,
    SequenceStarted,
    SequenceUpdates,
    SubmitReply,
)
from services.contracts.vectors import pack

MS = 1_000_000
SECOND = 1000 * MS
ENGINE = "engine-0"


class Words:
    """Token 7 reads as "w7 "; 100 and more as raw bytes of the number minus 100."""

    token_bytes = [f"w{i} ".encode() for i in range(100)] + [bytes([i]) for i in range(256)]

    def token_text(self, token_id: int) -> str:
        return self.token_bytes[token_id].decode("utf-8", "replace")


def ticket(request_id: str = "r1", **more: Any) -> Ticket:
    fields: dict[str, Any] = {
        "request_id": request_id,
        "model": "words",
        "reply": f"inbox.{request_id}",
        "encoding": Encoding.JSON,
        "prompt_token_ids": [1, 2, 3],
        "max_tokens": 16,
        "sampling": SamplingParams(),
        "stop_token_ids": [],
        "stop_strings": [],
        "include_stop": False,
        "stream": True,
        "salt": b"",
        "priority": 0,
        "deadline_ms": 0,
        "retry": False,
    }
    return Ticket(**{**fields, **more})


def logprobs(count: int = 1) -> Logprobs:
    return Logprobs(np.arange(count).astype("<f4").tobytes())


def engine_load(model: str = "words", *, ready: bool = True, num_running: int = 0) -> EngineLoad:
    """An idle engine, but for what is named."""
    zeros: dict[str, Any] = {f.name: 0 for f in msgspec.structs.fields(EngineLoad) if f.required}
    return EngineLoad(
        **{
            **zeros,
            "model": model,
            "ready": ready,
            "max_model_len": 100,
            "num_running": num_running,
        }
    )


class Desk:
    """The core, what came out of it, and messages of `engine-0` numbered as it would."""

    def __init__(self, max_open: int = 10, *, engine: bool = True) -> None:
        self.core = AdmissionCore("admission-0", {"words": Words()}, max_open)
        self.now_ns = 0
        self.generation = self.epoch = 1
        self.number = 0
        self.frames: list[tuple[str, Frame]] = []
        self.submits: list[Submit] = []
        self.aborts: list[Abort] = []
        self.cancelled: list[Cancelled] = []
        if engine:
            self.beat()

    def handle(self, event: Any) -> list[Any]:
        return self._take(self.core.handle(event, self.now_ns))

    def tick(self, after_ns: int = 0) -> list[Any]:
        self.now_ns += after_ns
        return self._take(self.core.tick(self.now_ns))

    def _take(self, effects: list[Any]) -> list[Any]:
        self.core.check_invariants()
        for effect in effects:
            match effect:
                case SendFrame():
                    self.frames.append((effect.reply, effect.frame))
                case Submit():
                    self.submits.append(effect)
                case Abort():
                    self.aborts.append(effect)
                case Cancelled():
                    self.cancelled.append(effect)
        return effects

    def open(self, request_id: str = "r1", **more: Any) -> int:
        """Accepted and acknowledged -> its tag."""
        self.handle(ticket(request_id, **more))
        self.acknowledge(request_id)
        return self.submits[-1].message.tag

    def acknowledge(self, request_id: str = "r1", code: ErrorCode | None = None) -> list[Any]:
        return self.handle(SubmitReply(request_id, self.epoch, code, "because" if code else ""))

    def refuse(self, request_id: str = "r1") -> list[Any]:
        """Another admission has it."""
        return self.handle(SubmitReply(request_id, self.epoch, owned_elsewhere=True))

    def beat(self, *, ready: bool = True, mark: int | None = None, engine: str = ENGINE) -> None:
        load = engine_load(ready=ready)
        marks = [] if mark is None else [StreamMark("admission-0", mark)]
        self.handle(
            Beat(ServiceKind.SCHEDULER, engine, self.generation, self.epoch, marks, engine=load)
        )

    def updates(
        self,
        tag: int,
        offset: int,
        token_ids: Sequence[int],
        *,
        end: FinishReason | None = None,
        code: ErrorCode | None = None,
        cached: int | None = None,
        moved: Sequence[int] = (),
        scored: bool = False,
        lost: bool = False,
    ) -> list[Frame]:
        """Tokens of one sequence, and then a flush -> the frames. `lost`: the message is."""
        self.number += 1
        message = SequenceUpdates(
            engine=ENGINE,
            generation=self.generation,
            epoch=self.epoch,
            number=self.number,
            tags=pack([tag] if token_ids else []),
            offsets=pack([offset] if token_ids else []),
            counts=pack([len(token_ids)] if token_ids else []),
            token_ids=pack(token_ids),
            logprobs=[
                SequenceLogprobs(tag, offset + at, logprobs())
                for at in range(len(token_ids) if scored else 0)
            ],
            started=[] if cached is None else [SequenceStarted(tag, cached)],
            finished=[]
            if end is None
            else [
                SequenceFinished(tag, end, offset + len(token_ids), code, "" if not code else "?")
            ],
            moved=pack(list(moved)),
        )
        if lost:
            return []
        self.handle(message)
        return self.flush()

    def news(self, rows: Sequence[tuple[int, int, int]]) -> None:
        """One token for each of several sequences, as (tag, offset, token id); not flushed."""
        self.number += 1
        tags, offsets, token_ids = (pack(list(column)) for column in zip(*rows, strict=True))
        self.handle(
            SequenceUpdates(
                engine=ENGINE,
                generation=self.generation,
                epoch=self.epoch,
                number=self.number,
                tags=tags,
                offsets=offsets,
                token_ids=token_ids,
            )
        )

    def flush(self, most: int | None = None) -> list[Frame]:
        return [e.frame for e in self.handle(Flush(most)) if isinstance(e, SendFrame)]

    def ends(self, request_id: str = "r1") -> list[Frame]:
        return [f for _, f in self.frames if f.request_id == request_id and f.finish_reason]

    def text(self, request_id: str = "r1") -> str:
        return "".join(f.text for _, f in self.frames if f.request_id == request_id)

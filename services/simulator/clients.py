"""A client as `services/client.py` is one: it trims what it has, and asks again when it hears
nothing or finds a gap.

Invariant: it keeps tokens in order, each once, whatever comes.

Shell of the simulation; no clock, no socket.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from services.contracts.public import (
    Encoding,
    FinishReason,
    Frame,
    GenerateRequest,
)

from .bus import Answer, Bus, Envelope
from .network import Action
from .phases import Phase

ASK_AFTER_NS: Final = 1_000_000_000
# So many resumes without a word: nobody owns the request.
UNANSWERED: Final = 3
PATIENCE_NS: Final = 1_500_000_000
CANCEL_TRIES: Final = 4

_json = msgspec.json.Decoder(Frame)
_msgpack = msgspec.msgpack.Decoder(Frame)


@dataclass(frozen=True, slots=True)
class Expected:
    """What the one right answer is. stopped: by a stop token, which is no part of it."""

    token_ids: list[int]
    stopped: bool


class Client:
    """One request, and what it got. number: its sampling seed, by which it is known anywhere.

    is_probe: sent after the faults. num_asks: requests sent, the first included. gave_up: it has
    cancelled and waits no longer.
    """

    alive = True

    def __init__(
        self, world: Any, request: GenerateRequest, expected: Expected, *, is_probe: bool = False
    ) -> None:
        self.world = world
        self.bus: Bus = world.bus
        self.request = request
        self.request_id = request.request_id or ""
        self.name = self.host = f"client-{self.request_id}"
        self.number = request.seed or 0
        self.expected = expected
        self.is_probe = is_probe
        self.encoding = Encoding.JSON if self.number % 2 else Encoding.MSGPACK
        self.token_ids: list[int] = []
        self.text = ""
        self.ending: Frame | None = None
        self.num_asks = 0
        self.num_terminals = 0
        self.num_gaps = 0
        self.cancelled = False
        self.gave_up = False
        self.sent_ns = 0
        self.ended_ns = 0
        self.vanished = False
        self._heard_ns = 0
        self._num_unanswered = 0

    @property
    def started(self) -> bool:
        return self.num_asks > 0

    @property
    def done(self) -> bool:
        return self.ending is not None or self.gave_up

    def run(self, action: Action, *, timer: bool = False) -> None:
        action()

    # ---- what it does

    def start(self) -> None:
        self.bus.subscribe(self, f"inbox.{self.request_id}", self._hear)
        self.sent_ns = self.world.clock.now_ns
        self._send()
        self._wait()

    def cancel(self, tries: int = CANCEL_TRIES) -> None:
        """Whoever owns it ends it; said again a few times, as a lost word is nobody's fault."""
        if self.done or not self.started:
            return
        self.cancelled = True
        if not tries:
            self.gave_up = True
            return
        payload = self.request_id.encode()
        self.bus.publish(self, "cancel", Envelope("cancel", payload, (Phase.CANCELLED,)))
        self.world.clock.after(PATIENCE_NS, lambda: self.cancel(tries - 1))

    def vanish(self) -> None:
        """It is gone without a word, and its inbox with it."""
        if not self.done:
            self.vanished = self.gave_up = True
            self.bus.leave(self)

    def _send(self) -> None:
        request = msgspec.structs.replace(self.request, retry=self.num_asks > 0)
        self.num_asks += 1
        self._num_unanswered = 0
        self._heard_ns = self.world.clock.now_ns
        encoder = msgspec.json if self.encoding is Encoding.JSON else msgspec.msgpack
        payload = encoder.encode(request)
        self.bus.publish(self, "generate", Envelope("generate", payload, (Phase.REQUESTED,)))

    def _resume(self) -> None:
        """Whoever owns the request shows it again from where this client stands."""
        self.num_asks += 1
        self._num_unanswered += 1
        self._heard_ns = self.world.clock.now_ns
        payload = f"{self.request_id} {len(self.token_ids)}".encode()
        self.bus.publish(self, "resume", Envelope("resume", payload, (Phase.RESUMED,)))

    def _wait(self) -> None:
        """Look again and again whether anything has come, until it has ended."""
        if self.done:
            return
        if self.world.clock.now_ns - self._heard_ns >= ASK_AFTER_NS and not self.cancelled:
            if self._num_unanswered < UNANSWERED:
                self._resume()
            else:
                self._send()
        self.world.clock.after(ASK_AFTER_NS, self._wait)

    # ---- what it hears

    def _hear(self, payload: bytes, _answer: Answer) -> None:
        decoder = _json if self.encoding is Encoding.JSON else _msgpack
        frame = decoder.decode(payload)
        self._heard_ns = self.world.clock.now_ns
        self._num_unanswered = 0
        known = len(self.token_ids)
        is_end = frame.finish_reason is not None
        self.num_terminals += is_end
        self.world.hears(self, frame)
        if self.done:
            return
        if frame.offset > known and frame.finish_reason not in (
            FinishReason.ABORT,
            FinishReason.ERROR,
        ):
            self.num_gaps += 1
            self._resume()
            return
        if frame.offset <= known:
            self.token_ids.extend(frame.token_ids[known - frame.offset :])
        if is_end:
            self.ending = frame
            self.ended_ns = self.world.clock.now_ns
            self.world.ends(self)

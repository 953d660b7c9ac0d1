"""Which worker this scheduler drives, in which generation and epoch, and whether it may still
believe it.

    DETACHED ─ attach answered ─▶ READY ─ other generation, nobody there, higher epoch known ─▶
    DETACHED

Pure.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from services.contracts.errors import InvariantError
from services.contracts.limits import BEAT_PERIOD_MS, SUSPECT_AFTER_BEATS
from services.contracts.step import Attach, Attached

from .times import NEVER_NS

ATTACH_RETRY_NS: Final = 250_000_000
SUSPECT_AFTER_NS: Final = SUSPECT_AFTER_BEATS * BEAT_PERIOD_MS * 1_000_000


class Superseded(InvariantError):
    """Another scheduler has attached with a higher epoch: this one must go."""


class LinkState(StrEnum):
    DETACHED = "detached"
    READY = "ready"


class WorkerLink:
    """epoch_seen: the highest epoch that anybody was heard to name; the next attach goes above
    it.
    """

    def __init__(self, scheduler_id: str, incarnation: str) -> None:
        self.state = LinkState.DETACHED
        self.generation = 0
        self.epoch = 0
        self.epoch_seen = 0
        self._scheduler_id = scheduler_id
        self._incarnation = incarnation
        self._attempt = 1
        self._attach_at_ns = 0
        self._asking = False
        self._asked_generation = 0
        self._heard_generation = 0
        self._heard_ns = 0

    @property
    def is_ready(self) -> bool:
        return self.state is LinkState.READY

    @property
    def wake_at_ns(self) -> int:
        return NEVER_NS if self.is_ready or self._asking else self._attach_at_ns

    def attach(self, now_ns: int) -> Attach | None:
        """The request to take over, when it is time for one; one at a time."""
        if now_ns < self.wake_at_ns:
            return None
        self._asking = True
        self._asked_generation = self._heard_generation
        return Attach(
            scheduler_id=self._scheduler_id,
            attempt=self._attempt_id,
            epoch_seen=max(self.epoch, self.epoch_seen),
        )

    def on_attached(self, attached: Attached) -> bool:
        """True where this is the awaited answer, which makes the link ready."""
        if self.is_ready or attached.attempt != self._attempt_id:
            return False
        self._asking = False
        self.generation, self.epoch = attached.generation, attached.epoch
        self.state = LinkState.READY
        return True

    def on_silence(self, *, gone: bool, now_ns: int) -> bool:
        """No answer to an attach, which is asked again, or to a poll -> True where the link is lost
        by it.
        """
        if self.is_ready:
            return gone
        self._asking = False
        self._attach_at_ns = now_ns + ATTACH_RETRY_NS
        return False

    def hear(self, now_ns: int) -> None:
        """A sign of life of the worker."""
        self._heard_ns = now_ns

    def is_suspect(self, now_ns: int) -> bool:
        """It has missed its beats: it may hang, or be dead with nothing in flight to show it."""
        return now_ns - self._heard_ns > SUSPECT_AFTER_NS

    def on_beat(self, generation: int, now_ns: int) -> None:
        """A worker that comes while another's answer is awaited will not give that answer."""
        self.hear(now_ns)
        if self._asking and generation != self._asked_generation:
            self._asking, self._attach_at_ns = False, now_ns
        self._heard_generation = generation

    def see_epoch(self, epoch: int) -> None:
        self.epoch_seen = max(self.epoch_seen, epoch)

    def detach(self) -> None:
        """What follows is another attempt, with another epoch."""
        self._attempt += 1
        self._attach_at_ns = 0
        self._asking = False
        self.state = LinkState.DETACHED

    def owns(self, generation: int, epoch: int) -> bool:
        """True for a message of the attached generation and epoch. Raises Superseded on a higher
        epoch of it.
        """
        if not self.is_ready or generation != self.generation:
            return False
        if epoch > self.epoch:
            raise Superseded(f"epoch {epoch} has taken over from {self.epoch}")
        return epoch == self.epoch

    @property
    def _attempt_id(self) -> str:
        return f"{self._incarnation}-{self._attempt}"

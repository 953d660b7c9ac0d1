"""What must hold in every history, checked by code that shares no logic with the engine: one class
for each invariant, by the numbers of the list that the project keeps.

    I1 ends once · I2 nothing uninvited · I3 stream · I4 answer · I5 blocks · I6 one view
    I7 epochs · I8 tenants · I9 usage · I10 cancel · I11, I13 idle · I12 progress · I15 errors
    I16 steps, spans · I17 forgotten

Here are those of what clients see; `engine_checks.py` has those of what the worker runs and of the
containers of the cores, `trace_checks.py` those of spans.

Pure.
"""

from __future__ import annotations

from typing import Any, Final

from services.contracts.errors import ERRORS, ErrorCode
from services.contracts.limits import ENGINE_ABSENCE_SECONDS
from services.contracts.public import FinishReason, Frame

from .check import Check
from .clients import Client
from .engine_checks import (
    Blocks,
    Forgotten,
    Idle,
    NothingUninvited,
    OneScheduler,
    OneView,
    Progress,
    Steps,
    Tenants,
)
from .model import Mark
from .trace_checks import Traces

SECOND_NS: Final = 1_000_000_000
# How long after a fault its effects may still be felt: suspicion, restarts, the longest time-out.
AFTERMATH_NS: Final = 20 * SECOND_NS
GRACE_MS: Final = 2
ABSENCE_NS: Final = ENGINE_ABSENCE_SECONDS * SECOND_NS


class EndsOnce(Check):
    """I1: every request reaches exactly one terminal state; a second terminal frame comes only to
    a client that has asked again (twice, where the network repeats that), or where another
    admission was offered what the first had not acknowledged.
    """

    name = "I1 ends once"

    def hears(self, client: Client, frame: Frame) -> None:
        network = self.world.network
        repeated = network.repeated_at[client.host] + network.repeated_by[client.host, "resume"]
        repeated += self.world.num_offers[client.request_id]
        self.require(
            client.num_terminals <= client.num_asks + repeated,
            f"{client.name}: a second terminal frame, and nobody asked for it",
        )
        if client.ending is not None:
            asked_again = client.num_asks > 1 or repeated
            self.require(bool(asked_again), f"{client.name}: a frame after the terminal frame")

    def at_rest(self) -> None:
        for client in self.world.clients.values():
            self.require(client.done, f"{client.name} has no terminal frame")


class Stream(Check):
    """I3: tokens are numbered 0 .. n - 1; a gap comes only where a frame was really lost."""

    name = "I3 stream"

    def hears(self, client: Client, frame: Frame) -> None:
        known = client.token_ids[frame.offset : frame.offset + len(frame.token_ids)]
        self.require(
            frame.token_ids[: len(known)] == known, f"{client.name}: an accepted token has changed"
        )
        if client.done:
            return
        network = self.world.network
        lost = network.lost_at[client.host] or client.num_asks > 1
        self.require(
            frame.offset <= len(client.token_ids) or bool(lost),
            f"{client.name}: frame at {frame.offset}, {len(client.token_ids)} tokens so far",
        )
        troubled = self.world.troubled(client.sent_ns, self.world.clock.now_ns)
        if not lost and not troubled and not network.repeated_at[client.host]:
            self.require(
                frame.offset == len(client.token_ids),
                f"{client.name}: tokens from {frame.offset} on come twice",
            )


class Answer(Check):
    """I4: tokens and text are those of the run without faults."""

    name = "I4 answer"

    def hears(self, client: Client, frame: Frame) -> None:
        right = client.expected.token_ids[frame.offset : frame.offset + len(frame.token_ids)]
        self.require(
            frame.token_ids == right, f"{client.name}: got {frame.token_ids}, must be {right}"
        )
        self.require(
            frame.text == "".join(f"{token_id} " for token_id in frame.token_ids),
            f"{client.name}: text {frame.text!r} is not of {frame.token_ids}",
        )

    def ends(self, client: Client) -> None:
        reason = client.ending.finish_reason if client.ending else None
        if reason in (FinishReason.ABORT, FinishReason.ERROR):
            return
        expected = client.expected
        self.require(
            client.token_ids == expected.token_ids,
            f"{client.name}: {len(client.token_ids)} of {len(expected.token_ids)} tokens",
        )
        right = FinishReason.STOP if expected.stopped else FinishReason.LENGTH
        self.require(reason is right, f"{client.name}: finish_reason {reason}")


class Usage(Check):
    """I9: usage is what was delivered."""

    name = "I9 usage"

    def ends(self, client: Client) -> None:
        frame = client.ending
        assert frame is not None
        if frame.finish_reason is FinishReason.ERROR:
            return
        usage, prompt = frame.usage, client.request.prompt_token_ids or ()
        self.require(usage is not None, f"{client.name}: no usage")
        assert usage is not None
        shown = frame.offset + len(frame.token_ids)
        self.require(usage.completion_tokens == shown, f"{client.name}: {usage}, {shown} shown")
        self.require(usage.prompt_tokens == len(prompt), f"{client.name}: {usage}")
        self.require(0 <= usage.cached_tokens <= len(prompt), f"{client.name}: {usage}")


class Cancel(Check):
    """I10: after a cancel is acknowledged there is no token; once its last step has ended, it
    holds nothing.
    """

    name = "I10 cancel"

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self._asks: dict[str, int] = {}

    def cancelled(self, request_id: str) -> None:
        client = self.world.clients.get(request_id)
        if client is not None:
            self._asks[request_id] = client.num_asks

    def hears(self, client: Client, frame: Frame) -> None:
        asked_once = self._asks.get(client.request_id) == client.num_asks == 1
        # A late submission of a dead admission brings it to life again, and another one adopts it.
        revived = self.world.num_offers[client.request_id]
        if asked_once and not revived and client.ending is not None:
            shown = frame.offset + len(frame.token_ids)
            new = shown > len(client.token_ids)
            self.require(not new, f"{client.name}: tokens after its cancel")

    def settled(self, node: Any) -> None:
        if node.role == "scheduler":
            core = node.core
            for seq in core.roster.logged():
                if not seq.num_in_flight:
                    self.require(not seq.block_ids, f"{seq.seq_id} has ended and holds blocks")


class Errors(Check):
    """I15: an error is of the published table, and comes only where it may."""

    name = "I15 errors"

    def ends(self, client: Client) -> None:
        frame = client.ending
        assert frame is not None
        if frame.finish_reason is FinishReason.ABORT:
            self.require(client.cancelled, f"{client.name}: ends with abort, and nobody asked")
        if frame.finish_reason is not FinishReason.ERROR:
            return
        self.require(frame.error is not None, f"{client.name}: an error without a code")
        assert frame.error is not None
        code = frame.error.code
        self.require(code in ERRORS, f"{client.name}: {code} is not in the table")
        may = self._may(client, code)
        self.require(may, f"{client.name}: {code} ({frame.error.message}) without a reason")

    def _may(self, client: Client, code: ErrorCode) -> bool:
        world = self.world
        # A block may have been spoilt and not read since, so that it is found only now.
        is_victim: bool = code is ErrorCode.NUMERICS and client.number in world.victims
        if client.is_probe or is_victim:
            return is_victim
        mark = world.marks.get(client.number, (None, 0))[0]
        match code:
            case ErrorCode.NO_WORKER:
                return self._has_waited(client)
            case ErrorCode.DEADLINE_EXCEEDED:
                return self._is_late(client)
            case ErrorCode.NUMERICS:
                return mark is Mark.NAN
            case ErrorCode.POISONED:
                # What dies with it by chance counts too.
                by_chance = world.num_killed("worker", client.sent_ns)
                return mark is Mark.DEADLY or bool(by_chance)
            case ErrorCode.OUT_OF_MEMORY:
                starved: bool = world.nemesis.starved_since(client.sent_ns)
                return starved
            case ErrorCode.CONTEXT_LENGTH_EXCEEDED:
                length = len(client.request.prompt_token_ids or ())
                most: int = world.options.max_model_len
                return length + (client.request.max_tokens or 0) > most
        return False

    def _has_waited(self, client: Client) -> bool:
        """There was no engine for as long as one is waited for, or for a new admission, which has
        heard of none.
        """
        world, ended_ns = self.world, client.ended_ns
        waited: bool = (ended_ns - client.sent_ns) * (1 + world.max_skew) >= ABSENCE_NS
        is_new: bool = world.since_start("admission", ended_ns) <= ABSENCE_NS + AFTERMATH_NS
        troubled: bool = world.troubled(ended_ns - ABSENCE_NS - AFTERMATH_NS, ended_ns)
        return troubled and (waited or is_new)

    def _is_late(self, client: Client) -> bool:
        """Its time has passed on whatever clock measured it."""
        deadline_ms = client.request.deadline_ms
        if deadline_ms is None:
            return False
        passed_ms = (client.ended_ns - client.sent_ns) / 1e6
        fastest: float = 1 + self.world.max_skew
        return passed_ms * fastest + GRACE_MS >= deadline_ms


CHECKS: Final[tuple[type[Check], ...]] = (
    EndsOnce,
    NothingUninvited,
    Stream,
    Answer,
    Blocks,
    OneView,
    OneScheduler,
    Tenants,
    Usage,
    Cancel,
    Idle,
    Progress,
    Errors,
    Steps,
    Forgotten,
    Traces,
)

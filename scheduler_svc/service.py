"""The scheduler on the bus: maps events and effects to subjects, and measures what planning costs.

Shell.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from services.contracts import codec
from services.contracts.beats import Beat, ServiceKind
from services.contracts.errors import WireError
from services.contracts.kv import (
    KvDelta,
    KvSnapshot,
    LeaseReply,
    LeaseRequest,
    LookupReply,
    LookupRequest,
)
from services.contracts.sequences import AbortSequences, SubmitSequence
from services.contracts.spans import TimedSpan
from services.contracts.step import (
    Attach,
    Attached,
    Poll,
    PollReply,
    StepEvent,
    StepPlan,
    StepResult,
)
from services.contracts.subjects import Subjects
from services.runtime.actor import Actor
from services.runtime.bus import (
    Bus,
    Delivery,
    Endpoint,
    NoResponders,
    PayloadTooLarge,
    RequestTimeout,
)
from services.runtime.failpoints import failpoint
from services.runtime.incoming import Incoming
from services.runtime.log import get_logger, report_ready
from services.runtime.service import (
    beat_forever,
    connect,
    run_until_left,
    say_leaving,
    subjects,
)
from services.runtime.settings import Settings
from services.runtime.telemetry.recorder import Recorder
from services.runtime.telemetry.sharing import telemetry

from .core import SchedulerConfig, SchedulerCore
from .events import (
    AbortAsked,
    DrainAsked,
    Effect,
    Event,
    Note,
    OfferAdoption,
    Reply,
    SendUpdates,
    Submitted,
    WorkerSilent,
)
from .policies import Policies

# An attach waits for the running step, which may take longer: the same attempt is asked again, as
# it must be where its answer was lost with the bus.
ATTACH_TIMEOUT_S: Final = 2.0
POLL_TIMEOUT_S: Final = 1.0
LEDGER_TIMEOUT_S: Final = 1.0
MAX_PLAN_SIZES: Final = 16
POLICY_SETTINGS: Final = tuple(field.name for field in dataclasses.fields(Policies))

_submit = codec.Decoder(SubmitSequence)
_abort = codec.Decoder(AbortSequences)
_result = codec.Decoder(StepResult)
_beat = codec.Decoder(Beat)
_attached = codec.Decoder(Attached)
_poll_reply = codec.Decoder(PollReply)
_lookup_reply = codec.Decoder(LookupReply)
_lease_reply = codec.Decoder(LeaseReply)


class _TimedCore:
    """The core, and how many nanoseconds it has taken since a StepEvent was last sent."""

    def __init__(self, core: SchedulerCore) -> None:
        self.core = core
        self.spent_ns = 0

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        effects = self.core.handle(event, now_ns)
        self.spent_ns += time.monotonic_ns() - now_ns
        return effects

    def tick(self, now_ns: int) -> list[Effect]:
        effects = self.core.tick(now_ns)
        self.spent_ns += time.monotonic_ns() - now_ns
        return effects

    @property
    def wake_at_ns(self) -> int | None:
        return self.core.wake_at_ns


class SchedulerService:
    def __init__(self, core: SchedulerCore, bus: Bus, names: Subjects, recorder: Recorder) -> None:
        self._timed = _TimedCore(core)
        self._bus = bus
        self._names = names
        self._recorder = recorder
        self._engine = core.config.engine
        self._log = get_logger("scheduler")
        self._plan_bytes: dict[int, int] = {}
        self._requests: set[asyncio.Task[None]] = set()
        self._drained = asyncio.Event()
        self.actor: Actor[Event, Effect] = Actor(self._timed, self._perform, self._after_turn)
        self._incoming = Incoming("scheduler")
        self.dropped = self._incoming.dropped

    # ---- in

    def on_submit(self, delivery: Delivery) -> None:
        message = self._incoming.decoded(_submit, delivery)
        if message is not None and not failpoint("scheduler.after_submit"):
            self.actor.post(Submitted(message, delivery.reply))

    def on_abort(self, delivery: Delivery) -> None:
        message = self._incoming.decoded(_abort, delivery)
        if message is not None:
            self.actor.post(AbortAsked(message, delivery.reply))

    def on_result(self, delivery: Delivery) -> None:
        message = self._incoming.decoded(_result, delivery)
        if message is not None and not failpoint("scheduler.after_result"):
            self.actor.post(message)

    def on_beat(self, delivery: Delivery) -> None:
        message = self._incoming.decoded(_beat, delivery)
        if message is not None:
            self.actor.post(message)

    # ---- out

    async def _perform(self, effect: Effect) -> None:
        names, engine = self._names, self._engine
        match effect:
            case StepPlan():
                payload = codec.encode(effect)
                self._remember_size(effect.step_id, len(payload))
                if not failpoint("scheduler.before_plan"):
                    await self._bus.publish(names.plan(engine), payload)
                    failpoint("scheduler.after_plan")
            case SendUpdates():
                subject = names.updates(effect.admission_id)
                if not failpoint("scheduler.before_updates"):
                    await self._bus.publish(subject, codec.encode(effect.updates))
            case OfferAdoption():
                await self._bus.publish(names.adopt, codec.encode(effect.message))
            case StepEvent():
                await self._bus.publish(names.steps(engine), codec.encode(self._measured(effect)))
            case KvDelta() | KvSnapshot():
                if not failpoint("scheduler.before_delta"):
                    await self._bus.publish(names.delta(engine), codec.encode(effect))
            case Reply():
                if effect.reply:
                    await self._bus.publish(effect.reply, codec.encode(effect.message))
            case LookupRequest():
                self._ask(self._ask_ledger(names.lookup(engine), effect, _lookup_reply))
            case LeaseRequest():
                self._ask(self._ask_ledger(names.lease(engine), effect, _lease_reply))
            case Attach():
                self._ask(
                    self._ask_worker(names.attach(engine), effect, _attached, ATTACH_TIMEOUT_S)
                )
            case Poll():
                self._ask(self._ask_worker(names.poll(engine), effect, _poll_reply, POLL_TIMEOUT_S))
            case TimedSpan():
                self._recorder.record(effect)
            case Note():
                self._log.info(effect.event, **effect.fields)

    def _ask(self, request: Awaitable[None]) -> None:
        task = asyncio.ensure_future(request)
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)

    async def _ask_ledger(
        self,
        subject: str,
        message: codec.Message,
        decoder: codec.Decoder[LookupReply] | codec.Decoder[LeaseReply],
    ) -> None:
        """The core gives a silent ledger up by itself: nothing is posted then."""
        try:
            answer = await self._bus.request(
                subject, codec.encode(message), timeout_s=LEDGER_TIMEOUT_S
            )
            self.actor.post(decoder.decode(answer))
        except (NoResponders, RequestTimeout, PayloadTooLarge):
            self.dropped["ledger_silent"] += 1
        except WireError as error:
            self.dropped["wire"] += 1
            self._log.warning("message_dropped", subject=subject, reason=str(error))

    async def _ask_worker(
        self,
        subject: str,
        message: codec.Message,
        decoder: codec.Decoder[Attached] | codec.Decoder[PollReply],
        timeout_s: float,
    ) -> None:
        try:
            answer = await self._bus.request(subject, codec.encode(message), timeout_s=timeout_s)
            self.actor.post(decoder.decode(answer))
        except NoResponders:
            self.actor.post(WorkerSilent(gone=True))
        except (RequestTimeout, WireError):
            self.actor.post(WorkerSilent(gone=False))

    async def drain(self) -> None:
        """Plan no more, and take what is in flight: its tokens and blocks are the successor's."""
        self.actor.post(DrainAsked())
        await self._drained.wait()
        await self.actor.finish()

    async def _after_turn(self, _num_queued: int) -> None:
        if self._timed.core.is_drained:
            self._drained.set()

    # ---- measurements

    def _remember_size(self, step_id: int, size: int) -> None:
        self._plan_bytes[step_id] = size
        while len(self._plan_bytes) > MAX_PLAN_SIZES:
            del self._plan_bytes[next(iter(self._plan_bytes))]

    def _measured(self, event: StepEvent) -> StepEvent:
        spent_us, self._timed.spent_ns = self._timed.spent_ns // 1000, 0
        size = self._plan_bytes.get(event.step_id, 0)
        return msgspec.structs.replace(event, plan_bytes=size, scheduler_us=spent_us)


def config_of(settings: Settings, max_payload: int) -> SchedulerConfig:
    return SchedulerConfig(
        engine=settings.engine_id,
        scheduler_id=settings.scheduler_id,
        incarnation=secrets.token_hex(8),
        model=settings.served_name or settings.model,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_waiting_seqs=settings.max_waiting_seqs,
        max_model_len=settings.max_model_len,
        max_join_bytes=max_payload // 2,
        policies=policies_of(settings),
        dp_group=settings.dp_group,
        dp_size=settings.dp_size,
    )


def policies_of(settings: Settings) -> Policies:
    """The settings have checked the names; this only gives them their types."""
    return msgspec.convert({name: getattr(settings, name) for name in POLICY_SETTINGS}, Policies)


async def serve(settings: Settings, stopping: asyncio.Event) -> None:
    names, engine = subjects(settings), settings.engine_id
    bus = await connect(settings, settings.scheduler_id, stopping)
    core = SchedulerCore(config_of(settings, bus.max_payload))
    traces = telemetry(settings, ServiceKind.SCHEDULER, engine)
    service = SchedulerService(core, bus, names, traces.recorder)
    listeners: list[tuple[str, Callable[[Delivery], None]]] = [
        (names.result(engine), service.on_result),
        (names.any_beat("gpu_worker"), service.on_beat),
        (names.any_beat("kv_store"), service.on_beat),
        (names.any_beat("scheduler"), service.on_beat),
        (names.any_beat("admission"), service.on_beat),
    ]
    for subject, handler in listeners:
        await bus.subscribe(subject, handler)
    await bus.serve(
        "streetcar-scheduler",
        "Streetcar: one engine's scheduler",
        [
            Endpoint("submit", names.submit(engine), service.on_submit, queue=engine),
            Endpoint("abort", names.abort(engine), service.on_abort, queue=engine),
        ],
    )
    await traces.join(bus, names)
    await bus.flush()
    report_ready(id=settings.scheduler_id, engine=engine)
    beat = names.beat("scheduler", engine)

    async def leave() -> None:
        await service.drain()
        await say_leaving(bus, beat, core.beat())

    try:
        await run_until_left(
            stopping,
            leave,
            service.actor.run(),
            beat_forever(bus, beat, core.beat),
            traces.share_forever(),
        )
    finally:
        await traces.close()
        await bus.close()

"""The services as the simulation runs them: real cores and the real codec behind a shell made of
virtual time, which does what each `service.py` does.

Shell of the simulation; no clock, no socket.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Any, ClassVar, Final

import msgspec

from gpu_worker.executor import EngineShape, Executor
from gpu_worker.poison import WorkerDied
from kv_store.core import Asked, KvCore
from kv_store.core import Reply as KvReply
from kv_store.core import Superseded as LedgerSuperseded
from scheduler_svc import events as sched
from scheduler_svc.core import SchedulerConfig, SchedulerCore
from scheduler_svc.worker_link import Superseded
from services.contracts import codec
from services.contracts.beats import Beat, ServiceKind, WorkerLoad
from services.contracts.kv import (
    KvDelta,
    KvSnapshot,
    LeaseReply,
    LeaseRequest,
    LookupReply,
    LookupRequest,
)
from services.contracts.limits import BEAT_PERIOD_MS
from services.contracts.sequences import (
    AbortSequences,
    SubmitReply,
    SubmitSequence,
)
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
from services.contracts.vectors import unpack

from . import phases
from .bus import Answer, Asking, Bus, Envelope
from .model import VOCAB_SIZE, MarkedModel
from .options import Options
from .phases import Phase
from .process import Process, Skew

ENGINE: Final = "engine-0"
MODEL: Final = "shadow"

SECOND_NS: Final = 1_000_000_000
BEAT_NS: Final = BEAT_PERIOD_MS * 1_000_000
# As in the services' shells.
ATTACH_TIMEOUT_NS: Final = 2 * SECOND_NS
POLL_TIMEOUT_NS: Final = SECOND_NS
LEDGER_TIMEOUT_NS: Final = SECOND_NS

_submit = codec.Decoder(SubmitSequence)
_abort = codec.Decoder(AbortSequences)
_plan = codec.Decoder(StepPlan)
_result = codec.Decoder(StepResult)
_attach = codec.Decoder(Attach)
_attached = codec.Decoder(Attached)
_poll = codec.Decoder(Poll)
_poll_reply = codec.Decoder(PollReply)
_lookup_reply = codec.Decoder(LookupReply)
_lease_reply = codec.Decoder(LeaseReply)
_to_ledger: codec.Decoder[LookupRequest | LeaseRequest | KvDelta | KvSnapshot] = codec.Decoder(
    LookupRequest, LeaseRequest, KvDelta, KvSnapshot
)
_beat = codec.Decoder(Beat)


class Node(Process, ABC):
    """One run of a service on the bus."""

    role: ClassVar[str]
    # Its place in the mesh, which a restarted run and a replacement have too.
    slot = ""

    def __init__(self, world: Any, name: str, host: str, skew: Skew) -> None:
        super().__init__(world.clock, world.rng, name, host, skew)
        self.world = world
        self.bus: Bus = world.bus
        self.options: Options = world.options

    @abstractmethod
    def begin(self) -> None:
        """Subscribe and beat."""

    @abstractmethod
    def beat(self) -> Beat: ...

    @property
    @abstractmethod
    def state(self) -> Any:
        """What it knows, for the census and the checks."""

    def publish(
        self, subject: str, kind: str, message: codec.Message, *reached: Phase, channel: str = ""
    ) -> None:
        envelope = Envelope(kind, codec.encode(message), reached, channel)
        self.bus.publish(self, subject, envelope)

    def beat_forever(self, kind: str) -> None:
        self.every(BEAT_NS, lambda: self.publish(f"beat.{kind}", "beat", self.beat()))


class CoreNode(Node):
    """One with a core: events in, effects out, and a timer for it, as the actor loop has them."""

    core: Any

    def __init__(self, world: Any, name: str, host: str, skew: Skew) -> None:
        super().__init__(world, name, host, skew)
        self._armed_ns = 0
        self._is_armed = False

    @abstractmethod
    def perform(self, effect: Any) -> None:
        """Do what the core wants done."""

    @property
    def state(self) -> Any:
        return self.core

    def beat(self) -> Beat:
        beat: Beat = self.core.beat()
        return beat

    def hear_beats(self, *kinds: str) -> None:
        for kind in kinds:
            self.bus.subscribe(self, f"beat.{kind}", lambda b, _: self.post(_beat.decode(b)))

    def settled(self) -> None:
        """After every event."""
        self.core.check_invariants()
        self.world.settled(self)

    def post(self, event: Any) -> None:
        if self.alive:
            self._do(self.core.handle(event, self.now_ns))

    def _do(self, effects: list[Any]) -> None:
        for effect in effects:
            # It may be killed between any two of them.
            if self.alive:
                self.perform(effect)
        if self.alive:
            self.settled()
            self._arm()

    def _arm(self) -> None:
        wake_ns = self.core.wake_at_ns
        if wake_ns is None or (self._is_armed and wake_ns >= self._armed_ns):
            return
        self._is_armed, self._armed_ns = True, wake_ns
        self.clock.at(self.skew.true(wake_ns), lambda: self.run(self._tick, timer=True))

    def _tick(self) -> None:
        self._is_armed = False
        wake_ns = self.core.wake_at_ns
        if wake_ns is None:
            return
        if wake_ns > self.now_ns:
            self._arm()
            return
        self._do(self.core.tick(self.now_ns))
        again_ns = self.core.wake_at_ns
        assert not self.alive or again_ns is None or again_ns > self.now_ns, (
            f"{self.name} spins: a tick changes nothing"
        )


class KvNode(CoreNode):
    role = "kv_store"

    def __init__(self, world: Any, name: str, host: str, skew: Skew) -> None:
        super().__init__(world, name, host, skew)
        self.core: KvCore = KvCore(name, self.options.tenant_share)
        self._answers: dict[str, Answer] = {}
        self._serial = 0

    def begin(self) -> None:
        self.bus.subscribe(self, "kv", self._hear)
        self.hear_beats("scheduler")
        self.beat_forever("kv_store")

    def _hear(self, payload: bytes, answer: Answer) -> None:
        message = _to_ledger.decode(payload)
        if isinstance(message, KvDelta | KvSnapshot):
            self.post(message)
            return
        self._serial += 1
        self._answers[str(self._serial)] = answer
        self.post(Asked(message, str(self._serial)))
        # What names another ledger is not answered.
        self._answers.pop(str(self._serial), None)

    def post(self, event: Any) -> None:
        try:
            super().post(event)
        except LedgerSuperseded:
            self.world.stepped_down(self)

    def perform(self, effect: KvReply) -> None:
        is_lookup = isinstance(effect.message, LookupReply)
        kind = "lookup reply" if is_lookup else "lease reply"
        reached = Phase.LOOKED_UP if is_lookup else Phase.LEASED
        answer = self._answers.pop(effect.reply)
        answer(Envelope(kind, codec.encode(effect.message), (reached,)))


class WorkerNode(Node):
    """One step at a time; the rest waits in a queue, as the runner's thread has it."""

    role = "worker"

    def __init__(self, world: Any, name: str, host: str, skew: Skew) -> None:
        super().__init__(world, name, host, skew)
        o = self.options
        shape = EngineShape(
            max_num_seqs=o.max_num_seqs,
            max_model_len=o.max_model_len,
            block_size=o.block_size,
            num_blocks=o.num_blocks,
            vocab_size=VOCAB_SIZE,
            host_blocks=o.host_blocks,
            copy_block_us=o.copy_block_us,
        )
        self.model = MarkedModel(shape, world.marks, world.victims, world.memory)
        self.executor = Executor(self.model, world.next_generation(), shape)
        self.queue: deque[tuple[int, StepPlan]] = deque()
        self.running = False
        self._waiting_attach: list[tuple[Attach, Answer]] = []

    def begin(self) -> None:
        for subject, handler in (
            ("plan", self._hear_plan),
            ("attach", self._hear_attach),
            ("poll", self._hear_poll),
        ):
            self.bus.subscribe(self, subject, handler, queue="" if subject == "plan" else ENGINE)
        self.beat_forever("gpu_worker")

    @property
    def state(self) -> Executor:
        return self.executor

    def _hear_plan(self, payload: bytes, _answer: Answer) -> None:
        plan = _plan.decode(payload)
        if self.executor.admit(plan):
            self.queue.append((self.now_ns, plan))
            self._run_next()

    def _hear_attach(self, payload: bytes, answer: Answer) -> None:
        request = _attach.decode(payload)
        if not self.executor.is_repeated(request):
            self.queue.clear()
        self._waiting_attach.append((request, answer))
        if not self.running:
            self._attach_waiting()

    def _attach_waiting(self) -> None:
        waiting, self._waiting_attach = self._waiting_attach, []
        for request, answer in waiting:
            attached = self.executor.attach(request)
            answer(Envelope("attach reply", codec.encode(attached), (Phase.ATTACHED,)))

    def _hear_poll(self, payload: bytes, answer: Answer) -> None:
        reply = self.executor.poll(_poll.decode(payload))
        answer(Envelope(f"poll reply {reply.state}", codec.encode(reply)))

    def _run_next(self) -> None:
        if self.running or not self.queue:
            return
        queued_ns, plan = self.queue.popleft()
        self.running = True
        self.world.executes(self, plan)
        self.world.reached(Phase.STEP_RUNS)
        if not self.alive:
            return
        try:
            result = self.executor.run(plan)
        except WorkerDied:
            self.world.died_of_poison(self)
            return
        num_tokens = int(unpack(plan.chunk_tokens).sum()) + 1
        elapsed = self.options.step_base_ns + num_tokens * self.options.step_token_ns
        waited = self.now_ns - queued_ns
        self.after(elapsed, lambda: self._done(result, elapsed, waited))

    def _done(self, result: StepResult, elapsed: int, waited: int) -> None:
        timed = msgspec.structs.replace(
            result, elapsed_us=max(1, elapsed // 1000), waited_us=waited // 1000
        )
        # The runner's thread takes what waits before or after the loop hears of the result.
        attach_first = self.rng.random() < 0.5
        if attach_first:
            self._attach_waiting()
        self.executor.remember(timed)
        self.publish("result", "result", timed, Phase.RESULT)
        self.running = False
        if not attach_first:
            self._attach_waiting()
        if self.alive:
            self._run_next()

    def beat(self) -> Beat:
        return Beat(
            kind=ServiceKind.GPU_WORKER,
            service_id="worker-0",
            generation=self.executor.generation,
            epoch=self.executor.epoch,
            worker=WorkerLoad(MODEL, self.executor.last_done, self.options.num_blocks),
        )


class SchedulerNode(CoreNode):
    role = "scheduler"

    def __init__(self, world: Any, name: str, host: str, skew: Skew) -> None:
        super().__init__(world, name, host, skew)
        options = self.options
        self.core: SchedulerCore = SchedulerCore(
            SchedulerConfig(
                engine=ENGINE,
                scheduler_id="scheduler-0",
                incarnation=name,
                model=MODEL,
                max_num_seqs=options.max_num_seqs,
                max_num_batched_tokens=options.max_num_batched_tokens,
                max_waiting_seqs=1000,
                policies=options.policies,
            )
        )
        self._answers: dict[str, Answer] = {}
        self._serial = 0
        self._num_preemptions = 0

    def begin(self) -> None:
        self.bus.subscribe(self, "result", lambda b, _: self.post(_result.decode(b)))
        self.bus.subscribe(self, "submit", self._hear_submit, queue=ENGINE)
        self.bus.subscribe(self, "abort", self._hear_abort, queue=ENGINE)
        self.hear_beats("gpu_worker", "kv_store", "scheduler", "admission")
        self.beat_forever("scheduler")
        self._arm()

    def post(self, event: Any) -> None:
        if isinstance(event, PollReply):
            result = event.result
        else:
            result = event if isinstance(event, StepResult) else None
        if result is not None and self.alive:
            self.world.answered(self, result)
        try:
            super().post(event)
        except Superseded:
            # It logs why and exits; whether it is started again is its supervisor's business.
            self.world.stepped_down(self)

    def _hear_submit(self, payload: bytes, answer: Answer) -> None:
        self.post(sched.Submitted(_submit.decode(payload), self._token(answer)))

    def _hear_abort(self, payload: bytes, answer: Answer) -> None:
        self.post(sched.AbortAsked(_abort.decode(payload), self._token(answer)))

    def _token(self, answer: Answer) -> str:
        self._serial += 1
        self._answers[str(self._serial)] = answer
        return str(self._serial)

    def settled(self) -> None:
        super().settled()
        core = self.core
        num_preemptions = core.totals.num_preemptions + core.batch.num_preempted
        if num_preemptions > self._num_preemptions:
            self._num_preemptions = num_preemptions
            self.world.reached(Phase.PREEMPTED)

    def perform(self, effect: sched.Effect) -> None:
        match effect:
            case StepPlan():
                self.world.planned(self, effect)
                self.publish("plan", "plan", effect, *phases.of_plan(effect))
            case sched.SendUpdates():
                reached = Phase.ENDED if effect.updates.finished else Phase.TOKENS
                subject = f"updates.{effect.admission_id}"
                self.publish(subject, "updates", effect.updates, reached)
            case KvDelta():
                reached_here = phases.of_delta(effect)
                self.publish("kv", "delta", effect, *reached_here, channel="kv")
            case KvSnapshot():
                self.publish("kv", "snapshot", effect, Phase.SNAPSHOT, channel="kv")
            case sched.Reply():
                self._reply(effect)
            case LookupRequest():
                self._ask_ledger("lookup", effect, _lookup_reply, Phase.LOOKING_UP)
            case LeaseRequest():
                self._ask_ledger("lease", effect, _lease_reply, Phase.LEASING)
            case Attach():
                self._ask_worker("attach", effect, _attached, Phase.ATTACHING)
            case Poll():
                self._ask_worker("poll", effect, _poll_reply, Phase.POLLED)
            case sched.OfferAdoption():
                self.world.num_offers.update(seq.seq_id for seq in effect.message.sequences)
                self.publish("adopt", "adopt", effect.message, Phase.ADOPTED)
            case StepEvent():
                self.world.step_event(self, effect)
            case TimedSpan():
                self.world.span(self, effect)
            case sched.Note():
                pass

    def _reply(self, effect: sched.Reply) -> None:
        is_submit = isinstance(effect.message, SubmitReply)
        kind = "submit reply" if is_submit else "abort reply"
        reached = (Phase.SUBMIT_ANSWERED,) if is_submit else ()
        answer = self._answers.pop(effect.reply)
        answer(Envelope(kind, codec.encode(effect.message), reached))

    def _ask_ledger(
        self, kind: str, message: codec.Message, decoder: codec.Decoder[Any], reached: Phase
    ) -> None:
        asking = Asking(
            LEDGER_TIMEOUT_NS, lambda b: self.post(decoder.decode(b)), lambda: None, lambda: None
        )
        envelope = Envelope(kind, codec.encode(message), (reached,), "kv")
        self.bus.request(self, "kv", envelope, asking)

    def _ask_worker(
        self, kind: str, message: codec.Message, decoder: codec.Decoder[Any], reached: Phase
    ) -> None:
        asking = Asking(
            ATTACH_TIMEOUT_NS if kind == "attach" else POLL_TIMEOUT_NS,
            lambda b: self.post(decoder.decode(b)),
            lambda: self.post(sched.WorkerSilent(gone=False)),
            lambda: self.post(sched.WorkerSilent(gone=True)),
        )
        self.bus.request(self, kind, Envelope(kind, codec.encode(message), (reached,)), asking)

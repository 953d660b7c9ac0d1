"""The services as the simulation runs them: real cores behind a shell made of virtual time.

Shell of the simulation; no clock, no socket.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec

from gpu_worker.executor import EngineShape, Executor, Model
from gpu_worker.poison import PoisonedModel, WorkerDied
from gpu_worker.shadow import ShadowModel
from kv_store.core import Asked, KvCore
from kv_store.core import Reply as KvReply
from scheduler_svc import events as sched
from scheduler_svc.core import SchedulerConfig, SchedulerCore
from services.admission import core as adm
from services.admission.open_request import Ticket
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
from services.contracts.public import Frame
from services.contracts.sequences import (
    AbortReply,
    AbortSequences,
    AdoptSequences,
    SequenceUpdates,
    SubmitReply,
    SubmitSequence,
)
from services.contracts.step import (
    Attach,
    Attached,
    Poll,
    PollReply,
    StepEvent,
    StepPlan,
    StepResult,
)

from .network import Clock, Network
from .options import Options

ENGINE = "engine-0"
MODEL = "shadow"
VOCAB_SIZE = 512
REQUEST_TIMEOUT_NS = 300_000_000
WORKER_TIMEOUT_NS = 1_000_000_000

_submit = codec.Decoder(SubmitSequence)
_submit_reply = codec.Decoder(SubmitReply)
_abort = codec.Decoder(AbortSequences)
_abort_reply = codec.Decoder(AbortReply)
_updates = codec.Decoder(SequenceUpdates)
_offer = codec.Decoder(AdoptSequences)
_plan = codec.Decoder(StepPlan)
_result = codec.Decoder(StepResult)
_attach = codec.Decoder(Attach)
_attached = codec.Decoder(Attached)
_poll = codec.Decoder(Poll)
_poll_reply = codec.Decoder(PollReply)
_ask: codec.Decoder[LookupRequest | LeaseRequest] = codec.Decoder(LookupRequest, LeaseRequest)
_lookup_reply = codec.Decoder(LookupReply)
_lease_reply = codec.Decoder(LeaseReply)
_delta: codec.Decoder[KvDelta | KvSnapshot] = codec.Decoder(KvDelta, KvSnapshot)
beat_decoder = codec.Decoder(Beat)


def _die() -> NoReturn:
    raise WorkerDied


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request: what is asked, who serves it, and what happens then."""

    kind: str
    payload: bytes
    serve: Callable[[bytes, Callable[[bytes], None]], None]
    answered: Callable[[bytes], None]
    timed_out: Callable[[], None]
    timeout_ns: int


class Link:
    """Request/reply with a time-out over the simulated network, as the bus gives it."""

    def __init__(self, clock: Clock, network: Network) -> None:
        self.clock = clock
        self.network = network

    def request(self, ends: tuple[str, str], exchange: Exchange) -> None:
        """`ends`: who asks, who answers. One of `answered` and `timed_out` is called, once."""
        sender, receiver = ends
        state = {"open": True}

        def close(then: Callable[[], None]) -> None:
            if state["open"]:
                state["open"] = False
                then()

        def reply(answer: bytes) -> None:
            self.network.send(
                receiver,
                sender,
                f"{exchange.kind} reply",
                answer,
                lambda b: close(lambda: exchange.answered(b)),
            )

        self.network.send(
            sender, receiver, exchange.kind, exchange.payload, lambda b: exchange.serve(b, reply)
        )
        self.clock.at(self.clock.now_ns + exchange.timeout_ns, lambda: close(exchange.timed_out))


class Node:
    """One core, its timer, and what to do with its effects."""

    def __init__(self, name: str, world: Any) -> None:
        self.name = name
        self.world = world
        self.clock: Clock = world.clock
        self.network: Network = world.network
        self.link: Link = world.link
        self.core: Any = None

    def post(self, event: Any) -> None:
        for effect in self.core.handle(event, self.clock.now_ns):
            self.perform(effect)
        self.settled()
        self._arm()

    def perform(self, effect: Any) -> None:
        raise NotImplementedError

    def settled(self) -> None:
        """After every event."""

    def _arm(self) -> None:
        wake = self.core.wake_at_ns
        if wake is not None:
            self.clock.at(wake, self._tick)

    def _tick(self) -> None:
        wake = self.core.wake_at_ns
        if wake is None or wake > self.clock.now_ns:
            return
        for effect in self.core.tick(self.clock.now_ns):
            self.perform(effect)
        self.settled()
        again = self.core.wake_at_ns
        assert again is None or again > self.clock.now_ns, (
            f"{self.name} spins: a tick changes nothing"
        )
        self._arm()

    def send(
        self, receiver: Node, kind: str, payload: bytes, deliver: Callable[[bytes], None]
    ) -> None:
        self.network.send(self.name, receiver.name, kind, payload, deliver)


class KvNode(Node):
    def __init__(self, world: Any, options: Options) -> None:
        super().__init__("kv_store", world)
        self.core = KvCore("kv-0", options.tenant_share)
        self._replies: dict[str, Callable[[bytes], None]] = {}

    def serve(self, payload: bytes, reply: Callable[[bytes], None]) -> None:
        token = f"r{len(self._replies)}"
        self._replies[token] = reply
        self.post(Asked(_ask.decode(payload), token))

    def take_delta(self, payload: bytes) -> None:
        self.post(_delta.decode(payload))

    def perform(self, effect: KvReply) -> None:
        self._replies[effect.reply](codec.encode(effect.message))

    def settled(self) -> None:
        self.core.check_invariants()


class WorkerNode(Node):
    """One step at a time; the rest waits in a queue, as the runner's thread has it."""

    def __init__(self, world: Any, options: Options) -> None:
        super().__init__("worker", world)
        self.options = options
        self.generation = 0
        self.executor = self._start()
        self.queue: deque[tuple[int, StepPlan]] = deque()
        self.running = False
        self._waiting_attach: list[Callable[[], None]] = []

    def _start(self) -> Executor:
        o = self.options
        self.generation += 1
        model: Model = ShadowModel(
            num_blocks=o.num_blocks,
            block_size=o.block_size,
            vocab_size=VOCAB_SIZE,
            host_blocks=o.host_blocks,
        )
        if o.poison:
            model = PoisonedModel(model, o.poison, _die)
        shape = EngineShape(
            max_num_seqs=o.max_num_seqs,
            max_model_len=o.max_model_len,
            block_size=o.block_size,
            num_blocks=o.num_blocks,
            vocab_size=VOCAB_SIZE,
            host_blocks=o.host_blocks,
            copy_block_us=o.copy_block_us,
        )
        return Executor(model, self.generation, shape)

    def restart(self) -> None:
        """Killed and started again: empty KV, a new generation, nothing remembered."""
        self.executor = self._start()
        self.queue.clear()
        self.running = False
        self._waiting_attach.clear()

    def take_plan(self, payload: bytes) -> None:
        plan = _plan.decode(payload)
        if self.executor.admit(plan):
            self.queue.append((self.clock.now_ns, plan))
            self._run_next()

    def serve_attach(self, payload: bytes, reply: Callable[[bytes], None]) -> None:
        request = _attach.decode(payload)
        self.queue.clear()

        def attach() -> None:
            reply(codec.encode(self.executor.attach(request)))

        if self.running:
            self._waiting_attach.append(attach)
        else:
            attach()

    def serve_poll(self, payload: bytes, reply: Callable[[bytes], None]) -> None:
        reply(codec.encode(self.executor.poll(_poll.decode(payload))))

    def _run_next(self) -> None:
        if self.running or not self.queue:
            return
        queued_ns, plan = self.queue.popleft()
        self.running = True
        executor = self.executor
        try:
            result = executor.run(plan)
        except WorkerDied:
            self.restart()
            return
        num_tokens = self.world.tokens_of(plan)
        elapsed = self.options.step_base_ns + num_tokens * self.options.step_token_ns
        waited = self.clock.now_ns - queued_ns
        self.clock.at(
            self.clock.now_ns + elapsed, lambda: self._done(executor, result, elapsed, waited)
        )

    def _done(self, executor: Executor, result: StepResult, elapsed: int, waited: int) -> None:
        if executor is not self.executor:
            return
        timed = msgspec.structs.replace(
            result, elapsed_us=max(1, elapsed // 1000), waited_us=waited // 1000
        )
        executor.remember(timed)
        scheduler = self.world.scheduler
        self.send(scheduler, "result", codec.encode(timed), scheduler.take_result)
        self.running = False
        attaches, self._waiting_attach = self._waiting_attach, []
        for attach in attaches:
            attach()
        self._run_next()
        self.world.step_done()

    def beat(self) -> Beat:
        return Beat(
            kind=ServiceKind.GPU_WORKER,
            service_id="worker-0",
            generation=self.generation,
            epoch=self.executor.epoch,
            worker=WorkerLoad(MODEL, self.executor.last_done, self.options.num_blocks),
        )


class SchedulerNode(Node):
    def __init__(self, world: Any, options: Options) -> None:
        super().__init__("scheduler", world)
        self.options = options
        self.incarnation = 0
        self.core = self._start()
        self._replies: dict[str, Callable[[bytes], None]] = {}

    def _start(self) -> SchedulerCore:
        options = self.options
        self.incarnation += 1
        return SchedulerCore(
            SchedulerConfig(
                engine=ENGINE,
                scheduler_id="scheduler-0",
                incarnation=f"sim-start-{self.incarnation}",
                model=MODEL,
                max_num_seqs=options.max_num_seqs,
                max_num_batched_tokens=options.max_num_batched_tokens,
                max_waiting_seqs=1000,
                policies=options.policies,
            )
        )

    def start(self) -> None:
        self._arm()

    def restart(self) -> None:
        """Killed and started again: knows nothing, and hears no answer to what it had asked."""
        self.core = self._start()
        self.start()

    def _mine(self, then: Callable[..., None]) -> Callable[..., None]:
        """`then`, unless this scheduler is started again before: its inbox is gone with it."""
        incarnation = self.incarnation

        def deliver(*args: bytes) -> None:
            if incarnation == self.incarnation:
                then(*args)

        return deliver

    def take_result(self, payload: bytes) -> None:
        self.post(_result.decode(payload))

    def serve_submit(self, payload: bytes, reply: Callable[[bytes], None]) -> None:
        self.post(sched.Submitted(_submit.decode(payload), self._token(reply)))

    def serve_abort(self, payload: bytes, reply: Callable[[bytes], None]) -> None:
        self.post(sched.AbortAsked(_abort.decode(payload), self._token(reply)))

    def _token(self, reply: Callable[[bytes], None]) -> str:
        token = f"r{len(self._replies)}"
        self._replies[token] = reply
        return token

    def perform(self, effect: sched.Effect) -> None:
        world = self.world
        match effect:
            case StepPlan():
                world.saw_plan(effect)
                self.send(world.worker, "plan", codec.encode(effect), world.worker.take_plan)
            case sched.SendUpdates():
                node = world.admission_of(effect.admission_id)
                if node is not None:
                    payload = codec.encode(effect.updates)
                    self.send(node, "updates", payload, node.mine(node.take_updates))
            case sched.OfferAdoption():
                node = world.any_admission()
                if node is not None:
                    self.send(node, "adopt", codec.encode(effect.message), node.take_offer)
            case KvDelta() | KvSnapshot():
                self.send(world.kv, "delta", codec.encode(effect), world.kv.take_delta)
            case sched.Reply():
                self._replies[effect.reply](codec.encode(effect.message))
            case LookupRequest():
                self._ask_kv("lookup", effect, lambda b: self.post(_lookup_reply.decode(b)))
            case LeaseRequest():
                self._ask_kv("lease", effect, lambda b: self.post(_lease_reply.decode(b)))
            case Attach():
                serve, decode = world.worker.serve_attach, _attached.decode
                self._ask_worker("attach", effect, serve, lambda b: self.post(decode(b)))
            case Poll():
                serve = world.worker.serve_poll
                self._ask_worker("poll", effect, serve, lambda b: self.post(_poll_reply.decode(b)))
            case StepEvent() | sched.Note():
                pass

    def _ask_kv(self, kind: str, message: codec.Message, answered: Callable[[bytes], None]) -> None:
        kv = self.world.kv
        ends = (self.name, kv.name)
        payload = codec.encode(message)
        heard = self._mine(answered)
        exchange = Exchange(kind, payload, kv.serve, heard, lambda: None, REQUEST_TIMEOUT_NS)
        self.link.request(ends, exchange)

    def _ask_worker(
        self, kind: str, message: codec.Message, serve: Any, answered: Callable[[bytes], None]
    ) -> None:
        ends = (self.name, self.world.worker.name)
        silent = sched.WorkerSilent(gone=False)
        self.link.request(
            ends,
            Exchange(
                kind,
                codec.encode(message),
                serve,
                self._mine(answered),
                self._mine(lambda: self.post(silent)),
                WORKER_TIMEOUT_NS,
            ),
        )

    def settled(self) -> None:
        self.core.check_invariants()


class AdmissionNode(Node):
    """Every run has an id of its own, as in the service."""

    def __init__(self, world: Any, number: int, vocabulary: Any) -> None:
        super().__init__(f"admission-{number}", world)
        self.vocabulary = vocabulary
        self.alive = True
        self.incarnation = 0
        self.core = self._start()

    def _start(self) -> adm.AdmissionCore:
        self.incarnation += 1
        self._ended: set[str] = set()
        self._was_asked = False
        name = f"{self.name}-{self.incarnation}"
        return adm.AdmissionCore(name, {MODEL: self.vocabulary}, max_open=1000)

    def die(self, down_ns: int) -> None:
        """Killed; started again after `down_ns`, knowing nothing."""
        self.alive = False
        self.clock.at(self.clock.now_ns + down_ns, self._restart)

    def _restart(self) -> None:
        self.core = self._start()
        self.alive = True

    def mine(self, then: Callable[..., None]) -> Callable[..., None]:
        """`then`, if this run lives when it comes."""
        incarnation = self.incarnation

        def deliver(*args: bytes) -> None:
            if self.alive and incarnation == self.incarnation:
                then(*args)

        return deliver

    def hear(self, event: adm.Event) -> None:
        if self.alive:
            self.post(event)

    def post(self, event: adm.Event) -> None:
        self._was_asked = isinstance(event, adm.ResumeAsked | Ticket)
        super().post(event)

    def _check_end(self, frame: Frame) -> None:
        """Only who asks hears anything after the end, or the end again."""
        request_id = frame.request_id
        if self._was_asked:
            self._ended.discard(request_id)
        assert request_id not in self._ended, f"{request_id}: a frame after the terminal frame"
        if frame.finish_reason is not None:
            self._ended.add(request_id)

    def take_beat(self, payload: bytes) -> None:
        self.hear(beat_decoder.decode(payload))

    def take_offer(self, payload: bytes) -> None:
        self.hear(_offer.decode(payload))

    def take_updates(self, payload: bytes) -> None:
        self.post(_updates.decode(payload))

    def _tick(self) -> None:
        if self.alive:
            super()._tick()

    def settled(self) -> None:
        while self.core.has_news:
            for effect in self.core.handle(adm.Flush(), self.clock.now_ns):
                self.perform(effect)
        self.core.check_invariants()

    def perform(self, effect: adm.Effect) -> None:
        scheduler = self.world.scheduler
        ends = (self.name, scheduler.name)
        match effect:
            case adm.SendFrame():
                self._check_end(effect.frame)
                self.world.send_frame(self, effect)
            case adm.Submit():
                seq_id = effect.message.seq_id
                self.link.request(
                    ends,
                    Exchange(
                        "submit",
                        codec.encode(effect.message),
                        scheduler.serve_submit,
                        self.mine(lambda b: self.post(_submit_reply.decode(b))),
                        self.mine(lambda: self.post(adm.SubmitFailed(seq_id))),
                        REQUEST_TIMEOUT_NS,
                    ),
                )
            case adm.Abort():
                self._abort(ends, effect, tries=5)
            case adm.Cancelled():
                pass

    def _abort(self, ends: tuple[str, str], effect: adm.Abort, tries: int) -> None:
        """Aborts are retried by the shell: they are idempotent and nobody waits for them."""
        self.link.request(
            ends,
            Exchange(
                "abort",
                codec.encode(effect.message),
                self.world.scheduler.serve_abort,
                lambda b: None,
                self.mine(lambda: self._abort(ends, effect, tries - 1) if tries else None),
                REQUEST_TIMEOUT_NS,
            ),
        )

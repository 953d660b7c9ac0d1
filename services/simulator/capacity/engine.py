"""One engine in virtual time: the real scheduler and ledger cores, and a worker that only takes
time.

Invariants: the bus is ideal (in order, nothing lost, one latency for all); a step takes what the
step-time model says, and every sequence gets its length; the same requests and options give the
same record.

Shell of the simulation: no clock, no socket.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kv_store.core import Asked, KvCore
from scheduler_svc import events as sched
from scheduler_svc.core import SchedulerConfig, SchedulerCore
from scheduler_svc.policies import Policies
from services.contracts.errors import InvariantError, StreetcarError
from services.contracts.kv import (
    KvDelta,
    KvSnapshot,
    LeaseReply,
    LeaseRequest,
    LookupReply,
    LookupRequest,
)
from services.contracts.sampling import SamplingParams
from services.contracts.sequences import AbortSequences, SubmitReply, SubmitSequence
from services.contracts.step import (
    Attach,
    Attached,
    Poll,
    PollReply,
    PollState,
    StepEvent,
    StepPlan,
    StepResult,
)
from services.contracts.vectors import pack
from services.simulator.network import Clock

from .lane_tracker import LaneTracker, Scheduled
from .record import Record, StepRecord
from .step_time import StepTime
from .workload import Request

_ENGINE: Final = "engine-0"
_ADMISSION: Final = "admission-0"
_GENERATION: Final = 1
_EPOCH: Final = 1
_FILLER_TOKEN: Final = 1
_STOP_TOKEN: Final = 2
_MS_NS: Final = 1_000_000
_GREEDY: Final = SamplingParams()


class SimulationStuck(StreetcarError):
    """Requests are open and nothing is going to happen."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """kv_tokens: size of the pool, rounded down to blocks. bus_ms: latency of one message.
    host_kv_tokens: of the host memory below it; copy_block_us: what a copy adds to its step.

    max_tokens: what every client asks for; its answer ends at its own length with a stop token,
    which the scheduler cannot foresee. 0: each asks for just what it gets, and ends by length.
    """

    step_time: StepTime
    kv_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    policies: Policies = field(default_factory=Policies)
    block_size: int = 16
    prefix_caching: bool = True
    bus_ms: float = 0.0
    max_tokens: int = 0
    host_kv_tokens: int = 0
    copy_block_us: int = 50


def run(options: EngineOptions, requests: Sequence[Request]) -> Record:
    """Serve `requests` to their end.

    Raises SimulationStuck where they cannot come to one, InvariantError where plans contradict
    themselves.
    """
    return _Engine(options, requests).run()


class _Engine:
    def __init__(self, options: EngineOptions, requests: Sequence[Request]) -> None:
        self.options = options
        self.requests = requests
        self.clock = Clock()
        self.record = Record.empty(requests)
        self.latency_ns = round(options.bus_ms * _MS_NS)
        self.num_outputs = np.array([request.num_output_tokens for request in requests])
        self.max_model_len = max(r.num_prompt_tokens + self._max_tokens(r) for r in requests)
        self.scheduler = SchedulerCore(self._config())
        self.ledger = KvCore("kv-0")
        self.worker = _Worker(self)
        self._armed_ns: int | None = None

    def _config(self) -> SchedulerConfig:
        options = self.options
        return SchedulerConfig(
            engine=_ENGINE,
            scheduler_id="scheduler-0",
            incarnation="sim",
            model="simulated",
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_waiting_seqs=len(self.requests),
            prefix_caching=options.prefix_caching,
            policies=options.policies,
        )

    def run(self) -> Record:
        # Before the lease arrives: those that are there at the start can share the first step.
        for index, request in enumerate(self.requests):
            self.clock.at(request.arrival_ns, lambda i=index: self._submit(i))  # type: ignore[misc]
        self._perform(self.scheduler.tick(0))
        while not self.record.is_complete:
            if not self.clock.step():
                left = len(self.requests) - self.record.num_finished
                raise SimulationStuck(f"{left} requests are open and no event is left")
        return self.record

    def later(self, delay_ns: int, event: sched.Event) -> None:
        self.clock.at(self.clock.now_ns + delay_ns, lambda: self.post(event))

    def post(self, event: sched.Event) -> None:
        self._perform(self.scheduler.handle(event, self.clock.now_ns))

    # ---- the scheduler's shell

    def _perform(self, effects: list[sched.Effect]) -> None:
        for effect in effects:
            match effect:
                case StepPlan():
                    self.clock.at(
                        self.clock.now_ns + self.latency_ns,
                        lambda plan=effect: self.worker.take(plan),  # type: ignore[misc]
                    )
                case StepEvent():
                    self.record.num_preemptions = effect.num_preemptions
                case sched.SendUpdates():
                    self._take_updates(effect)
                case KvDelta() | KvSnapshot():
                    self.ledger.handle(effect, self.clock.now_ns)
                case LookupRequest() | LeaseRequest():
                    self._ask_ledger(effect)
                case Attach():
                    self.post(self._attached(effect))
                case Poll():
                    self.later(2 * self.latency_ns, self._still_runs(effect))
                case sched.Reply(message=SubmitReply() as reply) if reply.code is not None:
                    self.record.refused[_index(reply.seq_id)] = reply.message
        self._arm()

    def _arm(self) -> None:
        wake_ns = self.scheduler.wake_at_ns
        if wake_ns is None or (self._armed_ns is not None and self._armed_ns <= wake_ns):
            return
        self._armed_ns = wake_ns
        self.clock.at(wake_ns, lambda: self._wake(wake_ns))

    def _wake(self, armed_ns: int) -> None:
        if self._armed_ns != armed_ns:
            return
        self._armed_ns = None
        wake_ns = self.scheduler.wake_at_ns
        if wake_ns is not None and wake_ns <= self.clock.now_ns:
            self._perform(self.scheduler.tick(self.clock.now_ns))
        else:
            self._arm()

    def _attached(self, attach: Attach) -> Attached:
        options = self.options
        return Attached(
            attempt=attach.attempt,
            generation=_GENERATION,
            epoch=_EPOCH,
            # Block 0 is the null block.
            num_blocks=options.kv_tokens // options.block_size + 1,
            block_size=options.block_size,
            max_num_seqs=options.max_num_seqs,
            max_model_len=self.max_model_len,
            vocab_size=len(self.requests) + _STOP_TOKEN + 1,
            host_blocks=options.host_kv_tokens // options.block_size,
            copy_block_us=options.copy_block_us if options.host_kv_tokens else 0,
            ledger=self.ledger.service_id,
        )

    @staticmethod
    def _still_runs(poll: Poll) -> PollReply:
        """On this bus, a result that has not arrived is under way or still to come."""
        return PollReply(poll.generation, poll.epoch, poll.step_id, PollState.RUNNING)

    def _ask_ledger(self, request: LookupRequest | LeaseRequest) -> None:
        for reply in self.ledger.handle(Asked(request, ""), self.clock.now_ns):
            message = reply.message
            if not isinstance(message, LookupReply | LeaseReply):
                raise InvariantError(f"the ledger answered with {type(message).__name__}")
            self.later(2 * self.latency_ns, message)

    # ---- the admission's part

    def _submit(self, index: int) -> None:
        request = self.requests[index]
        # The first token tells the prompts apart, so that none is another's prefix.
        prompt = np.full(request.num_prompt_tokens, _FILLER_TOKEN, dtype=np.int32)
        prompt[0] = index
        message = SubmitSequence(
            seq_id=f"r{index}",
            admission_id=_ADMISSION,
            tag=index,
            prompt=pack(prompt),
            max_tokens=self._max_tokens(request),
            stop_token_ids=pack([_STOP_TOKEN]),
            sampling=_GREEDY,
        )
        self.post(sched.Submitted(message, ""))

    def _max_tokens(self, request: Request) -> int:
        return max(request.num_output_tokens, self.options.max_tokens)

    def _take_updates(self, effect: sched.SendUpdates) -> None:
        ended = self.record.add_updates(effect.updates, self.clock.now_ns + self.latency_ns)
        if ended:
            seq_ids = [f"r{tag}" for tag in ended]
            known = AbortSequences(admission_id=_ADMISSION, seq_ids=seq_ids)
            self.later(2 * self.latency_ns, sched.AbortAsked(known, ""))


class _Worker:
    """One step at a time; the plan that is early waits."""

    def __init__(self, engine: _Engine) -> None:
        self.engine = engine
        self.tracker = LaneTracker(engine.options.max_num_seqs)
        self._queue: deque[tuple[int, StepPlan]] = deque()
        self._busy = False

    def take(self, plan: StepPlan) -> None:
        self._queue.append((self.engine.clock.now_ns, plan))
        self._start_next()

    def _start_next(self) -> None:
        if self._busy or not self._queue:
            return
        self._busy = True
        queued_ns, plan = self._queue.popleft()
        scheduled = self.tracker.apply(plan)
        clock = self.engine.clock
        start_ns = clock.now_ns
        options = self.engine.options
        compute_ns = round(options.step_time.ms(scheduled.load) * _MS_NS)
        end_ns = start_ns + max(1, compute_ns + _num_copies(plan) * options.copy_block_us * 1000)
        times = (queued_ns, start_ns, end_ns)
        clock.at(end_ns, lambda: self._done(plan, scheduled, times))

    def _done(self, plan: StepPlan, scheduled: Scheduled, times: tuple[int, int, int]) -> None:
        queued_ns, start_ns, end_ns = times
        record = self.engine.record
        record.steps.append(
            StepRecord(start_ns, end_ns, scheduled.load, scheduled.owners, scheduled.lanes)
        )
        # Whether by stop token or by length, this is where the answer ends.
        wanted = self.engine.num_outputs[scheduled.sampled_owners]
        record.num_discarded_tokens += int((scheduled.num_outputs > wanted).sum())
        token_ids = np.where(scheduled.num_outputs >= wanted, _STOP_TOKEN, _FILLER_TOKEN)
        result = StepResult(
            generation=plan.generation,
            epoch=plan.epoch,
            number=plan.number,
            step_id=plan.step_id,
            lanes=pack(scheduled.sampled),
            token_ids=pack(token_ids.astype(np.int32)),
            elapsed_us=max(1, (end_ns - start_ns) // 1000),
            waited_us=(start_ns - queued_ns) // 1000,
        )
        self.engine.later(self.engine.latency_ns, result)
        self._busy = False
        self._start_next()


def _num_copies(plan: StepPlan) -> int:
    """They run before the step computes; each is a pair of int32."""
    return (len(plan.copies_out) + len(plan.copies_in)) // 8


def _index(seq_id: str) -> int:
    return int(seq_id[1:])

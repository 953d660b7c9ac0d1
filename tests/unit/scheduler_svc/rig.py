"""A scheduler core between a real mirror with the shadow model and a real ledger, by hand.

Time stands still unless a test moves it; plans wait in `queue` until a test runs them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from gpu_worker.mirror import Mirror
from gpu_worker.shadow import ShadowModel, expected_token_ids
from kv_store.core import Asked, KvCore
from scheduler_svc.core import SchedulerConfig, SchedulerCore
from scheduler_svc.events import AbortAsked, Event, Reply, SendUpdates, Submitted
from scheduler_svc.policies import Policies
from services.contracts.kv import (
    KvDelta,
    KvSnapshot,
    KvStatus,
    LeaseReply,
    LeaseRequest,
    LookupRequest,
)
from services.contracts.sampling import SamplingParams
from services.contracts.sequences import (
    AbortSequences,
    SequenceFinished,
    SequenceUpdates,
    SubmitReply,
    SubmitSequence,
)
from services.contracts.step import Attach, Attached, Poll, StepPlan, StepResult
from services.contracts.vectors import pack, unpack

VOCAB_SIZE = 512
MS = 1_000_000

T = TypeVar("T")


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """The `count` tokens that the shadow model gives to `prompt`."""
    return expected_token_ids(np.array(prompt, dtype=np.int32), count, VOCAB_SIZE)


def submission(
    seq_id: str,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    tag: int = 0,
    stop: Sequence[int] = (),
    accepted: Sequence[int] = (),
    **more: Any,
) -> SubmitSequence:
    more.setdefault("sampling", SamplingParams())
    more.setdefault("admission_id", "admission-0")
    return SubmitSequence(
        seq_id=seq_id,
        tag=tag or int(seq_id.strip("abcdefghijklmnopqrstuvwxyz-") or 1),
        prompt=pack(prompt),
        accepted=pack(accepted),
        max_tokens=max_tokens,
        stop_token_ids=pack(sorted(stop)),
        **more,
    )


def lanes_of(vector: bytes) -> list[int]:
    return [int(value) for value in unpack(vector)]


class Rig:
    """`ledger`: answers lookups and leases at once; without it a test answers them. filled_by: the
    ledger that the worker remembers.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int = 4,
        budget: int = 64,
        block_size: int = 4,
        num_blocks: int = 64,
        max_model_len: int = 256,
        max_waiting: int = 100,
        ledger: bool = True,
        prefix_caching: bool = True,
        attach: bool = True,
        policies: Policies | None = None,
    ) -> None:
        self.core = SchedulerCore(
            SchedulerConfig(
                engine="engine-0",
                scheduler_id="scheduler-0",
                incarnation="rig",
                model="shadow",
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
                max_waiting_seqs=max_waiting,
                prefix_caching=prefix_caching,
                policies=policies or Policies(),
            )
        )
        self.kv = KvCore("kv-0")
        self.filled_by = self.kv.service_id
        self.ledger = ledger
        self.now_ns = 0
        self.shape = (num_blocks, block_size, max_num_seqs, max_model_len)
        self.generation, self.epoch = 1, 0
        self.effects: list[Any] = []
        self.plans: list[StepPlan] = []
        self.queue: deque[StepPlan] = deque()
        self.results: list[StepResult] = []
        self.new_worker()
        if attach:
            self.tick()
            self.attached()

    # ---- events in

    def handle(self, event: Event) -> list[Any]:
        return self._take(self.core.handle(event, self.now_ns))

    def tick(self, after_ns: int = 0) -> list[Any]:
        self.now_ns += after_ns
        return self._take(self.core.tick(self.now_ns))

    def _take(self, effects: list[Any]) -> list[Any]:
        """Record effects, let the ledger hear its part -> these and what its answers brought."""
        self.core.check_invariants()
        found = list(effects)
        replies: list[Any] = []
        self.effects.extend(effects)
        for effect in effects:
            match effect:
                case StepPlan():
                    self.plans.append(effect)
                    self.queue.append(effect)
                case KvDelta() | KvSnapshot() if self.ledger:
                    self.kv.handle(effect, self.now_ns)
                case LookupRequest() | LeaseRequest() if self.ledger:
                    answers = self.kv.handle(Asked(effect, ""), self.now_ns)
                    replies += [reply.message for reply in answers]
        # Answers come after all of these effects have reached the ledger, as on the bus.
        for message in replies:
            found += self.handle(message)
        self.kv.check_invariants()
        return found

    def ask_ledger(self, request: LookupRequest | LeaseRequest) -> list[Any]:
        (reply,) = self.kv.handle(Asked(request, ""), self.now_ns)
        return self.handle(reply.message)  # type: ignore[arg-type]

    def grant(self, block_ids: list[int], available: int = 5) -> list[Any]:
        """The answer to the last LeaseRequest."""
        asked = self.last(LeaseRequest)
        ids = (asked.generation, asked.epoch, asked.number)
        return self.handle(LeaseReply(*ids, KvStatus.OK, pack(block_ids), available))

    def submit(self, seq_id: str, prompt: Sequence[int], max_tokens: int, **more: Any) -> Any:
        """-> the SubmitReply."""
        effects = self.handle(Submitted(submission(seq_id, prompt, max_tokens, **more), "inbox"))
        (reply,) = [e.message for e in effects if isinstance(e, Reply)]
        assert isinstance(reply, SubmitReply)
        return reply

    def abort(self, *seq_ids: str) -> list[Any]:
        return self.handle(AbortAsked(AbortSequences("admission-0", list(seq_ids)), "inbox"))

    # ---- the worker

    def new_worker(self) -> None:
        num_blocks, block_size, max_num_seqs, max_model_len = self.shape
        self.mirror = Mirror(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
        )
        self.model = ShadowModel(
            num_blocks=num_blocks, block_size=block_size, vocab_size=VOCAB_SIZE
        )
        self.queue.clear()

    def attached(self, *, attempt: str = "") -> list[Any]:
        """The worker grants the epoch above the highest seen."""
        asked = self.last(Attach)
        self.epoch = max(self.epoch, asked.epoch_seen) + 1
        return self.handle(
            Attached(
                *(attempt or asked.attempt, self.generation, self.epoch, *self.shape, VOCAB_SIZE),
                ledger=self.filled_by,
            )
        )

    def run(self, plan: StepPlan, elapsed_us: int = 1000) -> StepResult:
        """Execute `plan` -> its result, which the scheduler has not heard yet."""
        self.filled_by = plan.ledger or self.filled_by
        scheduled = self.mirror.apply(plan)
        inputs, _ = self.mirror.inputs(scheduled)
        outputs = self.model.execute(inputs)
        self.mirror.accept(self.mirror.advance(scheduled), outputs.token_ids)
        result = StepResult(
            generation=plan.generation,
            epoch=plan.epoch,
            number=plan.number,
            step_id=plan.step_id,
            lanes=pack(scheduled.sampled_lanes),
            token_ids=pack(outputs.token_ids),
            elapsed_us=elapsed_us,
            waited_us=1000,
        )
        self.results.append(result)
        return result

    def step(self, elapsed_us: int = 1000) -> StepPlan:
        """Run the oldest queued plan and tell the scheduler -> that plan."""
        plan = self.queue.popleft()
        self.handle(self.run(plan, elapsed_us))
        return plan

    def drain(self, limit: int = 500) -> int:
        """Steps until nothing is planned any more -> how many."""
        for count in range(limit):
            if not self.queue:
                return count
            self.step()
        raise AssertionError(f"still running after {limit} steps")

    # ---- what came out

    def all(self, kind: type[T]) -> list[T]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def last(self, kind: type[T]) -> T:
        return self.all(kind)[-1]

    @property
    def updates(self) -> list[SequenceUpdates]:
        return [effect.updates for effect in self.all(SendUpdates)]

    def tokens(self, tag: int) -> list[int]:
        """Tokens of `tag` as an admission puts them together, by offset."""
        known: list[int] = []
        for updates in self.updates:
            tags = lanes_of(updates.tags)
            counts = lanes_of(updates.counts) or [1] * len(tags)
            token_ids, at = lanes_of(updates.token_ids), 0
            for row, offset, count in zip(tags, lanes_of(updates.offsets), counts, strict=True):
                if row == tag:
                    assert offset <= len(known), "a token is missing"
                    new = token_ids[at : at + count]
                    assert known[offset : offset + count] == new[: len(known) - offset]
                    known.extend(new[len(known) - offset :])
                at += count
        return known

    def ends(self, tag: int) -> list[SequenceFinished]:
        return [end for updates in self.updates for end in updates.finished if end.tag == tag]

    def poll(self) -> Poll:
        return self.last(Poll)


def decode_lanes(plan: StepPlan, running: set[int]) -> set[int]:
    """Lanes that `plan` lets decode: all that run but its chunks and holds."""
    named = set(lanes_of(plan.chunk_lanes)) | set(lanes_of(plan.hold))
    return running - named

"""What a steady decode step costs the scheduler: the real core and ledger, no bus, no model.

Measured per step: reading the result, hashing and committing full blocks, the updates, the delta
and the next plan. Not measured: the codec, the ledger's own work, whoever makes the tokens up.

Shell: reads the clock around the core.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np

from kv_store.core import Asked, KvCore
from scheduler_svc.core import SchedulerConfig, SchedulerCore
from scheduler_svc.events import Effect, Submitted
from services.contracts import codec
from services.contracts.kv import KvDelta, KvSnapshot, LeaseRequest, LookupRequest
from services.contracts.sampling import SamplingParams
from services.contracts.sequences import SubmitSequence
from services.contracts.step import Attach, Attached, StepPlan, StepResult
from services.contracts.trace_context import TraceContext
from services.contracts.vectors import pack

BLOCK_SIZE: Final = 16
VOCAB_SIZE: Final = 32_768
WARM_UP_STEPS: Final = 200
STEP_NS: Final = 5_000_000
STOP_TOKEN: Final = VOCAB_SIZE + 1
MAX_PROMPT: Final = 2 * BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class SteadyCost:
    """Microseconds a step; plan bytes beyond 8 for each appended block."""

    lanes: int
    steps: int
    p50_us: float
    p99_us: float
    plan_bytes_beyond_appends: int


def measure(lanes: int, steps: int = 2000, seed: int = 1, *, traced: bool = False) -> SteadyCost:
    """`lanes` sequences in random phases of their blocks, all decoding, for `steps` steps.

    traced: each of them is part of a trace that is recorded.
    """
    bench = _Bench(lanes, steps, random.Random(seed), traced=traced)
    for _ in range(WARM_UP_STEPS):
        bench.step()
    bench.costs_ns.clear()
    bench.extra_bytes = 0
    for _ in range(steps):
        bench.step()
    costs = sorted(cost / 1000 for cost in bench.costs_ns)
    return SteadyCost(
        lanes=lanes,
        steps=steps,
        p50_us=round(statistics.median(costs), 1),
        p99_us=round(costs[int(len(costs) * 0.99)], 1),
        plan_bytes_beyond_appends=bench.extra_bytes,
    )


class _Bench:
    """Plays worker and ledger by hand; `costs_ns`: of each step so far."""

    def __init__(self, lanes: int, steps: int, rng: random.Random, *, traced: bool) -> None:
        self.lanes = lanes
        self._traced = traced
        self.costs_ns: list[int] = []
        self.extra_bytes = 0
        self._now_ns = 0
        self._plans: deque[StepPlan] = deque()
        self._kv = KvCore("kv")
        self._tokens = np.random.default_rng(1).integers(0, VOCAB_SIZE, (64, lanes), np.int32)
        self._max_tokens = steps + WARM_UP_STEPS + MAX_PROMPT + 8
        self._core = SchedulerCore(
            SchedulerConfig(
                engine="e",
                scheduler_id="s",
                incarnation="bench",
                model="m",
                max_num_seqs=lanes,
                max_num_batched_tokens=lanes * (MAX_PROMPT + 1),
                max_waiting_seqs=lanes,
            )
        )
        self._perform(self._core.tick(0))
        for index in range(lanes):
            length = rng.randint(1, MAX_PROMPT)
            self._submit(index, [rng.randrange(VOCAB_SIZE) for _ in range(length)])
        while self._core.batch.lanes.num_active < lanes or len(self._plans[0].chunk_lanes):
            self.step()

    def step(self) -> None:
        """One result in, and whatever follows from it out, the next plan among it."""
        plan = self._plans.popleft()
        self._now_ns += STEP_NS
        sampled = self._core.batch.pipeline.steps[0].sampled
        tokens = self._tokens[plan.step_id % len(self._tokens), : len(sampled)]
        result = StepResult(
            generation=1,
            epoch=1,
            number=plan.number,
            step_id=plan.step_id,
            lanes=pack(sampled),
            token_ids=pack(tokens),
            elapsed_us=STEP_NS // 1000,
            waited_us=1000,
        )
        start = time.perf_counter_ns()
        effects = self._core.handle(result, self._now_ns)
        spent = time.perf_counter_ns() - start
        self._perform(effects)
        wake_ns = self._core.wake_at_ns
        if len(self._plans) < 2 and wake_ns is not None and wake_ns < self._now_ns + STEP_NS:
            start = time.perf_counter_ns()
            effects = self._core.tick(max(wake_ns, self._now_ns))
            spent += time.perf_counter_ns() - start
            self._perform(effects)
        self.costs_ns.append(spent)

    def _submit(self, index: int, prompt: list[int]) -> None:
        place = TraceContext(f"{index + 1:032x}", f"{index + 1:016x}", self._traced)
        message = SubmitSequence(
            seq_id=f"s{index}",
            admission_id="a",
            tag=index,
            prompt=pack(prompt),
            max_tokens=self._max_tokens,
            sampling=SamplingParams(),
            stop_token_ids=pack([STOP_TOKEN]),
            traceparent=place.traceparent,
        )
        self._perform(self._core.handle(Submitted(message, "reply"), self._now_ns))

    def _perform(self, effects: list[Effect]) -> None:
        queue = deque(effects)
        while queue:
            effect = queue.popleft()
            if isinstance(effect, StepPlan):
                size = len(codec.encode(effect))
                self.extra_bytes = max(self.extra_bytes, size - 2 * len(effect.append_lanes))
                self._plans.append(effect)
            elif isinstance(effect, LookupRequest | LeaseRequest):
                for reply in self._kv.handle(Asked(effect, "r"), self._now_ns):
                    queue.extend(self._core.handle(reply.message, self._now_ns))  # type: ignore[arg-type]
            elif isinstance(effect, KvDelta | KvSnapshot):
                self._kv.handle(effect, self._now_ns)
            elif isinstance(effect, Attach):
                queue.extend(self._core.handle(self._attached(effect), self._now_ns))

    def _attached(self, attach: Attach) -> Attached:
        length = self._max_tokens + MAX_PROMPT
        return Attached(
            attempt=attach.attempt,
            generation=1,
            epoch=1,
            num_blocks=self.lanes * (length // BLOCK_SIZE + 2) * 2,
            block_size=BLOCK_SIZE,
            max_num_seqs=self.lanes,
            max_model_len=length,
            vocab_size=VOCAB_SIZE,
            ledger=self._kv.service_id,
        )

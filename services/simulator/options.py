"""Everything that a simulation run may vary, drawn from its seed and printed first.

Pure: the random source is the caller's.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import get_args

from scheduler_svc.policies import Batching, Margin, Policies, Queue, StepKind


@dataclass(frozen=True, slots=True)
class Options:
    """Sizes in tokens and blocks, durations in ns, probabilities per message or request.

    num_prompts: how many different ones there are, 0: as many as requests. poison: tokens that,
    computed in one step, kill the worker.
    """

    num_requests: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    max_model_len: int
    max_prompt: int
    max_output: int
    shared_prefix: int
    mean_arrival_ns: int
    mean_delay_ns: int
    step_base_ns: int
    step_token_ns: int
    drop: float
    duplicate: float
    cancel: float
    stop: float
    deadline: float
    reattach: float
    num_salts: int
    policies: Policies
    host_blocks: int
    copy_block_us: int
    tenant_share: float
    scheduler_restart: float
    num_prompts: int
    admission_death: float = 0.0
    poison: tuple[int, ...] = ()


def draw(rng: random.Random) -> Options:
    """Options of one run. Every request fits the pool alone; together they often do not."""
    block_size = rng.choice([1, 2, 4, 8, 16])
    max_num_seqs = rng.choice([1, 2, 3, 5, 8, 16])
    max_prompt = rng.choice([3, 10, 40, 90])
    max_output = rng.choice([1, 5, 20, 40])
    max_model_len = max_prompt + max_output
    alone = -(-max_model_len // block_size)
    num_blocks = 1 + alone + rng.choice([0, 1, alone, 4 * alone])
    faulty = rng.random() < 0.5
    options = Options(
        num_requests=rng.randint(1, 24),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.choice([0, 1, 7, 64]),
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_prompt=max_prompt,
        max_output=max_output,
        shared_prefix=rng.choice([0, 0, max_prompt // 2, max_prompt]),
        mean_arrival_ns=rng.choice([1, 500_000, 5_000_000]),
        mean_delay_ns=rng.choice([1, 100_000, 2_000_000]),
        step_base_ns=rng.choice([100_000, 1_000_000, 5_000_000]),
        step_token_ns=rng.choice([0, 10_000]),
        drop=rng.choice([0.0, 0.01, 0.05]) if faulty else 0.0,
        duplicate=rng.choice([0.0, 0.02, 0.1]) if faulty else 0.0,
        cancel=rng.choice([0.0, 0.1, 0.5]),
        stop=rng.choice([0.0, 0.3]),
        deadline=rng.choice([0.0, 0.0, 0.2]),
        reattach=rng.choice([0.0, 0.0, 0.02]),
        num_salts=rng.choice([1, 1, 3]),
        policies=_draw_policies(rng),
        host_blocks=rng.choice([0, 1, alone, 4 * alone]),
        copy_block_us=rng.choice([0, 0, 1, 100]),
        tenant_share=rng.choice([1.0, 1.0, 0.3, 0.0]),
        scheduler_restart=rng.choice([0.0, 0.0, 0.02]),
        num_prompts=0,
        admission_death=rng.choice([0.0, 0.0, 0.05]),
    )
    return _with_revisits(options, alone, rng) if rng.random() < 0.3 else options


def _with_revisits(options: Options, alone: int, rng: random.Random) -> Options:
    """A few long prompts that come again and again, and do not fit the pool together: what is
    evicted is wanted again.
    """
    return dataclasses.replace(
        options,
        num_requests=rng.randint(10, 24),
        max_num_seqs=min(options.max_num_seqs, 3),
        num_blocks=1 + rng.choice([2, 3, 4]) * alone,
        host_blocks=rng.choice([alone, 3 * alone, 8 * alone]),
        num_salts=1,
        tenant_share=1.0,
        shared_prefix=0,
        num_prompts=rng.choice([4, 8]),
    )


def _draw_policies(rng: random.Random) -> Policies:
    """Half of the runs with the defaults, the rest with anything."""
    if rng.random() < 0.5:
        return Policies()
    return Policies(
        batching=rng.choice(get_args(Batching)),
        step_kind=rng.choice(get_args(StepKind)),
        queue=rng.choice(get_args(Queue)),
        margin=rng.choice(get_args(Margin)),
        itl_target_ms=rng.choice([0.0, 1.0, 6.0]),
        batch_size=rng.choice([0, 2]),
        max_delay_ms=rng.choice([0.0, 5.0]),
        prefill_attempt_interval=rng.choice([1, 3, 70]),
        prefill_any_attempt_interval=rng.choice([1, 5, 100]),
        cache_watermark=rng.choice([0.5, 0.9]),
    )

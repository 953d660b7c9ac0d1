"""Everything that a simulation run may vary, drawn from its seed and printed first.

Each seed enables a random part of the faults (swarm testing): a run with everything at once hides
what a run with one thing finds.

Pure: the random source is the caller's.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field
from typing import Final, get_args

from scheduler_svc.policies import Batching, Margin, Policies, Queue, StepKind

from .phases import Phase

ROLES: Final = ("admission", "scheduler", "kv_store", "worker")
PAIRS: Final = tuple(
    (first, second) for at, first in enumerate(ROLES) for second in ROLES[at + 1 :]
)
SECOND_NS: Final = 1_000_000_000
# Runs with no fault at all: there, nothing but the one right answer will do.
CALM: Final = 0.2
# Messages that the background may lose or repeat; a run picks some of them, or all.
LOSSY_KINDS: Final = (
    *("generate", "frame", "cancel", "submit", "abort", "updates", "plan", "result"),
    *("attach", "poll", "lookup", "lease", "delta", "snapshot", "beat"),
)


@dataclass(frozen=True, slots=True)
class Strike:
    """What is done when `phase` is reached for the `nth` time: `action` to `roles`."""

    phase: Phase
    nth: int
    action: str
    roles: tuple[str, ...] = ()

    def __repr__(self) -> str:
        at = f"{self.nth}th {self.phase.value!r}"
        return f"<{' '.join((self.action, '+'.join(self.roles))).strip()} at {at}>"


@dataclass(frozen=True, slots=True)
class FaultOptions:
    """timed: faults that come at random moments, by name in `nemesis.TIMED`; strikes: those that
    come at a phase. skewed: every host has a clock of its own. Durations in ns.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    kinds: tuple[str, ...] = ()
    timed: tuple[str, ...] = ()
    strikes: tuple[Strike, ...] = ()
    skewed: bool = False
    restart_ns: int = 0
    hold_ns: int = 0

    @property
    def none(self) -> bool:
        return not (self.drop or self.duplicate or self.timed or self.strikes)


@dataclass(frozen=True, slots=True)
class Options:
    """Sizes in tokens and blocks, durations in ns, probabilities per request.

    num_prompts: how many different ones there are, 0: as many as requests. num_probes: requests
    after the faults, which must be served as if there had never been any.
    """

    num_requests: int
    num_probes: int
    num_admissions: int
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
    cancel: float
    vanish: float
    stop: float
    deadline: float
    nan: float
    never_fits: float
    poison: float
    num_salts: int
    policies: Policies
    host_blocks: int
    copy_block_us: int
    tenant_share: float
    num_prompts: int
    faults: FaultOptions = field(default_factory=FaultOptions)


def draw(rng: random.Random, seed: int) -> Options:
    """Options of one run. Every request that may fit the pool fits it alone; together they often
    do not.
    """
    block_size = rng.choice([1, 2, 4, 8, 16])
    max_num_seqs = rng.choice([1, 2, 3, 5, 8, 16])
    max_prompt = rng.choice([3, 10, 40, 90])
    max_output = rng.choice([1, 5, 20, 40])
    max_model_len = max_prompt + max_output
    alone = -(-max_model_len // block_size)
    num_blocks = 1 + alone + rng.choice([0, 1, alone, 4 * alone])
    options = Options(
        num_requests=rng.randint(1, 24),
        num_probes=rng.choice([1, 3]),
        num_admissions=rng.choice([1, 2, 2]),
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
        cancel=rng.choice([0.0, 0.1, 0.5]),
        vanish=rng.choice([0.0, 0.0, 0.1]),
        stop=rng.choice([0.0, 0.3]),
        deadline=rng.choice([0.0, 0.0, 0.2]),
        nan=rng.choice([0.0, 0.0, 0.0, 0.1]),
        never_fits=rng.choice([0.0, 0.0, 0.1]),
        poison=rng.choice([0.0, 0.0, 0.0, 0.0, 0.1]),
        num_salts=rng.choice([1, 1, 3]),
        policies=_draw_policies(rng),
        host_blocks=rng.choice([0, 1, alone, 4 * alone]),
        copy_block_us=rng.choice([0, 0, 1, 100]),
        tenant_share=rng.choice([1.0, 1.0, 0.3, 0.0]),
        num_prompts=0,
    )
    if rng.random() < 0.3:
        options = _with_revisits(options, alone, rng)
    if rng.random() >= CALM:
        options = _with_faults(options, rng, seed)
    return _with_memory_faults(options, seed)


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


# ---- faults

# By weight in the draw; what they do is in `nemesis.TIMED`.
TIMED_FAULTS: Final = (
    "crash",
    "crash pair",
    "crash loop",
    "pause",
    "pause and replace",
    "hang until killed",
    "cut",
    "cut one way",
    "isolate",
    "swizzle",
    "lag",
    "server restart",
    "stale",
)
# Drawn apart from the others, so that all other histories stay as they are.
MEMORY_FAULTS: Final = ("spoil block", "short of memory")
MEMORY: Final = 0.2
# At a phase: to a role, to a pair, or to the message that shows it.
CELLS: Final = (
    *((phase, "crash", (role,)) for phase in Phase for role in ROLES),
    *((phase, "crash", pair) for phase in (Phase.PLANNED, Phase.RESULT) for pair in PAIRS),
    *((phase, "lose", ()) for phase in Phase),
    *((phase, "cancel", ()) for phase in Phase),
    *((phase, "pause", (role,)) for phase in (Phase.PLANNED, Phase.LEASED) for role in ROLES),
)
STRIKES_PER_RUN: Final = 4
# Which time a phase is struck: rare ones at the first, those of a start where there is more to hit.
NTH: Final = {
    Phase.PREEMPTED: (1,),
    Phase.COPYING: (1, 2),
    Phase.POLLED: (1,),
    Phase.ADOPTED: (1,),
    Phase.CANCELLED: (1,),
    Phase.ATTACHING: (2,),
    Phase.ATTACHED: (2,),
    Phase.SNAPSHOT: (2,),
}


def _with_faults(options: Options, rng: random.Random, seed: int) -> Options:
    """Strikes go through `CELLS` in turn as seeds go up, so that any few hundred seeds meet all."""
    strikes: list[Strike] = []
    for at in range(STRIKES_PER_RUN):
        phase, action, roles = CELLS[(seed + at * len(CELLS) // STRIKES_PER_RUN) % len(CELLS)]
        strikes.append(Strike(phase, rng.choice(NTH.get(phase, (1, 1, 2, 3, 5))), action, roles))
    enabled = rng.sample(TIMED_FAULTS, rng.choice([0, 1, 2, 3]))
    lossy = rng.random() < 0.5
    faults = FaultOptions(
        drop=rng.choice([0.0, 0.01, 0.05, 0.3]) if lossy else 0.0,
        duplicate=rng.choice([0.0, 0.02, 0.1, 0.3]) if lossy else 0.0,
        kinds=tuple(sorted(rng.sample(LOSSY_KINDS, 3))) if rng.random() < 0.5 else (),
        timed=tuple(rng.choice(enabled) for _ in range(rng.randint(1, 4)) if enabled),
        strikes=tuple(strikes),
        skewed=rng.random() < 0.5,
        restart_ns=rng.choice([1, 100_000_000, SECOND_NS, 3 * SECOND_NS]),
        hold_ns=rng.choice([100_000_000, SECOND_NS, 5 * SECOND_NS, 60 * SECOND_NS]),
    )
    needed = {strike.phase for strike in strikes}
    faults = _bring_about(faults, needed)
    # Spread over the faults, so that there is something to hit.
    options = dataclasses.replace(
        options,
        num_requests=max(options.num_requests, 8),
        mean_arrival_ns=rng.choice([5_000_000, 50_000_000, 300_000_000]),
        faults=faults,
    )
    return _with_room_for(options, needed, rng)


def _with_memory_faults(options: Options, seed: int) -> Options:
    """In some seeds a few blocks are spoilt, while the same prompts come again and again."""
    rng = random.Random(f"memory {seed}")
    if rng.random() >= MEMORY:
        return options
    timed = tuple(rng.choice(MEMORY_FAULTS) for _ in range(rng.randint(1, 3)))
    faults = dataclasses.replace(options.faults, timed=(*options.faults.timed, *timed))
    return dataclasses.replace(
        options,
        num_requests=max(options.num_requests, 16),
        mean_arrival_ns=rng.choice([5_000_000, 50_000_000]),
        num_prompts=rng.choice([1, 3]),
        num_salts=1,
        faults=faults,
    )


def _with_room_for(options: Options, needed: set[Phase], rng: random.Random) -> Options:
    """A workload in which these phases come."""
    if Phase.PREEMPTED in needed or Phase.COPYING in needed:
        options = dataclasses.replace(crowded(options, rng), mean_arrival_ns=1_000_000)
    if Phase.PREEMPTED in needed:
        # Short prompts are let in, and then all grow.
        policies = Policies(margin="watermark")
        # Longer than a block of `crowded` where it is to be looked up.
        longest = 6 if needed & {Phase.LOOKING_UP, Phase.LOOKED_UP} else 4
        options = dataclasses.replace(
            options, max_prompt=longest, max_output=24 - longest, policies=policies
        )
    if Phase.CANCELLED in needed:
        options = dataclasses.replace(options, cancel=0.5)
    if needed & {Phase.FRAME, Phase.ADOPTED} and options.max_output < 20:
        options = dataclasses.replace(
            options, max_prompt=10, max_output=20, max_model_len=30, num_blocks=61, block_size=2
        )
    if Phase.ADOPTED in needed:
        # Longer than it takes until an admission is missed.
        options = dataclasses.replace(options, step_base_ns=100_000_000, cancel=0.0)
    return options


def _bring_about(faults: FaultOptions, needed: set[Phase]) -> FaultOptions:
    """What it takes to reach some of the phases."""
    more: list[Strike] = []
    if needed & {Phase.ATTACHING, Phase.ATTACHED, Phase.SNAPSHOT}:
        more.append(Strike(Phase.JOINED, 2, "crash", ("scheduler",)))
    if Phase.ADOPTED in needed:
        # A scheduler that begins anew after it has nothing to offer.
        more.append(Strike(Phase.JOINED, 4 if more else 2, "crash", ("admission",)))
    if Phase.POLLED in needed:
        more.append(Strike(Phase.RESULT, 2, "lose", ()))
    return dataclasses.replace(faults, strikes=(*faults.strikes, *more))


def crowded(options: Options, rng: random.Random) -> Options:
    """More demand than blocks: sequences are preempted, and blocks move to host memory and back."""
    alone = 6
    options = dataclasses.replace(
        options,
        block_size=4,
        max_prompt=12,
        max_output=12,
        max_model_len=24,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        policies=Policies(),
    )
    return dataclasses.replace(_with_revisits(options, alone, rng), max_num_seqs=4)

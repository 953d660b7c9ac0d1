"""The step on the wire: attach, plan, result, poll, and the event that observers see (DESIGN
section 5).

A StepPlan is a diff against the plan before it and never contains a sampled token. Lane vectors are
int32.

Pure.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from . import limits
from .codec import Message
from .ids import Id, MaybeId
from .sampling import SamplingParams
from .sequences import Logprobs
from .vectors import EMPTY, Vector

_Lane = Annotated[int, Meta(ge=0, lt=limits.MAX_LANES)]


class Attach(Message, frozen=True, tag="attach"):
    """scheduler -> rank 0 (request/reply): take over. `epoch_seen`: the highest the caller knows
    of.

    attempt: new for each taking over; a repeated one gets the same answer, so that a lost reply
    costs no epoch.
    """

    scheduler_id: Id
    attempt: Id
    epoch_seen: int


class Attached(Message, frozen=True, tag="attached"):
    """The running step has ended and queued plans are dropped; the caller owns `epoch`.

    generation: new at each worker start, its KV is empty then. The rest is the shape of the engine.
    host_blocks: slots of host memory below the pool. copy_block_us: measured, 0 where unknown.
    ledger: the last one that a plan named which this worker ran.
    """

    attempt: Id
    generation: int
    epoch: int
    num_blocks: Annotated[int, Meta(ge=2, le=limits.MAX_BLOCKS)]
    block_size: Annotated[int, Meta(ge=1, le=limits.MAX_BLOCK_SIZE)]
    max_num_seqs: Annotated[int, Meta(ge=1, le=limits.MAX_LANES)]
    max_model_len: Annotated[int, Meta(ge=1, le=limits.MAX_MODEL_LEN)]
    vocab_size: Annotated[int, Meta(ge=1)]
    host_blocks: Annotated[int, Meta(ge=0, le=limits.MAX_BLOCKS)] = 0
    copy_block_us: Annotated[int, Meta(ge=0)] = 0
    ledger: MaybeId = ""


class LaneJoin(Message, frozen=True, kw_only=True):
    """A sequence takes a lane, once, with all that the worker must know of it.

    token_ids: prompt and accepted output. block_ids: those it holds now; more come by append.
    num_computed_tokens: how many of its tokens already lie in those blocks.
    num_prompt_tokens: where the output starts. traceparent: of a request whose trace is recorded,
    else "".
    """

    lane: _Lane
    token_ids: Vector
    block_ids: Vector = EMPTY
    num_computed_tokens: int = 0
    num_prompt_tokens: int
    sampling: SamplingParams
    traceparent: Annotated[str, Meta(max_length=limits.MAX_TRACE_CHARS)] = ""


class StepPlan(Message, frozen=True, tag="plan"):
    """scheduler -> rank 0. In order: reset, leave, join, append; then the step runs.

    decode: every lane that is neither in `chunk_lanes` nor in `hold` advances by one decode (False:
    none does).
    chunk_lanes, chunk_tokens: num_scheduled_tokens of lanes that are still catching up.
    hold: lanes that stand still in this step. append_lanes, append_blocks: pairs, in order.
    reset: first plan of an epoch: all lanes of the plans before it are empty.
    copies_out: pairs (block, host slot); copies_in: pairs (host slot, block). They run before the
    step computes, outs first.
    ledger: whose blocks are filled from this plan on; "" for the same as before.
    """

    generation: int
    epoch: int
    number: int
    step_id: int
    decode: bool = True
    reset: bool = False
    leave: Vector = EMPTY
    join: Annotated[list[LaneJoin], Meta(max_length=limits.MAX_LANES)] = []
    chunk_lanes: Vector = EMPTY
    chunk_tokens: Vector = EMPTY
    hold: Vector = EMPTY
    append_lanes: Vector = EMPTY
    append_blocks: Vector = EMPTY
    copies_out: Vector = EMPTY
    copies_in: Vector = EMPTY
    ledger: MaybeId = ""


class LaneLogprobs(Message, frozen=True):
    lane: _Lane
    logprobs: Logprobs


class LanePromptLogprobs(Message, frozen=True):
    lane: _Lane
    first: int
    logprobs: Logprobs


class StepResult(Message, frozen=True, tag="result"):
    """rank 0 -> scheduler. `lanes`, `token_ids`: int32 [n], the lanes that sampled and what, in
    ascending lane order.

    failed: lanes whose logits were not finite. elapsed_us: of the step. waited_us: how long its
    plan lay queued before the step began, or the step lay ready where it was prepared while another
    ran; 0 means that the worker stood idle for it. out_of_memory:
    it has not run, nor will any other of its epoch: the lanes are no longer those of the plans.
    """

    generation: int
    epoch: int
    number: int
    step_id: int
    lanes: Vector = EMPTY
    token_ids: Vector = EMPTY
    failed: Vector = EMPTY
    logprobs: Annotated[list[LaneLogprobs], Meta(max_length=limits.MAX_ENTRIES)] = []
    prompt_logprobs: Annotated[list[LanePromptLogprobs], Meta(max_length=limits.MAX_ENTRIES)] = []
    elapsed_us: int = 0
    waited_us: int = 0
    out_of_memory: bool = False


class Poll(Message, frozen=True, tag="poll"):
    """scheduler -> rank 0 (request/reply): what became of `step_id`?"""

    generation: int
    epoch: int
    step_id: int


class PollState(StrEnum):
    RESULT = "result"
    RUNNING = "running"
    UNKNOWN = "unknown"


class PollReply(Message, frozen=True, tag="poll_reply"):
    """UNKNOWN is answered by sending the same plans again. Carries the worker's own generation and
    epoch.
    """

    generation: int
    epoch: int
    step_id: int
    state: PollState
    result: StepResult | None = None


class ScheduledRequests(Message, frozen=True, kw_only=True):
    """What one step computes, under the names of Dynamo's ForwardPassMetrics.

    sum_prefill_tokens: computed in this step; var_prefill_length: population variance of the
    lengths of their sequences; sum_prefill_kv_tokens: theirs that were there before it.
    sum_decode_kv_tokens, var_decode_kv_tokens: context lengths of decodes.
    """

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    var_prefill_length: float = 0.0
    sum_prefill_kv_tokens: int = 0
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0
    var_decode_kv_tokens: float = 0.0


class QueuedRequests(Message, frozen=True, kw_only=True):
    """What waits, under the same names: sequences that have not run yet, and those that were
    generating when they were preempted.
    """

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    var_prefill_length: float = 0.0
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0
    var_decode_kv_tokens: float = 0.0


FORWARD_PASS_METRICS_VERSION: Final = 1


class StepEvent(Message, frozen=True, tag="step"):
    """scheduler -> anyone, one per step, dropped freely. Durations in microseconds, sizes in
    bytes.
    """

    engine: Id
    epoch: int
    step_id: int
    num_seqs: int
    num_decode_tokens: int
    num_prefill_tokens: int
    num_waiting: int
    num_running: int
    num_preemptions: int
    num_blocks_held: int
    num_blocks_total: int
    plan_bytes: int
    scheduler_us: int
    elapsed_us: int
    period_us: int
    scheduled: ScheduledRequests = ScheduledRequests()
    queued: QueuedRequests = QueuedRequests()


def forward_pass_metrics(event: StepEvent) -> dict[str, Any]:
    """`event` as Dynamo's ForwardPassMetrics, version 1: wall_time in seconds is the worker's own;
    the engine stands for the worker, and step ids, which begin anew with each epoch, for the count.
    """
    return {
        "version": FORWARD_PASS_METRICS_VERSION,
        "worker_id": event.engine,
        "dp_rank": 0,
        "counter_id": event.step_id,
        "wall_time": event.elapsed_us / 1e6,
        "scheduled_requests": msgspec.structs.asdict(event.scheduled),
        "queued_requests": msgspec.structs.asdict(event.queued),
    }

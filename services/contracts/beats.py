"""Heartbeats: every service says that it lives, what it carries, and the last number of every
stream it sends.

Pure.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from . import limits
from .codec import Message
from .ids import MAX_ID_LENGTH, Id, MaybeId


class ServiceKind(StrEnum):
    ADMISSION = "admission"
    SCHEDULER = "scheduler"
    KV_STORE = "kv_store"
    GPU_WORKER = "gpu_worker"
    GATEWAY = "gateway"


class StreamMark(Message, frozen=True):
    """The last number sent on a stream; `name` is the receiver's id, or the engine's."""

    name: Id
    number: int


_Marks = Annotated[list[StreamMark], Meta(max_length=limits.MAX_NAMES)]


class EngineLoad(Message, frozen=True):
    """A scheduler's load and running totals; what routers and /metrics read.

    ready: attached to a worker, with blocks to give. Totals count since the scheduler's start.
    wants_prefill: its vote in the data-parallel group `dp_group` ("" for none). Blocks held by
    sequences, and spare ones of the lease: together what the ledger has leased to it.
    ledger, binding: whose books count for this engine now.
    """

    model: Id
    ready: bool
    max_model_len: int
    num_running: int
    num_waiting: int
    num_blocks_total: int
    num_blocks_held: int
    num_preemptions: int
    num_steps: int
    num_step_seqs: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_prompt_tokens: int
    num_output_tokens: int
    dp_group: Annotated[str, Meta(max_length=MAX_ID_LENGTH)] = ""
    wants_prefill: bool = False
    num_blocks_spare: int = 0
    ledger: MaybeId = ""
    binding: int = 0


class AdmissionLoad(Message, frozen=True):
    models: Annotated[list[Id], Meta(max_length=limits.MAX_NAMES)]
    num_open: int


class WorkerLoad(Message, frozen=True):
    model: Id
    last_step_id: int
    num_blocks: int


class KvPoolLoad(Message, frozen=True):
    """free + leased + cached = total - 1: block 0 is the null block. need_snapshot: a delta was
    missed. Host slots: free, and cached; the rest is being written. Of two ledgers that say they
    have the pool, the one with the higher (generation, epoch, binding) does.
    """

    engine: Id
    generation: int
    epoch: int
    num_blocks: int
    num_free: int
    num_leased: int
    num_cached: int
    need_snapshot: bool
    num_host_blocks: int = 0
    num_host_free: int = 0
    num_host_cached: int = 0
    binding: int = 0


class Beat(Message, frozen=True, tag="beat"):
    """leaving: this is the sender's last one, it ends on purpose (SIGTERM) and in order."""

    kind: ServiceKind
    service_id: Id
    generation: int = 0
    epoch: int = 0
    streams: _Marks = []
    engine: EngineLoad | None = None
    admission: AdmissionLoad | None = None
    worker: WorkerLoad | None = None
    pools: Annotated[list[KvPoolLoad], Meta(max_length=limits.MAX_NAMES)] = []
    leaving: bool = False

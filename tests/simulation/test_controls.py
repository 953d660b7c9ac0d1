"""The simulator must notice: each test breaks one thing on purpose, and some seed must fail.

A checker that has never failed proves nothing. The first test runs some of the seeds unbroken;
`test_seeds` runs them all.
"""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

import scheduler_svc.results
import scheduler_svc.sequence
import services.simulator.world
from gpu_worker.executor import Executor
from gpu_worker.inputs import CopyLists, StepInputs
from gpu_worker.mirror import Mirror, Scheduled, Target
from gpu_worker.shadow import ShadowModel
from kv_store.block_pool import BlockPool
from kv_store.content import Entry, WriteBack
from kv_store.core import KvCore
from kv_store.host_tier import HostTier
from kv_store.ledger import Ledger
from scheduler_svc.batch import Batch
from scheduler_svc.ledger_talk import LedgerTalk
from scheduler_svc.phases import PhaseLog
from scheduler_svc.planning import Planner, Step
from scheduler_svc.sequence import SequenceStatus
from scheduler_svc.waiting import WaitingQueue
from scheduler_svc.worker_link import WorkerLink
from services.admission.core import AdmissionCore
from services.admission.events import Abort, SendFrame
from services.admission.request_spans import RequestSpans
from services.contracts.errors import ErrorCode, StreetcarError
from services.contracts.kv import KvStatus, LeaseRequest, LookupRequest
from services.contracts.step import StepPlan
from services.contracts.streams import Arrival, StreamReceiver
from services.simulator import nemesis, options
from services.simulator.census import census
from services.simulator.options import SECOND_NS, FaultOptions, Options, Strike, crowded
from services.simulator.phases import Phase
from services.simulator.world import World

SEEDS = range(1, 61)
SOUND_SEEDS = range(1, 9)
PROCESSES = 2
# A broken history may never end; a sound one among these seeds needs half of this.
MAX_EVENTS = 60_000


@pytest.fixture(autouse=True)
def _bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services.simulator.world, "MAX_EVENTS", MAX_EVENTS)


def failure(seeds: Iterable[int] = SEEDS) -> str:
    """What the first failing seed says; "" where all pass. Two processes, which are born with what
    the test has broken.
    """
    with multiprocessing.get_context("fork").Pool(PROCESSES) as pool:
        return next((text for text in pool.imap(_failure, seeds) if text), "")


def _failure(seed: int) -> str:
    try:
        World(seed).run()
    except (AssertionError, StreetcarError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def in_a_crowd(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """All seeds with more demand than blocks, so that they are copied out and in again."""

    def draw(rng: random.Random, seed: int) -> Options:
        return dataclasses.replace(crowded(options.draw(rng, seed), rng), **changes)

    monkeypatch.setattr(services.simulator.world, "draw", draw)


def while_others_die(monkeypatch: pytest.MonkeyPatch, *strikes: Strike) -> None:
    """All seeds with these strikes, and late messages of the dead."""
    faults = FaultOptions(strikes=strikes, timed=("stale",) * 3, restart_ns=100_000_000, hold_ns=1)
    in_a_crowd(monkeypatch, faults=faults, mean_arrival_ns=5_000_000)


def _change_inputs(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Mirror, StepInputs], StepInputs]
) -> None:
    honest = Mirror.inputs

    def broken(self: Mirror, scheduled: Scheduled) -> tuple[StepInputs, list[Target]]:
        inputs, targets = honest(self, scheduled)
        return change(self, inputs), targets

    monkeypatch.setattr(Mirror, "inputs", broken)


def test_unbroken_they_pass() -> None:
    assert failure(SOUND_SEEDS) == ""


def test_a_constant_hash_alone_is_harmless_case_09(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_svc.sequence, "block_hash", lambda parent, tokens: b"7" * 32)
    assert failure(SOUND_SEEDS) == ""


def test_a_constant_hash_without_token_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_svc.sequence, "block_hash", lambda parent, tokens: b"7" * 32)
    monkeypatch.setattr(Entry, "is_same", lambda *args: True)
    assert failure() != ""


def test_blocks_committed_before_their_result(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Planner.fill

    def broken(self: Planner, *args: Any) -> Step:
        step = honest(self, *args)
        lanes, block_size = self.lanes, self.lease.block_size
        for lane in step.lanes.tolist():
            full = min(lanes.computed[lane], lanes.accepted_tokens[lane]) // block_size
            for index in range(int(lanes.committed_blocks[lane]), int(full)):
                self.lease.commit(lanes.occupant(lane), index, lanes.token_ids[lane])
            lanes.committed_blocks[lane] = max(lanes.committed_blocks[lane], full)
        return step

    monkeypatch.setattr(Planner, "fill", broken)
    assert failure() != ""


def test_copies_out_run_after_copies_in(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ShadowModel.copy_blocks

    def broken(self: ShadowModel, copies: CopyLists) -> None:
        nothing = copies.out_blocks[:0]
        honest(self, copies._replace(out_blocks=nothing, out_slots=nothing))
        honest(self, copies._replace(in_slots=nothing, in_blocks=nothing))

    monkeypatch.setattr(ShadowModel, "copy_blocks", broken)
    in_a_crowd(monkeypatch, faults=FaultOptions())
    assert "got [" in failure(range(1, 301))


def test_a_copy_in_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShadowModel, "copy_blocks", lambda self, copies: None)
    in_a_crowd(monkeypatch, faults=FaultOptions())
    assert "got [" in failure()


def test_copies_out_are_believed_before_they_have_run(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = HostTier.save

    def broken(self: HostTier, block_id: int, entry: Entry) -> WriteBack | None:
        write = honest(self, block_id, entry)
        if write is not None and entry.host_slot is None:
            entry.host_slot = write.host_slot
            self._content[write.host_slot] = self._writing.pop(write.host_slot)
            self._lru.add(write.host_slot, entry.salt)
        return write

    monkeypatch.setattr(HostTier, "save", broken)
    monkeypatch.setattr(HostTier, "confirm_write", lambda self, write: None)
    monkeypatch.setattr(HostTier, "drop_write", lambda self, write: None)
    in_a_crowd(monkeypatch)
    assert failure(range(1, 301)) != ""


def test_one_released_block_of_a_thousand_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = BlockPool.release
    serial = itertools.count(1)

    def broken(self: BlockPool, block_id: int) -> None:
        if next(serial) % 1000:
            honest(self, block_id)

    monkeypatch.setattr(BlockPool, "release", broken)
    assert failure() != ""


def test_one_block_is_released_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = BlockPool.release
    serial = itertools.count(1)

    def broken(self: BlockPool, block_id: int) -> None:
        honest(self, block_id)
        if next(serial) == 100:
            honest(self, block_id)

    monkeypatch.setattr(BlockPool, "release", broken)
    assert "nobody holds it" in failure()


def test_the_terminal_frame_is_sent_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = AdmissionCore.handle

    def broken(self: AdmissionCore, event: Any, now_ns: int) -> list[Any]:
        effects = honest(self, event, now_ns)
        ends = [e for e in effects if isinstance(e, SendFrame) and e.frame.finish_reason]
        return [*effects, *ends]

    monkeypatch.setattr(AdmissionCore, "handle", broken)
    assert "I1 ends once" in failure()


def test_a_frame_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = AdmissionCore.handle
    serial = itertools.count(1)

    def broken(self: AdmissionCore, event: Any, now_ns: int) -> list[Any]:
        effects = honest(self, event, now_ns)
        return [e for e in effects if not isinstance(e, SendFrame) or next(serial) % 50]

    monkeypatch.setattr(AdmissionCore, "handle", broken)
    assert failure() != ""


def test_the_block_table_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def swap(mirror: Mirror, inputs: StepInputs) -> StepInputs:
        if inputs.block_table.shape[1] < 2:
            return inputs
        table = inputs.block_table.copy()
        table[:, [0, 1]] = table[:, [1, 0]]
        return dataclasses.replace(inputs, block_table=table)

    _change_inputs(monkeypatch, swap)
    assert "got [" in failure()


def test_a_slot_is_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def shift(mirror: Mirror, inputs: StepInputs) -> StepInputs:
        last = mirror.num_blocks * mirror.block_size - 1
        slots = np.minimum(inputs.slot_mapping + 1, last)
        if len(np.unique(slots)) < len(slots):
            return inputs
        return dataclasses.replace(inputs, slot_mapping=slots)

    _change_inputs(monkeypatch, shift)
    assert "got [" in failure()


def test_a_sequence_is_one_token_shorter_than_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(mirror: Mirror, inputs: StepInputs) -> StepInputs:
        return dataclasses.replace(inputs, seqlens_k=np.maximum(inputs.seqlens_k - 1, 1))

    _change_inputs(monkeypatch, cut)
    assert "got [" in failure()


def test_gaps_are_not_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(self: StreamReceiver, number: int) -> Arrival:
        self.last = max(self.last, number)
        return Arrival.NEXT

    monkeypatch.setattr(StreamReceiver, "arrive", blind)
    assert failure() != ""


def test_a_waiting_sequence_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = WaitingQueue.add
    serial = itertools.count(1)

    def broken(self: WaitingQueue, seq: Any) -> None:
        if next(serial) != 20:
            honest(self, seq)

    monkeypatch.setattr(WaitingQueue, "add", broken)
    assert failure() != ""


# ---- fencing


def test_plans_of_any_epoch_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fencing off at the worker."""

    def broken(self: Executor, plan: StepPlan) -> bool:
        self.last_queued = plan.step_id
        return True

    monkeypatch.setattr(Executor, "admit", broken)
    assert failure() != ""


def test_deltas_and_requests_of_any_epoch_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fencing off at the ledger."""
    monkeypatch.setattr(Ledger, "owns", lambda self, message: True)
    monkeypatch.setattr(Ledger, "status_for", lambda self, request: KvStatus.OK)
    while_others_die(monkeypatch, Strike(Phase.LEASED, 3, "crash", ("scheduler",)))
    assert failure() != ""


def test_results_of_any_epoch_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fencing off at the scheduler."""
    monkeypatch.setattr(WorkerLink, "owns", lambda self, generation, epoch: self.is_ready)
    while_others_die(monkeypatch, Strike(Phase.PLANNED, 5, "crash", ("scheduler",)))
    assert failure() != ""


def test_the_ledger_grants_before_the_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Ledger.status_for

    def broken(self: Ledger, request: LookupRequest | LeaseRequest) -> KvStatus:
        status = honest(self, request)
        return KvStatus.OK if status is KvStatus.NEED_SNAPSHOT else status

    monkeypatch.setattr(Ledger, "status_for", broken)
    lost = Strike(Phase.SNAPSHOT, 2, "lose")
    while_others_die(monkeypatch, Strike(Phase.COMMITTED, 5, "crash", ("worker",)), lost)
    assert failure() != ""


def two_ledgers(monkeypatch: pytest.MonkeyPatch) -> None:
    """All seeds with a ledger that sleeps while another takes its place."""
    monkeypatch.setattr(nemesis, "REPLACED", ("kv_store",))
    faults = FaultOptions(timed=("pause and replace",) * 3, restart_ns=1, hold_ns=SECOND_NS)
    in_a_crowd(monkeypatch, faults=faults, mean_arrival_ns=200_000_000)


def test_two_ledgers_are_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    two_ledgers(monkeypatch)
    assert failure(SOUND_SEEDS) == ""


def test_every_ledger_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fencing off between ledgers."""
    monkeypatch.setattr(KvCore, "_is_named", lambda self, message: True)
    monkeypatch.setattr(KvCore, "_yield", lambda self, *term: None)
    monkeypatch.setattr(Ledger, "owns", lambda self, m: self.term[:2] == (m.generation, m.epoch))
    two_ledgers(monkeypatch)
    assert failure() != ""


# ---- the rest of the list


def test_blocks_with_logits_that_are_not_finite_are_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = scheduler_svc.results._commit
    monkeypatch.setattr(
        scheduler_svc.results,
        "_commit",
        lambda step, lanes, lease, failed: honest(step, lanes, lease, set()),
    )
    # Or they would be forgotten at once.
    monkeypatch.setattr(BlockPool, "forget", lambda self, hashes: None)
    in_a_crowd(monkeypatch, nan=0.5, faults=FaultOptions())
    # Whichever comes first: somebody joins on such a block, or a wrong token of it is shown.
    assert failure().startswith(("Violation: I17", "Violation: I4"))


def test_the_ledger_forgets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "MEMORY", 1.0)
    monkeypatch.setattr(BlockPool, "forget", lambda self, hashes: None)
    assert "I17 forgotten" in failure()


def test_those_that_wait_keep_what_may_be_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "MEMORY", 1.0)
    monkeypatch.setattr(LedgerTalk, "_let_go", lambda self, first: None)
    assert "I17 forgotten" in failure()


def test_an_acknowledgement_is_never_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost by it but room: the log keeps what nobody wants."""
    honest = AdmissionCore.handle

    def broken(self: AdmissionCore, event: Any, now_ns: int) -> list[Any]:
        return [e for e in honest(self, event, now_ns) if not isinstance(e, Abort)]

    monkeypatch.setattr(AdmissionCore, "handle", broken)
    in_a_crowd(monkeypatch, faults=FaultOptions())
    assert "I11 and I13" in failure()


def test_a_container_grows_with_every_event(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = AdmissionCore.handle

    def broken(self: AdmissionCore, event: Any, now_ns: int) -> list[Any]:
        self.__dict__.setdefault("history", []).append(event)
        return honest(self, event, now_ns)

    monkeypatch.setattr(AdmissionCore, "handle", broken)
    assert "keeps {'history'" in failure()


def test_the_census_sees_what_lies_deep() -> None:
    world = World(1)
    world.run()
    counts = census(world.scheduler.core)
    assert counts["batch.lease.spare"] == len(world.scheduler.core.batch.lease.spare)
    assert counts["experience.times._fit"] == 3


def test_an_error_without_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = AdmissionCore.handle
    serial = itertools.count(1)

    def broken(self: AdmissionCore, event: Any, now_ns: int) -> list[Any]:
        effects = honest(self, event, now_ns)
        for request in list(self.requests.values())[:1]:
            if next(serial) % 200 == 0:
                self._fail(request, ErrorCode.INTERNAL, "because")
        return effects

    monkeypatch.setattr(AdmissionCore, "handle", broken)
    assert "I15 errors" in failure()


def test_two_tenants_share_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_svc.sequence, "root_hash", lambda salt: b"0" * 32)
    monkeypatch.setattr(Entry, "is_same", lambda self, tokens, parent, salt: self.tokens == tokens)
    in_a_crowd(monkeypatch, faults=FaultOptions(), num_salts=3, num_prompts=1)
    assert "I8 tenants" in failure()


def test_a_cancel_gives_no_block_back(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Batch.return_blocks

    def broken(self: Batch, seq: Any) -> None:
        if seq.status is not SequenceStatus.FINISHED or seq.num_output_tokens % 7:
            honest(self, seq)

    monkeypatch.setattr(Batch, "return_blocks", broken)
    assert failure() != ""


def test_a_request_that_is_given_away_leaves_its_span_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestSpans, "given_away", lambda self, request_id, now_ns: None)
    pause = Strike(Phase.TOKENS, 3, "pause", ("admission",))
    faults = FaultOptions(strikes=(pause,), restart_ns=100_000_000, hold_ns=3_000_000_000)
    in_a_crowd(monkeypatch, faults=faults, num_admissions=2, mean_arrival_ns=5_000_000)
    assert "I16 spans" in failure()


def test_a_phase_begins_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = PhaseLog._turn

    def late(self: PhaseLog, opened: Any, phase: Any) -> None:
        turn(self, opened, phase)
        opened.since_ns += 1

    monkeypatch.setattr(PhaseLog, "_turn", late)
    assert "I16 spans" in failure()

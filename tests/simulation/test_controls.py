"""The simulator must notice: each test breaks one thing on purpose, and some seed must fail.

A checker that has never failed proves nothing. The first test runs some of the seeds unbroken;
`test_seeds` runs them all.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np
import pytest

import scheduler_svc.sequence
import services.simulator.world
from gpu_worker.inputs import StepInputs
from gpu_worker.mirror import CopyLists, Mirror, Scheduled, Target
from gpu_worker.shadow import ShadowModel
from kv_store.block_pool import BlockPool
from kv_store.content import Entry, WriteBack
from kv_store.host_tier import HostTier
from scheduler_svc.planning import Planner, Step
from scheduler_svc.waiting import WaitingQueue
from services.admission.core import AdmissionCore, SendFrame
from services.admission.open_request import OpenRequest
from services.contracts.errors import StreetcarError
from services.contracts.public import Frame
from services.contracts.streams import Arrival, StreamReceiver
from services.simulator.world import World

SEEDS = range(1, 61)
SOUND_SEEDS = range(1, 21)
# A broken history may never end; a sound one among these seeds needs a tenth of this.
MAX_EVENTS = 30_000


@pytest.fixture(autouse=True)
def _bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services.simulator.world, "MAX_EVENTS", MAX_EVENTS)


def failure(seeds: Iterable[int] = SEEDS) -> str:
    """What the first failing seed says; "" where all pass."""
    for seed in seeds:
        try:
            World(seed).run()
        except (AssertionError, StreetcarError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


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
    assert "got [" in failure()


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
    # Histories that are long in copies; the first to show it is the 162nd.
    assert "got [" in failure(range(150, 301))


def test_a_copy_in_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShadowModel, "copy_blocks", lambda self, copies: None)
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
    assert "a frame after the terminal frame" in failure()


def test_a_frame_leaves_a_token_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole frame that is lost is asked for again."""
    honest = OpenRequest.frame

    def broken(self: OpenRequest) -> Frame | None:
        frame = honest(self)
        if frame is None or len(frame.token_ids) < 2:
            return frame
        return msgspec.structs.replace(frame, token_ids=frame.token_ids[1:])

    monkeypatch.setattr(OpenRequest, "frame", broken)
    assert "got [" in failure()


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

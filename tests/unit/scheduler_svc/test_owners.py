"""Whose a sequence is: offers when its admission is gone, and takeovers from nobody else."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_svc.events import AbortAsked, OfferAdoption, SendUpdates
from scheduler_svc.owners import FORGET_NS, SUSPECT_NS, next_part
from services.contracts.beats import Beat, ServiceKind
from services.contracts.limits import BEAT_PERIOD_MS
from services.contracts.sequences import AbortSequences, SubmitSequence
from services.contracts.vectors import unpack
from tests.unit.scheduler_svc.rig import MS, Rig, answer

A, B = "admission-a", "admission-b"
PERIOD_NS = BEAT_PERIOD_MS * MS
PROMPT = [1, 2, 3]


class Owned(Rig):
    """`heard`: the admissions that beat, with the worker's beats, while time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = [A, B]
        self.pass_time(PERIOD_NS)

    def beat(self, admission_id: str, *, leaving: bool = False) -> None:
        self.handle(Beat(ServiceKind.ADMISSION, admission_id, leaving=leaving))

    def pass_time(self, time_ns: int) -> None:
        for _ in range(-(-time_ns // PERIOD_NS)):
            self.tick(PERIOD_NS)
            for admission_id in self.heard:
                self.beat(admission_id)
            worker = Beat(ServiceKind.GPU_WORKER, "w", self.generation, self.epoch)
            self.handle(worker)

    def take(self, seq_id: str, admission_id: str, tag: int = 0) -> Any:
        return self.submit(
            seq_id, PROMPT, 8, admission_id=admission_id, tag=tag, envelope=b"envelope"
        )

    def offers(self) -> list[list[SubmitSequence]]:
        offers = [effect.message.sequences for effect in self.all(OfferAdoption)]
        self.effects = [e for e in self.effects if not isinstance(e, OfferAdoption)]
        return offers

    def moved(self, admission_id: str) -> list[int]:
        return [
            tag
            for effect in self.all(SendUpdates)
            if effect.admission_id == admission_id
            for tag in unpack(effect.updates.moved).tolist()
        ]


def test_nothing_is_offered_while_owners_beat() -> None:
    rig = Owned()
    rig.take("r1", A)
    rig.pass_time(20 * PERIOD_NS)
    assert rig.offers() == []


def test_three_missed_beats_and_it_is_offered_until_it_is_taken() -> None:
    rig = Owned()
    rig.take("r1", A)
    rig.step()
    rig.heard = [B]
    rig.pass_time(SUSPECT_NS)
    assert rig.offers() == []
    rig.pass_time(4 * PERIOD_NS)
    (first, *more) = rig.offers()
    assert len(more) == 3, "about four times a second"
    (offered,) = first
    assert (offered.seq_id, offered.envelope) == ("r1", b"envelope")
    assert unpack(offered.prompt).tolist() == PROMPT
    assert offered.max_tokens == 8 and not offered.accepted
    reply = rig.take("r1", B, tag=77)
    assert (reply.code, reply.owned_elsewhere) == (None, False)
    assert rig.moved(A) == [1]
    rig.pass_time(4 * PERIOD_NS)
    assert rig.offers() == []
    rig.drain()
    assert rig.tokens(77) == answer(PROMPT, 8)


def test_a_finished_sequence_is_offered_too() -> None:
    rig = Owned()
    rig.take("r1", A)
    rig.drain()
    rig.heard = [B]
    rig.pass_time(SUSPECT_NS + PERIOD_NS)
    assert [seq.seq_id for seq in rig.offers()[0]] == ["r1"]
    rig.take("r1", B, tag=77)
    assert rig.tokens(77) == answer(PROMPT, 8)
    assert len(rig.ends(77)) == 1


def test_a_last_beat_that_says_leaving_is_enough() -> None:
    rig = Owned()
    rig.take("r1", A)
    rig.heard = [B]
    rig.beat(A, leaving=True)
    rig.pass_time(PERIOD_NS)
    assert [seq.seq_id for seq in rig.offers()[0]] == ["r1"]


@pytest.mark.parametrize("known", [True, False])
def test_a_living_owner_keeps_what_is_its_own(known: bool) -> None:
    rig = Owned()
    if not known:
        # Its first beat is still on the way; its submission is a sign of life.
        rig.heard = [B]
    owner = A if known else "admission-new"
    rig.take("r1", owner)
    reply = rig.take("r1", B, tag=77)
    assert reply.owned_elsewhere and reply.code is None and reply.is_same
    assert rig.moved(owner) == []
    rig.handle(AbortAsked(AbortSequences(B, ["r1"]), "inbox"))
    rig.drain()
    assert rig.tokens(1) == answer(PROMPT, 8)


def test_the_late_owner_is_refused_once_another_has_it() -> None:
    rig = Owned()
    rig.take("r1", A)
    rig.heard = [B]
    rig.pass_time(SUSPECT_NS + PERIOD_NS)
    rig.take("r1", B, tag=77)
    rig.heard = [A, B]
    rig.pass_time(PERIOD_NS)
    assert rig.take("r1", A).owned_elsewhere
    rig.drain()
    assert rig.tokens(77) == answer(PROMPT, 8)


def test_nobody_is_suspect_after_an_outage_of_the_bus() -> None:
    rig = Owned()
    rig.take("r1", A)
    rig.tick(20 * PERIOD_NS)
    rig.handle(Beat(ServiceKind.GPU_WORKER, "w", rig.generation, rig.epoch))
    assert rig.offers() == []
    assert rig.take("r1", B, tag=77).owned_elsewhere
    rig.heard = [B]
    rig.pass_time(SUSPECT_NS + PERIOD_NS)
    assert rig.offers() != [], "but the silence after it counts"


def test_what_nobody_takes_is_dropped_and_forgotten() -> None:
    rig = Owned()
    rig.take("r1", A)
    rig.take("r2", A, tag=2)
    rig.step()
    rig.heard = [B]
    rig.pass_time(FORGET_NS + 2 * PERIOD_NS)
    assert rig.core.roster.find("r1") is None and rig.core.roster.find("r2") is None
    assert A not in rig.core.updates.index
    rig.drain()
    assert rig.core.batch.lanes.num_active == 0 and not rig.core.batch.lease.holds


def test_indices_of_forgotten_admissions_are_used_again() -> None:
    rig = Owned()
    for run in range(5):
        name = f"admission-{run}"
        rig.heard = [name]
        rig.take(f"r{run + 1}", name)
        rig.drain()
        rig.pass_time(FORGET_NS + 2 * PERIOD_NS)
    assert len(rig.core.updates.index) <= 2
    assert set(rig.core.updates.index.values()) <= {0, 1}
    numbers = [
        (effect.admission_id, effect.updates.number)
        for effect in rig.all(SendUpdates)
        if effect.admission_id == "admission-4"
    ]
    assert numbers[0][1] > 1, "an admission that was only asleep must find a gap, not old news"


def test_offers_come_in_parts_that_go_round() -> None:
    rig = Owned()
    for at in range(1, 6):
        rig.take(f"r{at}", A)
    orphans = list(rig.core.roster.live())
    size = 512 + 4 * len(PROMPT) + len(b"envelope")
    first = next_part(orphans, 0, 2 * size)
    assert [seq.seq_id for seq in first] == ["r1", "r2"]
    second = next_part(orphans, first[-1].uid, 2 * size)
    assert [seq.seq_id for seq in second] == ["r3", "r4"]
    assert [s.seq_id for s in next_part(orphans, second[-1].uid, 2 * size)] == ["r5", "r1"]
    assert [s.seq_id for s in next_part(orphans, 0, 1)] == ["r1"], "one always"
    assert next_part([], 3, size) == []

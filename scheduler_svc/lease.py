"""The scheduler's side of the ledger: blocks it may fill, what it holds, and what the next delta
will say.

    granted ─▶ spare ─take─▶ held by a sequence ─┬─ uncommitted ─▶ spare
    pinned by a lookup ────▶ held by a sequence ─┴─ committed ───▶ released in the next delta

Every block of the pool that the epoch has is in `spare` or has at least one hold in `holds`; a
block is filled from `spare` only, and a committed one goes back to the ledger before it is filled
again.

Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.contracts.kv import (
    NO_PARENT,
    Commits,
    KvDelta,
    KvSnapshot,
    KvStatus,
    LeaseReply,
    LeaseRequest,
    LookupRequest,
)
from services.contracts.vectors import Int32Array, pack, unpack

from .sequence import Sequence

LOOKUP_WAIT_NS = 20_000_000
LEASE_RETRY_NS = 100_000_000
LEASE_MAX_SHARE = 4
# Ask before the lease is empty, but not for every block that a step takes.
TOP_UP_AT = 0.75


def low_water_blocks(
    num_blocks: int, block_size: int, max_num_batched_tokens: int, max_num_seqs: int
) -> int:
    """Blocks that the lease is kept at: two full steps of need, at most a quarter of the pool
    (DESIGN section 6).
    """
    two_steps = 2 * (-(-max_num_batched_tokens // block_size) + max_num_seqs)
    return max(1, min(two_steps, (num_blocks - 1) // LEASE_MAX_SHARE))


@dataclass(slots=True)
class _Delta:
    """What the next delta will say."""

    block_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    tokens: list[bytes] = field(default_factory=list)
    salts: list[bytes] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    abandoned: list[int] = field(default_factory=list)

    def add_content(
        self, seq: Sequence, index: int, token_ids: Int32Array, block_size: int
    ) -> None:
        """Block `index` of `seq`, whose tokens are `token_ids` int32 [>= (index + 1) * block_size]."""
        tokens = token_ids[index * block_size : (index + 1) * block_size]
        self.block_ids.append(seq.block_ids[index])
        self.parents.append(seq.block_ids[index - 1] if index else NO_PARENT)
        self.hashes.append(seq.hash_of(index, token_ids, block_size))
        self.tokens.append(pack(tokens))
        if index == 0:
            self.salts.append(seq.salt)

    def commits(self) -> Commits:
        return Commits(
            block_ids=pack(self.block_ids),
            parents=pack(self.parents),
            hashes=b"".join(self.hashes),
            token_ids=b"".join(self.tokens),
            salts=self.salts,
        )


@dataclass(slots=True)
class _Part:
    """One part of a snapshot: holds by block, and content."""

    holds: dict[int, int] = field(default_factory=dict)
    content: _Delta = field(default_factory=_Delta)


@dataclass(slots=True)
class OpenLookup:
    number: int
    seq: Sequence
    give_up_ns: int


@dataclass(slots=True)
class OpenLease:
    number: int
    give_up_ns: int
    step_id: int


class Lease:
    """Blocks of one epoch. Numbers: requests (lookups and leases) and deltas each count from 1.

    shortage: blocks that the last step lacked. exhausted: the ledger has no more, and nothing went
    back since.
    bound: the ledger has answered this epoch.
    """

    def __init__(
        self,
        engine: str,
        generation: int,
        epoch: int,
        *,
        num_blocks: int,
        block_size: int,
        low_water: int,
    ) -> None:
        self.engine = engine
        self.generation = generation
        self.epoch = epoch
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.low_water = low_water
        self.spare: list[int] = []
        self.holds: Counter[int] = Counter()
        self.committed: set[int] = set()
        self.lookups: dict[int, OpenLookup] = {}
        self.open_lease: OpenLease | None = None
        self.bound = False
        self.shortage = 0
        self.exhausted = False
        self.delta_number = 0
        self._request_number = 0
        self._ask_from = 0
        self._delta = _Delta()

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_held(self) -> int:
        """Distinct blocks that sequences hold."""
        return len(self.holds)

    # ---- blocks of sequences

    def take(self, seq: Sequence, count: int) -> int:
        """Move up to `count` spare blocks to the end of `seq`'s table -> how many; the rest is a
        shortage.
        """
        taken = min(count, len(self.spare))
        for _ in range(taken):
            block_id = self.spare.pop()
            assert block_id not in self.holds and block_id not in self.committed
            self.holds[block_id] = 1
            seq.block_ids.append(block_id)
        self.shortage += count - taken
        return taken

    def commit(self, seq: Sequence, index: int, token_ids: Int32Array) -> None:
        """Block `index` of `seq` is full and its step's result has arrived."""
        block_id = seq.block_ids[index]
        assert block_id not in self.committed, f"block {block_id} is committed twice"
        self.committed.add(block_id)
        self._delta.add_content(seq, index, token_ids, self.block_size)

    def release(self, seq: Sequence) -> None:
        """`seq` holds nothing any more; no step in flight may name its blocks."""
        assert seq.num_in_flight == 0
        for block_id in reversed(seq.block_ids):
            self.holds[block_id] -= 1
            last = not self.holds[block_id]
            if last:
                del self.holds[block_id]
            if block_id in self.committed:
                self._delta.released.append(block_id)
                if last:
                    self.committed.remove(block_id)
            else:
                assert last
                self.spare.append(block_id)
        seq.block_ids.clear()
        seq.num_committed_blocks = 0
        self._exhaustion_outdated()

    def shed(self) -> None:
        """Give back spare blocks that a burst of ended sequences has piled up."""
        while len(self.spare) > 2 * self.low_water:
            self._delta.released.append(self.spare.pop())

    # ---- requests to the ledger

    def ask_lookup(self, seq: Sequence, token_ids: Int32Array, now_ns: int) -> LookupRequest | None:
        """The longest hit leaves at least one token to compute; None where no full block could hit."""
        num_blocks = (len(token_ids) - 1) // self.block_size
        if num_blocks == 0:
            return None
        seq.hash_of(num_blocks - 1, token_ids, self.block_size)
        number = self._next_number()
        self.lookups[number] = OpenLookup(number, seq, now_ns + LOOKUP_WAIT_NS)
        return LookupRequest(
            engine=self.engine,
            generation=self.generation,
            epoch=self.epoch,
            number=number,
            salt=seq.salt,
            hashes=b"".join(seq.hashes[:num_blocks]),
            token_ids=pack(token_ids[: num_blocks * self.block_size]),
        )

    def close_lookup(self, number: int, hits: Int32Array) -> Sequence | None:
        """Use a reply: blocks `hits` are pinned for the sequence -> it; None where the lookup was
        given up before.
        """
        opened = self.lookups.pop(number, None)
        if opened is None:
            return None
        seq = opened.seq
        seq.block_ids.extend(hits.tolist())
        self.holds.update(seq.block_ids)
        self.committed.update(seq.block_ids)
        seq.num_committed_blocks = len(hits)
        seq.num_computed_tokens = len(hits) * self.block_size
        return seq

    def give_up_lookup(self, number: int) -> Sequence:
        """The sequence goes on without; the ledger takes back what it pinned, or will pin, for this
        number.
        """
        self._delta.abandoned.append(number)
        self._exhaustion_outdated()
        return self.lookups.pop(number).seq

    def ask_lease(self, now_ns: int, step_id: int) -> LeaseRequest | None:
        """A request for more blocks, where they are needed and none is under way."""
        if self.open_lease is not None:
            return None
        short = len(self.spare) < TOP_UP_AT * self.low_water
        if not (short or self.shortage) or self.exhausted:
            return None
        number = self._next_number()
        self.open_lease = OpenLease(number, now_ns + LEASE_RETRY_NS, step_id)
        want = max(self.low_water - len(self.spare), self.shortage, 1)
        return LeaseRequest(
            engine=self.engine,
            generation=self.generation,
            epoch=self.epoch,
            number=number,
            num_blocks=min(want, self.num_usable),
        )

    def on_lease(self, reply: LeaseReply) -> bool:
        """Take a grant -> True where the reply was awaited."""
        if self.open_lease is None or self.open_lease.number != reply.number:
            return False
        self.open_lease = None
        self.bound = reply.status is KvStatus.OK
        granted = unpack(reply.block_ids).tolist()
        assert not any(b in self.holds or b in self.committed for b in granted)
        self.spare.extend(granted)
        if reply.number >= self._ask_from and reply.status is KvStatus.OK:
            self.exhausted = reply.num_available == 0
        self.shortage = max(0, self.shortage - len(granted))
        return True

    def give_up_lease(self) -> None:
        assert self.open_lease is not None
        self._delta.abandoned.append(self.open_lease.number)
        self._exhaustion_outdated()
        self.open_lease = None
        self.bound = False

    # ---- what the ledger hears

    def flush(self) -> KvDelta | None:
        """The delta of this step, or None where nothing changed."""
        delta, self._delta = self._delta, _Delta()
        if not (delta.block_ids or delta.released or delta.abandoned):
            return None
        self.delta_number += 1
        return KvDelta(
            engine=self.engine,
            generation=self.generation,
            epoch=self.epoch,
            number=self.delta_number,
            commits=delta.commits() if delta.block_ids else None,
            released=pack(delta.released),
            abandoned=pack(delta.abandoned),
        )

    def snapshot(
        self, holders: Iterable[tuple[Sequence, Int32Array]], part_blocks: int
    ) -> list[KvSnapshot]:
        """Everything held, in parts of at most `part_blocks` blocks; requests under way are closed
        by it.

        holders: sequences with blocks, and their known tokens. A block comes after the one before
        it in its sequence.
        """
        self._delta = _Delta()
        self.open_lease = None
        self._exhaustion_outdated()
        parts = [_Part()]
        told: set[int] = set()
        for seq, token_ids in holders:
            for index, block_id in enumerate(seq.block_ids):
                if block_id in told:
                    continue
                told.add(block_id)
                part = _with_room(parts, part_blocks)
                part.holds[block_id] = self.holds[block_id]
                if block_id in self.committed:
                    part.content.add_content(seq, index, token_ids, self.block_size)
        for block_id in self.spare:
            _with_room(parts, part_blocks).holds[block_id] = 1
        return [self._snapshot_part(part, at, len(parts)) for at, part in enumerate(parts)]

    def _snapshot_part(self, part: _Part, index: int, parts: int) -> KvSnapshot:
        return KvSnapshot(
            engine=self.engine,
            generation=self.generation,
            epoch=self.epoch,
            number=self.delta_number,
            part=index,
            parts=parts,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            block_ids=pack(part.holds.keys()),
            holds=pack(part.holds.values()),
            commits=part.content.commits(),
            closed_through=self._request_number,
        )

    def _exhaustion_outdated(self) -> None:
        """What the ledger lacked may be there now: only the answer to a later request counts."""
        self.exhausted = False
        self._ask_from = self._request_number + 1

    def _next_number(self) -> int:
        self._request_number += 1
        return self._request_number

    def check_invariants(self, sequences: list[Sequence]) -> None:
        """Every hold is a live sequence's; spare and held are apart; nothing exceeds the pool."""
        counted: Counter[int] = Counter()
        for seq in sequences:
            counted.update(seq.block_ids)
        assert counted == self.holds, (
            "a block is held by no live sequence, or by one that does not count it"
        )
        assert len(set(self.spare)) == len(self.spare)
        assert not set(self.spare) & self.holds.keys()
        assert 0 not in self.holds and 0 not in self.spare
        assert len(self.spare) + len(self.holds) <= self.num_usable
        assert self.committed <= self.holds.keys()


def _with_room(parts: list[_Part], part_blocks: int) -> _Part:
    if len(parts[-1].holds) == part_blocks:
        parts.append(_Part())
    return parts[-1]

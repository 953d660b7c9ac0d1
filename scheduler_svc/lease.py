"""The scheduler's side of the ledger: blocks it may fill, what it holds, what it has asked for.

    granted ─▶ spare ─take─▶ held by a sequence ─┬─ uncommitted ─▶ spare
    pinned by a lookup ────▶ held by a sequence ─┴─ committed ───▶ released in the next delta

Every block that the epoch has is in `spare` or has at least one hold in `holds`; a block is filled
from `spare` only, and a committed one goes back to the ledger before it is filled again.

Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from services.contracts.kv import (
    KvDelta,
    KvSnapshot,
    KvStatus,
    LeaseReply,
    LeaseRequest,
    LookupRequest,
)
from services.contracts.vectors import EMPTY, Int32Array, pack, unpack

from .copies import Copies
from .delta import DeltaDraft, Holder, SnapshotPart, snapshot_parts
from .sequence import Sequence

LOOKUP_WAIT_NS: Final = 20_000_000
LEASE_RETRY_NS: Final = 100_000_000
LEASE_MAX_SHARE: Final = 4
# A ledger that is stopped, or started anew, is not felt for so long: spare blocks go on.
RESERVE_NS: Final = 2_000_000_000
# Ask before the lease is empty, but not for every block that a step takes.
TOP_UP_AT: Final = 0.75
# Half of the smallest payload limit that a nats-server has by default.
SNAPSHOT_PART_BYTES: Final = 512 * 1024
_BYTES_BESIDE_TOKENS: Final = 80


def low_water_blocks(
    num_blocks: int, block_size: int, max_num_batched_tokens: int, max_num_seqs: int
) -> int:
    """What the lease is kept at: two full steps of need, at most a quarter of the pool.

    DESIGN section 6. 1,024 blocks of 16, 512 tokens and 64 sequences a step: 192 blocks.
    """
    two_steps = 2 * (-(-max_num_batched_tokens // block_size) + max_num_seqs)
    return max(1, min(two_steps, (num_blocks - 1) // LEASE_MAX_SHARE))


def reserve_blocks(num_lanes: int, step_ns: int, block_size: int) -> int:
    """What so many decoding lanes take while the ledger is away, for RESERVE_NS at most.

    64 lanes, steps of 5 ms, blocks of 16: 1,600 blocks; steps of 100 ms: 80.
    """
    return num_lanes * RESERVE_NS // (max(step_ns, 1) * block_size)


@dataclass(frozen=True, slots=True)
class Pool:
    """Whose blocks: one engine, generation and epoch, and their shape. host_blocks: slots of host
    memory below them; copy_block_us: to bring one in, 0 where unknown. ledger: the one that the
    epoch begins with.
    """

    engine: str
    generation: int
    epoch: int
    num_blocks: int
    block_size: int
    host_blocks: int = 0
    copy_block_us: int = 0
    ledger: str = ""


@dataclass(slots=True)
class OpenLookup:
    seq: Sequence
    give_up_ns: int


@dataclass(slots=True)
class OpenLease:
    number: int
    give_up_ns: int
    step_id: int


class Lease:
    """Blocks of one epoch. Requests (lookups and leases) and deltas each count from 1.

    shortage: blocks that the last step lacked. exhausted: the ledger has no more, and nothing went
    back since. ledger: whose blocks these are, "" for nobody's yet; binding: how many others there
    were before it in this epoch. bound: it answers. snapshot_due: it wants a snapshot, which waits
    until no copy is in flight, so that it tells only what is there.
    """

    def __init__(self, pool: Pool, low_water: int) -> None:
        self.pool = pool
        self.ledger = pool.ledger
        self.binding = 0
        self.block_size = pool.block_size
        self.low_water = low_water
        self.spare: list[int] = []
        self.holds: Counter[int] = Counter()
        self.committed: set[int] = set()
        self.lookups: dict[int, OpenLookup] = {}
        self.open_lease: OpenLease | None = None
        self.bound = False
        self.shortage = 0
        self.exhausted = False
        self.snapshot_due = False
        self.copies = Copies()
        self.delta_number = 0
        self._request_number = 0
        self._ask_from = 0
        self._told_ledger = ""
        self._has_granted = False
        self._draft = DeltaDraft()

    @property
    def num_usable(self) -> int:
        """All but the null block."""
        return self.pool.num_blocks - 1

    @property
    def num_held(self) -> int:
        """Distinct blocks that sequences hold."""
        return len(self.holds)

    # ---- blocks of sequences

    def take(self, seq: Sequence, count: int) -> int:
        """Move up to `count` spare blocks to the end of `seq`'s table -> how many.

        The rest is a shortage.
        """
        taken = min(count, len(self.spare))
        for _ in range(taken):
            block_id = self.spare.pop()
            assert block_id not in self.holds and block_id not in self.committed
            self.holds[block_id] = 1
            seq.block_ids.append(block_id)
        self.shortage += count - taken
        return taken

    def take_one_each(self, seqs: list[Sequence]) -> list[int]:
        """A spare block for each of `seqs`, in order; there must be enough."""
        first = len(self.spare) - len(seqs)
        assert first >= 0
        blocks = self.spare[first:]
        del self.spare[first:]
        assert self.holds.keys().isdisjoint(blocks)
        # A Counter's own update would count them one by one.
        dict.update(self.holds, dict.fromkeys(blocks, 1))
        for seq, block_id in zip(seqs, blocks, strict=True):
            seq.block_ids.append(block_id)
        return blocks

    def commit_one_each(self, seqs: list[Sequence], indices: list[int], tokens: bytes) -> None:
        """As `commit`, for one block of each of `seqs`; `tokens`: int32 [n, block_size] as
        bytes.
        """
        block_ids = self._draft.content.add_one_each(seqs, indices, tokens)
        assert self.committed.isdisjoint(block_ids), "a block is committed twice"
        self.committed.update(block_ids)

    def commit(self, seq: Sequence, index: int, token_ids: Int32Array) -> None:
        """Block `index` of `seq` is full and its step's result has arrived."""
        block_id = seq.block_ids[index]
        assert block_id not in self.committed, f"block {block_id} is committed twice"
        self.committed.add(block_id)
        self._draft.content.add(seq, index, token_ids, self.block_size)

    def forget(self, content_hash: bytes) -> None:
        """What has this hash, and what continues it, may be broken: nobody shall hit it again."""
        self._draft.forget.append(content_hash)

    @property
    def is_forgetting(self) -> bool:
        """The ledger has not been told yet, and would answer a lookup with it."""
        return bool(self._draft.forget)

    def release(self, seq: Sequence) -> None:
        """`seq` holds nothing any more; no step in flight may name its blocks."""
        assert seq.num_in_flight == 0
        # Its last block first: the ledger evicts in this order, and a prefix outlives its tail.
        for block_id in reversed(seq.block_ids):
            self.holds[block_id] -= 1
            last = not self.holds[block_id]
            if last:
                del self.holds[block_id]
            if block_id in self.committed:
                self._draft.released.append(block_id)
                if last:
                    self.committed.remove(block_id)
            else:
                assert last, f"block {block_id} is shared and has no known content"
                self.spare.append(block_id)
        seq.block_ids.clear()
        seq.num_committed_blocks = seq.num_computed_tokens = 0
        self._exhaustion_outdated()

    def shed(self) -> None:
        """Give back spare blocks that a burst of ended sequences has piled up."""
        surplus = len(self.spare) - 2 * self.low_water - self.shortage
        if surplus > 0:
            self._draft.released.extend(self.spare[:surplus])
            del self.spare[:surplus]
            self._exhaustion_outdated()

    def make_room(self, num_blocks: int) -> KvDelta | None:
        """Give up to `num_blocks` spare blocks back, half of them at most, for content that the
        ledger is to bring in from host memory -> the delta, to go out before that lookup.
        """
        given = min(num_blocks, len(self.spare) // 2)
        if not self.pool.host_blocks or not given:
            return None
        self._draft.released.extend(self.spare[:given])
        del self.spare[:given]
        self._exhaustion_outdated()
        return self.flush()

    # ---- whose they are

    def bind(self, ledger: str) -> None:
        """To another ledger than before, with nothing asked and open."""
        assert not self.lookups and self.open_lease is None
        self.ledger = ledger
        self.binding += 1
        self.bound, self._has_granted = False, False
        self.snapshot_due = True

    def news_of_ledger(self) -> str:
        """For the next plan: whose blocks it may be the first to fill, or "" for those of the same
        as before.
        """
        if not self._has_granted or self._told_ledger == self.ledger:
            return ""
        self._told_ledger = self.ledger
        return self.ledger

    # ---- requests to the ledger

    def ask_lookup(
        self, seq: Sequence, token_ids: Int32Array, now_ns: int, recompute_block_us: int = 0
    ) -> LookupRequest | None:
        """The longest hit leaves a token to compute; None where no full block could hit."""
        num_blocks = (len(token_ids) - 1) // self.block_size
        if num_blocks == 0:
            return None
        seq.hash_of(num_blocks - 1, token_ids, self.block_size)
        number = self._next_number()
        self.lookups[number] = OpenLookup(seq, now_ns + LOOKUP_WAIT_NS)
        return LookupRequest(
            engine=self.pool.engine,
            generation=self.pool.generation,
            epoch=self.pool.epoch,
            number=number,
            salt=seq.salt,
            hashes=b"".join(seq.hashes[:num_blocks]),
            token_ids=pack(token_ids[: num_blocks * self.block_size]),
            copy_block_us=self.pool.copy_block_us,
            recompute_block_us=recompute_block_us,
            ledger=self.ledger,
            binding=self.binding,
        )

    def close_lookup(
        self, number: int, hits: Int32Array, copies_out: bytes = EMPTY, copies_in: bytes = EMPTY
    ) -> Sequence | None:
        """Blocks `hits` are pinned for the sequence -> it; None where it was given up before, and
        then nothing is copied either.
        """
        opened = self.lookups.pop(number, None)
        if opened is None:
            return None
        seq = opened.seq
        assert not seq.block_ids
        self.copies.add_outs(number, unpack(copies_out))
        ins = unpack(copies_in)
        held = frozenset(block_id for block_id in ins[1::2].tolist() if block_id in self.holds)
        self.copies.add_ins(number, ins, held)
        seq.block_ids.extend(hits.tolist())
        self.holds.update(seq.block_ids)
        self.committed.update(seq.block_ids)
        seq.num_committed_blocks = len(hits)
        seq.num_computed_tokens = len(hits) * self.block_size
        return seq

    def give_up_lookup(self, number: int) -> Sequence:
        """The sequence goes on without; the ledger takes back what it pins for this number."""
        self._draft.abandoned.append(number)
        self._exhaustion_outdated()
        return self.lookups.pop(number).seq

    def ask_lease(self, now_ns: int, step_id: int) -> LeaseRequest | None:
        """A request for more blocks, where they are needed and none is under way."""
        short = len(self.spare) < TOP_UP_AT * self.low_water
        # Unbound, it asks whatever it holds: only an answer binds it to a new ledger.
        wanted = short or self.shortage or not self.bound
        in_vain = self.exhausted or self.snapshot_due
        if self.open_lease is not None or in_vain or not wanted:
            return None
        number = self._next_number()
        self.open_lease = OpenLease(number, now_ns + LEASE_RETRY_NS, step_id)
        want = max(self.low_water - len(self.spare), self.shortage, 1)
        return LeaseRequest(
            engine=self.pool.engine,
            generation=self.pool.generation,
            epoch=self.pool.epoch,
            number=number,
            num_blocks=min(want, self.num_usable),
            ledger=self.ledger,
            binding=self.binding,
        )

    def on_lease(self, reply: LeaseReply) -> bool:
        """Take a grant -> True where the reply was awaited."""
        if self.open_lease is None or self.open_lease.number != reply.number:
            return False
        self.open_lease = None
        self.bound = reply.status is KvStatus.OK
        self._has_granted |= self.bound
        granted = unpack(reply.block_ids).tolist()
        assert not any(b in self.holds or b in self.committed for b in granted)
        self.spare.extend(granted)
        self.copies.add_outs(reply.number, unpack(reply.copies_out))
        self.shortage = max(0, self.shortage - len(granted))
        if reply.number >= self._ask_from and reply.status is KvStatus.OK:
            self.exhausted = reply.num_available == 0
        return True

    def give_up_lease(self) -> None:
        """No answer in time: what it grants, or will grant, goes back."""
        assert self.open_lease is not None
        self._draft.abandoned.append(self.open_lease.number)
        self._exhaustion_outdated()
        self.open_lease = None
        self.bound = False

    # ---- what the ledger hears

    def step_ended(self, step_id: int) -> None:
        """Its result has arrived, so its copies have run."""
        self._draft.copied.extend(self.copies.confirm(step_id))

    def flush(self) -> KvDelta | None:
        """The delta of this step, or None where nothing changed."""
        draft = self._draft
        if draft.is_empty:
            return None
        self._draft = DeltaDraft()
        self.delta_number += 1
        return KvDelta(
            engine=self.pool.engine,
            generation=self.pool.generation,
            epoch=self.pool.epoch,
            number=self.delta_number,
            commits=draft.content.commits() if draft.content.block_ids else None,
            released=pack(draft.released),
            abandoned=pack(draft.abandoned),
            copied=pack(draft.copied),
            forget=b"".join(draft.forget),
            ledger=self.ledger,
            binding=self.binding,
        )

    def snapshot(self, holders: Iterable[Holder], forgotten: bytes = b"") -> list[KvSnapshot]:
        """Everything held; it closes all requests under way and stands in for unsent deltas.
        forgotten: 32 bytes each, whatever this or a lost delta was to forget.

        No copy may be pending or in flight: what is told here is there.
        """
        assert not self.lookups and not self.copies.are_in_flight
        assert not self.copies.pending_blocks
        self.snapshot_due = False
        # A number of its own: the loss of one that closes requests would not be noticed otherwise.
        self.delta_number += 1
        self._draft = DeltaDraft()
        self.open_lease = None
        self._exhaustion_outdated()
        part_blocks = max(1, SNAPSHOT_PART_BYTES // (4 * self.block_size + _BYTES_BESIDE_TOKENS))
        parts = snapshot_parts(
            holders, self.holds, self.spare, self.committed, self.block_size, part_blocks
        )
        last = len(parts) - 1
        return [
            self._snapshot_part(part, at, len(parts), forgotten if at == last else b"")
            for at, part in enumerate(parts)
        ]

    def _snapshot_part(
        self, part: SnapshotPart, index: int, num_parts: int, forget: bytes
    ) -> KvSnapshot:
        return KvSnapshot(
            engine=self.pool.engine,
            generation=self.pool.generation,
            epoch=self.pool.epoch,
            number=self.delta_number,
            part=index,
            parts=num_parts,
            num_blocks=self.pool.num_blocks,
            block_size=self.block_size,
            block_ids=pack(part.holds.keys()),
            holds=pack(part.holds.values()),
            commits=part.content.commits(),
            closed_through=self._request_number,
            host_blocks=self.pool.host_blocks,
            forget=forget,
            ledger=self.ledger,
            binding=self.binding,
        )

    def _exhaustion_outdated(self) -> None:
        """What the ledger lacked may be there now: only answers to later requests count."""
        self.exhausted = False
        self._ask_from = self._request_number + 1

    def _next_number(self) -> int:
        self._request_number += 1
        return self._request_number

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Every hold is a sequence's; spare and held are apart; nothing exceeds the pool."""
        counted: Counter[int] = Counter()
        for seq in sequences:
            counted.update(seq.block_ids)
        assert counted == self.holds, "holds differ from what the sequences count"
        assert len(set(self.spare)) == len(self.spare), "a block is spare twice"
        assert not set(self.spare) & self.holds.keys(), "a spare block is held"
        assert 0 not in self.holds and 0 not in self.spare, "the null block is in use"
        assert len(self.spare) + len(self.holds) <= self.num_usable
        assert self.committed <= self.holds.keys()

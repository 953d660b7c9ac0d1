"""What the ledger will hear: the delta of a step in the making, and the parts of a snapshot.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from services.contracts.hashing import block_hash, root_hash
from services.contracts.kv import NO_PARENT, Commits
from services.contracts.vectors import Int32Array, pack

from .sequence import Sequence


@dataclass(slots=True)
class Content:
    """Committed blocks, column by column, in an order in which each comes after the one before
    it.
    """

    block_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    tokens: list[bytes] = field(default_factory=list)
    salts: list[bytes] = field(default_factory=list)

    def add(self, seq: Sequence, index: int, token_ids: Int32Array, block_size: int) -> None:
        """Block `index` of `seq`; `token_ids` int32 [>= (index + 1) * block_size] are its
        tokens.
        """
        if index:
            seq.hash_of(index - 1, token_ids, block_size)
        tokens = token_ids[index * block_size : (index + 1) * block_size].tobytes()
        self.add_one_each([seq], [index], tokens)

    def add_one_each(self, seqs: list[Sequence], indices: list[int], tokens: bytes) -> list[int]:
        """Block `indices[i]` of each of `seqs`, the hashes before it being known -> block ids.

        tokens: of all these blocks, one after the other.
        """
        stride = len(tokens) // len(seqs)
        added: list[int] = []
        start = 0
        for seq, index in zip(seqs, indices, strict=True):
            hashes, ids = seq.hashes, seq.block_ids
            if index == len(hashes):
                parent = hashes[-1] if index else root_hash(seq.salt)
                hashes.append(block_hash(parent, tokens[start : start + stride]))
            start += stride
            added.append(ids[index])
            self.hashes.append(hashes[index])
            if index:
                self.parents.append(ids[index - 1])
            else:
                self.parents.append(NO_PARENT)
                self.salts.append(seq.salt)
        self.block_ids.extend(added)
        self.tokens.append(tokens)
        return added

    def commits(self) -> Commits:
        return Commits(
            block_ids=pack(self.block_ids),
            parents=pack(self.parents),
            hashes=b"".join(self.hashes),
            token_ids=b"".join(self.tokens),
            salts=self.salts,
        )


@dataclass(slots=True)
class DeltaDraft:
    content: Content = field(default_factory=Content)
    released: list[int] = field(default_factory=list)
    abandoned: list[int] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)
    forget: list[bytes] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        changed = self.content.block_ids or self.released or self.abandoned or self.copied
        return not (changed or self.forget)


@dataclass(slots=True)
class SnapshotPart:
    """holds: by block."""

    holds: dict[int, int] = field(default_factory=dict)
    content: Content = field(default_factory=Content)


Holder = tuple[Sequence, Int32Array]


def snapshot_parts(
    holders: Iterable[Holder],
    holds: Mapping[int, int],
    spare: Iterable[int],
    committed: frozenset[int] | set[int],
    block_size: int,
    part_blocks: int,
) -> list[SnapshotPart]:
    """Everything held, at least one part, each of at most `part_blocks` blocks.

    holders: sequences with blocks, and their known tokens. A block comes after its parent.
    """
    parts = [SnapshotPart()]
    told: set[int] = set()
    for seq, token_ids in holders:
        for index, block_id in enumerate(seq.block_ids):
            if block_id in told:
                continue
            told.add(block_id)
            part = _with_room(parts, part_blocks)
            part.holds[block_id] = holds[block_id]
            if block_id in committed:
                part.content.add(seq, index, token_ids, block_size)
    for block_id in spare:
        _with_room(parts, part_blocks).holds[block_id] = 1
    return parts


def _with_room(parts: list[SnapshotPart], part_blocks: int) -> SnapshotPart:
    if len(parts[-1].holds) == part_blocks:
        parts.append(SnapshotPart())
    return parts[-1]

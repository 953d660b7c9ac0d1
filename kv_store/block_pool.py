"""One engine's blocks: FREE, LEASED (held by the epoch) or CACHED (no holder, content known).

    FREE ─grant─▶ LEASED ─release─┬─ content found under its hash ─▶ CACHED ─┬─ hit ─▶ LEASED
      ▲                           └─ else ─▶ FREE                           └─ evict ─▶ FREE

free + leased + cached = num_blocks - 1: block 0 is the null block and never in any of them. A block
is LEASED while it has holds; a grant and a pin are one hold each, released once.

Pure.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from services.contracts.errors import InvariantError

from .content import Entry, PrefixIndex


class BlockPool:
    """Blocks 1 .. num_blocks - 1. Eviction: least recently released first."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: deque[int] = deque(range(1, num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._holds: dict[int, int] = {}
        self._content: dict[int, Entry] = {}
        self._index = PrefixIndex()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_leased(self) -> int:
        return len(self._holds)

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._cached)

    def holds(self, block_id: int) -> int:
        return self._holds.get(block_id, 0)

    # ---- grants and pins

    def grant(self, count: int) -> list[int]:
        """Up to `count` blocks, one hold each, free ones first; an evicted block's content is
        forgotten.
        """
        granted: list[int] = []
        while len(granted) < count and self.num_available:
            block_id = self._free.popleft() if self._free else self._evict()
            self._holds[block_id] = 1
            granted.append(block_id)
        return granted

    def lookup(self, salt: bytes, hashes: Sequence[bytes], tokens: Sequence[bytes]) -> list[int]:
        """Longest cached prefix -> its blocks, pinned; `tokens[i]` int32 bytes of block i, compared
        on a hit.
        """
        hits: list[int] = []
        parent: Entry | None = None
        for content_hash, block_tokens in zip(hashes, tokens, strict=True):
            entry = self._index.find(content_hash, block_tokens, parent, salt)
            if entry is None or entry.block_id is None:
                break
            hits.append(entry.block_id)
            parent = entry
        for block_id in hits:
            self._hold(block_id)
        return hits

    def release(self, block_id: int) -> None:
        """Take one hold of `block_id` back. Raises InvariantError where it has none."""
        holds = self._holds.get(block_id, 0)
        if holds == 0:
            raise InvariantError(f"block {block_id} is released but nobody holds it")
        if holds > 1:
            self._holds[block_id] = holds - 1
            return
        del self._holds[block_id]
        entry = self._content.get(block_id)
        if entry is not None and self._can_be_found(entry, block_id):
            entry.block_id = block_id
            self._cached[block_id] = None
        else:
            self._content.pop(block_id, None)
            self._free.append(block_id)

    # ---- content

    def commit(
        self, block_id: int, content_hash: bytes, tokens: bytes, parent: int | None, salt: bytes
    ) -> None:
        """`block_id` is full and its content is known. `parent`: the block before it, or None for a
        first one.

        Raises InvariantError where the block is not held, or its parent has no content.
        """
        if block_id not in self._holds:
            raise InvariantError(f"block {block_id} is committed but nobody holds it")
        before = None if parent is None else self._content.get(parent)
        if parent is not None and before is None:
            raise InvariantError(
                f"block {block_id} follows block {parent}, whose content is unknown"
            )
        entry = self._index.intern(content_hash, tokens, before, salt)
        known = self._content.get(block_id)
        if known is not None and known is not entry:
            raise InvariantError(f"block {block_id} is committed twice, with different content")
        self._content[block_id] = entry
        if entry.block_id is None and self._index.is_indexed(entry):
            entry.block_id = block_id

    def salt_of(self, block_id: int) -> bytes:
        """Salt of the chain that `block_id` belongs to; b"" where its content is unknown."""
        entry = self._content.get(block_id)
        return entry.salt if entry is not None else b""

    def revoke(self) -> None:
        """The epoch's lease ends: what has content stays cached, the rest is free."""
        for block_id in list(self._holds):
            self._holds[block_id] = 1
            self.release(block_id)

    def adopt(self, block_id: int, holds: int) -> None:
        """A snapshot says that `block_id` is held. Its content is unknown until the snapshot
        repeats it.
        """
        if block_id in self._cached:
            del self._cached[block_id]
            self._content.pop(block_id).block_id = None
        elif block_id not in self._holds:
            self._free.remove(block_id)
        self._holds[block_id] = holds

    def check_invariants(self) -> None:
        free, cached, leased = set(self._free), set(self._cached), set(self._holds)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached and not free & leased and not cached & leased
        assert free | cached | leased == set(range(1, self.num_blocks)), "a block is lost"
        assert all(holds > 0 for holds in self._holds.values())
        for block_id in cached:
            assert self._content[block_id].block_id == block_id, "a cached block cannot be found"
        assert not free & self._content.keys(), "a free block has content"
        for block_id, entry in self._content.items():
            assert entry.block_id is None or entry.block_id in self._content
            assert len(entry.tokens) == 4 * self.block_size
            assert block_id in cached or block_id in leased

    def _hold(self, block_id: int) -> None:
        if block_id in self._cached:
            del self._cached[block_id]
            self._holds[block_id] = 1
        else:
            self._holds[block_id] += 1

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        self._content.pop(block_id).block_id = None
        return block_id

    def _can_be_found(self, entry: Entry, block_id: int) -> bool:
        if entry.block_id is None:
            return self._index.is_indexed(entry)
        return entry.block_id == block_id

"""What blocks contain: a chain of entries, one per distinct full block of tokens under a salt,
found by hash.

An entry lives while a block or a host slot has it, or a later entry continues it, so a block that
is computed again after its eviction is the same entry again, and what was cached behind it is found
again. Tokens are compared wherever a hash matches: a collision is a miss, never another prompt's
KV. What was forgotten because it may be broken, and what continues it, is never found; the same
content computed anew is another entry.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary


class Entry:
    """Content of one block.

    block_id: the block that is found under `hash`, or None (none, or a duplicate). host_slot: where
    host memory has it. arrival: the block that a copy from host memory is about to fill.
    is_forgotten: it may be broken; never indexed again.
    """

    __slots__ = (
        "__weakref__",
        "arrival",
        "block_id",
        "hash",
        "host_slot",
        "is_forgotten",
        "parent",
        "salt",
        "tokens",
    )

    def __init__(
        self, content_hash: bytes, tokens: bytes, parent: Entry | None, salt: bytes
    ) -> None:
        self.hash = content_hash
        self.tokens = tokens
        self.parent = parent
        self.salt = salt
        self.block_id: int | None = None
        self.host_slot: int | None = None
        self.arrival: Arrival | None = None
        self.is_forgotten: bool = parent is not None and parent.is_forgotten

    def is_same(self, tokens: bytes, parent: Entry | None, salt: bytes) -> bool:
        """True for the very same content: `parent` by identity, and so every token before it."""
        return self.tokens == tokens and self.parent is parent and self.salt == salt


@dataclass(frozen=True, slots=True, eq=False)
class WriteBack:
    """A copy that saves `entry`, which `block_id` held, in `host_slot`."""

    block_id: int
    host_slot: int
    entry: Entry


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A copy that fills `block_id` with `entry` from `host_slot`."""

    host_slot: int
    block_id: int
    entry: Entry


@dataclass(slots=True)
class Copies:
    """What the reply to one request must have copied, and so what a confirmation confirms."""

    outs: list[WriteBack] = field(default_factory=list)
    ins: list[Arrival] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.outs or self.ins)

    def __len__(self) -> int:
        return len(self.outs) + len(self.ins)


class PrefixIndex:
    """Entries by hash. A second content under a known hash stays unindexed."""

    def __init__(self) -> None:
        self._entries: WeakValueDictionary[bytes, Entry] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._entries)

    def intern(
        self, content_hash: bytes, tokens: bytes, parent: Entry | None, salt: bytes
    ) -> Entry:
        """The entry of this content, made where there is none."""
        entry = self._entries.get(content_hash)
        if entry is not None and entry.is_same(tokens, parent, salt):
            return entry
        fresh = Entry(content_hash, tokens, parent, salt)
        if entry is None and not fresh.is_forgotten:
            self._entries[content_hash] = fresh
        return fresh

    def find(
        self, content_hash: bytes, tokens: bytes, parent: Entry | None, salt: bytes
    ) -> Entry | None:
        """The entry of this content, wherever it lies; None where there is none."""
        entry = self._entries.get(content_hash)
        if entry is None or not entry.is_same(tokens, parent, salt):
            return None
        return entry

    def is_indexed(self, entry: Entry) -> bool:
        return self._entries.get(entry.hash) is entry

    def forget(self, hashes: Iterable[bytes]) -> list[Entry]:
        """Take what has one of `hashes`, and all that continues it, out -> those entries.

        O(entries): what continues an entry is not kept, because nothing else asks for it.
        """
        for content_hash in hashes:
            entry = self._entries.get(content_hash)
            if entry is not None:
                entry.is_forgotten = True
        sound: set[Entry] = set()
        for entry in list(self._entries.values()):
            _inherit(entry, sound)
        forgotten = [entry for entry in self._entries.values() if entry.is_forgotten]
        for entry in forgotten:
            del self._entries[entry.hash]
        return forgotten


def _inherit(entry: Entry, sound: set[Entry]) -> None:
    """Forget `entry`, and those between, where one before it is forgotten; else all are `sound`."""
    chain: list[Entry] = []
    at: Entry | None = entry
    while at is not None and not at.is_forgotten and at not in sound:
        chain.append(at)
        at = at.parent
    if at is not None and at.is_forgotten:
        for continued in chain:
            continued.is_forgotten = True
    else:
        sound.update(chain)

"""The pool against a model of three sets: no block is lost, doubled, or found under another's
name.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_store.block_pool import BlockPool
from services.contracts.errors import InvariantError
from services.contracts.vectors import pack

BLOCK_SIZE = 1
MAX_LENGTH = 4


class PoolMachine(RuleBasedStateMachine):
    """`holds` counts what was taken and not yet released; `content` names the chain of each block.

    A chain is the tuple of all tokens up to and with the block's own; its hash is a number that
    collides on purpose, so that only the comparison of tokens tells chains apart.
    """

    @initialize(num_blocks=st.integers(2, 9), colliding=st.booleans())
    def begin(self, num_blocks: int, colliding: bool) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.num_blocks = num_blocks
        self.colliding = colliding
        self.holds: dict[int, int] = {}
        self.content: dict[int, tuple[int, ...]] = {}
        self.cached: set[int] = set()

    def _hash(self, chain: tuple[int, ...]) -> bytes:
        return bytes([len(chain) % 2 if self.colliding else hash(chain) % 251])

    @rule(count=st.integers(0, 5))
    def grant(self, count: int) -> None:
        available = self.pool.num_available
        free_first = min(self.pool.num_free, count)
        granted = self.pool.grant(count)
        assert len(granted) == min(count, available) == len(set(granted))
        assert not any(block in self.holds for block in granted)
        assert sum(block in self.cached for block in granted) == len(granted) - free_first
        for block in granted:
            self.holds[block] = 1
            self.cached.discard(block)
            self.content.pop(block, None)

    @precondition(lambda self: bool(self.holds))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.holds)))
        before = self.pool.num_cached, self.pool.num_free
        self.pool.release(block)
        self.holds[block] -= 1
        if self.holds[block]:
            assert (self.pool.num_cached, self.pool.num_free) == before
            return
        del self.holds[block]
        if self.pool.num_cached > before[0]:
            assert block in self.content
            self.cached.add(block)
        else:
            assert self.pool.num_free == before[1] + 1
            self.content.pop(block, None)

    @rule(block=st.integers(0, 9))
    def release_what_nobody_holds(self, block: int) -> None:
        if self.holds.get(block):
            return
        with pytest.raises(InvariantError):
            self.pool.release(block)

    @precondition(lambda self: bool(self.holds))
    @rule(data=st.data(), token=st.integers(0, 1))
    def commit(self, data: st.DataObject, token: int) -> None:
        block = data.draw(st.sampled_from(sorted(self.holds)))
        parents = [
            known
            for known, chain in self.content.items()
            if known in self.holds and known != block and len(chain) < MAX_LENGTH
        ]
        parent = data.draw(st.sampled_from([None, *sorted(parents)]))
        chain = (*(self.content[parent] if parent is not None else ()), token)
        if block in self.content:
            return
        self.pool.commit(block, self._hash(chain), pack([token]), parent, b"")
        self.content[block] = chain

    @rule(chain=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_LENGTH).map(tuple))
    def forget(self, chain: tuple[int, ...]) -> None:
        """What is forgotten is gone with all that continues it; what is held stays held."""
        self.pool.forget([self._hash(chain)])
        for block in [b for b in self.cached if not self._is_cached(b)]:
            self.cached.discard(block)
            del self.content[block]
        prefixes = [chain[: end + 1] for end in range(len(chain))]
        hits = self.pool.lookup(
            b"", [self._hash(prefix) for prefix in prefixes], [pack([token]) for token in chain]
        )
        assert len(hits) < len(chain)
        for block in hits:
            self.holds[block] = self.holds.get(block, 0) + 1
            self.cached.discard(block)
        if not self.colliding:
            assert not [b for b in self.cached if self.content[b][: len(chain)] == chain]

    @rule(chain=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_LENGTH).map(tuple))
    def lookup(self, chain: tuple[int, ...]) -> None:
        prefixes = [chain[: end + 1] for end in range(len(chain))]
        hits = self.pool.lookup(
            b"", [self._hash(prefix) for prefix in prefixes], [pack([token]) for token in chain]
        )
        for block, prefix in zip(hits, prefixes, strict=False):
            assert self.content[block] == prefix, "another prompt's KV"
            self.holds[block] = self.holds.get(block, 0) + 1
            self.cached.discard(block)
        if not self.colliding and len(hits) < len(chain):
            missing = prefixes[len(hits)]
            assert not [b for b in self.cached if self.content[b] == missing] or not hits

    @rule()
    def revoke(self) -> None:
        self.pool.revoke()
        self.cached = {b for b in self.content if self.pool.holds(b) == 0 and self._is_cached(b)}
        self.content = {block: self.content[block] for block in self.cached}
        self.holds = {}
        assert self.pool.num_leased == 0

    def _is_cached(self, block: int) -> bool:
        return block in self.pool._cached

    @rule(data=st.data(), holds=st.integers(1, 3))
    def adopt(self, data: st.DataObject, holds: int) -> None:
        block = data.draw(st.integers(1, self.num_blocks - 1))
        if block in self.holds:
            return
        self.pool.adopt(block, holds)
        self.holds[block] = holds
        self.cached.discard(block)
        self.content.pop(block, None)

    @invariant()
    def books(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_invariants()
        total = self.pool.num_free + self.pool.num_leased + self.pool.num_cached
        assert total == self.num_blocks - 1
        assert {block: self.pool.holds(block) for block in self.holds} == self.holds
        assert self.pool.num_leased == len(self.holds)
        assert self.pool.num_cached == len(self.cached)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)

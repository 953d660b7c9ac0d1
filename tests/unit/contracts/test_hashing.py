"""Names of KV content. The constants were computed with hashlib by hand, once."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import pytest

from services.contracts.hashing import HASH_BYTES, block_hash, chain_hashes, root_hash
from services.contracts.vectors import pack

TOKENS = np.arange(10, dtype=np.int32)


def test_the_chain_is_blake2b_over_parent_and_tokens() -> None:
    root = blake2b(b"t", digest_size=32, person=b"streetcar-root").digest()
    first = blake2b(root + pack([0, 1, 2, 3]), digest_size=32).digest()
    second = blake2b(first + pack([4, 5, 6, 7]), digest_size=32).digest()
    assert chain_hashes(b"t", TOKENS, 4, 2) == [first, second]
    assert root_hash(b"t") == root and block_hash(root, pack([0, 1, 2, 3])) == first
    assert len(first) == HASH_BYTES


def test_every_earlier_token_and_the_salt_change_every_later_hash() -> None:
    base = chain_hashes(b"", TOKENS, 2, 5)
    changed = TOKENS.copy()
    changed[0] = 99
    assert not set(base) & set(chain_hashes(b"", changed, 2, 5))
    assert not set(base) & set(chain_hashes(b"a", TOKENS, 2, 5))
    changed = TOKENS.copy()
    changed[9] = 99
    assert chain_hashes(b"", changed, 2, 5)[:4] == base[:4]


def test_a_root_is_no_block() -> None:
    assert root_hash(b"") != block_hash(b"", b"")


def test_more_blocks_than_tokens_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        chain_hashes(b"", TOKENS, 4, 3)


def test_the_order_of_bytes_in_memory_does_not_matter() -> None:
    assert chain_hashes(b"", TOKENS.astype(">i4").astype(np.int32), 5, 2) == chain_hashes(
        b"", TOKENS, 5, 2
    )

"""Names of KV content: a chain of BLAKE2b-256 over (parent hash, token ids of one full block).

The chain starts from the tenant's salt, so blocks of different tenants never share a name
(CVE-2025-46570).

Pure.
"""

from __future__ import annotations

from hashlib import blake2b

from .vectors import Int32Array, pack

HASH_BYTES = 32


def root_hash(salt: bytes) -> bytes:
    """Parent of every first block under `salt` (b"" for the shared namespace) -> 32 bytes."""
    return blake2b(salt, digest_size=HASH_BYTES, person=b"streetcar-root").digest()


def block_hash(parent: bytes, token_bytes: bytes) -> bytes:
    """`parent`: 32 bytes; `token_bytes`: int32 little-endian [block_size] -> 32 bytes."""
    return blake2b(parent + token_bytes, digest_size=HASH_BYTES).digest()


def chain_hashes(
    salt: bytes, token_ids: Int32Array, block_size: int, num_blocks: int
) -> list[bytes]:
    """Hashes of the first `num_blocks` full blocks of `token_ids` int32 [>= num_blocks *
    block_size].
    """
    assert num_blocks * block_size <= len(token_ids)
    buffer = pack(token_ids[: num_blocks * block_size])
    stride = 4 * block_size
    parent, hashes = root_hash(salt), []
    for start in range(0, len(buffer), stride):
        parent = block_hash(parent, buffer[start : start + stride])
        hashes.append(parent)
    return hashes

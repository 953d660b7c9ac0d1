"""Content that may be broken, because a sequence that held it had logits that are not finite.

One hash for each such sequence, that of its first full block: whatever it held hangs below that. A
ledger that has missed the delta hears of it again in every snapshot. Whoever computes the same
tokens anew makes content anew, which a later snapshot forgets too: that costs a recompute.

Pure.
"""

from __future__ import annotations

from typing import Final

# Beyond it the oldest is left out of snapshots: at worst one more request meets it, and fails.
MAX_FORGOTTEN: Final = 256


class Forgotten:
    """Of one worker's life: another one begins with an empty cache."""

    def __init__(self) -> None:
        self._hashes: dict[bytes, None] = {}
        self._generation = 0

    def attached(self, generation: int) -> None:
        """A worker has been found, perhaps another one."""
        if generation != self._generation:
            self._hashes.clear()
            self._generation = generation

    def add(self, content_hash: bytes) -> None:
        self._hashes.pop(content_hash, None)
        self._hashes[content_hash] = None
        if len(self._hashes) > MAX_FORGOTTEN:
            del self._hashes[next(iter(self._hashes))]

    @property
    def hashes(self) -> bytes:
        """32 bytes each, for a snapshot."""
        return b"".join(self._hashes)

"""The log file of one service: what its processes write to standard error.

Invariant: the file and the one before it hold at most MAX_LOG_BYTES each.

Shell: files.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Final

MAX_LOG_BYTES: Final = 4 * 1024 * 1024
TAIL_LINES: Final = 8
MAX_TAIL_CHARS: Final = 400


class BoundedLog:
    """A log file of at most MAX_LOG_BYTES, with the one before it kept as `.1`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb")
        self._size = 0
        self._recent: deque[bytes] = deque(maxlen=TAIL_LINES)

    def write(self, chunk: bytes) -> None:
        if self._size + len(chunk) > MAX_LOG_BYTES:
            self._file.close()
            self.path.replace(self.path.with_suffix(".log.1"))
            self._file = self.path.open("wb")
            self._size = 0
        self._file.write(chunk)
        self._file.flush()
        self._size += len(chunk)
        self._recent.extend(chunk.splitlines()[-TAIL_LINES:])

    def tail(self) -> list[str]:
        """The last lines written, shortened."""
        return [line[:MAX_TAIL_CHARS].decode(errors="replace") for line in self._recent]

    def close(self) -> None:
        self._file.close()

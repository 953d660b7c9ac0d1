"""A thread that runs jobs one after the other.

Shell.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable


class JobThread(threading.Thread):
    """What a job raises goes to `failed`, in the loop's thread."""

    def __init__(
        self,
        name: str,
        loop: asyncio.AbstractEventLoop,
        failed: Callable[[BaseException], None],
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._loop = loop
        self._failed = failed

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        """After the jobs that are queued."""
        self._jobs.put(None)

    def run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - it ends the process, in the loop's thread
                self._loop.call_soon_threadsafe(self._failed, error)
                return

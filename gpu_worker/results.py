"""Small tensors on their way to the host, while the device goes on.

Invariants: on a GPU the copy runs on a stream of its own, into pinned memory, and what is copied is
a copy already, so that the next step may overwrite the original.

Device: copies results to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch


class Fetch:
    """What will be on the host; `read` is called once, by whoever needs it."""

    def __init__(self, arrays: Sequence[torch.Tensor], kept: object, event: Any) -> None:
        self._arrays = arrays
        self._kept = kept
        self._event = event

    def wait(self) -> None:
        """Return once it is there; from any thread."""
        if self._event is not None:
            self._event.synchronize()

    def read(self) -> list[npt.NDArray[Any]]:
        self.wait()
        self._kept = None
        return [tensor.numpy() for tensor in self._arrays]


class Results:
    """Fetches from one device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetch:
        """Queue the copies, behind what the current stream has been given so far."""
        if self._stream is None:
            return Fetch([tensor.cpu() for tensor in tensors], None, None)
        copies = [tensor.clone() for tensor in tensors]
        hosts = [torch.empty(c.shape, dtype=c.dtype, pin_memory=True) for c in copies]
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for host, copy in zip(hosts, copies, strict=True):
                host.copy_(copy, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        # Freed before the copy has ended, their memory would be given to the next step.
        return Fetch(hosts, copies, event)

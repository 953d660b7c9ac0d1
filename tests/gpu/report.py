"""What the check found, written as one JSON whatever happens to it on the way."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Report:
    """`content` is the JSON. After `limit_s` it is written as it stands, and the process ends, even
    where the device does not answer any more.
    """

    def __init__(self, path: Path, limit_s: float) -> None:
        self._path = path
        self._limit_s = limit_s
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self.content: dict[str, Any] = {
            "machine": machine(),
            "limit_s": limit_s,
            "checks": [],
            "speed": [],
            "engines": [],
            "skipped": [],
            "failed": [],
        }
        timer = threading.Timer(limit_s, self._give_up)
        timer.daemon = True
        timer.start()

    def left_s(self) -> float:
        return self._limit_s - (time.monotonic() - self._started)

    def add(self, section: str, **entry: Any) -> None:
        with self._lock:
            self.content[section].append(entry)
        say(f"{section}: {entry}")

    def attempt(self, name: str, needed_s: float, run: Callable[[], None]) -> None:
        """Run a part, unless there is too little time for it; what it raises is a finding."""
        if self.left_s() < needed_s:
            self.add(
                "skipped", part=name, reason=f"{self.left_s():.0f} s left, {needed_s:.0f} wanted"
            )
            return
        started = time.monotonic()
        try:
            run()
        except Exception as error:  # noqa: BLE001 - the other parts go on
            self.add("failed", part=name, error=f"{type(error).__name__}: {error}"[:2000])
        say(f"{name}: {time.monotonic() - started:.1f} s")

    @property
    def is_good(self) -> bool:
        return not self.content["failed"] and all(c["ok"] for c in self.content["checks"])

    def write(self) -> None:
        with self._lock:
            self.content["elapsed_s"] = round(time.monotonic() - self._started, 1)
            self.content["ok"] = self.is_good
            self._path.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")

    def _give_up(self) -> None:
        self.add("failed", part="time", error=f"not done after {self._limit_s:.0f} s")
        self.write()
        os._exit(2)


def machine() -> dict[str, Any]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("numpy", "safetensors", "triton", "flash-attn", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    if not torch.cuda.is_available():
        return {"device": "cpu", "versions": versions}
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "capability": list(torch.cuda.get_device_capability(0)),
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "versions": versions,
    }

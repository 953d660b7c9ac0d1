"""`streetcar bench mesh --stop-ledger`: the steps before, while and after the kv_store is stopped.

Shell: one signal, the clock.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from services.contracts.step import StepEvent


@dataclass(slots=True)
class LedgerStop:
    """`stopped_s`: how long; periods: of all steps in ms, by phase; short_steps: those of them in
    which not every lane decoded; preemptions: in the phase.
    """

    stopped_s: float
    lanes: int
    phase: str = ""
    periods: dict[str, list[float]] = field(default_factory=dict)
    short_steps: dict[str, int] = field(default_factory=dict)
    preemptions: dict[str, list[int]] = field(default_factory=dict)

    def add(self, step: StepEvent) -> None:
        if not self.phase:
            return
        self.periods.setdefault(self.phase, []).append(step.period_us / 1000.0)
        short = step.num_decode_tokens != self.lanes
        self.short_steps[self.phase] = self.short_steps.get(self.phase, 0) + short
        self.preemptions.setdefault(self.phase, []).append(step.num_preemptions)

    async def run(self, kv_store: int, seconds: float) -> None:
        """Half of `seconds`, the process `kv_store` stopped, and half of `seconds` again."""
        self.phase = "before"
        await asyncio.sleep(seconds / 2)
        os.kill(kv_store, signal.SIGSTOP)
        self.phase = "during"
        try:
            await asyncio.sleep(self.stopped_s)
        finally:
            os.kill(kv_store, signal.SIGCONT)
        self.phase = "after"
        await asyncio.sleep(seconds / 2)

    def figures(self) -> dict[str, Any]:
        """By phase: step periods in ms, and what was short."""
        import numpy as np

        figures: dict[str, Any] = {}
        for phase, periods in self.periods.items():
            p50, p99 = np.percentile(periods, [50, 99])
            preemptions = self.preemptions[phase]
            figures[phase] = {
                "steps": len(periods),
                "p50": round(float(p50), 3),
                "p99": round(float(p99), 3),
                "max": round(max(periods), 3),
                "short_steps": self.short_steps[phase],
                "preemptions": preemptions[-1] - preemptions[0],
            }
        return figures

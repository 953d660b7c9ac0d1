"""When a step began, and how long it took: a device computes one at a time, in order.

Pure: times are on the clock of the caller.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.contracts.step import StepPlan
from services.contracts.trace_context import TraceContext

from .executor import Begun


@dataclass(slots=True, eq=False)
class TimedStep:
    """A step under way. links: see ``step_spans``.

    queued_ns:  its plan had come
    began_ns:   the host began to prepare it
    ready_ns:   the device had it
    """

    plan: StepPlan
    begun: Begun
    links: tuple[TraceContext, ...]
    queued_ns: int
    began_ns: int
    ready_ns: int

    def start_ns(self, last_end_ns: int) -> int:
        """When it could start, where the step before it ended at `last_end_ns`."""
        return max(self.began_ns, last_end_ns)

    def waited_ns(self, last_end_ns: int) -> int:
        """How long it had been in time for its start: the device's, where it was prepared while
        another one ran, so that the lead of plans grows until the preparation is hidden.

        Ready at 7, the one before ends at 9: 2; ready at 11: 0, the device stood idle.
        """
        ahead = self.began_ns < last_end_ns
        return max(0, self.start_ns(last_end_ns) - (self.ready_ns if ahead else self.queued_ns))

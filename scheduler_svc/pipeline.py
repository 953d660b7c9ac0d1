"""Steps in flight: at most two, published one lead ahead, answered in order, polled when late.

Pure.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from services.contracts.limits import KEPT_PLANS, MAX_STEPS_IN_FLIGHT
from services.contracts.step import StepPlan

from .planning import Step
from .sequence import Sequence
from .step_time import Lead, StepTimeModel
from .times import NEVER_NS

POLL_AFTER_NS: Final = 250_000_000
POLL_AFTER_PREDICTED: Final = 4


class Pipeline:
    """Times are on the clock of `now_ns`. `steps`: in flight, oldest first."""

    def __init__(self, times: StepTimeModel) -> None:
        self.steps: deque[Step] = deque()
        self.plans: deque[StepPlan] = deque(maxlen=KEPT_PLANS)
        self.model = times
        self.lead = Lead()
        self.next_step_id = 1
        self.last_result_ns = 0
        self._poll_at_ns = NEVER_NS
        self._publish_at_ns = 0

    @property
    def may_publish_at_ns(self) -> int:
        """When the next plan may go out: at once, one lead before the predicted end, or not before
        a result.
        """
        return self._publish_at_ns if len(self.steps) < MAX_STEPS_IN_FLIGHT else NEVER_NS

    def publish(self, step: Step, plan: StepPlan, now_ns: int) -> None:
        assert len(self.steps) < MAX_STEPS_IN_FLIGHT
        step.published_ns = step.started_ns = now_ns
        self.steps.append(step)
        self.plans.append(plan)
        self.next_step_id += 1
        if len(self.steps) == 1:
            self._watch(now_ns)

    def finish(self, elapsed_us: int, waited_us: int, now_ns: int) -> Step:
        """The oldest step's result has arrived."""
        step = self.steps.popleft()
        self.model.observe(step.num_tokens, step.num_kv_tokens, elapsed_us * 1000)
        if step.started_ns != step.published_ns:
            # Only a step with a predecessor can tell whether its plan came early enough.
            self.lead.observe(waited_us * 1000)
        self.last_result_ns = now_ns
        if self.steps:
            self.steps[0].started_ns = now_ns
        self._watch(now_ns)
        return step

    def depart(self, seq: Sequence, lane: int) -> None:
        """`seq` leaves `lane`: steps under way that name it will find it here."""
        for step in self.steps:
            if lane not in step.departed and bool((step.lanes == lane).any()):
                step.departed[lane] = seq
                seq.num_in_flight += 1

    # ---- the step deadline

    @property
    def poll_at_ns(self) -> int:
        return self._poll_at_ns

    def polled(self, now_ns: int) -> None:
        """A poll is under way, or has said that the step still runs."""
        self._poll_at_ns = now_ns + POLL_AFTER_NS

    def plans_from(self, step_id: int) -> list[StepPlan]:
        """Kept plans from `step_id` on, to be sent again."""
        return [plan for plan in self.plans if plan.step_id >= step_id]

    def _watch(self, now_ns: int) -> None:
        """The oldest step has just begun, as far as is known here."""
        if not self.steps:
            self._poll_at_ns, self._publish_at_ns = NEVER_NS, 0
            return
        step = self.steps[0]
        predicted_ns = self.model.predict_ns(step.num_tokens, step.num_kv_tokens)
        self._poll_at_ns = now_ns + max(POLL_AFTER_NS, POLL_AFTER_PREDICTED * predicted_ns)
        self._publish_at_ns = step.started_ns + predicted_ns - self.lead.ns

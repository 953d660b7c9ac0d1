"""What `bench mesh --stop-ledger` counts, phase by phase."""

from __future__ import annotations

from services.cli.ledger_stop import LedgerStop
from services.contracts.step import StepEvent


def _step(period_us: int, num_decode_tokens: int, num_preemptions: int) -> StepEvent:
    numbers = dict.fromkeys(StepEvent.__struct_fields__, 0)
    numbers |= {"period_us": period_us, "num_decode_tokens": num_decode_tokens}
    return StepEvent(**{**numbers, "engine": "e", "num_preemptions": num_preemptions})  # type: ignore[arg-type]


def test_steps_are_counted_in_the_phase_in_which_they_come() -> None:
    stop = LedgerStop(1.0, lanes=4)
    stop.add(_step(1000, 4, 0))
    for phase, periods in (("before", [5000, 5000]), ("during", [5000, 9000])):
        stop.phase = phase
        for number, period_us in enumerate(periods):
            stop.add(_step(period_us, 4 - number * (phase == "during"), number))
    figures = stop.figures()
    assert figures["before"]["steps"] == 2, "what came before it all does not count"
    assert (figures["before"]["p50"], figures["before"]["short_steps"]) == (5.0, 0)
    assert figures["during"]["max"] == 9.0
    assert (figures["during"]["short_steps"], figures["during"]["preemptions"]) == (1, 1)

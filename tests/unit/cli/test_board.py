"""What `streetcar top` shows of the mesh, from nothing to many engines."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from services.cli.board import FORGET_NS, KEPT_STEPS, SHOWN_STEPS, Board, gauge
from services.contracts.beats import Beat, EngineLoad, KvPoolLoad, ServiceKind
from services.contracts.limits import MAX_NAMES
from services.contracts.step import ScheduledRequests, StepEvent
from tests.unit.admission.streams import engine_load

SECOND = 1_000_000_000


def beat(engine: str = "engine-0") -> Beat:
    return Beat(ServiceKind.SCHEDULER, engine, generation=7, epoch=2, engine=load())


def load() -> EngineLoad:
    return engine_load()


def step(step_id: int, engine: str = "engine-0", **more: Any) -> StepEvent:
    fields: dict[str, Any] = {
        "num_seqs": 3, "num_decode_tokens": 2, "num_prefill_tokens": 5, "num_waiting": 1,
        "num_running": 3, "num_preemptions": 0, "num_blocks_held": 4, "num_blocks_total": 9,
        "plan_bytes": 40, "scheduler_us": 90, "elapsed_us": 5000, "period_us": 5100,
    }  # fmt: skip
    return StepEvent(engine=engine, epoch=2, step_id=step_id, **{**fields, **more})


def shown(board: Board, now_ns: int) -> str:
    console = Console(width=120, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as capture:
        console.print(board.render(now_ns))
    return capture.get()


def test_no_service_and_no_engine_are_said_apart() -> None:
    board = Board()
    assert "no service" in shown(board, 0)
    board.hear_beat(Beat(ServiceKind.GATEWAY, "gateway-0"), 0)
    text = shown(board, 1)
    assert "no scheduler" in text and "1 gateway" in text


def test_engines_lanes_queue_blocks_and_steps() -> None:
    board = Board()
    board.hear_beat(beat(), 0)
    board.hear_beat(beat("engine-1"), 0)
    board.hear_step(step(41), 0)
    pool = KvPoolLoad("engine-0", 7, 2, 100, 60, 20, 19, need_snapshot=False)
    board.hear_beat(Beat(ServiceKind.KV_STORE, "kv-0", pools=[pool]), 0)
    text = shown(board, SECOND // 10)
    for part in ("engine-0", "engine-1", "generation 7 epoch 2", "cached 19", "41", "5.10"):
        assert part in text, text


def test_who_is_silent_is_gone() -> None:
    board = Board()
    board.hear_beat(beat(), 0)
    assert board.engines(FORGET_NS - 1)
    assert not board.engines(FORGET_NS + 1)


def test_records_have_dynamo_s_names() -> None:
    board = Board()
    board.hear_beat(beat(), 0)
    scheduled = ScheduledRequests(num_prefill_requests=1, sum_prefill_tokens=5)
    board.hear_step(step(41, scheduled=scheduled), 0)
    (record,) = board.as_dicts(1)
    metrics = record["last_step"]
    assert (metrics["worker_id"], metrics["counter_id"], metrics["wall_time"]) == (
        "engine-0", 41, 0.005,
    )  # fmt: skip
    assert metrics["scheduled_requests"]["sum_prefill_tokens"] == 5
    assert set(metrics["queued_requests"]) == {
        *("num_prefill_requests", "sum_prefill_tokens", "var_prefill_length"),
        *("num_decode_requests", "sum_decode_kv_tokens", "var_decode_kv_tokens"),
    }


def test_what_is_kept_is_bounded() -> None:
    board = Board()
    for number in range(KEPT_STEPS + 5):
        board.hear_step(step(number), 0)
    for number in range(MAX_NAMES + 5):
        board.hear_step(step(1, f"e{number}"), 0)
    engines = board.engines(1)
    assert len(engines) == MAX_NAMES and len(engines["engine-0"].steps) == KEPT_STEPS
    assert shown(board, 1).count("5.10") <= SHOWN_STEPS * MAX_NAMES * 2


def test_a_gauge_shows_any_part() -> None:
    assert gauge(0, 0).endswith("0/0") and "█" not in gauge(0, 9)
    assert gauge(1, 1000).count("█") == 1 and "░" not in gauge(9, 9)

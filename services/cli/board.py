"""What `streetcar top` knows and shows: the engines from their beats, the last steps from their
events.

Invariants: who has not been heard for FORGET_NS is not shown; engines and steps kept are bounded.

Shell: builds what the terminal shows; the time is given.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.contracts.beats import Beat, EngineLoad, KvPoolLoad, ServiceKind
from services.contracts.limits import BEAT_PERIOD_MS, MAX_NAMES
from services.contracts.step import StepEvent, forward_pass_metrics

FORGET_NS: Final = 8 * BEAT_PERIOD_MS * 1_000_000
KEPT_STEPS: Final = 4096
SHOWN_STEPS: Final = 10
WINDOW_NS: Final = 2_000_000_000
GAUGE_WIDTH: Final = 20


@dataclass(slots=True)
class Engine:
    """One scheduler as it was last heard. steps: (when, event), the newest last."""

    heard_ns: int
    load: EngineLoad | None = None
    generation: int = 0
    epoch: int = 0
    steps: deque[tuple[int, StepEvent]] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))

    def window(self, now_ns: int) -> list[StepEvent]:
        """The steps of the last two seconds."""
        return [event for at_ns, event in self.steps if now_ns - at_ns <= WINDOW_NS]


class Board:
    """Beats and steps in, a page or records out."""

    def __init__(self) -> None:
        self._engines: dict[str, Engine] = {}
        self._pools: dict[str, tuple[int, KvPoolLoad]] = {}
        self._services: dict[tuple[str, str], int] = {}

    # ---- in

    def hear_beat(self, beat: Beat, now_ns: int) -> None:
        key = (beat.kind.value, beat.service_id)
        if key in self._services or len(self._services) < MAX_NAMES:
            self._services[key] = now_ns
        if beat.kind is ServiceKind.SCHEDULER and beat.engine is not None:
            engine = self._engine(beat.service_id, now_ns)
            if engine is not None:
                engine.load, engine.heard_ns = beat.engine, now_ns
                engine.generation, engine.epoch = beat.generation, beat.epoch
        for pool in beat.pools:
            self._hear_pool(pool, now_ns)

    def _hear_pool(self, pool: KvPoolLoad, now_ns: int) -> None:
        """Of two ledgers that both say they have it, the later one does, while it is heard."""
        heard_ns, known = self._pools.get(pool.engine, (now_ns, pool))
        after = (known.generation, known.epoch, known.binding)
        outdated = (pool.generation, pool.epoch, pool.binding) < after
        if outdated and now_ns - heard_ns <= FORGET_NS:
            return
        if pool.engine in self._pools or len(self._pools) < MAX_NAMES:
            self._pools[pool.engine] = (now_ns, pool)

    def hear_step(self, event: StepEvent, now_ns: int) -> None:
        engine = self._engine(event.engine, now_ns)
        if engine is not None:
            engine.heard_ns = now_ns
            engine.steps.append((now_ns, event))

    def _engine(self, name: str, now_ns: int) -> Engine | None:
        if name not in self._engines:
            self._forget(now_ns)
            if len(self._engines) >= MAX_NAMES:
                return None
            self._engines[name] = Engine(now_ns)
        return self._engines[name]

    def _forget(self, now_ns: int) -> None:
        old_ns = now_ns - FORGET_NS
        self._engines = {n: e for n, e in self._engines.items() if e.heard_ns > old_ns}
        self._services = {n: at for n, at in self._services.items() if at > old_ns}
        self._pools = {n: entry for n, entry in self._pools.items() if entry[0] > old_ns}

    # ---- out

    def engines(self, now_ns: int) -> dict[str, Engine]:
        """Those that live, by name."""
        self._forget(now_ns)
        return dict(sorted(self._engines.items()))

    def nothing(self) -> str:
        """Why there is no engine to show."""
        kinds = Counter(kind for kind, _ in self._services)
        if not kinds:
            return "no service of Streetcar is heard on this bus"
        heard = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        return f"no scheduler is heard on this bus, only {heard}"

    def as_dicts(self, now_ns: int) -> list[dict[str, Any]]:
        """One record per engine, the last step as Dynamo's ForwardPassMetrics."""
        records = []
        for name, engine in self.engines(now_ns).items():
            window = engine.window(now_ns)
            last = engine.steps[-1][1] if engine.steps else None
            pool = self._pools.get(name)
            records.append(
                {
                    "engine": name,
                    "generation": engine.generation,
                    "epoch": engine.epoch,
                    "load": _fields(engine.load),
                    "pool": _fields(pool[1]) if pool else None,
                    "steps_per_s": round(len(window) * 1e9 / WINDOW_NS, 1),
                    "tokens_per_s": round(_sampled(window) * 1e9 / WINDOW_NS, 1),
                    "last_step": forward_pass_metrics(last) if last else None,
                }
            )
        return records

    def render(self, now_ns: int) -> RenderableType:
        engines = self.engines(now_ns)
        if not engines:
            return Text(self.nothing(), style="yellow")
        parts: list[RenderableType] = [self._services_line()]
        for name, engine in engines.items():
            parts.append(self._engine_lines(name, engine, now_ns))
            if engine.steps:
                parts.append(_steps_table([e for _, e in list(engine.steps)[-SHOWN_STEPS:]]))
        return Group(*parts)

    def _services_line(self) -> Text:
        kinds = Counter(kind for kind, _ in self._services)
        return Text("  ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())), "dim")

    def _engine_lines(self, name: str, engine: Engine, now_ns: int) -> Text:
        load, window = engine.load, engine.window(now_ns)
        text = Text("\n").append(name, "bold")
        if load is None:
            return text.append("  no heartbeat yet", style="yellow")
        text.append(f"  {load.model}  generation {engine.generation} epoch {engine.epoch}  ", "dim")
        text.append("ready\n" if load.ready else "no worker\n", "green" if load.ready else "red")
        rate = 1e9 / WINDOW_NS
        text.append(f"  running {load.num_running:>5}   waiting {load.num_waiting:>5}   ")
        text.append(f"preempted {load.num_preemptions}   steps/s {len(window) * rate:.0f}   ")
        text.append(f"tokens/s {_sampled(window) * rate:.0f}\n")
        text.append(f"  kv held {gauge(load.num_blocks_held, load.num_blocks_total)}")
        if name in self._pools:
            pool = self._pools[name][1]
            text.append(f"   cached {pool.num_cached}   free {pool.num_free}")
        if window:
            periods = sorted(event.period_us for event in window)
            text.append(
                f"\n  step ms p50 {periods[len(periods) // 2] / 1000:.2f}  max "
                f"{periods[-1] / 1000:.2f}   scheduler us "
                f"{sorted(event.scheduler_us for event in window)[len(window) // 2]}"
            )
        return text


def gauge(part: int, whole: int) -> str:
    """A bar and its numbers."""
    filled = min(GAUGE_WIDTH, -(-part * GAUGE_WIDTH // whole)) if whole else 0
    return f"{'█' * filled}{'░' * (GAUGE_WIDTH - filled)} {part}/{whole}"


def _steps_table(events: Sequence[StepEvent]) -> Table:
    table = Table(box=None, pad_edge=True, header_style="dim", padding=(0, 1))
    for name in ("step", "ms", "period", "seqs", "decode", "prefill", "waiting", "held", "bytes"):
        table.add_column(name, justify="right")
    for event in events:
        table.add_row(
            str(event.step_id),
            f"{event.elapsed_us / 1000:.2f}",
            f"{event.period_us / 1000:.2f}",
            str(event.num_seqs),
            str(event.num_decode_tokens),
            str(event.num_prefill_tokens),
            str(event.num_waiting),
            str(event.num_blocks_held),
            str(event.plan_bytes),
        )
    return table


def _sampled(events: Sequence[StepEvent]) -> int:
    return sum(event.num_decode_tokens for event in events)


def _fields(value: msgspec.Struct | None) -> dict[str, Any] | None:
    return None if value is None else msgspec.structs.asdict(value)

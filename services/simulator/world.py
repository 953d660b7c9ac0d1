"""One simulated history: requests come, the mesh serves them while the nemesis does harm, then all
is healed and everything must end, all from one seed.

    safety: requests and faults ─▶ heal ─▶ liveness: all end, probes pass ─▶ rest: back to idle

Checked after every event: the invariants of every core, and those of `checks.py`.

Shell of the simulation: no clock, no socket; one object per history.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeVar

from services.contracts.errors import StreetcarError
from services.contracts.public import Frame
from services.contracts.spans import TimedSpan
from services.contracts.step import StepEvent, StepPlan, StepResult

from .admission_node import AdmissionNode
from .bus import Bus
from .census import census, excess
from .check import Check, Violation
from .checks import AFTERMATH_NS, CHECKS
from .clients import Client
from .model import VOCAB_SIZE, Mark, Memory
from .nemesis import MAX_LAG_NS, Nemesis
from .network import Clock, Network, Weather
from .nodes import KvNode, Node, SchedulerNode, WorkerNode
from .options import ROLES, SECOND_NS, Options, draw
from .phases import Phase
from .process import Skew
from .workload import Workload

MAX_EVENTS = 1_000_000
SETTLE_NS: Final = SECOND_NS
# Longer than a tombstone stays in admission; where an acknowledgement may be lost, longer than the
# end of a sequence stays in the scheduler's log.
REST_NS: Final = 15 * SECOND_NS
LONG_REST_NS: Final = 75 * SECOND_NS
LIVENESS_NS: Final = 60 * SECOND_NS
MAX_SKEW_PPM: Final = 20_000

KINDS: Final[dict[str, type[Node]]] = {
    node.role: node for node in (AdmissionNode, SchedulerNode, KvNode, WorkerNode)
}
C = TypeVar("C", bound=Check)


class ShadowVocabulary:
    """Token 7 reads as "7 "."""

    token_bytes = tuple(f"{token_id} ".encode() for token_id in range(VOCAB_SIZE))

    def token_text(self, token_id: int) -> str:
        return f"{token_id} "


@dataclass(frozen=True, slots=True)
class Report:
    """What happened. faults: by name, those that really took place; reached: phases; errors: by
    code.
    """

    seed: int
    options: Options
    requests: int
    finished: Counter[str]
    errors: Counter[str]
    faults: Counter[str]
    reached: Counter[str]
    steps: int
    preemptions: int
    prefix_hits: int
    copies_out: int
    copies_in: int
    forgotten: int
    starts: Counter[str]
    virtual_ms: int
    healed_ms: int
    events: int
    checked: int
    messages: Counter[str]


class World:
    """Build with a seed, `run()` once. Raises AssertionError (Violation, or a core's own) where
    anything is wrong.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.options = draw(self.rng, seed)
        o = self.options
        self.clock = Clock()
        weather = Weather(o.mean_delay_ns, o.faults.drop, o.faults.duplicate, o.faults.kinds)
        self.network = Network(self.clock, self.rng, weather)
        self.bus = Bus(self.clock, self.network, self.rng)
        self.vocabulary = ShadowVocabulary()
        self.marks: dict[int, tuple[Mark, int]] = {}
        self.victims: set[int] = set()
        self.memory = Memory()
        self.clients: dict[str, Client] = {}
        self.nodes: list[Node] = []
        self.max_skew = MAX_SKEW_PPM / 1e6 if o.faults.skewed else 0.0
        self.checks = [kind(self) for kind in CHECKS]
        self.nemesis = Nemesis(self, o.faults)
        self._workload = Workload(self)
        self._by_number: dict[int, Client] = {}
        self._skews: dict[str, Skew] = {}
        self._current: dict[str, Node] = {}
        self.num_offers: Counter[str] = Counter()
        self._killed: list[tuple[int, str]] = []
        self._started_ns: dict[str, int] = {}
        self._starts: Counter[str] = Counter()
        self._generation = 0
        self._healed_ns = 0

    # ---- the history

    def run(self) -> Report:
        self.open()
        for role in ROLES:
            self.start(role, role, role)
        for number in range(1, self.options.num_admissions):
            self.start("admission", f"admission-{number}", f"admission-{number}")
        last_ns = self._workload.begin()
        self.safety(last_ns)
        self.heal()
        self.liveness()
        self.rest()
        return self.report()

    def open(self) -> None:
        """For those who watch: everything is built, nothing has begun."""

    def safety(self, last_ns: int) -> None:
        """Until the faults and the arrivals are through, or all is done where there are none."""
        faults = self.options.faults
        if faults.none:
            self._until(self._all_done, self._bound_ns(), "with no fault at all")
            return
        end_ns = last_ns + self.rng.choice([SECOND_NS, 5 * SECOND_NS])
        if faults.timed:
            end_ns += faults.hold_ns
            self.nemesis.begin(last_ns, end_ns)
        while self.clock.now_ns < end_ns and self._step():
            pass

    def heal(self) -> None:
        self._healed_ns = self.clock.now_ns
        self.nemesis.heal()

    def liveness(self) -> None:
        """Everything ends within a bound, and new requests are served as if nothing had been."""
        self._until(self._all_done, self._bound_ns(), "after the faults")
        self._until(self._in_order, AFTERMATH_NS + SETTLE_NS + self._late_ns(), "no engine")
        self._workload.probe()
        self._until(self._all_done, self._bound_ns(), "a probe")

    def rest(self) -> None:
        """Let acknowledgements, aborts, deltas and logs run out."""
        end_ns = self.clock.now_ns + (REST_NS if self.options.faults.none else LONG_REST_NS)
        while self.clock.now_ns < end_ns:
            until_ns = self.clock.now_ns + SETTLE_NS
            while self.clock.now_ns < until_ns:
                self._step()
            if self._is_idle():
                break
        for check in self.checks:
            check.at_rest()

    def _bound_ns(self) -> int:
        """Long enough for everything one after the other, and for what is still on its way."""
        o = self.options
        tokens = (o.num_requests + o.num_probes) * (o.max_prompt + o.max_output)
        work_ns = 4 * tokens * (o.step_base_ns + 2 * o.mean_delay_ns)
        return LIVENESS_NS + self._late_ns() + work_ns

    def _late_ns(self) -> int:
        """How long after the faults a message may still be on its way."""
        return 2 * MAX_LAG_NS if "lag" in self.options.faults.timed else 0

    def _until(self, done: Callable[[], bool], bound_ns: int, what: str) -> None:
        end_ns = self.clock.now_ns + bound_ns
        while not done():
            if self.clock.now_ns > end_ns or not self._step():
                stuck = [name for name, client in self.clients.items() if not client.done]
                raise Violation(f"I12 progress: {what}: {stuck} after {bound_ns // SECOND_NS} s")

    def _step(self) -> bool:
        if self.clock.num_events > MAX_EVENTS:
            raise Violation(f"I12 progress: {MAX_EVENTS} events and no end")
        return self.clock.step()

    def _all_done(self) -> bool:
        return all(client.done for client in self.clients.values())

    def _in_order(self) -> bool:
        """No effect of a fault is on its way any more, and admission knows an engine."""
        calm_ns = self._healed_ns + AFTERMATH_NS + self._late_ns()
        calm = self.options.faults.none or self.clock.now_ns > calm_ns
        admissions = [n for n in self.running() if isinstance(n, AdmissionNode)]
        return calm and all(n.core.engines.choose("shadow", n.now_ns) for n in admissions)

    def _is_idle(self) -> bool:
        return not any(
            excess(node.role, census(node.state), self.options) for node in self.running()
        )

    # ---- services

    def start(self, role: str, slot: str, host: str) -> Node:
        self._starts[role] += 1
        name = f"{role}-{self._starts[role]}"
        skew = self._skews.setdefault(host, self._draw_skew())
        node = KINDS[role](self, name, host, skew)
        node.slot = slot
        self.nodes.append(node)
        self._current[slot] = node
        self._started_ns[role] = self.clock.now_ns
        node.begin()
        return node

    def _draw_skew(self) -> Skew:
        if not self.options.faults.skewed:
            return Skew()
        self.nemesis.happened["skewed clock"] += 1
        offset_ns = self.rng.randrange(30 * 24 * 3600 * SECOND_NS)
        return Skew(offset_ns, self.rng.randrange(-MAX_SKEW_PPM, MAX_SKEW_PPM))

    def kill(self, *roles: str) -> None:
        """The present run of each role dies, and is started again after a while."""
        for role in roles:
            node = self.current(role)
            if node is not None:
                self._killed.append((self.clock.now_ns, role))
                self._end(node)

    def _end(self, node: Node) -> None:
        node.die()
        self.bus.leave(node)
        if self._current[node.slot] is node:
            self.clock.after(self.options.faults.restart_ns, lambda: self._restart(node))

    def _restart(self, dead: Node) -> None:
        if self._current[dead.slot] is dead:
            self.start(dead.role, dead.slot, dead.host)

    def replace(self, node: Node) -> None:
        """Another run on another host takes its place; it lives on, if it does."""
        self.start(node.role, node.slot, f"{node.host}'")

    def stepped_down(self, node: Node) -> None:
        """It has found that another has taken over."""
        self.nemesis.happened["stepped down"] += 1
        self.nemesis.happened[f"stepped down {node.role}"] += 1
        self._end(node)

    def died_of_poison(self, node: Node) -> None:
        self.nemesis.note("poisoned", self.options.faults.restart_ns)
        self._end(node)

    def revive(self) -> None:
        for node in list(self._current.values()):
            if not node.alive:
                self._restart(node)
        for node in self.nodes:
            node.wake()

    def current(self, role: str) -> Node | None:
        """The run that has the place, if it lives; one of them where there are several."""
        living = [n for n in self._current.values() if n.role == role and n.alive]
        return self.rng.choice(living) if len(living) > 1 else next(iter(living), None)

    def running(self) -> list[Node]:
        return [node for node in self.nodes if node.alive]

    def hosts(self) -> list[str]:
        """Those that links may be cut between: of services, and of some clients."""
        hosts = dict.fromkeys(node.host for node in self.running())
        return [*hosts, *[c.host for c in list(self.clients.values())[:3]]]

    def next_generation(self) -> int:
        self._generation += 1
        return self._generation

    @property
    def scheduler(self) -> Any:
        return self._current["scheduler"]

    @property
    def kv(self) -> Any:
        """The ledger that the scheduler is bound to; None where it is gone, or there is none."""
        bound = self.scheduler.core.batch.lease.ledger
        return next((node for node in self.running() if node.name == bound), None)

    @property
    def worker(self) -> Any:
        return self._current["worker"]

    @property
    def admission(self) -> Any:
        return self._current["admission"]

    # ---- what they tell

    def reached(self, phase: Phase) -> None:
        self.nemesis.reach(phase)

    def planned(self, node: Node, plan: StepPlan) -> None:
        for check in self.checks:
            check.planned(node, plan)

    def executes(self, node: Node, plan: StepPlan) -> None:
        for check in self.checks:
            check.executes(node, plan)

    def answered(self, node: Node, result: StepResult) -> None:
        for check in self.checks:
            check.answered(node, result)

    def settled(self, node: Node) -> None:
        for check in self._that_settle:
            check.settled(node)

    @cached_property
    def _that_settle(self) -> list[Check]:
        """Of `checks`, those that look at a node after each of its events: most have nothing to
        look at then.
        """
        return [check for check in self.checks if type(check).settled is not Check.settled]

    def step_event(self, node: Node, event: StepEvent) -> None:
        for check in self.checks:
            check.step_event(node, event)

    def span(self, node: Node, span: TimedSpan) -> None:
        for check in self.checks:
            check.span(node, span)

    def cancelled(self, request_id: str) -> None:
        for check in self.checks:
            check.cancelled(request_id)

    def hears(self, client: Client, frame: Frame) -> None:
        for check in self.checks:
            check.hears(client, frame)

    def ends(self, client: Client) -> None:
        for check in self.checks:
            check.ends(client)

    # ---- what checks ask

    def add(self, client: Client) -> None:
        self.clients[client.request_id] = client
        self._by_number[client.number] = client

    def client_of(self, number: int) -> Client | None:
        return self._by_number.get(number)

    def check(self, kind: type[C]) -> C:
        return next(check for check in self.checks if isinstance(check, kind))

    def troubled(self, from_ns: int, to_ns: int) -> bool:
        """Something was wrong between these times."""
        faults = self.options.faults
        lossy = (faults.drop or faults.duplicate) and from_ns <= self._healed_until()
        return bool(lossy) or any(
            start <= to_ns and end >= from_ns for start, end in self.nemesis.trouble
        )

    def num_killed(self, role: str, since_ns: int) -> int:
        """How often the nemesis has killed it."""
        return sum(who == role and at_ns >= since_ns for at_ns, who in self._killed)

    def since_start(self, role: str, at_ns: int) -> int:
        """How long before `at_ns` the last run of the role began."""
        return at_ns - self._started_ns[role]

    def _healed_until(self) -> int:
        return self._healed_ns or self.clock.now_ns

    def report(self) -> Report:
        endings = [client.ending for client in self.clients.values() if client.ending]
        schedulers = [n.core for n in self.nodes if isinstance(n, SchedulerNode)]
        ledgers = [
            ledger
            for node in self.nodes
            if isinstance(node, KvNode)
            for ledger in node.core.ledgers.values()
        ]
        return Report(
            seed=self.seed,
            options=self.options,
            requests=len(self.clients),
            finished=Counter(str(frame.finish_reason) for frame in endings),
            errors=Counter(str(frame.error.code) for frame in endings if frame.error),
            faults=self.nemesis.happened
            + self.network.faults
            + Counter({"step did not fit": self.memory.num_unfit}),
            reached=Counter({str(phase): n for phase, n in self.nemesis.reached.items()}),
            steps=sum(core.totals.num_steps for core in schedulers),
            preemptions=sum(
                core.totals.num_preemptions + core.batch.num_preempted for core in schedulers
            ),
            prefix_hits=sum(core.totals.num_prefix_hits for core in schedulers),
            copies_out=sum(ledger.pool.totals.copies_out for ledger in ledgers),
            copies_in=sum(ledger.pool.totals.copies_in for ledger in ledgers),
            forgotten=sum(ledger.pool.totals.forgotten for ledger in ledgers),
            starts=self._starts,
            virtual_ms=self.clock.now_ns // 1_000_000,
            healed_ms=self._healed_ns // 1_000_000,
            events=self.clock.num_events,
            checked=sum(check.num_checked for check in self.checks),
            messages=self.network.counts,
        )


FAILURES: Final = (AssertionError, StreetcarError)
"""What a broken history ends with."""

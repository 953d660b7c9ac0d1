"""Does harm: kills, stops, cuts, delays and repeats, at random moments and at chosen phases, and
counts what it has really done.

Invariants: everything it does is drawn from the seed; after `heal` nothing is wrong any more; a
fault is counted when it has happened, not when it was planned.

Pure: randomness and time come from the caller.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from scheduler_svc.step_memory import SMALL_STEP_TOKENS

from .bus import Asking, Envelope
from .network import Action, Cut, Parcel
from .options import MEMORY_FAULTS, ROLES, SECOND_NS, FaultOptions, Strike
from .phases import Phase

# Of each kind: beats would crowd out all the others.
MAX_PAST: Final = 32
CRASHES_IN_A_LOOP: Final = 5
HUNG_AFTER_NS: Final = 4 * SECOND_NS
REPLACED_AFTER_NS: Final = SECOND_NS
REPLACED: Final = ("scheduler", "admission", "kv_store")
STALE_MESSAGES: Final = 8
MAX_LAG_NS: Final = 60 * SECOND_NS
LOOK_AGAIN_NS: Final = 20_000_000
MEMORY_TOKENS: Final = (0, 0, 1, 2, 5)
SHORT_OF_MEMORY_NS: Final = 2 * SECOND_NS
ASKED_KINDS: Final = frozenset({"submit", "abort", "attach", "poll", "lookup", "lease"})
REPLAYED_KINDS: Final = ASKED_KINDS | {"updates", "plan", "result", "delta", "snapshot", "beat"}


# Phases that no message shows.
SILENT: Final = (Phase.PREEMPTED, Phase.STEP_RUNS)


def _name(strike: Strike) -> str:
    return f"{strike.action} {'+'.join(strike.roles)} at {strike.phase.value}"


class Ghost:
    """Whoever sent a message that comes long after its sender's end."""

    alive = True

    def __init__(self, name: str) -> None:
        self.name = self.host = name

    def run(self, action: Action, *, timer: bool = False) -> None:
        """Nobody is there to hear an answer."""


class Nemesis:
    """happened: how often each fault took place; reached: each phase. trouble: times (from, to) in
    which something was wrong; starved: when memory became short, and for how many tokens there was.
    """

    def __init__(self, world: Any, faults: FaultOptions) -> None:
        self.world = world
        self.faults = faults
        self.rng = world.rng
        self.clock = world.clock
        self.network = world.network
        self.happened: Counter[str] = Counter()
        self.reached: Counter[Phase] = Counter()
        self.trouble: list[tuple[int, int]] = []
        self.starved: list[tuple[int, int]] = []
        self.over = False
        self._strikes: dict[Phase, list[Strike]] = {}
        for strike in faults.strikes:
            self._strikes.setdefault(strike.phase, []).append(strike)
        self._past: dict[str, deque[Parcel]] = {}
        self._num_ghosts = 0
        self.network.watch = self.watch

    def begin(self, last_ns: int, until_ns: int) -> None:
        """Draw the moments of the timed faults, from now to `until_ns`; of those that need requests
        to hit, to the last one's arrival at `last_ns`.
        """
        for name in self.faults.timed:
            latest_ns = last_ns if name in MEMORY_FAULTS else until_ns
            at_ns = self.rng.randrange(self.clock.now_ns, latest_ns)
            self.clock.at(at_ns, partial(self._strike_now, name))

    def heal(self) -> None:
        """The faults are over: links carry, the stopped wake, the dead are started."""
        self.over = True
        self.world.bus.outage = False
        self.world.memory.tokens = None
        self.network.calm()
        self.world.revive()

    def _strike_now(self, name: str) -> None:
        if not self.over:
            TIMED[name](self)

    def _later(self, delay_ns: int, action: Action) -> None:
        """Unless all is healed by then."""
        self.clock.after(delay_ns, lambda: None if self.over else action())

    def note(self, what: str, duration_ns: int = 0) -> None:
        self.happened[what] += 1
        now_ns = self.clock.now_ns
        self.trouble.append((now_ns, now_ns + duration_ns))

    # ---- at a phase

    def watch(self, parcel: Parcel) -> bool:
        """A message is about to leave -> True where it is lost."""
        if parcel.subject and parcel.kind in REPLAYED_KINDS:
            self._past.setdefault(parcel.kind, deque(maxlen=MAX_PAST)).append(parcel)
        lost = False
        for phase in parcel.phases:
            lost = self.reach(phase, parcel) or lost
        return lost

    def reach(self, phase: Phase, parcel: Parcel | None = None) -> bool:
        self.reached[phase] += 1
        due = self._strikes.get(phase)
        if not due or self.over:
            return False
        lost = False
        for strike in list(due):
            if strike.nth <= self.reached[phase]:
                # What it does may reach the phase again.
                due.remove(strike)
                before = self.happened.total()
                lost = self._strike(strike, parcel) or lost
                if self.happened.total() > before:
                    self.happened[_name(strike)] += 1
                else:
                    # There was nothing to hit: it waits for the next time.
                    due.append(strike)
        return lost

    def _strike(self, strike: Strike, parcel: Parcel | None) -> bool:
        lost = False
        match strike.action:
            case "crash":
                if all(self.world.current(role) for role in strike.roles):
                    self.world.kill(*strike.roles)
                    self.note("struck " + "+".join(strike.roles), self.faults.restart_ns)
            case "pause":
                self._pause(strike.roles[0], self._duration())
            case "lose":
                lost = parcel is not None
                if lost or strike.phase in SILENT:
                    self.note("struck message" if lost else "struck nothing")
            case "cancel":
                self._cancel_one()
        return lost

    def _cancel_one(self) -> None:
        running = [c for c in self.world.clients.values() if c.started and not c.done]
        if running:
            self.rng.choice(running).cancel()
            self.note("struck request")

    # ---- services

    def crash(self) -> None:
        self._crash(self.rng.choice(ROLES))

    def crash_pair(self) -> None:
        self._crash(*self.rng.sample(ROLES, 2))

    def _crash(self, *roles: str) -> None:
        self.world.kill(*roles)
        self.note("crash " + "+".join(roles), self.faults.restart_ns)
        if len(roles) > 1:
            self.happened["crash pair"] += 1

    def crash_loop(self) -> None:
        """It dies again shortly after each of its starts."""
        role = self.rng.choice(ROLES)

        def again(left: int) -> None:
            self._crash(role)
            if left:
                alive_ns = self.rng.randrange(300_000_000)
                self._later(self.faults.restart_ns + alive_ns, lambda: again(left - 1))
            else:
                self.happened["crash loop"] += 1

        again(CRASHES_IN_A_LOOP - 1)

    def pause(self) -> None:
        self._pause(self.rng.choice(ROLES), self._duration())

    def _pause(self, role: str, duration_ns: int) -> None:
        node = self.world.current(role)
        if node is not None and not node.paused:
            node.pause()
            self.note(f"pause {role}", duration_ns)
            self._later(duration_ns, node.wake)

    def pause_and_replace(self) -> None:
        """Another takes the place of a stopped one, which then comes back and knows nothing of
        it.
        """
        role = self.rng.choice(REPLACED)
        node = self.world.current(role)
        if node is None or node.paused:
            return
        node.pause()
        duration_ns = self._duration()
        self.note(f"pause {role}", duration_ns)

        def replace() -> None:
            if node.alive:
                self.world.replace(node)
                self.note(f"replace {role}", 0)

        def wake() -> None:
            if node.alive:
                self.note(f"zombie {role}", SECOND_NS)
            node.wake()

        self._later(REPLACED_AFTER_NS, replace)
        self._later(REPLACED_AFTER_NS + duration_ns, wake)

    def hang_until_killed(self) -> None:
        """Its supervisor notices after a while that it does nothing."""
        role = self.rng.choice(ROLES)
        node = self.world.current(role)
        if node is None or node.paused:
            return
        node.pause()
        self.note(f"hang {role}", HUNG_AFTER_NS + self.faults.restart_ns)

        def kill() -> None:
            if node.alive and node.paused and self.world.current(role) is node:
                self._crash(role)

        self._later(HUNG_AFTER_NS, kill)

    # ---- the worker's memory

    def spoil_block(self) -> None:
        """The content of a block that may be hit again is not finite any more."""
        worker, kv = self.world.current("worker"), self.world.current("kv_store")
        known: list[int] = []
        for ledger in kv.core.ledgers.values() if worker and kv else ():
            if ledger.generation == worker.executor.generation:
                pool = ledger.pool
                known = sorted({e.block_id for e in pool._content.values() if e.block_id})
        if known:
            worker.model.spoil(self.rng.choice(known))
            self.note("block spoilt")
        else:
            self._later(LOOK_AGAIN_NS, self.spoil_block)

    def short_of_memory(self) -> None:
        """Steps of more tokens than so many do not fit, for a while; it begins while some run."""
        scheduler = self.world.current("scheduler")
        if scheduler is None or not scheduler.core.batch.lanes.num_active:
            self._later(LOOK_AGAIN_NS, self.short_of_memory)
            return
        tokens = self.rng.choice(MEMORY_TOKENS)
        duration_ns = self.rng.randrange(1, SHORT_OF_MEMORY_NS)
        self.world.memory.tokens = tokens
        self.note("short of memory", duration_ns)
        now_ns = self.clock.now_ns
        self.starved.append((now_ns, tokens))

        def enough() -> None:
            self.world.memory.tokens = None

        self._later(duration_ns, enough)

    def starved_since(self, at_ns: int) -> bool:
        """From `at_ns` on, or shortly before, there was not even memory for a small step."""
        return any(
            started_ns + SHORT_OF_MEMORY_NS >= at_ns and tokens < SMALL_STEP_TOKENS
            for started_ns, tokens in self.starved
        )

    # ---- links

    def cut(self) -> None:
        one, other = self._two_hosts()
        self._cut("cut", [(one, other), (other, one)])

    def cut_one_way(self) -> None:
        self._cut("cut one way", [self._two_hosts()])

    def isolate(self) -> None:
        """One host hears nobody, and nobody hears it."""
        hosts = self.world.hosts()
        lonely = self.rng.choice([node.host for node in self.world.running()] or hosts)
        others = [host for host in hosts if host != lonely]
        self._cut("isolate", [link for o in others for link in ((lonely, o), (o, lonely))])

    def _cut(self, name: str, links: list[tuple[str, str]]) -> None:
        duration_ns = self._duration()
        how = self.rng.choice(list(Cut))
        self.network.cut(links, how)
        self.note(f"{name}, {how}", duration_ns)
        self._later(duration_ns, lambda: self.network.restore(links))

    def swizzle(self) -> None:
        """Stop the links one by one, and restore them in another order."""
        hosts = self.world.hosts()
        chosen = self.rng.sample(hosts, self.rng.randint(2, len(hosts)))
        links = [(a, b) for a in chosen for b in chosen if a != b]
        how = self.rng.choice(list(Cut))
        duration_ns = self._duration()
        self.note(f"swizzle, {how}", 2 * duration_ns)
        for begin_ns, action in ((0, True), (duration_ns, False)):
            for link in self.rng.sample(links, len(links)):
                at_ns = begin_ns + self.rng.randrange(duration_ns)
                if action:
                    self._later(at_ns, partial(self.network.cut, [link], how))
                else:
                    self._later(at_ns, partial(self.network.restore, [link]))

    def lag(self) -> None:
        """Everything from and to one host is late; in order, as a connection keeps it."""
        host = self.rng.choice(self.world.hosts())
        lag_ns = self.rng.choice([50_000_000, 500_000_000, 5 * SECOND_NS, MAX_LAG_NS])
        lag_ns = self.rng.randrange(lag_ns)
        self.network.weather.lag_ns[host] = lag_ns
        duration_ns = self._duration()
        self.note("lag", duration_ns + 2 * lag_ns)
        self._later(duration_ns, lambda: self.network.weather.lag_ns.pop(host, None))

    def server_restart(self) -> None:
        """The bus is away; what was on its way is lost."""
        self.network.wipe()
        self.world.bus.outage = True
        away_ns = self.rng.choice([100_000_000, 2 * SECOND_NS, 30 * SECOND_NS])
        self.note("server restart", away_ns)

        def back() -> None:
            self.world.bus.outage = False

        self._later(away_ns, back)

    def stale(self) -> None:
        """Messages of a run that is over come late."""
        past = [parcel for parcels in self._past.values() for parcel in parcels]
        if all(parcel.sender.alive for parcel in past):
            self._crash(self.rng.choice(ROLES))
        dead: dict[str, list[Parcel]] = {}
        for parcel in past:
            if not parcel.sender.alive:
                dead.setdefault(parcel.kind, []).append(parcel)
        # Of each kind alike: most of what is sent are beats.
        for _ in range(STALE_MESSAGES if dead else 0):
            parcel = self.rng.choice(dead[self.rng.choice(list(dead))])
            at_ns = self.rng.randrange(MAX_LAG_NS if self.rng.random() < 0.2 else SECOND_NS)
            self.trouble.append((self.clock.now_ns, self.clock.now_ns + at_ns))
            self._later(at_ns, partial(self._replay, parcel))

    def _replay(self, parcel: Parcel) -> None:
        self._num_ghosts += 1
        ghost = Ghost(f"ghost-{self._num_ghosts}")
        envelope = Envelope(parcel.kind, parcel.payload)
        self.note(f"stale {parcel.kind}", SECOND_NS)
        if parcel.kind in ASKED_KINDS:
            asking = Asking(SECOND_NS, lambda b: None, lambda: None)
            self.world.bus.request(ghost, parcel.subject, envelope, asking)
        else:
            self.world.bus.publish(ghost, parcel.subject, envelope)

    # ---- draws

    def _duration(self) -> int:
        duration_ns: int = self.rng.randrange(1, self.faults.hold_ns + 1)
        return duration_ns

    def _two_hosts(self) -> tuple[str, str]:
        one, other = self.rng.sample(self.world.hosts(), 2)
        return one, other


TIMED: Final[dict[str, Callable[[Nemesis], None]]] = {
    "crash": Nemesis.crash,
    "crash pair": Nemesis.crash_pair,
    "crash loop": Nemesis.crash_loop,
    "pause": Nemesis.pause,
    "pause and replace": Nemesis.pause_and_replace,
    "hang until killed": Nemesis.hang_until_killed,
    "cut": Nemesis.cut,
    "cut one way": Nemesis.cut_one_way,
    "isolate": Nemesis.isolate,
    "swizzle": Nemesis.swizzle,
    "lag": Nemesis.lag,
    "server restart": Nemesis.server_restart,
    "stale": Nemesis.stale,
    "spoil block": Nemesis.spoil_block,
    "short of memory": Nemesis.short_of_memory,
}

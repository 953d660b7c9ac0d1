"""One simulated history: requests come, the mesh serves them, everything is checked, all from one
seed.

Checked: the invariants of every core after every event; that every client gets the one right
stream, gap-free, with one terminal frame; that at the end every block is accounted for, in both
books.

Shell of the simulation: no clock, no socket; one object per history.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import msgspec
import numpy as np

from gpu_worker.shadow import expected_token_ids
from services.admission import core as adm
from services.admission.open_request import Ticket
from services.contracts import codec
from services.contracts.limits import BEAT_PERIOD_MS
from services.contracts.public import Encoding, Frame, encode_frame
from services.contracts.sampling import SamplingParams
from services.contracts.step import StepPlan
from services.contracts.vectors import unpack

from .clients import Client, SimulationError
from .network import Clock, Network, NetworkOptions
from .nodes import (
    MODEL,
    VOCAB_SIZE,
    AdmissionNode,
    KvNode,
    Link,
    SchedulerNode,
    WorkerNode,
    beat_decoder,
)
from .options import Options, draw

MAX_EVENTS = 400_000
MAX_LIVES = 4
DOWN_TIMES_NS = (10_000_000, 300_000_000, 2_000_000_000)
QUIET_NS = 6_000_000_000
NUM_ADMISSIONS = 2
MARKERS = 8


_frame = msgspec.msgpack.Decoder(Frame)


class ShadowVocabulary:
    """Token 7 reads as "7 ". Some ids more than the model can give: prompts may be marked with
    them.
    """

    token_bytes = tuple(f"{token_id} ".encode() for token_id in range(VOCAB_SIZE + MARKERS))

    def token_text(self, token_id: int) -> str:
        return f"{token_id} "


@dataclass(frozen=True, slots=True)
class Report:
    seed: int
    options: Options
    requests: int
    finished: Counter[str]
    steps: int
    preemptions: int
    prefix_hits: int
    scheduler_restarts: int
    copies_out: int
    copies_in: int
    virtual_ms: int
    events: int
    messages: Counter[str]


class World:
    """Build with a seed, `run()` once. Raises AssertionError (SimulationError, or a core's own)
    where anything is wrong.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.options = self._draw()
        o = self.options
        self.clock = Clock()
        network = NetworkOptions(o.mean_delay_ns, o.drop, o.duplicate)
        self.network = Network(self.clock, self.rng, network)
        self.link = Link(self.clock, self.network)
        self.kv = KvNode(self, o)
        self.worker = WorkerNode(self, o)
        self.scheduler = SchedulerNode(self, o)
        self.admissions = [
            AdmissionNode(self, number, ShadowVocabulary()) for number in range(NUM_ADMISSIONS)
        ]
        self.clients: dict[str, Client] = {}
        self._restarts = 0
        self._prompts: list[list[int]] = []

    def run(self) -> Report:
        self.scheduler.start()
        self._beat()
        self._arrivals()
        events = 0
        while not self._all_done():
            if events >= MAX_EVENTS or not self.clock.step():
                stuck = [name for name, client in self.clients.items() if not client.done]
                raise SimulationError(f"no progress: {stuck} after {events} events")
            events += 1
        self._quiesce()
        self._check_books()
        core = self.scheduler.core
        reasons = Counter(str(client.frames[-1].finish_reason) for client in self.clients.values())
        return Report(
            seed=self.seed,
            options=self.options,
            requests=len(self.clients),
            finished=reasons,
            steps=core.totals.num_steps,
            preemptions=core.beat().engine.num_preemptions,
            prefix_hits=core.totals.num_prefix_hits,
            scheduler_restarts=self.scheduler.incarnation - 1,
            copies_out=sum(
                ledger.pool.totals.copies_out for ledger in self.kv.core.ledgers.values()
            ),
            copies_in=sum(ledger.pool.totals.copies_in for ledger in self.kv.core.ledgers.values()),
            virtual_ms=self.clock.now_ns // 1_000_000,
            events=events,
            messages=self.network.counts,
        )

    # ---- what the nodes call

    def send_frame(self, node: AdmissionNode, effect: adm.SendFrame) -> None:
        """To the client, where it still listens; the server tells who asked to know."""
        client = self.clients[effect.frame.request_id]

        def deliver(payload: bytes) -> None:
            if not client.done:
                client.hear(_frame.decode(payload), self)
            elif effect.frame.finish_reason is None:
                node.hear(adm.Unheard(effect.frame.request_id))

        payload = encode_frame(effect.frame, Encoding.MSGPACK)
        self.network.send(node.name, client.name, "frame", payload, deliver)

    def any_admission(self) -> AdmissionNode | None:
        """The one that the queue group gives a message; None where none listens.

        As the service does, it listens once it has heard of an engine.
        """
        living = [node for node in self.admissions if node.alive and node.core.engines.engines]
        return self.rng.choice(living) if living else None

    def admission_of(self, admission_id: str) -> AdmissionNode | None:
        """Where that run of an admission is, if it lives."""
        for node in self.admissions:
            if node.alive and node.core.admission_id == admission_id:
                return node
        return None

    def saw_plan(self, plan: StepPlan) -> None:
        if len(plan.join) > self.options.max_num_seqs:
            raise SimulationError("a plan joins more lanes than there are")

    def tokens_of(self, plan: StepPlan) -> int:
        return int(unpack(plan.chunk_tokens).sum()) + 1

    def step_done(self) -> None:
        # A third one in the same few tokens of a request would be its fault.
        if self._restarts < 2 and self.rng.random() < self.options.reattach:
            self._restarts += 1
            self.worker.restart()
        if self.scheduler.incarnation < 4 and self.rng.random() < self.options.scheduler_restart:
            self.scheduler.restart()
        if self.rng.random() < self.options.admission_death:
            node = self.rng.choice(self.admissions)
            if node.alive and node.incarnation < MAX_LIVES:
                node.die(self.rng.choice(DOWN_TIMES_NS))

    # ---- the workload

    def _draw(self) -> Options:
        return draw(self.rng)

    def _arrivals(self) -> None:
        o, rng = self.options, self.rng
        shared = [rng.randrange(VOCAB_SIZE) for _ in range(o.shared_prefix)]
        # Admission hears of the engine by its beat: the first request comes after it.
        at = self.clock.now_ns + 1_000_000_000
        for index in range(o.num_requests):
            at += int(rng.expovariate(1.0 / o.mean_arrival_ns))
            client = self._draw_client(f"r{index}", shared)
            self.clients[client.ticket.request_id] = client
            self.clock.at(at, lambda c=client: c.start(self))  # type: ignore[misc]
            if rng.random() < o.cancel:
                client.may_end_early = True
                delay = int(rng.expovariate(1.0 / (20 * o.step_base_ns)))
                self.clock.at(at + delay, lambda c=client: c.cancel(self))  # type: ignore[misc]

    def _draw_client(self, request_id: str, shared: list[int]) -> Client:
        o, rng = self.options, self.rng
        prompt = self._draw_prompt(shared)
        max_tokens = rng.randint(1, o.max_output)
        expected = expected_token_ids(np.array(prompt, dtype=np.int32), max_tokens, VOCAB_SIZE)
        stop_ids: list[int] = []
        stopped = False
        if rng.random() < o.stop:
            stop_ids = [expected[rng.randrange(len(expected))]]
            expected = expected[: expected.index(stop_ids[0])]
            stopped = True
        has_deadline = rng.random() < o.deadline
        ticket = Ticket(
            request_id=request_id,
            model=MODEL,
            reply=f"inbox.{request_id}",
            encoding=Encoding.JSON,
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            sampling=SamplingParams(),
            stop_token_ids=stop_ids,
            stop_strings=[],
            include_stop=False,
            stream=rng.random() < 0.8,
            salt=bytes([rng.randrange(o.num_salts)]),
            priority=rng.choice([0, 0, 0, 1, -1]),
            deadline_ms=rng.choice([1, 20, 200]) if has_deadline else 0,
            retry=False,
        )
        return Client(ticket, expected, stopped, may_end_early=has_deadline)

    def _draw_prompt(self, shared: list[int]) -> list[int]:
        """A new one, or one that was asked before: it may have been evicted meanwhile."""
        o, rng = self.options, self.rng
        if o.num_prompts and len(self._prompts) >= o.num_prompts:
            return rng.choice(self._prompts)
        length = rng.randint(o.max_prompt // 2 if o.num_prompts else 1, o.max_prompt)
        prompt = shared[: min(length, o.shared_prefix)]
        prompt = prompt + [rng.randrange(VOCAB_SIZE) for _ in range(length - len(prompt))]
        self._prompts.append(prompt)
        return prompt

    # ---- time

    def _beat(self) -> None:
        def post(node: SchedulerNode | KvNode, payload: bytes) -> None:
            node.post(beat_decoder.decode(payload))

        scheduler_beat = codec.encode(self.scheduler.core.beat())
        self.scheduler.send(self.kv, "beat", scheduler_beat, lambda b: post(self.kv, b))
        for node in self.admissions:
            self.scheduler.send(node, "beat", scheduler_beat, node.take_beat)
            if node.alive:
                own = codec.encode(node.core.beat())
                node.send(self.scheduler, "beat", own, lambda b: post(self.scheduler, b))
                node.hear(adm.BeatSent())
        for sender, beat in ((self.worker, self.worker.beat()), (self.kv, self.kv.core.beat())):
            payload = codec.encode(beat)
            sender.send(self.scheduler, "beat", payload, lambda b: post(self.scheduler, b))
        self.clock.at(self.clock.now_ns + BEAT_PERIOD_MS * 1_000_000, self._beat)

    def _all_done(self) -> bool:
        return all(client.done for client in self.clients.values())

    def _quiesce(self) -> None:
        """Let acknowledgements, aborts and deltas arrive, with a network that loses nothing any
        more.
        """
        self.network.heal()
        end = self.clock.now_ns + QUIET_NS
        while self.clock.now_ns < end:
            self.clock.step()

    def _check_books(self) -> None:
        core, ledgers = self.scheduler.core, self.kv.core.ledgers
        if any(core.roster.live()) or len(core.waiting) or core.batch.lanes.num_active:
            raise SimulationError("a sequence lives on after its request has ended")
        if core.batch.lease.holds:
            raise SimulationError(f"blocks are held by nobody: {dict(core.batch.lease.holds)}")
        for ledger in ledgers.values():
            pool = ledger.pool
            spare = set(core.batch.lease.spare)
            for block_id in range(1, pool.num_blocks):
                here = core.batch.lease.holds[block_id] + (block_id in spare)
                if pool.holds(block_id) != here:
                    there = pool.holds(block_id)
                    text = f"block {block_id}: {there} holds in the ledger, {here} in the scheduler"
                    raise SimulationError(text)

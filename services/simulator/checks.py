"""What must hold in every history, checked by code that shares no logic with the engine: one class
for each invariant, by the numbers of the list that the project keeps.

    I1 ends once · I2 nothing uninvited · I3 stream · I4 answer · I5 blocks · I6 one view
    I7 epochs · I8 tenants · I9 usage · I10 cancel · I11, I13 idle · I12 progress · I15 errors
    I16 steps here, spans in `trace_checks.py` · I17 forgotten

They see what goes over the wire, what the worker is about to run, and the containers of the cores.

Pure.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from services.contracts.errors import ERRORS, ErrorCode
from services.contracts.limits import ENGINE_ABSENCE_SECONDS
from services.contracts.public import FinishReason, Frame
from services.contracts.spans import TimedSpan
from services.contracts.step import StepEvent, StepPlan, StepResult
from services.contracts.vectors import unpack

from .census import census, excess
from .clients import Client
from .model import Mark

SECOND_NS: Final = 1_000_000_000
# How long after a fault its effects may still be felt: suspicion, restarts, the longest time-out.
AFTERMATH_NS: Final = 20 * SECOND_NS
GRACE_MS: Final = 2
ABSENCE_NS: Final = ENGINE_ABSENCE_SECONDS * SECOND_NS


class Violation(AssertionError):
    """An invariant does not hold."""


class Check:
    """One invariant. Each method is told of one kind of event; `world` may be looked at."""

    name = ""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.num_checked = 0

    def hears(self, client: Client, frame: Frame) -> None:
        """A frame has reached `client`, which has not looked at it yet."""

    def ends(self, client: Client) -> None:
        """`client` has its terminal frame."""

    def planned(self, node: Any, plan: StepPlan) -> None:
        """Scheduler `node` publishes `plan`."""

    def executes(self, node: Any, plan: StepPlan) -> None:
        """Worker `node` is about to run `plan`."""

    def answered(self, node: Any, result: StepResult) -> None:
        """Scheduler `node` is about to handle `result`."""

    def settled(self, node: Any) -> None:
        """`node` has handled an event."""

    def step_event(self, node: Any, event: StepEvent) -> None:
        """Scheduler `node` reports a step."""

    def span(self, node: Any, span: TimedSpan) -> None:
        """`node` has closed a span."""

    def cancelled(self, request_id: str) -> None:
        """An admission says that it has cancelled the request."""

    def at_rest(self) -> None:
        """All requests have ended, and the mesh has had time to come to rest."""

    def require(self, condition: bool, text: str) -> None:
        self.num_checked += 1
        if not condition:
            raise Violation(f"{self.name}: {text}")


class EndsOnce(Check):
    """I1: every request reaches exactly one terminal state; a second terminal frame comes only to
    a client that has asked again, or where another admission was offered what the first had not
    acknowledged.
    """

    name = "I1 ends once"

    def hears(self, client: Client, frame: Frame) -> None:
        repeated = self.world.network.repeated_at[client.host]
        repeated += self.world.num_offers[client.request_id]
        self.require(
            client.num_terminals <= client.num_asks + repeated,
            f"{client.name}: a second terminal frame, and nobody asked for it",
        )
        if client.ending is not None:
            asked_again = client.num_asks > 1 or repeated
            self.require(bool(asked_again), f"{client.name}: a frame after the terminal frame")

    def at_rest(self) -> None:
        for client in self.world.clients.values():
            self.require(client.done, f"{client.name} has no terminal frame")


class NothingUninvited(Check):
    """I2: only what a client has asked for is executed, and it is asked with its own prompt."""

    name = "I2 nothing uninvited"

    def executes(self, node: Any, plan: StepPlan) -> None:
        for join in plan.join:
            client = self.world.client_of(join.sampling.seed)
            self.require(
                client is not None and client.started, f"seed {join.sampling.seed} was never sent"
            )
            tokens = unpack(join.token_ids).tolist()
            prompt = list(client.request.prompt_token_ids or ())
            self.require(
                tokens[: join.num_prompt_tokens] == prompt, f"{client.name} joins another prompt"
            )


class Stream(Check):
    """I3: tokens are numbered 0 .. n - 1; a gap comes only where a frame was really lost."""

    name = "I3 stream"

    def hears(self, client: Client, frame: Frame) -> None:
        known = client.token_ids[frame.offset : frame.offset + len(frame.token_ids)]
        self.require(
            frame.token_ids[: len(known)] == known, f"{client.name}: an accepted token has changed"
        )
        if client.done:
            return
        network = self.world.network
        lost = network.lost_at[client.host] or client.num_asks > 1
        self.require(
            frame.offset <= len(client.token_ids) or bool(lost),
            f"{client.name}: frame at {frame.offset}, {len(client.token_ids)} tokens so far",
        )
        troubled = self.world.troubled(client.sent_ns, self.world.clock.now_ns)
        if not lost and not troubled and not network.repeated_at[client.host]:
            self.require(
                frame.offset == len(client.token_ids),
                f"{client.name}: tokens from {frame.offset} on come twice",
            )


class Answer(Check):
    """I4: tokens and text are those of the run without faults."""

    name = "I4 answer"

    def hears(self, client: Client, frame: Frame) -> None:
        right = client.expected.token_ids[frame.offset : frame.offset + len(frame.token_ids)]
        self.require(
            frame.token_ids == right, f"{client.name}: got {frame.token_ids}, must be {right}"
        )
        self.require(
            frame.text == "".join(f"{token_id} " for token_id in frame.token_ids),
            f"{client.name}: text {frame.text!r} is not of {frame.token_ids}",
        )

    def ends(self, client: Client) -> None:
        reason = client.ending.finish_reason if client.ending else None
        if reason in (FinishReason.ABORT, FinishReason.ERROR):
            return
        expected = client.expected
        self.require(
            client.token_ids == expected.token_ids,
            f"{client.name}: {len(client.token_ids)} of {len(expected.token_ids)} tokens",
        )
        right = FinishReason.STOP if expected.stopped else FinishReason.LENGTH
        self.require(reason is right, f"{client.name}: finish_reason {reason}")


class Usage(Check):
    """I9: usage is what was delivered."""

    name = "I9 usage"

    def ends(self, client: Client) -> None:
        frame = client.ending
        assert frame is not None
        if frame.finish_reason is FinishReason.ERROR:
            return
        usage, prompt = frame.usage, client.request.prompt_token_ids or ()
        self.require(usage is not None, f"{client.name}: no usage")
        assert usage is not None
        shown = frame.offset + len(frame.token_ids)
        self.require(usage.completion_tokens == shown, f"{client.name}: {usage}, {shown} shown")
        self.require(usage.prompt_tokens == len(prompt), f"{client.name}: {usage}")
        self.require(0 <= usage.cached_tokens <= len(prompt), f"{client.name}: {usage}")


class Lanes:
    """What the worker's lanes hold, from the plans alone: by lane, seed, blocks and token count."""

    def __init__(self) -> None:
        self.seeds: dict[int, int] = {}
        self.blocks: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.length: dict[int, int] = {}

    def apply(self, plan: StepPlan) -> dict[int, tuple[int, int]]:
        """-> by lane, which positions (from, to) it writes in this step."""
        gone = list(self.seeds) if plan.reset else unpack(plan.leave).tolist()
        for lane in gone:
            for column in (self.seeds, self.blocks, self.computed, self.length):
                column.pop(lane, None)
        for join in plan.join:
            self.seeds[join.lane] = join.sampling.seed
            self.blocks[join.lane] = unpack(join.block_ids).tolist()
            self.computed[join.lane] = join.num_computed_tokens
            self.length[join.lane] = len(join.token_ids) // 4
        pairs = zip(
            unpack(plan.append_lanes).tolist(), unpack(plan.append_blocks).tolist(), strict=True
        )
        for lane, block_id in pairs:
            self.blocks[lane].append(block_id)
        return self._advance(plan)

    def _advance(self, plan: StepPlan) -> dict[int, tuple[int, int]]:
        columns = unpack(plan.chunk_lanes).tolist(), unpack(plan.chunk_tokens).tolist()
        counts = dict(zip(*columns, strict=True))
        held = set(unpack(plan.hold).tolist())
        if plan.decode:
            counts.update({n: 1 for n in self.seeds if n not in counts and n not in held})
        written: dict[int, tuple[int, int]] = {}
        for lane, count in counts.items():
            first = self.computed[lane]
            written[lane] = (first, first + count)
            self.computed[lane] = first + count
            if first + count == self.length[lane]:
                self.length[lane] += 1
        return written


class Blocks(Check):
    """I5: a block is written by one lane, and by none while another reads it; at rest both books
    say the same, and nothing is lost.
    """

    name = "I5 blocks"

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self.lanes: dict[str, Lanes] = {}
        self.written: dict[int, tuple[int, int]] = {}

    def executes(self, node: Any, plan: StepPlan) -> None:
        lanes = self.lanes.setdefault(node.name, Lanes())
        written = self.written = lanes.apply(plan)
        size = self.world.options.block_size
        owners = Counter(block for blocks in lanes.blocks.values() for block in blocks)
        for lane, (first, last) in written.items():
            for index in range(first // size, (last - 1) // size + 1):
                block_id = lanes.blocks[lane][index]
                self.require(
                    owners[block_id] == 1, f"block {block_id} is written and in use elsewhere"
                )

    def at_rest(self) -> None:
        core = self.world.scheduler.core
        self.require(self.world.kv is not None, "the scheduler has no living ledger")
        for ledger in self.world.kv.core.ledgers.values():
            pool = ledger.pool
            states = [*pool._free, *pool._surplus, *pool._cached, *pool._holds]
            self.require(
                sorted(states) == list(range(1, pool.num_blocks)), "free + leased + cached != total"
            )
            spare = Counter(core.batch.lease.spare)
            for block_id in range(1, pool.num_blocks):
                here = core.batch.lease.holds[block_id] + spare[block_id]
                there = pool.holds(block_id)
                self.require(
                    there == here,
                    f"block {block_id}: {there} holds in the ledger, {here} in the scheduler",
                )
        held = dict(core.batch.lease.holds)
        self.require(not held, f"blocks are held by nobody: {held}")


class OneView(Check):
    """I6: every block that the worker is about to use is leased in the ledger, where that speaks of
    the same epoch.
    """

    name = "I6 one view"

    def executes(self, node: Any, plan: StepPlan) -> None:
        blocks_check = self.world.check(Blocks)
        lanes = blocks_check.lanes[node.name]
        kv = self.world.kv
        for ledger in kv.core.ledgers.values() if kv is not None else ():
            same = (ledger.generation, ledger.epoch) == (plan.generation, plan.epoch)
            if not same or ledger.need_snapshot or ledger.next_part:
                continue
            # A lane on hold may have given its blocks back already: it computes nothing here.
            for lane in blocks_check.written:
                free = [b for b in lanes.blocks[lane] if not ledger.pool.holds(b)]
                self.require(not free, f"lane {lane} uses blocks {free}, which nobody holds")


class OneScheduler(Check):
    """I7: an epoch belongs to one scheduler; at a worker, epochs only grow."""

    name = "I7 epochs"

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self._owners: dict[tuple[int, int], str] = {}
        self._reached: dict[str, tuple[int, int]] = {}

    def planned(self, node: Any, plan: StepPlan) -> None:
        epoch = (plan.generation, plan.epoch)
        owner = self._owners.setdefault(epoch, node.name)
        self.require(owner == node.name, f"{owner} and {node.name} both plan in epoch {epoch}")

    def executes(self, node: Any, plan: StepPlan) -> None:
        self._grow(f"{node.name} runs", (plan.generation, plan.epoch))

    def settled(self, node: Any) -> None:
        if node.role == "kv_store":
            for engine, ledger in node.core.ledgers.items():
                self._grow(f"{node.name} for {engine}", (ledger.generation, ledger.epoch))

    def _grow(self, who: str, epoch: tuple[int, int]) -> None:
        before = self._reached.get(who, epoch)
        self.require(epoch >= before, f"{who}: epoch {epoch} after {before}")
        self._reached[who] = epoch


class Tenants(Check):
    """I8: no step has requests of different tenants in one block."""

    name = "I8 tenants"

    def executes(self, node: Any, plan: StepPlan) -> None:
        lanes = self.world.check(Blocks).lanes[node.name]
        salts: dict[int, str] = {}
        for lane, blocks in lanes.blocks.items():
            client = self.world.client_of(lanes.seeds[lane])
            salt = client.request.cache_salt if client is not None else ""
            for block_id in blocks:
                other = salts.setdefault(block_id, salt)
                self.require(other == salt, f"block {block_id} is shared by two tenants")


class Cancel(Check):
    """I10: after a cancel is acknowledged there is no token; once its last step has ended, it
    holds nothing.
    """

    name = "I10 cancel"

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self._asks: dict[str, int] = {}

    def cancelled(self, request_id: str) -> None:
        client = self.world.clients.get(request_id)
        if client is not None:
            self._asks[request_id] = client.num_asks

    def hears(self, client: Client, frame: Frame) -> None:
        asked_once = self._asks.get(client.request_id) == client.num_asks == 1
        # A late submission of a dead admission brings it to life again, and another one adopts it.
        revived = self.world.num_offers[client.request_id]
        if asked_once and not revived and client.ending is not None:
            shown = frame.offset + len(frame.token_ids)
            new = shown > len(client.token_ids)
            self.require(not new, f"{client.name}: tokens after its cancel")

    def settled(self, node: Any) -> None:
        if node.role == "scheduler":
            core = node.core
            for seq in core.roster.logged():
                if not seq.num_in_flight:
                    self.require(not seq.block_ids, f"{seq.seq_id} has ended and holds blocks")


class Idle(Check):
    """I11 and I13: nothing grows without a bound, and at rest every container of every core is as
    empty as it was, or as full as its cap allows.
    """

    name = "I11 and I13 idle"

    def at_rest(self) -> None:
        core = self.world.scheduler.core
        alive = [seq.seq_id for seq in core.roster.live()]
        self.require(not alive, f"sequences live on after their requests: {alive}")
        self.require(not len(core.waiting), "a sequence waits after its request has ended")
        for node in self.world.running():
            over = excess(node.role, census(node.state), self.world.options)
            self.require(not over, f"{node.name} keeps {over}")


class Progress(Check):
    """I12: with the faults over, everything ends within a bound: `World.liveness` raises where it
    does not. Here: no step runs that computes nothing.
    """

    name = "I12 progress"

    def executes(self, node: Any, plan: StepPlan) -> None:
        lanes = self.world.check(Blocks).lanes[node.name]
        self.require(bool(lanes.seeds), "a step without a sequence")


class Errors(Check):
    """I15: an error is of the published table, and comes only where it may."""

    name = "I15 errors"

    def ends(self, client: Client) -> None:
        frame = client.ending
        assert frame is not None
        if frame.finish_reason is FinishReason.ABORT:
            self.require(client.cancelled, f"{client.name}: ends with abort, and nobody asked")
        if frame.finish_reason is not FinishReason.ERROR:
            return
        self.require(frame.error is not None, f"{client.name}: an error without a code")
        assert frame.error is not None
        code = frame.error.code
        self.require(code in ERRORS, f"{client.name}: {code} is not in the table")
        may = self._may(client, code)
        self.require(may, f"{client.name}: {code} ({frame.error.message}) without a reason")

    def _may(self, client: Client, code: ErrorCode) -> bool:
        world = self.world
        # A block may have been spoilt and not read since, so that it is found only now.
        is_victim: bool = code is ErrorCode.NUMERICS and client.number in world.victims
        if client.is_probe or is_victim:
            return is_victim
        mark = world.marks.get(client.number, (None, 0))[0]
        match code:
            case ErrorCode.NO_WORKER:
                return self._has_waited(client)
            case ErrorCode.DEADLINE_EXCEEDED:
                return self._is_late(client)
            case ErrorCode.NUMERICS:
                return mark is Mark.NAN
            case ErrorCode.POISONED:
                # What dies with it by chance counts too.
                by_chance = world.num_killed("worker", client.sent_ns)
                return mark is Mark.DEADLY or bool(by_chance)
            case ErrorCode.CONTEXT_LENGTH_EXCEEDED:
                length = len(client.request.prompt_token_ids or ())
                most: int = world.options.max_model_len
                return length + (client.request.max_tokens or 0) > most
        return False

    def _has_waited(self, client: Client) -> bool:
        """There was no engine for as long as one is waited for, or for a new admission, which has
        heard of none.
        """
        world, ended_ns = self.world, client.ended_ns
        waited: bool = (ended_ns - client.sent_ns) * (1 + world.max_skew) >= ABSENCE_NS
        is_new: bool = world.since_start("admission", ended_ns) <= ABSENCE_NS + AFTERMATH_NS
        troubled: bool = world.troubled(ended_ns - ABSENCE_NS - AFTERMATH_NS, ended_ns)
        return troubled and (waited or is_new)

    def _is_late(self, client: Client) -> bool:
        """Its time has passed on whatever clock measured it."""
        deadline_ms = client.request.deadline_ms
        if deadline_ms is None:
            return False
        passed_ms = (client.ended_ns - client.sent_ns) / 1e6
        fastest: float = 1 + self.world.max_skew
        return passed_ms * fastest + GRACE_MS >= deadline_ms


class Steps(Check):
    """I16: step ids of an epoch are 1, 2, 3 ... at the worker, and in the events."""

    name = "I16 steps"

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self._last: dict[tuple[str, int, int], int] = {}

    def executes(self, node: Any, plan: StepPlan) -> None:
        self._next((node.name, plan.generation, plan.epoch), plan.step_id)

    def step_event(self, node: Any, event: StepEvent) -> None:
        self._next((node.name, node.core.link.generation, event.epoch), event.step_id)

    def _next(self, stream: tuple[str, int, int], step_id: int) -> None:
        last = self._last.get(stream, 0)
        self.require(step_id == last + 1, f"{stream}: step {step_id} after {last}")
        self._last[stream] = step_id


class Forgotten(Check):
    """I17: what a sequence held that has failed with logits that are not finite is hit by nobody
    whom the same scheduler lets join later, wherever it was copied meanwhile.
    """

    name = "I17 forgotten"

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self._num_written = 0
        # By place: which writing it holds, in blocks and in host slots of each worker.
        self._blocks: dict[tuple[str, int], int] = {}
        self._slots: dict[tuple[str, int], int] = {}
        self._broken: dict[str, frozenset[int]] = {}
        self._known: dict[tuple[int, int, int], frozenset[int]] = {}

    def answered(self, node: Any, result: StepResult) -> None:
        core, worker = node.core, self.world.current("worker")
        steps = core.batch.pipeline.steps
        owned = (core.link.generation, core.link.epoch) == (result.generation, result.epoch)
        is_next = core.link.is_ready and owned and steps and steps[0].step_id == result.step_id
        if not result.failed or not is_next or worker is None:
            return
        held: set[int] = set()
        for lane in unpack(result.failed).tolist():
            seq = steps[0].departed.get(lane)
            if seq is None:
                seq = core.batch.lanes.occupant(lane)
                held.update(seq.block_ids[: core.batch.lanes.committed_blocks[lane]])
            elif seq.status != "finished":
                held.update(seq.block_ids[: seq.num_committed_blocks])
        broken = {self._blocks[worker.name, block_id] for block_id in held}
        self._broken[node.name] = self._broken.get(node.name, frozenset()) | broken

    def planned(self, node: Any, plan: StepPlan) -> None:
        if plan.join and node.name in self._broken:
            self._known[plan.generation, plan.epoch, plan.step_id] = self._broken[node.name]

    def executes(self, node: Any, plan: StepPlan) -> None:
        blocks, slots, name = self._blocks, self._slots, node.name
        outs, ins = unpack(plan.copies_out).tolist(), unpack(plan.copies_in).tolist()
        for block_id, slot in zip(outs[::2], outs[1::2], strict=True):
            slots[name, slot] = blocks.get((name, block_id), 0)
        for slot, block_id in zip(ins[::2], ins[1::2], strict=True):
            blocks[name, block_id] = slots.get((name, slot), 0)
        size = self.world.options.block_size
        known = self._known.pop((plan.generation, plan.epoch, plan.step_id), frozenset())
        for join in plan.join:
            hits = unpack(join.block_ids)[: join.num_computed_tokens // size].tolist()
            bad = [block_id for block_id in hits if blocks.get((name, block_id)) in known]
            self.require(not bad, f"lane {join.lane} joins on blocks {bad}, which may be broken")
        check = self.world.check(Blocks)
        for lane, (first, last) in check.written.items():
            for index in range(-(-first // size), (last - 1) // size + 1):
                self._num_written += 1
                blocks[name, check.lanes[name].blocks[lane][index]] = self._num_written


CHECKS: Final[tuple[type[Check], ...]] = (
    EndsOnce,
    NothingUninvited,
    Stream,
    Answer,
    Blocks,
    OneView,
    OneScheduler,
    Tenants,
    Usage,
    Cancel,
    Idle,
    Progress,
    Errors,
    Steps,
    Forgotten,
)

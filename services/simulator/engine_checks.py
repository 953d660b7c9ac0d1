"""What must hold of lanes, blocks, epochs and steps in every history, numbered as in `checks.py`.

    I2 nothing uninvited · I5 blocks · I6 one view · I7 epochs · I8 tenants · I11, I13 idle
    I12 progress · I16 steps · I17 forgotten

They see what goes over the wire, what the worker is about to run, and the containers of the cores.

Pure.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from services.contracts.step import StepEvent, StepPlan, StepResult
from services.contracts.vectors import unpack

from .census import census, excess
from .check import Check


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
        if plan.join:
            # A plan that a poll asks for again was made when it was sent first.
            step = (plan.generation, plan.epoch, plan.step_id)
            self._known.setdefault(step, self._broken.get(node.name, frozenset()))

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

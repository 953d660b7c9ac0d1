"""Copies between the pool and host memory that the ledger has asked for: all that is pending goes
into the next plan, and is confirmed, request by request, by that plan's result.

A block that a copy fills is as good as computed for every plan from that one on, because plans run
in order. A copy whose sequence has gone runs all the same: whoever shares its block counts on it,
and where nobody does it writes a block before anybody computes into it.

Pure.
"""

from __future__ import annotations

from collections import deque

from services.contracts.vectors import Int32Array, pack


class Copies:
    """Of one epoch. Pending ones are keyed by where they write, so that a later copy to the same
    place is the one that counts.
    """

    def __init__(self) -> None:
        self._outs: dict[int, int] = {}
        self._ins: dict[int, int] = {}
        self._requests: list[int] = []
        self._in_flight: deque[tuple[int, list[int]]] = deque()

    @property
    def are_in_flight(self) -> bool:
        """A plan under way carries copies."""
        return bool(self._in_flight)

    @property
    def pending_blocks(self) -> frozenset[int]:
        """Blocks that no plan has filled yet."""
        return frozenset(self._ins)

    def add_outs(self, request: int, pairs: Int32Array) -> None:
        """`pairs`: int32 [2 n], block and host slot of each copy of reply number `request`."""
        if len(pairs):
            self._outs.update(zip(pairs[1::2].tolist(), pairs[::2].tolist(), strict=True))
            self._note(request)

    def add_ins(self, request: int, pairs: Int32Array, held: frozenset[int]) -> None:
        """`pairs`: int32 [2 n], host slot and block. `held`: blocks that sequences held before this
        reply, which are filled already or are about to be.
        """
        if len(pairs):
            for slot, block_id in zip(pairs[::2].tolist(), pairs[1::2].tolist(), strict=True):
                if block_id not in held:
                    self._ins[block_id] = slot
            self._note(request)

    def _note(self, request: int) -> None:
        if request not in self._requests[-1:]:
            self._requests.append(request)

    def publish(self, step_id: int) -> tuple[bytes, bytes]:
        """Everything pending, for the plan of `step_id` -> outs (block, slot), ins (slot, block)
        as packed pairs.
        """
        if not self._requests:
            return b"", b""
        outs = pack([end for slot, block_id in self._outs.items() for end in (block_id, slot)])
        ins = pack([end for block_id, slot in self._ins.items() for end in (slot, block_id)])
        self._in_flight.append((step_id, self._requests))
        self.clear_pending()
        return outs, ins

    def confirm(self, step_id: int) -> list[int]:
        """The result of `step_id` is here -> the requests whose copies it has run."""
        confirmed: list[int] = []
        while self._in_flight and self._in_flight[0][0] <= step_id:
            confirmed += self._in_flight.popleft()[1]
        return confirmed

    def clear_pending(self) -> None:
        """What no plan carries is not to be done."""
        self._outs, self._ins, self._requests = {}, {}, []

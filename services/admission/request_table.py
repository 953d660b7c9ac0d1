"""Who is open here: requests by id, and by the number that schedulers call them.

Invariants: an id and a tag name one request; a tag is used again only after all others were.

Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from services.contracts.limits import CANCEL_TOMBSTONE_SECONDS, MAX_TOMBSTONES

from .open_request import OpenRequest

MAX_TAG: Final = 2**31 - 1
TOMBSTONE_NS: Final = CANCEL_TOMBSTONE_SECONDS * 1_000_000_000


class RequestTable:
    """`news`: those with something to show, in the order in which they take their turns."""

    def __init__(self) -> None:
        self.by_id: dict[str, OpenRequest] = {}
        self.by_tag: dict[int, OpenRequest] = {}
        self.news: dict[str, OpenRequest] = {}
        self._next_tag = 0

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[OpenRequest]:
        """Those of this moment; the table may change meanwhile."""
        return iter(list(self.by_id.values()))

    def add(self, request: OpenRequest) -> None:
        """Under its id, and under a tag that it is given here."""
        self.by_id[request.request_id] = request
        self._tag(request)

    def rename(self, request: OpenRequest) -> None:
        """Another tag: what is still said of the one before is nobody's."""
        del self.by_tag[request.tag]
        self._tag(request)

    def remove(self, request: OpenRequest) -> None:
        del self.by_id[request.request_id]
        del self.by_tag[request.tag]
        self.news.pop(request.request_id, None)

    def _tag(self, request: OpenRequest) -> None:
        self._next_tag = self._next_tag % MAX_TAG + 1
        while self._next_tag in self.by_tag:
            self._next_tag = self._next_tag % MAX_TAG + 1
        request.tag = self._next_tag
        self.by_tag[request.tag] = request

    def check_invariants(self) -> None:
        assert len(self.by_id) == len(self.by_tag)
        assert all(self.by_tag[request.tag] is request for request in self.by_id.values())
        assert self.news.keys() <= self.by_id.keys()


class Tombstones:
    """Cancelled before they were known: a cancel may overtake its request, which is then still
    being tokenised. The oldest goes where there are too many.
    """

    def __init__(self) -> None:
        self._until_ns: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until_ns)

    def bury(self, request_id: str, now_ns: int) -> None:
        self._until_ns[request_id] = now_ns + TOMBSTONE_NS
        if len(self._until_ns) > MAX_TOMBSTONES:
            self._until_ns.popitem(last=False)

    def take(self, request_id: str) -> bool:
        """True where the request was cancelled; its tombstone has done its work then."""
        return self._until_ns.pop(request_id, None) is not None

    def forget_old(self, now_ns: int) -> None:
        while self._until_ns and next(iter(self._until_ns.values())) <= now_ns:
            self._until_ns.popitem(last=False)

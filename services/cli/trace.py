"""`streetcar trace`: what one request went through, as a waterfall; every service is asked.

Shell: the bus, the terminal.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from cyclopts import Parameter

from services.cli.output import print_json
from services.cli.running_file import find_cluster
from services.contracts.ids import is_id
from services.runtime.problem import Problem
from services.runtime.settings import load

if TYPE_CHECKING:
    from services.contracts.spans import SpanRecord, TraceReply

SETTLE_S: Final = 0.3
"""A request that has just ended: its last spans may not have been closed yet."""

WINDOW_S: Final = 0.3
"""How long answers are waited for; a service that has nothing of the request gives none."""


def trace(
    request_id: str,
    *,
    nats_url: Annotated[str | None, Parameter(name="--nats", help="bus of the cluster")] = None,
    json: bool = False,
) -> int:
    """Show where the time of a request went: every service's spans, in the order of time.

    Parameters
    ----------
    request_id
        A `request_id`, the `id` of an HTTP answer, or a trace id.
    json
        Print one object per span.
    """
    if not is_id(request_id):
        raise Problem("E408", "No such request", cause=f"{request_id[:80]!r} is no id of a request")
    settings = load(flags={} if nats_url is None else {"nats_url": nats_url})
    url = find_cluster(settings).watch_url
    spans, notes = asyncio.run(gather(url, settings.subject_prefix, request_id))
    if not spans:
        raise Problem(
            "E408",
            "No such request",
            cause=f"no service has a span of {request_id!r}: it is unknown, was not sampled, "
            "or so old that newer spans took its place",
            fix="`--trace-ratio 1` records every request",
        )
    if json:
        for span in spans:
            print_json(as_dict(span))
        return 0
    from services.cli.waterfall import show

    show(request_id, spans, notes)
    return 0


async def show_own(url: str, prefix: str, span: dict[str, Any], *, as_json: bool) -> None:
    """The trace of a request of this process; `span` is its client's own (`services.client`)."""
    from services.cli.waterfall import show
    from services.contracts.spans import SpanKind, SpanRecord

    own = SpanRecord(**span | {"kind": SpanKind(span["kind"])})
    spans, notes = await gather(url, prefix, own.request_id)
    if as_json:
        for record in (own, *spans):
            print_json(as_dict(record))
        return
    show(own.request_id, [own, *spans], notes, to_stderr=True)


def as_dict(span: SpanRecord) -> dict[str, Any]:
    """The span with its field names, which the wire leaves out."""
    links = [msgspec.structs.asdict(link) for link in span.links]
    return {**msgspec.structs.asdict(span), "links": links}


async def gather(url: str, prefix: str, request_id: str) -> tuple[list[SpanRecord], list[str]]:
    """Each span of every trace that the request is in, once, by beginning; and what is to be said
    about them. Raises Problem.
    """
    from services.cli.bus import connect
    from services.contracts.subjects import Subjects

    async with connect(url) as client:
        names = Subjects(prefix)
        replies = await ask(client, names.trace(request_id))
        if replies and not _has_ended(replies):
            await asyncio.sleep(SETTLE_S)
            replies = await ask(client, names.trace(request_id))
        own = {span.trace_id for r in replies for span in r.spans if span.request_id == request_id}
        # Those that know the request have said which traces it is in; now everybody is asked.
        for trace_id in own:
            replies += await ask(client, names.trace(trace_id))
    found = {(span.trace_id, span.span_id): span for reply in replies for span in reply.spans}
    cut = sorted({reply.service for reply in replies if reply.cut})
    notes = [f"{service} has more spans than one message takes" for service in cut]
    return sorted(found.values(), key=lambda span: (span.start_unix_ns, -span.duration_ns)), notes


def _has_ended(replies: list[TraceReply]) -> bool:
    """Whether the span of a whole request is there: it is closed last."""
    kinds = {span.kind.value for reply in replies for span in reply.spans}
    return not kinds.isdisjoint({"server", "consumer"})


async def ask(client: Any, subject: str) -> list[TraceReply]:
    """What comes within the window from those that know the request or the trace."""
    from services.contracts.codec import Decoder
    from services.contracts.errors import WireError
    from services.contracts.spans import TraceReply

    decoder = Decoder(TraceReply)
    replies: list[TraceReply] = []

    async def hear(message: Any) -> None:
        try:
            replies.append(decoder.decode(message.data))
        except WireError:
            # Nobody answers, which the server says; or another version of Streetcar.
            return

    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox, cb=hear)
    await client.publish(subject, b"", reply=inbox)
    await asyncio.sleep(WINDOW_S)
    await subscription.unsubscribe()
    return replies

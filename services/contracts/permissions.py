"""Who may say what on the bus: one row per family of subjects, one user per kind of service.

Invariants: what is not in the table is refused by the server; replies go to an inbox that belongs
to the user who asked, under a prefix of its own, and only those whom that user asks may publish
there. So no user needs the right to answer anywhere (`allow_responses`), and none can read what
was meant for another.

Pure: the server's configuration, the deployment files and the tests are made from this table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from .subjects import Subjects


class User(StrEnum):
    """A user of the bus. The first five are services, called as their kinds in heartbeats.

    client: asks for text; whoever reaches an embedded bus on loopback without a password is it.
    observer: hears heartbeats and steps, asks the ledger for its books and everybody for spans.
    """

    ADMISSION = "admission"
    SCHEDULER = "scheduler"
    KV_STORE = "kv_store"
    GPU_WORKER = "gpu_worker"
    GATEWAY = "gateway"
    CLIENT = "client"
    OBSERVER = "observer"


SERVICES: Final = (
    *(User.ADMISSION, User.SCHEDULER, User.KV_STORE),
    *(User.GPU_WORKER, User.GATEWAY),
)
CLIENTS: Final = (User.CLIENT, User.GATEWAY)
"""Those who may ask for text, and so those whose inboxes take frames."""

RECORDERS: Final = (User.ADMISSION, User.SCHEDULER, User.GPU_WORKER, User.GATEWAY)
"""Those who have spans to share."""

SPAN_KEEPERS: Final = (User.ADMISSION, User.GATEWAY)
"""Those who keep the spans of others: two kinds, so that the death of any one process loses no part
of a trace but its last moment.
"""

DEFAULT_INBOX: Final = "_INBOX"
DISCOVERY: Final = ("$SRV.PING", "$SRV.INFO", "$SRV.STATS")


@dataclass(frozen=True, slots=True)
class Family:
    """Subjects with the same rights; `subject` may hold wildcards."""

    subject: str
    publish: tuple[User, ...]
    subscribe: tuple[User, ...]


@dataclass(frozen=True, slots=True)
class Grant:
    """What one user may do: subjects, with wildcards."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def inbox_prefix(user: str) -> str:
    """First token of the reply subjects of `user`; a name that is not in the table gets NATS's own.

    A client keeps NATS's own as well, so that any NATS tool works by hand.
    """
    named = user in set(User) and user != User.CLIENT
    return f"{DEFAULT_INBOX}_{user}" if named else DEFAULT_INBOX


def takes_frames(reply: str) -> bool:
    """Whether `reply` is an inbox of somebody who may ask for text."""
    return reply.startswith(tuple(f"{inbox_prefix(user)}." for user in CLIENTS))


def takes_spans(reply: str) -> bool:
    """Whether `reply` is an inbox of the observer, or NATS's own, where the bus has no users."""
    return reply.startswith((f"{inbox_prefix(User.OBSERVER)}.", f"{DEFAULT_INBOX}."))


def families(subjects: Subjects) -> tuple[Family, ...]:
    """The table. Every pair of a subject and a user that it does not name is refused."""
    admission, scheduler, ledger = (User.ADMISSION,), (User.SCHEDULER,), (User.KV_STORE,)
    worker, observer = (User.GPU_WORKER,), (User.OBSERVER,)
    return (
        Family(subjects.any_generate, CLIENTS, admission),
        Family(subjects.any_cancel, CLIENTS, admission),
        Family(subjects.any_resume, CLIENTS, admission),
        Family(_every(subjects.submit), admission, scheduler),
        Family(_every(subjects.abort), admission, scheduler),
        Family(_every(subjects.updates), scheduler, admission),
        Family(subjects.adopt, scheduler, admission),
        Family(_every(subjects.plan), scheduler, worker),
        Family(_every(subjects.attach), scheduler, worker),
        Family(_every(subjects.poll), scheduler, worker),
        Family(_every(subjects.result), worker, scheduler),
        Family(_every(subjects.steps), scheduler, observer),
        # The ledger hears all of `kv` on one subscription, so that it stays in order.
        Family(subjects.any_kv, (), ledger),
        Family(_every(subjects.lookup), scheduler, ()),
        Family(_every(subjects.lease), scheduler, ()),
        Family(_every(subjects.delta), scheduler, ()),
        Family(_every(subjects.kv_report), observer, ()),
        Family(_every(subjects.kv_check), observer, ()),
        Family(subjects.any_trace, observer, SERVICES),
        Family(subjects.spans, RECORDERS, SPAN_KEEPERS),
        Family(subjects.any_beat(), (), (*SERVICES, *observer)),
        *(Family(subjects.any_beat(service), (service,), ()) for service in SERVICES),
        *(Family(subject, observer, SERVICES) for subject in DISCOVERY),
        *(Family(f"{subject}.>", observer, SERVICES) for subject in DISCOVERY),
        # Inboxes: the owner reads; those whom the owner asks write.
        *(Family(f"{inbox_prefix(user)}.>", admission, (user,)) for user in CLIENTS),
        Family(f"{inbox_prefix(User.ADMISSION)}.>", scheduler, admission),
        Family(
            f"{inbox_prefix(User.SCHEDULER)}.>",
            (User.ADMISSION, User.KV_STORE, User.GPU_WORKER),
            scheduler,
        ),
        Family(f"{inbox_prefix(User.OBSERVER)}.>", SERVICES, observer),
    )


def grants(subjects: Subjects) -> dict[User, Grant]:
    """The table by user, each list in the table's order."""
    table = families(subjects)
    return {
        user: Grant(
            publish=tuple(row.subject for row in table if user in row.publish),
            subscribe=tuple(row.subject for row in table if user in row.subscribe),
        )
        for user in User
    }


def _every(build: Callable[[str], str]) -> str:
    """The wildcard for all subjects that `build` makes of one id."""
    name = "any-id-of-this-kind"
    return build(name).replace(f".{name}.", ".*.")

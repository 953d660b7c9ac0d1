"""Subjects, queue groups and request/reply over the simulated network, as nats-server gives them.

Invariants: a message to a queue group reaches one member, any other message every subscriber; a
request is answered, times out, or is told that nobody listens: one of them, once.

Pure: randomness and time come from the caller.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from .network import Action, Bytes, Clock, Host, Network, Parcel
from .phases import Phase

# Of all answers to one connection: they come by one subscription, so they keep their order.
REPLIES = "replies"


@dataclass(frozen=True, slots=True)
class Envelope:
    """What is sent: `kind` is its name in the books of the simulation."""

    kind: str
    payload: bytes
    phases: tuple[Phase, ...] = ()
    channel: str = ""


Answer = Callable[[Envelope], None]
Handler = Callable[[bytes, Answer], None]


@dataclass(frozen=True, slots=True)
class Asking:
    """What becomes of a request. nobody: no subscriber at all; where absent, as a time-out."""

    timeout_ns: int
    answered: Bytes
    timed_out: Action
    nobody: Action | None = None


@dataclass(frozen=True, slots=True)
class _Subscription:
    host: Host
    handler: Handler
    queue: str


def _no_answer(envelope: Envelope) -> None:
    """A message without a reply subject."""


class Bus:
    """outage: the server is away: what is published is lost, what is asked times out."""

    def __init__(self, clock: Clock, network: Network, rng: random.Random) -> None:
        self._clock = clock
        self._network = network
        self._rng = rng
        self._subscriptions: dict[str, list[_Subscription]] = {}
        self.outage = False

    def subscribe(self, host: Host, subject: str, handler: Handler, queue: str = "") -> None:
        self._subscriptions.setdefault(subject, []).append(_Subscription(host, handler, queue))

    def leave(self, host: Host) -> None:
        """Its connection is gone, and its subscriptions with it."""
        for subject, known in list(self._subscriptions.items()):
            left = [entry for entry in known if entry.host is not host]
            if left:
                self._subscriptions[subject] = left
            else:
                del self._subscriptions[subject]

    def publish(self, sender: Host, subject: str, envelope: Envelope) -> bool:
        """-> False where nobody listens."""
        receivers = self._receivers(subject)
        for entry in receivers:
            self._send(sender, entry, subject, envelope, _no_answer)
        return bool(receivers)

    def request(self, sender: Host, subject: str, envelope: Envelope, asking: Asking) -> None:
        is_open = True

        def close(then: Action) -> None:
            nonlocal is_open
            if is_open:
                is_open = False
                then()

        receivers = self._receivers(subject)
        if not receivers and not self.outage and asking.nobody is not None:
            nobody = asking.nobody
            self._clock.after(0, lambda: sender.run(lambda: close(nobody)))
            return
        for entry in receivers:

            def answer(reply: Envelope, host: Host = entry.host) -> None:
                if self.outage:
                    return
                parcel = Parcel(host, sender, reply.kind, reply.payload, "", REPLIES, reply.phases)
                self._network.send(parcel, lambda b: close(lambda: asking.answered(b)))

            self._send(sender, entry, subject, envelope, answer)
        self._clock.after(
            asking.timeout_ns, lambda: sender.run(lambda: close(asking.timed_out), timer=True)
        )

    def _receivers(self, subject: str) -> list[_Subscription]:
        if self.outage:
            return []
        chosen: list[_Subscription] = []
        groups: dict[str, list[_Subscription]] = {}
        for entry in self._subscriptions.get(subject, ()):
            if entry.queue:
                groups.setdefault(entry.queue, []).append(entry)
            else:
                chosen.append(entry)
        chosen.extend(self._rng.choice(members) for members in groups.values())
        return chosen

    def _send(
        self, sender: Host, entry: _Subscription, subject: str, envelope: Envelope, answer: Answer
    ) -> None:
        parcel = Parcel(
            sender,
            entry.host,
            envelope.kind,
            envelope.payload,
            subject,
            envelope.channel,
            envelope.phases,
        )
        self._network.send(parcel, lambda payload: entry.handler(payload, answer))

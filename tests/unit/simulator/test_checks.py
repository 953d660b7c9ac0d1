"""What a check of the simulation lets pass, and what not."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from services.contracts.public import FinishReason, Frame
from services.simulator.bus import Bus, Envelope
from services.simulator.check import Violation
from services.simulator.checks import EndsOnce
from services.simulator.network import Clock, Network, Weather
from services.simulator.process import Process, Skew

END = Frame(request_id="r1", offset=0, finish_reason=FinishReason.LENGTH)


def resumed_once(repeated: str) -> tuple[EndsOnce, Any]:
    """A client that has resumed once, where the network says messages of one kind twice."""
    clock, rng = Clock(), random.Random(1)
    network = Network(clock, rng, Weather(1, duplicate=1.0, kinds=(repeated,)))
    bus = Bus(clock, network, rng)
    admission = Process(clock, rng, "admission", "admission", Skew())
    bus.subscribe(admission, "resume", lambda payload, answer: None)
    client = SimpleNamespace(
        name="client-r1",
        host="client-r1",
        request_id="r1",
        alive=True,
        num_asks=2,
        num_terminals=0,
        ending=None,
    )
    bus.publish(client, "resume", Envelope("resume", b"r1 0"))
    world = SimpleNamespace(network=network, num_offers={"r1": 0})
    return EndsOnce(world), client


def hear_ends(check: EndsOnce, client: Any, count: int) -> None:
    for _ in range(count):
        client.num_terminals += 1
        check.hears(client, END)


def test_a_resume_that_the_network_repeats_is_answered_twice() -> None:
    """Found by the simulator (seed 2671): it was called an answer that nobody had asked for."""
    check, client = resumed_once("resume")
    hear_ends(check, client, 3)
    with pytest.raises(Violation):
        hear_ends(check, client, 1)


def test_what_else_is_repeated_is_no_reason_for_another_end() -> None:
    check, client = resumed_once("cancel")
    hear_ends(check, client, 2)
    with pytest.raises(Violation):
        hear_ends(check, client, 1)

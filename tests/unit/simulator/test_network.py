"""The bus of the simulation: order, cuts, outages, queue groups, requests."""

from __future__ import annotations

import random

from services.simulator.bus import Asking, Bus, Envelope
from services.simulator.network import Clock, Cut, Network, Parcel, Weather
from services.simulator.process import Process, Skew


class Mesh:
    """Two processes, a bus between them, and what was heard."""

    def __init__(self, weather: Weather | None = None) -> None:
        self.clock, rng = Clock(), random.Random(1)
        self.network = Network(self.clock, rng, weather or Weather(1_000_000))
        self.bus = Bus(self.clock, self.network, rng)
        self.a, self.b = (Process(self.clock, rng, name, name, Skew()) for name in "ab")
        self.heard: list[bytes] = []
        self.bus.subscribe(self.b, "x", lambda payload, _: self.heard.append(payload))

    def send(self, *payloads: bytes, channel: str = "") -> None:
        for payload in payloads:
            self.bus.publish(self.a, "x", Envelope("kind", payload, (), channel))

    def run(self, until_ns: int = 10**12) -> None:
        self.clock.at(until_ns, lambda: None)
        while self.clock.now_ns < until_ns:
            self.clock.step()


NUMBERS = [bytes([n]) for n in range(50)]


def test_a_channel_keeps_its_order() -> None:
    mesh = Mesh()
    mesh.send(*NUMBERS)
    mesh.run()
    assert mesh.heard == NUMBERS


def test_channels_overtake_each_other() -> None:
    mesh = Mesh()
    for number in NUMBERS:
        mesh.send(number, channel=f"channel {number[0] % 5}")
    mesh.run()
    assert mesh.heard != NUMBERS and sorted(mesh.heard) == NUMBERS


def test_a_cut_that_holds_gives_everything_back_in_order_and_one_that_loses_nothing() -> None:
    for how, late in ((Cut.HOLD, NUMBERS), (Cut.LOSE, [])):
        mesh = Mesh()
        mesh.network.cut([("a", "b")], how)
        mesh.send(*NUMBERS)
        mesh.run(10**10)
        assert mesh.heard == []
        mesh.network.restore([("a", "b")])
        mesh.run()
        assert mesh.heard == late
        assert sum(mesh.network.faults.values()) == len(NUMBERS)


def test_what_is_on_its_way_dies_with_the_server() -> None:
    mesh = Mesh()
    mesh.send(*NUMBERS)
    mesh.network.wipe()
    mesh.run()
    assert mesh.heard == [] and mesh.network.faults["wiped kind"] == len(NUMBERS)


def test_losses_and_repeats_are_counted_as_they_happen() -> None:
    mesh = Mesh(Weather(1000, drop=0.5, duplicate=0.5))
    mesh.send(*NUMBERS)
    mesh.run()
    faults = mesh.network.faults
    assert faults["dropped kind"] and faults["repeated kind"]
    assert len(mesh.heard) == len(NUMBERS) - faults["dropped kind"] + faults["repeated kind"]
    mesh.network.calm()
    mesh.heard.clear()
    mesh.send(*NUMBERS)
    mesh.run(2 * 10**12)
    assert mesh.heard == NUMBERS


def test_the_watcher_may_kill_the_sender_before_its_message_leaves() -> None:
    mesh = Mesh()

    def kill(parcel: Parcel) -> bool:
        mesh.a.die()
        return False

    mesh.network.watch = kill
    mesh.send(b"last word")
    mesh.run()
    assert mesh.heard == []


def test_a_queue_group_hears_once_and_a_request_has_one_outcome() -> None:
    mesh, outcomes = Mesh(), []
    for member in (mesh.a, mesh.b):
        mesh.bus.subscribe(
            member, "q", lambda payload, answer: answer(Envelope("reply", payload)), queue="group"
        )

    def ask(subject: str) -> None:
        asking = Asking(
            10**9,
            lambda answer: outcomes.append(answer),
            lambda: outcomes.append(b"late"),
            lambda: outcomes.append(b"nobody"),
        )
        mesh.bus.request(mesh.a, subject, Envelope("ask", b"!"), asking)

    ask("q")
    ask("nowhere")
    ask("x")
    mesh.run()
    assert sorted(outcomes) == [b"!", b"late", b"nobody"]

"""Whatever a service may say arrives as it was said; whatever else arrives is a WireError."""

from __future__ import annotations

import contextlib
import inspect
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.contracts import beats, kv, sequences, spans, step
from services.contracts.codec import Decoder, Message, encode
from services.contracts.errors import WireError
from tests.properties.strategies import messages

quick = settings(max_examples=25, deadline=None, derandomize=True)


def _tagged(*modules: ModuleType) -> list[type[Any]]:
    found = {
        kind
        for module in modules
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, Message) and kind.__struct_config__.tag is not None
    }
    return sorted(found, key=lambda kind: kind.__name__)


KINDS = _tagged(beats, kv, sequences, spans, step)


def test_these_are_all_of_them() -> None:
    tags = [kind.__struct_config__.tag for kind in KINDS]
    assert len(tags) == len(set(tags)) >= 18


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_message_survives_the_wire(kind: type[Any]) -> None:
    decoder = Decoder(kind)

    @quick
    @given(messages(kind))
    def check(message: Message) -> None:
        assert decoder.decode(encode(message)) == message

    check()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_damaged_message_is_refused_or_still_one(kind: type[Any]) -> None:
    decoder = Decoder(kind)

    @quick
    @given(messages(kind), st.data())
    def check(message: Message, data: st.DataObject) -> None:
        payload = bytearray(encode(message))
        at = data.draw(st.integers(0, len(payload) - 1))
        payload[at] = data.draw(st.integers(0, 255))
        cut = data.draw(st.integers(0, len(payload)))
        for damaged in (bytes(payload), bytes(payload[:cut])):
            with contextlib.suppress(WireError):
                assert isinstance(decoder.decode(damaged), kind)

    check()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=64))
def test_random_bytes_raise_nothing_but_a_wire_error(payload: bytes) -> None:
    decoder: Decoder[Any] = Decoder(*KINDS)
    for candidate in (payload, b"\x01" + payload):
        with contextlib.suppress(WireError):
            decoder.decode(candidate)

"""Bytes to messages and back, for what services say to each other.

A payload is one version byte and one MessagePack array: `[tag, field, field, ...]`. Unknown fields,
unknown tags, another version and trailing bytes are refused; fields are only ever appended, with a
default.

Pure.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from .errors import WireError

WIRE_VERSION = 1
_PREFIX = bytes([WIRE_VERSION])

T = TypeVar("T")


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of every internal message; subclasses set `tag`."""


_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """`message` -> version byte + MessagePack."""
    return _PREFIX + _encoder.encode(message)


class Decoder(Generic[T]):
    """Decodes one message type, or a tagged union of them.

    decode: raises WireError for anything that is not exactly one such message.
    """

    def __init__(self, *types: type[T]) -> None:
        union = types[0]
        for extra in types[1:]:
            union = union | extra  # type: ignore[assignment]
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)

    def decode(self, payload: bytes) -> T:
        if payload[:1] != _PREFIX:
            found = payload[0] if payload else "nothing"
            raise WireError(f"wire version is {found}, this service speaks {WIRE_VERSION}")
        try:
            return self._decoder.decode(memoryview(payload)[1:])
        except (msgspec.DecodeError, RecursionError) as error:
            raise WireError(str(error)) from None

"""S05: every field of a public request has a bound, and the bound is where it says."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgpack
import msgspec
import pytest
from msgspec import inspect

from services.contracts import beats, codec, kv, sequences, step
from services.contracts.errors import RequestError
from services.contracts.public import GenerateRequest, decode_request

_REQUEST = {"prompt": "x"}


@dataclass(frozen=True)
class Leaf:
    """One place in a type that takes a value of a client. path: from the outermost object."""

    path: tuple[str, ...]
    type: Any


def _leaves(kind: Any, path: tuple[str, ...]) -> Iterator[Leaf]:
    match kind:
        case inspect.StructType():
            for field in kind.fields:
                yield from _leaves(field.type, (*path, field.encode_name))
        case inspect.UnionType():
            for option in kind.types:
                yield from _leaves(option, path)
        case inspect.ListType() | inspect.VarTupleType():
            yield Leaf(path, kind)
            yield from _leaves(kind.item_type, (*path, "[]"))
        case inspect.TupleType():
            for item in kind.item_types:
                yield from _leaves(item, (*path, "[]"))
        case inspect.DictType():
            yield Leaf(path, kind)
            yield from _leaves(kind.key_type, (*path, "key"))
            yield from _leaves(kind.value_type, (*path, "value"))
        case _:
            yield Leaf(path, kind)


PUBLIC = list(_leaves(inspect.type_info(GenerateRequest), ()))
_CLOSED = (inspect.BoolType, inspect.NoneType, inspect.LiteralType, inspect.EnumType)


def _is_bounded(kind: Any) -> bool:
    match kind:
        case inspect.IntType() | inspect.FloatType():
            return (kind.ge is not None or kind.gt is not None) and (
                kind.le is not None or kind.lt is not None
            )
        case inspect.StrType() | inspect.ListType() | inspect.BytesType() | inspect.DictType():
            return kind.max_length is not None
        case _:
            return isinstance(kind, _CLOSED)


def test_s05_every_public_field_is_bounded() -> None:
    assert len(PUBLIC) > 40, "the walk sees the nested objects"
    assert [leaf.path for leaf in PUBLIC if not _is_bounded(leaf.type)] == []


def _messages() -> list[type]:
    modules = (beats, kv, sequences, step)
    found = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, codec.Message)
    }
    return sorted(found - {codec.Message}, key=lambda kind: kind.__name__)


@pytest.mark.parametrize("message", _messages(), ids=lambda kind: kind.__name__)
def test_s05_nothing_between_services_grows_without_a_bound(message: type) -> None:
    """Integers are bounded by MessagePack itself; binary vectors by the payload."""
    growing = (inspect.StrType, inspect.ListType, inspect.DictType, inspect.AnyType)
    leaves = _leaves(inspect.type_info(message), (message.__name__,))
    loose = [
        leaf.path
        for leaf in leaves
        if isinstance(leaf.type, growing) and not _is_bounded(leaf.type)
    ]
    assert loose == []


# ---- the bounds themselves


def _nested(path: tuple[str, ...], value: object) -> object:
    """`value` in as many objects and lists as the path has, with what else they need."""
    for depth, name in reversed(list(enumerate(path))):
        parent = path[depth - 1] if depth else ""
        value = [value] if name == "[]" else {**_BESIDE.get(f"{parent}.{name}", {}), name: value}
    return value


_BESIDE: dict[str, dict[str, object]] = {
    "[].name": {"role": "user"},
    "[].content": {"role": "user"},
    "[].tool_calls": {"role": "assistant"},
    "[].tool_call_id": {"role": "tool"},
    "[].id": {"function": {"name": "f"}},
    "function.arguments": {"name": "f"},
}
"""Required fields beside one of a nested object."""


def _numbers() -> Iterator[Any]:
    for leaf in PUBLIC:
        if isinstance(leaf.type, inspect.IntType | inspect.FloatType):
            yield pytest.param(leaf, id=".".join(leaf.path))


def _passes(path: tuple[str, ...], value: object) -> bool:
    """Whether both encodings take it; they must agree."""
    body = {**_REQUEST, **_nested(path, value)}  # type: ignore[dict-item]
    verdicts = set()
    for payload in _payloads(body):
        try:
            decode_request(payload)
            verdicts.add(True)
        except RequestError:
            verdicts.add(False)
    assert len(verdicts) == 1, (path, value)
    return verdicts.pop()


def _payloads(body: object) -> Iterator[bytes]:
    yield json.dumps(body).encode()
    # MessagePack has no integers beyond 64 bits.
    with contextlib.suppress(OverflowError):
        yield msgpack.packb(body)


@pytest.mark.parametrize("leaf", list(_numbers()))
def test_s05_numbers_end_where_the_bound_says(leaf: Leaf) -> None:
    low, high = leaf.type.ge, leaf.type.le
    is_float = isinstance(leaf.type, inspect.FloatType)
    assert high is not None
    assert _passes(leaf.path, high)
    assert not _passes(leaf.path, math.nextafter(high, math.inf) if is_float else high + 1)
    if low is not None:
        assert _passes(leaf.path, low)
        assert not _passes(leaf.path, math.nextafter(low, -math.inf) if is_float else low - 1)
    for value in (2**31, 2**32, 2**63 - 1, -(2**31) - 1, -(2**63)):
        least = leaf.type.gt if low is None else low
        inside = least <= value <= high
        assert _passes(leaf.path, value) == inside, value
    for value in (2**63, 2**64 - 1):
        assert not _passes(leaf.path, value)
    for value in ("1", True, [1], {}):
        assert not _passes(leaf.path, value)


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "frequency_penalty"])
def test_s05_only_finite_numbers(name: str) -> None:
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(RequestError):
            decode_request(msgpack.packb({**_REQUEST, name: value}))
        with pytest.raises(RequestError):
            decode_request(json.dumps({**_REQUEST, name: value}).encode())
    assert _passes(("temperature",), -0.0)
    assert not _passes(("top_p",), -0.0)


def _growing() -> Iterator[Any]:
    for leaf in PUBLIC:
        if isinstance(leaf.type, inspect.StrType | inspect.ListType):
            yield pytest.param(leaf, id=f"{'.'.join(leaf.path)}-{type(leaf.type).__name__}")


@pytest.mark.parametrize("leaf", list(_growing()))
def test_s05_texts_and_lists_end_where_the_bound_says(leaf: Leaf) -> None:
    bound = leaf.type.max_length
    if isinstance(leaf.type, inspect.StrType):
        assert _passes(leaf.path, "x" * bound)
        assert not _passes(leaf.path, "x" * (bound + 1))
        if leaf.type.min_length:
            assert not _passes(leaf.path, "")
        return
    item = _item(leaf.type.item_type)
    assert _passes(leaf.path, [item] * bound)
    assert not _passes(leaf.path, [item] * (bound + 1))


def _item(kind: Any) -> object:
    match kind:
        case inspect.StructType():
            required = {f.encode_name: _item(f.type) for f in kind.fields if f.required}
            return required
        case inspect.StrType():
            return "x"
        case _:
            return 1


def test_s05_a_long_list_is_refused_before_it_is_read() -> None:
    """A million stop ids: the length alone decides, so that nothing is built."""
    packed = msgpack.packb({**_REQUEST, "stop_token_ids": [1] * 10**6})
    with pytest.raises(RequestError, match="stop_token_ids"):
        decode_request(packed)
    for header in (b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"):
        with pytest.raises(RequestError):
            decode_request(b"\x81\xa6prompt" + header)


def test_types_of_fields_are_known_to_this_walk() -> None:
    """An object of a kind that the walk does not enter would pass unseen."""
    kinds = {type(leaf.type) for leaf in PUBLIC}
    known = {inspect.IntType, inspect.FloatType, inspect.StrType, inspect.ListType}
    assert kinds <= known | set(_CLOSED), kinds
    assert msgspec.structs.fields(GenerateRequest)

"""Whatever a client sends, a RequestError in plain words is the worst that comes of it."""

from __future__ import annotations

import json
from typing import Any

import msgpack
import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from services.contracts.errors import RequestError
from services.contracts.explain import explain
from services.contracts.public import (
    Encoding,
    Frame,
    GenerateRequest,
    decode_request,
    encode_frame,
    request_id_of,
)
from tests.properties.strategies import messages

FIELDS = GenerateRequest.__struct_fields__

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
bodies = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), values, max_size=5)


def _decode(payload: bytes) -> GenerateRequest | None:
    request_id_of(payload)
    try:
        return decode_request(payload)
    except RequestError as error:
        assert explain(error.message, FIELDS)
        return None


@settings(max_examples=300, deadline=None, derandomize=True)
@given(bodies)
def test_json_and_msgpack_are_taken_or_refused_alike(body: dict[str, Any]) -> None:
    one = _decode(json.dumps(body).encode())
    other = _decode(msgpack.packb(body))
    assert one == other


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=80), st.sampled_from([b"", b"{", b'{"prompt":', b"\x81\xa6prompt"]))
def test_random_bytes_are_refused_with_a_reason(payload: bytes, start: bytes) -> None:
    _decode(start + payload)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(messages(GenerateRequest))
def test_a_request_within_its_bounds_is_taken(request: GenerateRequest) -> None:
    for payload in (msgspec.json.encode(request), msgspec.msgpack.encode(request)):
        assert decode_request(payload) == request


@settings(max_examples=100, deadline=None, derandomize=True)
@given(messages(Frame))
def test_a_frame_says_the_same_in_both_encodings(frame: Frame) -> None:
    as_json = json.loads(encode_frame(frame, Encoding.JSON))
    assert as_json == msgpack.unpackb(encode_frame(frame, Encoding.MSGPACK))

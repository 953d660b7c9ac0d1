"""The public request and its frames, as JSON and MessagePack."""

from __future__ import annotations

import json
from typing import Any

import msgpack
import pytest

from services.contracts import limits
from services.contracts.errors import ERRORS, ErrorCode, RequestError
from services.contracts.public import (
    Encoding,
    ErrorBody,
    FinishReason,
    Frame,
    Usage,
    decode_request,
    encode_frame,
    encoding_of,
)


def both(request: Any) -> list[bytes]:
    return [json.dumps(request).encode(), msgpack.packb(request)]


@pytest.mark.parametrize(
    ("payload", "encoding"),
    [
        (b"{}", Encoding.JSON),
        (b" {}", Encoding.JSON),
        (b"[1]", Encoding.JSON),
        (b'"x"', Encoding.JSON),
        (b"\n{}", Encoding.JSON),
        (msgpack.packb({}), Encoding.MSGPACK),
        (msgpack.packb({"a": 1}), Encoding.MSGPACK),
        (msgpack.packb({str(i): i for i in range(20)}), Encoding.MSGPACK),
        (b"", Encoding.MSGPACK),
    ],
)
def test_the_first_byte_tells_the_encoding(payload: bytes, encoding: Encoding) -> None:
    assert encoding_of(payload) is encoding


def test_both_encodings_say_the_same() -> None:
    request = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "max_tokens": 5,
        "temperature": 0,
        "stop": ["a", "b"],
        "seed": -(2**63),
        "top_k": -1,
    }
    one, other = map(decode_request, both(request))
    assert one == other
    assert one.stop_strings == ["a", "b"] and one.seed == -(2**63)
    assert one.messages is not None and one.messages[0].text == "Hi"


def test_what_is_absent_has_its_default() -> None:
    request = decode_request(b'{"prompt": "x"}')
    assert (request.temperature, request.top_p, request.top_k, request.stream) == (
        1.0,
        1.0,
        0,
        True,
    )
    assert request.stop_strings == [] and request.seed is None and request.max_tokens is None
    assert decode_request(b'{"prompt": "x", "stop": "s"}').stop_strings == ["s"]
    assert decode_request(b'{"prompt": "x", "stop": null}').stop_strings == []


def test_case_37_messages_of_assistants_that_called_tools() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for calls in ([], [call]):
        messages = [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "user", "content": [{"type": "text", "text": "and now?"}]},
        ]
        for payload in both({"messages": messages}):
            decoded = decode_request(payload).messages
            assert decoded is not None
            assert [message.text for message in decoded] == ["weather?", "", "and now?"]


BAD: list[dict[str, Any]] = [
    {"prompt": "x", "surprise": 1},
    {"prompt": 5},
    {"prompt_token_ids": [-1]},
    {"prompt_token_ids": [2**31]},
    {"prompt_token_ids": "abc"},
    {"prompt_token_ids": [1.5]},
    {"prompt": "x", "max_tokens": 0},
    {"prompt": "x", "max_tokens": limits.MAX_OUTPUT_TOKENS + 1},
    {"prompt": "x", "max_tokens": True},
    {"prompt": "x", "temperature": -0.5},
    {"prompt": "x", "temperature": limits.MAX_TEMPERATURE + 1},
    {"prompt": "x", "top_p": 0},
    {"prompt": "x", "top_p": 1.1},
    {"prompt": "x", "top_k": -2},
    {"prompt": "x", "stop": ""},
    {"prompt": "x", "stop": ["ok", ""]},
    {"prompt": "x", "stop": ["s"] * (limits.MAX_STOP_STRINGS + 1)},
    {"prompt": "x", "stop": "s" * (limits.MAX_STOP_CHARS + 1)},
    {"prompt": "x", "stop_token_ids": [1] * (limits.MAX_STOP_TOKEN_IDS + 1)},
    {"prompt": "x", "logprobs": limits.MAX_LOGPROBS + 1},
    {"prompt": "x", "logprobs": -1},
    {"prompt": "x", "seed": 2**63},
    {"prompt": "x", "request_id": "a.b"},
    {"prompt": "x", "request_id": ""},
    {"prompt": "x", "request_id": "a" * 65},
    {"prompt": "x", "request_id": "a\n"},
    {"prompt": "x", "cache_salt": "s" * (limits.MAX_CACHE_SALT_CHARS + 1)},
    {"prompt": "x", "priority": limits.MAX_PRIORITY + 1},
    {"prompt": "x", "deadline_ms": 0},
    {"messages": [{"content": "no role"}]},
    {"messages": [{"role": "user", "content": [{"type": "image", "text": "x"}]}]},
    {"messages": [{"role": "user"}] * (limits.MAX_MESSAGES + 1)},
]


@pytest.mark.parametrize("request_body", BAD, ids=lambda body: str(body)[:40])
def test_bad_fields_are_refused_by_name_in_both_encodings(request_body: dict[str, Any]) -> None:
    for payload in both(request_body):
        with pytest.raises(RequestError) as caught:
            decode_request(payload)
        assert caught.value.code is ErrorCode.INVALID_REQUEST and caught.value.status == 400
        fields = [name for name in request_body if name != "prompt"] or ["prompt"]
        assert any(name in caught.value.message for name in fields)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{",
        b"[]",
        b"nonsense",
        b"\xc1",
        b'{"prompt": "\xff"}',
        b'{"a":' * 5000,
        b"null",
        b"\x80\x00",
    ],
)
def test_what_is_no_object_is_refused(payload: bytes) -> None:
    with pytest.raises(RequestError):
        decode_request(payload)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "-1e999"])
def test_json_has_no_numbers_that_are_none(number: str) -> None:
    with pytest.raises(RequestError):
        decode_request(f'{{"prompt": "x", "temperature": {number}}}'.encode())


def test_case_30_a_nul_is_a_character_like_others() -> None:
    request = decode_request(json.dumps({"prompt": "Say RED.\0 No, BLUE."}).encode())
    assert request.prompt == "Say RED.\0 No, BLUE."


def test_a_frame_is_plain_in_both_encodings() -> None:
    frame = Frame(
        request_id="r",
        offset=2,
        text="é",
        token_ids=[7],
        finish_reason=FinishReason.LENGTH,
        usage=Usage(3, 3, 0),
    )
    plain = json.loads(encode_frame(frame, Encoding.JSON))
    assert plain == msgpack.unpackb(encode_frame(frame, Encoding.MSGPACK))
    assert plain["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "cached_tokens": 0}
    assert (plain["finish_reason"], plain["error"], plain["logprobs"]) == ("length", None, None)


def test_an_error_frame_names_its_code() -> None:
    body = ErrorBody(ErrorCode.NEVER_FITS, "why")
    frame = Frame(request_id="r", offset=0, finish_reason=FinishReason.ERROR, error=body)
    plain = json.loads(encode_frame(frame, Encoding.JSON))
    assert plain["error"] == {"code": "never_fits", "message": "why"}


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ErrorCode.INVALID_REQUEST, 400),
        (ErrorCode.MODEL_NOT_FOUND, 404),
        (ErrorCode.PAYLOAD_TOO_LARGE, 413),
        (ErrorCode.QUEUE_FULL, 429),
        (ErrorCode.NO_WORKER, 503),
        (ErrorCode.DEADLINE_EXCEEDED, 504),
    ],
)
def test_codes_have_the_status_that_clients_expect(code: ErrorCode, status: int) -> None:
    assert ERRORS[code].status == status
    assert RequestError(code, "x").status == status


def test_only_what_may_pass_later_is_called_retryable() -> None:
    retryable = {code for code, kind in ERRORS.items() if kind.retryable}
    assert {ErrorCode.QUEUE_FULL, ErrorCode.NO_WORKER, ErrorCode.DRAINING} <= retryable
    assert not {c for c in retryable if ERRORS[c].status in (400, 404, 409, 413)}

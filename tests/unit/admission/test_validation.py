from __future__ import annotations

import json
import math
from typing import Any

import msgpack
import pytest

from services.admission import validation
from services.admission.validation import ModelLimits
from services.contracts.errors import ErrorCode, RequestError
from services.contracts.public import GenerateRequest

LIMITS = ModelLimits(vocab_size=100, max_model_len=50, longest_token_bytes=4)
SEED = 7


def decode(**fields: Any) -> GenerateRequest:
    return validation.decode(json.dumps(fields).encode())


def refused(code: ErrorCode = ErrorCode.INVALID_REQUEST, **fields: Any) -> str:
    with pytest.raises(RequestError) as caught:
        validation.check(decode(**fields), LIMITS)
    assert caught.value.code is code
    return caught.value.message


def prepare(num_prompt_tokens: int = 10, **fields: Any) -> validation.Prepared:
    request = decode(prompt="hi", **fields)
    validation.check(request, LIMITS)
    return validation.prepare(request, num_prompt_tokens, LIMITS, seed=SEED, eos_token_ids=[2, 5])


def test_exactly_one_prompt() -> None:
    assert "none of them" in refused()
    assert "prompt and messages" in refused(prompt="a", messages=[{"role": "user"}])
    validation.check(decode(prompt="a"), LIMITS)
    validation.check(decode(prompt_token_ids=[99]), LIMITS)
    validation.check(decode(messages=[{"role": "user", "content": "a"}]), LIMITS)


@pytest.mark.parametrize("name", ["prompt", "prompt_token_ids", "messages"])
def test_case_29_empty_prompts_are_refused(name: str) -> None:
    value = "" if name == "prompt" else []
    assert refused(**{name: value}) == f"`{name}` may not be empty"


def test_case_29_a_prompt_of_no_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match="no tokens"):
        prepare(num_prompt_tokens=0)


@pytest.mark.parametrize("name", ["prompt_token_ids", "stop_token_ids"])
def test_token_ids_outside_the_vocabulary_are_refused(name: str) -> None:
    fields: dict[str, Any] = {"prompt": "a"} if name == "stop_token_ids" else {}
    assert f"`{name}` has token id 100" in refused(**fields, **{name: [1, 99, 100]})


def test_the_context_is_the_limit_and_the_numbers_are_named() -> None:
    assert prepare(49).max_tokens == 1
    assert prepare(10).max_tokens == 40
    assert prepare(10, max_tokens=40).max_tokens == 40
    with pytest.raises(RequestError, match="10 prompt tokens and max_tokens 41 make 51") as caught:
        prepare(10, max_tokens=41)
    assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    with pytest.raises(RequestError, match="has 50 tokens"):
        prepare(50)
    message = refused(ErrorCode.CONTEXT_LENGTH_EXCEEDED, prompt_token_ids=[1] * 51)
    assert "51 tokens" in message


def test_case_43_hopeless_text_is_refused_before_tokenising() -> None:
    validation.check(decode(prompt="x" * 200), LIMITS)
    assert "201 characters" in refused(ErrorCode.CONTEXT_LENGTH_EXCEEDED, prompt="x" * 201)
    long = [{"role": "user", "content": "x" * 101}] * 2
    assert "202 characters" in refused(ErrorCode.CONTEXT_LENGTH_EXCEEDED, messages=long)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"]
)
def test_numbers_that_are_none_are_refused(name: str, value: float) -> None:
    payload = msgpack.packb({"prompt": "a", name: value})
    with pytest.raises(RequestError, match=name) as caught:
        validation.check(validation.decode(payload), LIMITS)
    assert caught.value.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(("top_k", "expected"), [(-1, 0), (0, 0), (1, 1), (99, 99), (100, 0)])
def test_case_21_top_k_off_is_zero(top_k: int, expected: int) -> None:
    assert prepare(top_k=top_k).sampling.top_k == expected


def test_seed_stops_and_logprobs() -> None:
    assert prepare().sampling.seed == SEED
    assert prepare(seed=-1).sampling.seed == 2**64 - 1
    assert prepare(stop_token_ids=[9, 5]).stop_token_ids == [2, 5, 9]
    assert prepare(stop_token_ids=[9, 9], ignore_eos=True).stop_token_ids == [9]
    assert prepare(stop="x").stop_strings == ["x"]
    assert prepare(stop=[]).stop_strings == []
    assert prepare().sampling.num_logprobs == -1
    assert prepare(logprobs=0).sampling.num_logprobs == 0


@pytest.mark.parametrize("stop", [[""], "", ["ok", ""]])
def test_case_33_an_empty_stop_string_is_refused(stop: object) -> None:
    for payload in (
        json.dumps({"prompt": "a", "stop": stop}).encode(),
        msgpack.packb({"prompt": "a", "stop": stop}),
    ):
        with pytest.raises(RequestError, match="stop string may not be empty") as caught:
            validation.decode(payload)
        assert caught.value.status == 400


@pytest.mark.parametrize("stop", [None, []])
def test_case_33_no_stop_strings(stop: object) -> None:
    assert prepare(stop=stop).stop_strings == []


def test_roles_are_known_ones() -> None:
    message = refused(messages=[{"role": "user", "content": "a"}, {"role": "endoftext"}])
    assert message.startswith("`messages[1].role` is 'endoftext', not one of system,")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": ""}, "`stop`: a stop string may not be empty"),
        ({"stop": ["ok", ""]}, "`stop[1]`: a stop string may not be empty"),
        ({"stop": ["a"] * 17}, "`stop` must have at most 16 entries"),
        ({"stop": 5}, "`stop` must be text or a list or null, not an integer"),
        ({"tempurature": 1}, "unknown field `tempurature`; did you mean `temperature`?"),
        ({"zzz": 1}, "unknown field `zzz`"),
        ({"temperature": -1}, "`temperature` must be at least 0"),
        ({"top_p": 0}, "`top_p` must be greater than 0"),
        ({"top_p": 1.5}, "`top_p` must be at most 1"),
        ({"max_tokens": True}, "`max_tokens` must be an integer or null, not true or false"),
        ({"logprobs": 21}, "`logprobs` must be at most 20"),
        (
            {"request_id": "a b"},
            "`request_id` must be 1 to 64 characters of A-Z, a-z, 0-9, _ and -",
        ),
        ({"request_id": "a" * 65}, "`request_id` must have at most 64 characters"),
        ({"messages": [{}]}, "`messages[0]` has no field `role`, which is required"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]},
            "`messages[0].content[0].type` may not be 'image_url'",
        ),
    ],
)
def test_what_does_not_decode_is_said_in_plain_words(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        decode(**fields)
    assert caught.value.message == message
    assert caught.value.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize("payload", [b"", b"hello", b"[1]", b'{"prompt": ', b"\xff", b"\x93\x01"])
def test_what_is_no_request_is_refused(payload: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        validation.decode(payload)
    assert caught.value.code is ErrorCode.INVALID_REQUEST

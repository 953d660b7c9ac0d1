"""What a client reads when its request did not decode."""

from __future__ import annotations

import pytest

from services.contracts.errors import RequestError
from services.contracts.explain import explain
from services.contracts.public import GenerateRequest, decode_request

FIELDS = GenerateRequest.__struct_fields__


def _said(payload: bytes) -> str:
    with pytest.raises(RequestError) as caught:
        decode_request(payload)
    return explain(caught.value.message, FIELDS)


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (b'{"max_token": 1}', "unknown field `max_token`; did you mean `max_tokens`?"),
        (b'{"zzzzzz": 1}', "unknown field `zzzzzz`"),
        (b'{"max_tokens": "5"}', "`max_tokens` must be an integer or null, not text"),
        (b'{"max_tokens": 0}', "`max_tokens` must be at least 1"),
        (b'{"temperature": -1}', "`temperature` must be at least 0"),
        (b'{"top_p": 0}', "`top_p` must be greater than 0"),
        (b'{"stop": ["a", ""]}', "`stop[1]`: a stop string may not be empty"),
        (b'{"stop": ""}', "`stop`: a stop string may not be empty"),
        (b'{"messages": [{}]}', "`messages[0]` has no field `role`, which is required"),
        (
            b'{"request_id": "a.b"}',
            "`request_id` must be 1 to 64 characters of A-Z, a-z, 0-9, _ and -",
        ),
        (b"[]", "the request must be an object, not a list"),
    ],
)
def test_faults_in_plain_words(payload: bytes, text: str) -> None:
    assert _said(payload) == text


def test_a_field_of_another_object_gets_no_hint() -> None:
    said = _said(b'{"messages": [{"role": "u", "contents": "x"}]}')
    assert said == "unknown field `contents` in `messages[0]`"


def test_what_the_client_sent_is_not_echoed_at_length() -> None:
    said = _said(b'{"' + b"x" * 100_000 + b'": 1}')
    assert len(said) < 500

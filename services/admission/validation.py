"""Every check of a request that its decoding cannot make, in two moments.

`check` looks at the request alone, before anything costly is done with its text; `prepare` looks at
the tokens of the prompt and says what the scheduler is to be asked. Both raise RequestError only.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from services.contracts.errors import ErrorCode, RequestError
from services.contracts.explain import explain
from services.contracts.public import GenerateRequest, decode_request
from services.contracts.sampling import NO_LOGPROBS, SamplingParams, uint64

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
"""A template may put a role between the marks of a control token; so a role is one of these."""

_PROMPT_FIELDS: Final = ("prompt", "prompt_token_ids", "messages")
_PENALTIES: Final = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_NUMBERS: Final = ("temperature", "top_p", "min_p", *_PENALTIES)
_REQUEST_FIELDS: Final = tuple(field.name for field in msgspec.structs.fields(GenerateRequest))


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the served model allows. longest_token_bytes: of any token in the vocabulary."""

    vocab_size: int
    max_model_len: int
    longest_token_bytes: int

    @property
    def max_prompt_chars(self) -> int:
        """No longer text can fit: a character has at least one byte, a token at most so many."""
        return self.max_model_len * self.longest_token_bytes


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the scheduler is asked. stop_token_ids: sorted, with end-of-sequence unless ignored."""

    max_tokens: int
    sampling: SamplingParams
    stop_token_ids: list[int]
    stop_strings: list[str]


def decode(payload: bytes) -> GenerateRequest:
    """`payload` as a request; the RequestError says in plain words which field is wrong and how."""
    try:
        return decode_request(payload)
    except RequestError as error:
        raise RequestError(error.code, explain(error.message, _REQUEST_FIELDS)) from None


def check(request: GenerateRequest, limits: ModelLimits) -> None:
    """Refuse what can be refused without tokenising."""
    _check_prompt(request, limits)
    # Comparisons with NaN are false, so bounds alone would let it pass in some encodings.
    for name in _NUMBERS:
        if not math.isfinite(getattr(request, name)):
            raise _invalid(f"`{name}` must be a finite number")
    _check_token_ids("stop_token_ids", request.stop_token_ids or (), limits.vocab_size)


def prepare(
    request: GenerateRequest,
    num_prompt_tokens: int,
    limits: ModelLimits,
    *,
    seed: int,
    eos_token_ids: Iterable[int],
) -> Prepared:
    """Fit the request to its tokenised prompt. `seed`: for a request that gives none."""
    max_tokens = _max_tokens(request, num_prompt_tokens, limits.max_model_len)
    stop_token_ids = set(request.stop_token_ids or ())
    if not request.ignore_eos:
        stop_token_ids.update(eos_token_ids)
    sampling = SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=_top_k(request.top_k, limits.vocab_size),
        seed=uint64(seed if request.seed is None else request.seed),
        num_logprobs=NO_LOGPROBS if request.logprobs is None else request.logprobs,
        num_prompt_logprobs=(
            NO_LOGPROBS if request.prompt_logprobs is None else request.prompt_logprobs
        ),
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
    )
    return Prepared(max_tokens, sampling, sorted(stop_token_ids), request.stop_strings)


def _check_prompt(request: GenerateRequest, limits: ModelLimits) -> None:
    given = [name for name in _PROMPT_FIELDS if getattr(request, name) is not None]
    if len(given) != 1:
        found = " and ".join(given) if given else "none of them"
        raise _invalid(f"give exactly one of {', '.join(_PROMPT_FIELDS)}; the request has {found}")
    name = given[0]
    if not getattr(request, name):
        raise _invalid(f"`{name}` may not be empty")
    if request.prompt is not None:
        check_chars(len(request.prompt), limits)
    elif request.prompt_token_ids is not None:
        _check_token_ids(name, request.prompt_token_ids, limits.vocab_size)
        _max_tokens(request, len(request.prompt_token_ids), limits.max_model_len)
    else:
        _check_messages(request, limits)


def _check_messages(request: GenerateRequest, limits: ModelLimits) -> None:
    messages = request.messages or ()
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise _invalid(
                f"`messages[{index}].role` is {message.role[:32]!r}, not one of {', '.join(ROLES)}"
            )
    check_chars(sum(len(message.text) for message in messages), limits)


def check_chars(num_chars: int, limits: ModelLimits) -> None:
    """Refuse a text, also a rendered chat, that no tokenisation can fit into the context."""
    if num_chars > limits.max_prompt_chars:
        raise RequestError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"a prompt of {num_chars} characters cannot fit the model's context of "
            f"{limits.max_model_len} tokens",
        )


def _check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if not token_ids or (max(token_ids) < vocab_size and min(token_ids) >= 0):
        return
    wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
    raise _invalid(f"`{name}` has token id {wrong}, outside the vocabulary 0 .. {vocab_size - 1}")


def _max_tokens(request: GenerateRequest, num_prompt_tokens: int, max_model_len: int) -> int:
    """Output tokens at most; all the room that is left where the request names no number."""
    if num_prompt_tokens < 1:
        raise _invalid("the prompt has no tokens")
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise RequestError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"the prompt has {num_prompt_tokens} tokens; the model's context of {max_model_len} "
            "leaves no room for an answer",
        )
    if request.max_tokens is not None and request.max_tokens > room:
        raise RequestError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"{num_prompt_tokens} prompt tokens and max_tokens {request.max_tokens} make "
            f"{num_prompt_tokens + request.max_tokens}, over the model's context of "
            f"{max_model_len}; max_tokens may be at most {room}",
        )
    return room if request.max_tokens is None else request.max_tokens


def _top_k(top_k: int, vocab_size: int) -> int:
    """0 for off, which -1, 0 and anything not below the vocabulary mean."""
    return top_k if 0 < top_k < vocab_size else 0


def _invalid(message: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_REQUEST, message)

"""From an OpenAI body to what is asked of the mesh.

Invariants: what comes out passes the checks of the public interface; a field that would change the
answer and is not supported is refused by name unless it has its neutral value; counts are bounded
before anything is multiplied.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from services.contracts.explain import explain
from services.contracts.limits import MAX_LOGPROBS
from services.contracts.public import GenerateRequest
from services.gateway.fan_out import Fields, child_seed
from services.gateway.refusals import invalid

MAX_CHOICES: Final = 16
MAX_GENERATIONS: Final = 64
"""Of one HTTP request: choices times prompts."""

COMPLETION_MAX_TOKENS: Final = 16
"""Where /v1/completions names none, as OpenAI's does; a chat gets the room that is left."""

PASSED: Final = (
    *("max_tokens", "temperature", "top_p", "seed", "stop"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "min_p"),
    *("top_k", "ignore_eos", "stop_token_ids", "include_stop_str_in_output"),
    *("cache_salt", "priority", "prompt_logprobs", "deadline_ms"),
)
"""Fields that mean the same in the public interface; vLLM's and our own among them."""

IGNORED: Final = frozenset(
    {
        *("metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier"),
        *("service_tier", "store", "user", "verbosity"),
    }
)
"""Fields that change nothing in an answer of ours."""

NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "add_generation_prompt": (None, True),
    "audio": (None,),
    "continue_final_message": (None, False),
    "echo": (None, False),
    "function_call": (None, "none"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "min_tokens": (None, 0),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "web_search_options": (None,),
}
"""Fields that are not supported, with the values that ask for nothing."""

_MESSAGE_EXTRAS: Final = ("annotations", "audio", "function_call", "reasoning_content", "refusal")
"""Keys of an assistant message as our answers and OpenAI's carry it; empty ones may come back."""


class _StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False


class _Common(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = 1
    stream: bool | None = False
    stream_options: _StreamOptions | None = None


class _Completion(_Common, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: int | None = None


class _Chat(_Common, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    max_completion_tokens: Any = None


@dataclass(frozen=True, slots=True)
class Ask:
    """What one HTTP request asks. children: fields of each generation, the first prompt's first."""

    model: str
    children: list[Fields]
    num_choices: int
    stream: bool
    include_usage: bool
    num_logprobs: int | None


B = TypeVar("B", bound=_Common)


def completion(body: dict[str, Any]) -> Ask:
    """`body` of /v1/completions. Raises Refusal (400)."""
    parsed = _parse(body, _Completion)
    num_choices = parsed.n or 1
    if parsed.best_of not in (None, 1, num_choices):
        raise invalid("`best_of` is not supported: it may only be 1 or `n`")
    prompts = _prompts(parsed.prompt)
    if num_choices * len(prompts) > MAX_GENERATIONS:
        raise invalid(
            f"`n` {num_choices} times {len(prompts)} prompts is more than {MAX_GENERATIONS}"
        )
    fields = _passed(body)
    fields.setdefault("max_tokens", COMPLETION_MAX_TOKENS)
    if parsed.logprobs is not None:
        fields["logprobs"] = parsed.logprobs
    return _ask(parsed, [fields | prompt for prompt in prompts], parsed.logprobs)


def chat(body: dict[str, Any]) -> Ask:
    """`body` of /v1/chat/completions. Raises Refusal (400)."""
    parsed = _parse(body, _Chat)
    if not parsed.messages:
        raise invalid("`messages` may not be empty")
    if parsed.top_logprobs is not None and not parsed.logprobs:
        raise invalid("`top_logprobs` needs `logprobs` to be true")
    fields = _passed(body)
    if parsed.max_completion_tokens is not None:
        fields["max_tokens"] = parsed.max_completion_tokens
    fields["messages"] = [_message(message) for message in parsed.messages]
    num_logprobs = (parsed.top_logprobs or 0) if parsed.logprobs else None
    if num_logprobs is not None:
        fields["logprobs"] = num_logprobs
    return _ask(parsed, [fields], num_logprobs)


def with_request_ids(ask: Ask, request_id: str) -> Ask:
    """`ask` whose generations are named after the HTTP request."""
    children = [
        child | {"request_id": f"{request_id}-{index}"} for index, child in enumerate(ask.children)
    ]
    return replace(ask, children=children)


def _parse(body: dict[str, Any], kind: type[B]) -> B:
    own = [field.name for field in msgspec.structs.fields(kind)]
    _check_names(body, own)
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise invalid(explain(str(error), own)) from None


def _check_names(body: dict[str, Any], own: list[str]) -> None:
    for name, value in body.items():
        if name in own or name in PASSED or name in IGNORED:
            continue
        if name not in NEUTRAL:
            known = [*own, *PASSED, *NEUTRAL, *IGNORED]
            raise invalid(explain(f"Object contains unknown field `{name}`", known))
        if value not in NEUTRAL[name]:
            raise invalid(f"`{name}` is not supported; leave it out")


def _passed(body: dict[str, Any]) -> Fields:
    """The fields of the public interface; null means the same as nothing."""
    return {name: body[name] for name in PASSED if body.get(name) is not None}


def _prompts(prompt: str | list[str | int | list[int]]) -> list[Fields]:
    """Each prompt as `{"prompt": ...}` or `{"prompt_token_ids": ...}`."""
    if isinstance(prompt, str):
        return [{"prompt": prompt}]
    if not prompt:
        raise invalid("`prompt` may not be empty")
    kinds = {type(item) for item in prompt}
    if len(kinds) != 1:
        raise invalid("`prompt` must be text, token ids, or a list of only one of them")
    if kinds == {int}:
        return [{"prompt_token_ids": prompt}]
    name = "prompt" if kinds == {str} else "prompt_token_ids"
    if not all(prompt):
        raise invalid("`prompt` may not have an empty entry")
    return [{name: item} for item in prompt]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what only some servers write into it."""
    extras = [name for name in _MESSAGE_EXTRAS if name in message and not message[name]]
    return {name: value for name, value in message.items() if name not in extras}


def _ask(parsed: _Common, prompts: list[Fields], num_logprobs: int | None) -> Ask:
    stream = bool(parsed.stream)
    if parsed.stream_options is not None and not stream:
        raise invalid("`stream_options` needs `stream` to be true")
    if stream and "prompt_logprobs" in prompts[0]:
        raise invalid("`prompt_logprobs` cannot be streamed")
    _check_public(prompts)
    num_choices = parsed.n or 1
    return Ask(
        model=parsed.model,
        children=[_child(fields, index) for fields in prompts for index in range(num_choices)],
        num_choices=num_choices,
        stream=stream,
        include_usage=parsed.stream_options is not None and parsed.stream_options.include_usage,
        num_logprobs=num_logprobs,
    )


def _check_public(prompts: Iterable[Fields]) -> None:
    names = [field.name for field in msgspec.structs.fields(GenerateRequest)]
    for fields in prompts:
        try:
            msgspec.convert(fields, GenerateRequest)
        except msgspec.ValidationError as error:
            raise invalid(explain(str(error), names)) from None


def _child(fields: Fields, index: int) -> Fields:
    if "seed" not in fields:
        return fields
    return fields | {"seed": child_seed(fields["seed"], index)}

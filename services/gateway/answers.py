"""The bodies and chunks of the two OpenAI routes.

Invariant: one JSON encoding per chunk; log-probabilities have exactly one entry per token.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, Protocol, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from services.client import Frame

_REPLACEMENT: Final = "\ufffd"
encode = msgspec.json.Encoder().encode


class CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Lists of equal length; `text_offset` counts characters from the start of the answer."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]] | None


class ChatTopLogprob(msgspec.Struct, frozen=True):
    """`bytes`: UTF-8 of the token, null where the token is only a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None = None


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET


AnyChoice: TypeAlias = CompletionChoice | ChatChunkChoice | ChatChoice


class Answer(msgspec.Struct, frozen=True):
    """A whole answer or a chunk of one; `created` in seconds since 1970."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[AnyChoice]
    usage: Usage | UnsetType = UNSET


class Choice:
    """One choice as it grows. `num_chars`: of the tokens so far, for `text_offset`."""

    __slots__ = ("finish_reason", "index", "logprobs", "num_chars", "prompt_logprobs", "texts")

    def __init__(self, index: int) -> None:
        self.index = index
        self.texts: list[str] = []
        self.logprobs: list[Frame] = []
        self.prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET
        self.finish_reason: str | None = None
        self.num_chars = 0

    def add(self, frame: Frame) -> None:
        self.texts.append(frame["text"])
        self.logprobs += frame["logprobs"] or ()
        if frame["prompt_logprobs"] is not None:
            self.prompt_logprobs = [_prompt_entry(entry) for entry in frame["prompt_logprobs"]]
        self.finish_reason = frame["finish_reason"]

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Dialect(Protocol):
    """How one route writes its answers. `num_logprobs`: None where none were asked for."""

    prefix: str
    whole: str
    chunk: str

    def opening(self, index: int) -> CompletionChoice | ChatChunkChoice | None: ...

    def part(
        self, choice: Choice, frame: Frame, num_logprobs: int | None
    ) -> CompletionChoice | ChatChunkChoice: ...

    def complete(
        self, choice: Choice, num_logprobs: int | None
    ) -> CompletionChoice | ChatChoice: ...


class CompletionDialect:
    """/v1/completions."""

    prefix = "cmpl-"
    whole = chunk = "text_completion"

    def opening(self, index: int) -> None:
        return None

    def part(self, choice: Choice, frame: Frame, num_logprobs: int | None) -> CompletionChoice:
        logprobs = _completion_logprobs(choice, frame["logprobs"] or [], num_logprobs)
        return CompletionChoice(choice.index, frame["text"], logprobs, frame["finish_reason"])

    def complete(self, choice: Choice, num_logprobs: int | None) -> CompletionChoice:
        logprobs = _completion_logprobs(choice, choice.logprobs, num_logprobs)
        return CompletionChoice(
            choice.index, choice.text, logprobs, choice.finish_reason, choice.prompt_logprobs
        )


class ChatDialect:
    """/v1/chat/completions. A stream begins with the role of every choice."""

    prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def opening(self, index: int) -> ChatChunkChoice:
        return ChatChunkChoice(index, ChatDelta("assistant", ""))

    def part(self, choice: Choice, frame: Frame, num_logprobs: int | None) -> ChatChunkChoice:
        delta = ChatDelta(content=frame["text"]) if frame["text"] else ChatDelta()
        logprobs = _chat_logprobs(frame["logprobs"] or [], num_logprobs)
        return ChatChunkChoice(choice.index, delta, logprobs, frame["finish_reason"])

    def complete(self, choice: Choice, num_logprobs: int | None) -> ChatChoice:
        return ChatChoice(
            choice.index,
            ChatMessage(choice.text),
            _chat_logprobs(choice.logprobs, num_logprobs),
            choice.finish_reason,
            choice.prompt_logprobs,
        )


def total_usage(usages: dict[int, Frame], num_choices: int) -> Usage:
    """Of all choices, by their index; the prompt of several choices counts once."""
    firsts = [usage for index, usage in usages.items() if index % num_choices == 0]
    prompt = sum(usage["prompt_tokens"] for usage in firsts)
    completion = sum(usage["completion_tokens"] for usage in usages.values())
    cached = sum(usage["cached_tokens"] for usage in firsts)
    return Usage(prompt, completion, prompt + completion, CachedTokens(cached))


def _completion_logprobs(
    choice: Choice, entries: list[Frame], num_logprobs: int | None
) -> CompletionLogprobs | None:
    if num_logprobs is None:
        return None
    offsets = []
    for entry in entries:
        offsets.append(choice.num_chars)
        choice.num_chars += len(entry["token"])
    return CompletionLogprobs(
        offsets,
        [entry["logprob"] for entry in entries],
        [entry["token"] for entry in entries],
        [_top(entry) for entry in entries] if num_logprobs else None,
    )


def _top(entry: Frame) -> dict[str, float]:
    """The likeliest tokens and the chosen one."""
    likeliest = {top["token"]: top["logprob"] for top in entry["top"]}
    return likeliest | {entry["token"]: entry["logprob"]}


def _chat_logprobs(entries: list[Frame], num_logprobs: int | None) -> ChatLogprobs | None:
    if num_logprobs is None:
        return None
    return ChatLogprobs(
        [
            ChatLogprob(
                entry["token"],
                entry["logprob"],
                _utf8(entry["token"]),
                [
                    ChatTopLogprob(top["token"], top["logprob"], _utf8(top["token"]))
                    for top in entry["top"]
                ],
            )
            for entry in entries
        ]
    )


def _utf8(token: str) -> list[int] | None:
    return None if _REPLACEMENT in token else list(token.encode())


def _prompt_entry(entry: Frame | None) -> dict[str, Any] | None:
    """By token id as text, as vLLM writes it."""
    if entry is None:
        return None
    return {
        str(item["token_id"]): {"logprob": item["logprob"], "decoded_token": item["token"]}
        for item in (*entry["top"], entry)
    }

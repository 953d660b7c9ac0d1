"""Renders the messages of a chat through the model's own template.

Invariants: nothing that a client writes becomes a control token: where its text looks like one, a
single private-use character stands for it while the template runs, and the piece comes back marked
as content; otherwise the result is the plain rendering, byte for byte. Templates come from model
files only; they run with a bounded number of instructions and see no clock, file or environment.

Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import minijinja
import msgspec

from services.contracts.errors import ErrorCode, RequestError, StreetcarError
from services.contracts.public import ChatMessage, ToolCall

FUEL: Final = 2_000_000
"""Instructions of one rendering. Templates of known models take under 100 a message."""

MAX_DETAIL_CHARS: Final = 300
_PRIVATE_USE: Final = range(0xF0000, 0xFFFFE)
_NAME: Final = "chat"


class TemplateError(StreetcarError):
    """The model's chat template does not compile; said at the start of a service."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of the prompt's text. `is_content`: a client wrote it, and it names a control token."""

    text: str
    is_content: bool


class ChatTemplate:
    """One model's template. Rendering is thread-safe: it keeps nothing between calls."""

    def __init__(
        self,
        source: str,
        *,
        control_texts: Iterable[str] = (),
        bos_token: str = "",
        eos_token: str = "",
    ) -> None:
        """Raises TemplateError where `source` does not compile."""
        # The reference passes `tools` and `documents` always, and templates compare them with none.
        self._given = {
            "bos_token": bos_token,
            "eos_token": eos_token,
            "tools": None,
            "documents": None,
        }
        self._control = control_pattern(control_texts)
        self._environment = minijinja.Environment(
            fuel=FUEL,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_escape_callback=lambda _name: None,
        )
        self._environment.add_global("raise_exception", _raise_exception)
        self._environment.add_filter("tojson", _to_json)
        try:
            self._environment.add_template(_NAME, source)
        except minijinja.TemplateError as error:
            raise TemplateError(f"the chat template does not compile: {_detail(error)}") from None

    def render(
        self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True
    ) -> list[Piece]:
        """The prompt's text in order. Raises RequestError with the template's own message."""
        if not messages:
            raise RequestError(ErrorCode.INVALID_REQUEST, "`messages` may not be empty")
        mask = _Mask(self._control, messages)
        values = [_template_value(message, mask) for message in messages]
        try:
            text = self._environment.render_template(
                _NAME,
                messages=values,
                add_generation_prompt=add_generation_prompt,
                **self._given,
            )
        except _Refused as refusal:
            message = f"the model's chat template refuses the messages: {mask.plain(str(refusal))}"
            raise RequestError(ErrorCode.INVALID_REQUEST, message) from None
        except minijinja.TemplateError as error:
            message = f"the model's chat template cannot render the messages: {_detail(error)}"
            raise RequestError(ErrorCode.INVALID_REQUEST, mask.plain(message)) from None
        return list(mask.pieces(text))


def control_pattern(control_texts: Iterable[str]) -> re.Pattern[str] | None:
    """Matches what a tokenizer would take for a control token, the longest first; None: nothing."""
    longest_first = sorted(filter(None, control_texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


class _Refused(Exception):
    """`raise_exception` was called by the template."""


class _Mask:
    """Swaps control-token text in what a client wrote for single characters, and back.

    One character per distinct text, so that a template that trims or slices cannot cut it in two;
    characters that the client itself uses are not taken.
    """

    def __init__(self, pattern: re.Pattern[str] | None, messages: Sequence[ChatMessage]) -> None:
        self._pattern = pattern
        self._marks: dict[str, str] = {}
        self._texts: dict[str, str] = {}
        self._messages = messages
        self._free: Iterator[str] | None = None

    def text(self, text: str) -> str:
        if self._pattern is None or self._pattern.search(text) is None:
            return text
        return self._pattern.sub(self._mark, text)

    def value(self, value: object) -> object:
        """`value` of JSON types with every string in it masked, keys too."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            return {self.text(key): self.value(item) for key, item in value.items()}
        return value

    def plain(self, text: str) -> str:
        return "".join(piece.text for piece in self.pieces(text))

    def pieces(self, text: str) -> Iterator[Piece]:
        if not self._texts:
            yield Piece(text, False)
            return
        for part in re.split(f"([{''.join(self._texts)}])", text):
            if part:
                yield Piece(self._texts.get(part, part), part in self._texts)

    def _mark(self, found: re.Match[str]) -> str:
        text = found[0]
        if text not in self._marks:
            if self._free is None:
                self._free = self._unused_characters()
            mark = next(self._free, "")
            if not mark:
                message = "the messages use every private-use character there is"
                raise RequestError(ErrorCode.INVALID_REQUEST, message)
            self._marks[text] = mark
            self._texts[mark] = text
        return self._marks[text]

    def _unused_characters(self) -> Iterator[str]:
        used = set(msgspec.json.encode(self._messages).decode())
        return (chr(code) for code in _PRIVATE_USE if chr(code) not in used)


def _template_value(message: ChatMessage, mask: _Mask) -> Mapping[str, object]:
    """A message as templates expect it: text content, no absent fields, no empty `tool_calls`."""
    value: dict[str, object] = {"role": message.role, "content": mask.text(message.text)}
    if message.name is not None:
        value["name"] = mask.text(message.name)
    if message.tool_call_id is not None:
        value["tool_call_id"] = mask.text(message.tool_call_id)
    if message.tool_calls:
        value["tool_calls"] = [_call_value(call, mask) for call in message.tool_calls]
    return value


def _call_value(call: ToolCall, mask: _Mask) -> Mapping[str, object]:
    function = {
        "name": mask.text(call.function.name),
        "arguments": mask.value(_arguments(call.function.arguments)),
    }
    return {"id": mask.text(call.id), "type": call.type, "function": function}


def _arguments(text: str) -> object:
    """Templates expect the object that the client sends as JSON text; other text stays text."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _raise_exception(message: object) -> None:
    raise _Refused(str(message)[:MAX_DETAIL_CHARS])


def _to_json(value: Any, indent: int | None = None) -> str:
    """As the reference templates mean it: no escapes for HTML, letters as they are."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _detail(error: minijinja.TemplateError) -> str:
    """The first line; the rest quotes the template and its variables."""
    return (str(error).splitlines() or ["unknown error"])[0][:MAX_DETAIL_CHARS]

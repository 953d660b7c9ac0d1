"""What clients publish and receive: the Generate request and its frames, as JSON or MessagePack.

The encoding is told by the first byte and answered in kind: JSON objects start with `{`,
MessagePack maps never do.

Pure.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from . import limits
from .errors import ErrorCode, RequestError
from .ids import Id
from .sampling import Penalty


class Encoding(StrEnum):
    JSON = "json"
    MSGPACK = "msgpack"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class _Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


_Text = Annotated[str, Meta(max_length=limits.MAX_PROMPT_CHARS)]
_Name = Annotated[str, Meta(max_length=limits.MAX_NAME_CHARS)]
_StopString = Annotated[str, Meta(min_length=1, max_length=limits.MAX_STOP_CHARS)]
_TokenId = Annotated[int, Meta(ge=0, le=limits.MAX_TOKEN_ID)]
_Logprobs = Annotated[int, Meta(ge=0, le=limits.MAX_LOGPROBS)]


class TextPart(_Request, frozen=True):
    text: _Text
    type: Literal["text"] = "text"


class FunctionCall(_Request, frozen=True):
    name: _Name
    arguments: _Text = ""


class ToolCall(_Request, frozen=True):
    function: FunctionCall
    id: _Name = ""
    type: Literal["function"] = "function"


class ChatMessage(_Request, frozen=True):
    """One turn. `content` is text, parts of text, or null for an assistant that only called
    tools.
    """

    role: _Name
    content: _Text | Annotated[list[TextPart], Meta(max_length=limits.MAX_CONTENT_PARTS)] | None = (
        None
    )
    name: _Name | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=limits.MAX_CONTENT_PARTS)] | None = None
    tool_call_id: _Name | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content or ())


class GenerateRequest(_Request, frozen=True):
    """A request on `generate.<model>`. Exactly one of `prompt`, `prompt_token_ids`, `messages`.

    max_tokens: new tokens at most; absent means all the room that the model length leaves.
    top_k: -1, 0 and anything not below the vocabulary mean off.
    min_p, repetition_penalty, presence_penalty, frequency_penalty: as in `SamplingParams`.
    seed: drawn by admission where absent; who may retry draws it, so that the retry is the same
    request.
    priority: lower is more urgent. deadline_ms: from arrival; the request then ends with
    `deadline_exceeded`.
    retry: the client has sent this `request_id` before and saw no frame.
    """

    prompt: _Text | None = None
    prompt_token_ids: (
        Annotated[list[_TokenId], Meta(max_length=limits.MAX_PROMPT_TOKENS)] | None
    ) = None
    messages: Annotated[list[ChatMessage], Meta(max_length=limits.MAX_MESSAGES)] | None = None
    request_id: Id | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=limits.MAX_OUTPUT_TOKENS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=limits.MAX_TEMPERATURE)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=limits.MAX_TOKEN_ID)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=limits.MAX_REPETITION_PENALTY)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    seed: Annotated[int, Meta(ge=-limits.MAX_SEED - 1, le=limits.MAX_SEED)] | None = None
    stop: (
        Annotated[str, Meta(min_length=1, max_length=limits.MAX_STOP_CHARS)]
        | Annotated[list[_StopString], Meta(max_length=limits.MAX_STOP_STRINGS)]
        | None
    ) = None
    include_stop_str_in_output: bool = False
    stop_token_ids: Annotated[list[_TokenId], Meta(max_length=limits.MAX_STOP_TOKEN_IDS)] | None = (
        None
    )
    ignore_eos: bool = False
    logprobs: _Logprobs | None = None
    prompt_logprobs: _Logprobs | None = None
    stream: bool = True
    cache_salt: Annotated[str, Meta(max_length=limits.MAX_CACHE_SALT_CHARS)] = ""
    priority: Annotated[int, Meta(ge=-limits.MAX_PRIORITY, le=limits.MAX_PRIORITY)] = 0
    deadline_ms: Annotated[int, Meta(ge=1, le=limits.MAX_DEADLINE_MS)] | None = None
    retry: bool = False

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())


class ResumeRequest(_Request, frozen=True):
    """On `resume.<request_id>`: show again from output token `offset` on."""

    offset: Annotated[int, Meta(ge=0, le=limits.MAX_OUTPUT_TOKENS)] = 0


class TopLogprob(msgspec.Struct, frozen=True):
    token_id: int
    token: str
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log-probability of one token under the model's own distribution (before temperature)."""

    token_id: int
    token: str
    logprob: float
    top: list[TopLogprob] = []


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request; `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class ErrorBody(msgspec.Struct, frozen=True):
    code: ErrorCode
    message: str


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """One message on the reply inbox.

    offset: tokens before this frame; a client drops what it already has.
    finish_reason: null until the last frame, which carries `usage`, or `error`.
    prompt_logprobs: on the first frame of a request that asked; one entry per prompt token, the
    first null.
    """

    request_id: str
    offset: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    error: ErrorBody | None = None


_request_json = msgspec.json.Decoder(GenerateRequest)
_request_msgpack = msgspec.msgpack.Decoder(GenerateRequest)
_frame_json = msgspec.json.Encoder()
_frame_msgpack = msgspec.msgpack.Encoder()

_JSON_STARTS = b'{[" \t\r\n'


def encoding_of(payload: bytes) -> Encoding:
    """JSON where the first byte starts a JSON text, else MessagePack."""
    return Encoding.JSON if payload[:1] in {bytes([b]) for b in _JSON_STARTS} else Encoding.MSGPACK


def decode_request(payload: bytes) -> GenerateRequest:
    """Raises RequestError(INVALID_REQUEST) that names the field and the fault."""
    decoder = _request_json if encoding_of(payload) is Encoding.JSON else _request_msgpack
    try:
        return decoder.decode(payload)
    except msgspec.ValidationError as error:
        raise RequestError(ErrorCode.INVALID_REQUEST, str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"the payload is neither a JSON nor a MessagePack object: {error}"
        raise RequestError(ErrorCode.INVALID_REQUEST, message) from None


_resume_json = msgspec.json.Decoder(ResumeRequest)
_resume_msgpack = msgspec.msgpack.Decoder(ResumeRequest)


def decode_resume(payload: bytes) -> ResumeRequest:
    """An empty payload asks for everything. Raises RequestError(INVALID_REQUEST)."""
    if not payload:
        return ResumeRequest()
    is_json = encoding_of(payload) is Encoding.JSON
    try:
        return (_resume_json if is_json else _resume_msgpack).decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(ErrorCode.INVALID_REQUEST, str(error)) from None


class _Named(msgspec.Struct, frozen=True):
    request_id: Id


_named_json = msgspec.json.Decoder(_Named)
_named_msgpack = msgspec.msgpack.Decoder(_Named)


def request_id_of(payload: bytes) -> str:
    """The id of a request that may be wrong otherwise, so that its error frame can name it; else
    "".
    """
    decoder = _named_json if encoding_of(payload) is Encoding.JSON else _named_msgpack
    try:
        return decoder.decode(payload).request_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


def encode_frame(frame: Frame, encoding: Encoding) -> bytes:
    encoder = _frame_json if encoding is Encoding.JSON else _frame_msgpack
    return encoder.encode(frame)

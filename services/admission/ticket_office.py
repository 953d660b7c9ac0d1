"""From a decoded request to a ticket: checked against the model's limits, tokenised, checked again.

Invariants: what the limits refuse never reaches the core; long texts are tokenised in a thread, so
that the bus always answers; how many wait for a thread, or for an engine's first worker, is
bounded.

Shell.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from services.contracts.errors import ErrorCode, RequestError
from services.contracts.ids import is_id
from services.contracts.public import Encoding, GenerateRequest

from .engines import ABSENCE_NS, EngineDirectory
from .model_text import ModelText
from .open_request import Ticket
from .validation import ModelLimits, check, prepare

MAX_TOKENISING: Final = 256
# Below this, a thread costs more than the tokenising.
INLINE_CHARS: Final = 4096
# Requests that came before an engine had its first worker, and how often each looks for it.
MAX_EARLY: Final = 1024
EARLY_LOOK_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Sender:
    """Whose request it is, and where its frames go."""

    request_id: str
    reply: str
    encoding: Encoding
    traceparent: str


class TicketOffice:
    """`engines`: the core's, to read: what they can serve is what a request may ask for."""

    def __init__(self, text: ModelText, engines: EngineDirectory) -> None:
        self._text = text
        self._engines = engines
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="tokenise")
        self._num_tokenising = 0
        self._num_early = 0

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def ticket(self, request: GenerateRequest, model: str, sender: Sender) -> Ticket:
        """Raises RequestError."""
        self._check_model(model)
        limits = await self._limits(model)
        check(request, limits)
        prompt = await self._tokenise(request)
        prepared = prepare(
            request,
            len(prompt),
            limits,
            seed=secrets.randbits(63),
            eos_token_ids=self._text.tokenizer.eos_token_ids,
        )
        return Ticket(
            request_id=sender.request_id,
            model=model,
            reply=sender.reply,
            encoding=sender.encoding,
            prompt_token_ids=prompt,
            max_tokens=prepared.max_tokens,
            sampling=prepared.sampling,
            stop_token_ids=prepared.stop_token_ids,
            stop_strings=prepared.stop_strings,
            include_stop=request.include_stop_str_in_output,
            stream=request.stream,
            salt=request.cache_salt.encode()[:64],
            priority=request.priority,
            deadline_ms=request.deadline_ms or 0,
            retry=request.retry,
            traceparent=sender.traceparent,
        )

    def _check_model(self, model: str) -> None:
        if model != self._text.name:
            shown = model[:64] if is_id(model[:64]) else repr(model[:64])
            raise RequestError(
                ErrorCode.MODEL_NOT_FOUND,
                f"model {shown} is not served here; known: {self._text.name}",
            )

    async def _limits(self, model: str) -> ModelLimits:
        """Of an engine that is there, or soon will be. Raises RequestError."""
        engine = self._engines.expect(model, time.monotonic_ns())
        give_up_ns = time.monotonic_ns() + ABSENCE_NS
        while engine is not None and not engine.max_model_len:
            # Its first worker is still to come.
            if time.monotonic_ns() > give_up_ns or self._num_early >= MAX_EARLY:
                engine = None
                break
            self._num_early += 1
            await asyncio.sleep(EARLY_LOOK_S)
            self._num_early -= 1
            engine = self._engines.expect(model, time.monotonic_ns())
        if engine is None:
            raise RequestError(ErrorCode.NO_WORKER, f"no worker serves {model} at this moment")
        tokenizer = self._text.tokenizer
        return ModelLimits(
            vocab_size=tokenizer.vocab_size,
            max_model_len=engine.max_model_len,
            longest_token_bytes=tokenizer.longest_token_bytes,
        )

    async def _tokenise(self, request: GenerateRequest) -> list[int]:
        messages = request.messages or ()
        num_chars = len(request.prompt or "") + sum(len(message.text) for message in messages)
        if num_chars <= INLINE_CHARS:
            return list(self._text.prompt_token_ids(request))
        if self._num_tokenising >= MAX_TOKENISING:
            raise RequestError(
                ErrorCode.QUEUE_FULL, f"{MAX_TOKENISING} long prompts are being tokenised already"
            )
        self._num_tokenising += 1
        try:
            loop = asyncio.get_running_loop()
            work = self._text.prompt_token_ids
            return list(await loop.run_in_executor(self._threads, work, request))
        finally:
            self._num_tokenising -= 1

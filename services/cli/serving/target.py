"""An OpenAI-compatible server that is measured: one streamed completion, as its client sees it.

Invariant: an answer is timed from before its request is written to its last text; parsing costs
every server the same.

Shell: HTTP.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from services.runtime.problem import Problem

from .figures import Answer
from .workload import Job

if TYPE_CHECKING:
    from aiohttp import ClientSession

ANSWER_TIMEOUT_S: Final = 1800.0
MAX_ERROR_CHARS: Final = 200
_DATA: Final = b"data: "
_DONE: Final = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Target:
    """`url` without `/v1`; `extra` goes into every request body."""

    name: str
    url: str
    model: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self, job: Job) -> dict[str, Any]:
        """Greedy, to the given length whatever the model says, one event for each piece of text."""
        return {
            "model": self.model,
            "prompt": job.prompt,
            "max_tokens": job.max_tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }


@asynccontextmanager
async def http_session() -> AsyncIterator[ClientSession]:
    """One connection for each request, as users who know nothing of each other make them."""
    try:
        import aiohttp
    except ImportError:
        raise Problem(
            "E407",
            "A package is missing",
            cause="`bench serve` speaks HTTP through aiohttp, which is not installed",
            fix="pip install 'streetcar[bench]'",
        ) from None
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        yield session


async def first_model(session: ClientSession, url: str) -> str:
    """The first model that the server lists. Raises Problem where it does not answer."""
    import aiohttp

    try:
        async with session.get(f"{url}/v1/models") as response:
            listed = await response.json(content_type=None)
        return str(listed["data"][0]["id"])
    except (aiohttp.ClientError, OSError, KeyError, IndexError, TypeError, ValueError) as error:
        raise Problem(
            "E408",
            "The server does not answer",
            cause=f"GET {url}/v1/models: {type(error).__name__} {error}",
            fix="check --url; it is without /v1",
        ) from error


async def complete(session: ClientSession, target: Target, job: Job) -> Answer:
    """One streamed completion. What fails is in `Answer.error`; nothing is raised for it."""
    import aiohttp

    answer = Answer(started=time.monotonic())
    try:
        url = f"{target.url}/v1/completions"
        async with session.post(url, json=target.body(job)) as response:
            if response.status != 200:
                answer.error = f"HTTP {response.status}"
                return answer
            async for line in response.content:
                _take(answer, line)
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
        answer.error = type(error).__name__
    if not answer.error and not answer.texts:
        answer.error = "no text"
    return answer


def _take(answer: Answer, line: bytes) -> None:
    """One line of the event stream."""
    if not line.startswith(_DATA) or line.startswith(_DONE, len(_DATA)):
        return
    event = json.loads(line[len(_DATA) :])
    if error := event.get("error"):
        answer.error = str(error.get("code") or error.get("type") or "error")[:MAX_ERROR_CHARS]
    if event.get("choices") and event["choices"][0].get("text"):
        answer.texts.append(time.monotonic())
    if usage := event.get("usage"):
        with contextlib.suppress(KeyError, TypeError):
            answer.prompt_tokens = int(usage["prompt_tokens"])
            answer.completion_tokens = int(usage["completion_tokens"])

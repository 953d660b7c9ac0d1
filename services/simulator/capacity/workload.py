"""Who asks for what, and when: the requests of a simulation.

Invariant: the same arguments give the same requests.

Pure: but for `read_trace`, which parses text that the caller has read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np

from services.contracts.errors import StreetcarError
from services.contracts.limits import MAX_OUTPUT_TOKENS, MAX_PROMPT_TOKENS

_MS_NS: Final = 1_000_000
MAX_REQUESTS: Final = 1_000_000

_MIN_TOKENS: Final = 4

_LCG_MULTIPLIER: Final = 6364136223846793005
_LCG_INCREMENT: Final = 1442695040888963407
_LCG_MASK: Final = 2**64 - 1


class TraceError(StreetcarError):
    """A recorded trace that cannot be read."""


class Request(NamedTuple):
    """arrival_ns: on the simulation's clock, which starts at 0."""

    arrival_ns: int
    num_prompt_tokens: int
    num_output_tokens: int


class Lengths(NamedTuple):
    num_prompt_tokens: int
    num_output_tokens: int


# ---- lengths


def fixed(count: int, num_prompt_tokens: int, num_output_tokens: int) -> list[Lengths]:
    return [Lengths(num_prompt_tokens, num_output_tokens)] * count


def deep_dive(count: int) -> list[Lengths]:
    """The deep dive's generator, bit for bit: (834, 726), (788, 943), (344, 116), ..."""
    state = 42

    def draw(low: int, high: int) -> int:
        nonlocal state
        state = (state * _LCG_MULTIPLIER + _LCG_INCREMENT) & _LCG_MASK
        return low + (state >> 33) % (high - low)

    return [Lengths(draw(50, 1000), draw(10, 1000)) for _ in range(count)]


class LogNormal(NamedTuple):
    """Means of the lengths, and the spread of their logarithms; cut to [4, max_tokens]."""

    prompt_mean: float
    output_mean: float
    prompt_sigma: float
    output_sigma: float
    max_tokens: int


# Mean lengths of ShareGPT conversations as the PagedAttention paper (SOSP 2023) gives them; the
# spread is chosen, so that p99 over median is 16 for prompts and 9 for outputs.
SHAREGPT: Final = LogNormal(161.0, 338.0, prompt_sigma=1.2, output_sigma=0.95, max_tokens=2048)


def log_normal(count: int, shape: LogNormal, seed: int) -> list[Lengths]:
    rng = np.random.default_rng(seed)
    prompts = _draw(rng, count, shape.prompt_mean, shape.prompt_sigma, shape.max_tokens)
    outputs = _draw(rng, count, shape.output_mean, shape.output_sigma, shape.max_tokens)
    return [Lengths(p, o) for p, o in zip(prompts, outputs, strict=True)]


def _draw(rng: np.random.Generator, count: int, mean: float, sigma: float, most: int) -> list[int]:
    drawn = rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)
    return [int(tokens) for tokens in np.clip(np.rint(drawn), _MIN_TOKENS, most)]


# ---- arrivals


def closed(lengths: Iterable[Lengths]) -> list[Request]:
    """All there at the start."""
    return [Request(0, *each) for each in lengths]


def every(lengths: Iterable[Lengths], period_ms: float) -> list[Request]:
    """One by one, evenly."""
    return [Request(round(index * period_ms * _MS_NS), *each) for index, each in enumerate(lengths)]


def poisson(lengths: Sequence[Lengths], rate: float, seed: int) -> list[Request]:
    """`rate`: requests per second. The gaps do not depend on the lengths' own draws."""
    rng = np.random.default_rng([seed, 1])
    at_ns = np.cumsum(rng.exponential(1e9 / rate, len(lengths)))
    return [Request(int(at), *each) for at, each in zip(at_ns, lengths, strict=True)]


# ---- a recorded trace


class _TraceLine(msgspec.Struct, frozen=True):
    arrival_ms: float
    prompt_tokens: int
    output_tokens: int


def read_trace(lines: Iterable[str]) -> list[Request]:
    """JSON lines of {"arrival_ms", "prompt_tokens", "output_tokens"} -> requests by arrival.

    Raises TraceError, with the line's number.
    """
    decoder = msgspec.json.Decoder(_TraceLine)
    requests: list[Request] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if len(requests) == MAX_REQUESTS:
            raise TraceError(f"line {number}: more than {MAX_REQUESTS} requests")
        try:
            entry = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise TraceError(f"line {number}: {error}") from None
        _check(entry, number)
        arrival_ns = round(entry.arrival_ms * _MS_NS)
        requests.append(Request(arrival_ns, entry.prompt_tokens, entry.output_tokens))
    if not requests:
        raise TraceError("it holds no request")
    return sorted(requests, key=lambda request: request.arrival_ns)


def _check(entry: _TraceLine, number: int) -> None:
    if not 0 <= entry.arrival_ms < math.inf:
        raise TraceError(f"line {number}: arrival_ms is {entry.arrival_ms}")
    if not 1 <= entry.prompt_tokens <= MAX_PROMPT_TOKENS:
        raise TraceError(f"line {number}: prompt_tokens is {entry.prompt_tokens}")
    if not 1 <= entry.output_tokens <= MAX_OUTPUT_TOKENS:
        raise TraceError(f"line {number}: output_tokens is {entry.output_tokens}")

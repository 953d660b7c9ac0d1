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

# Mean lengths of ShareGPT conversations as the PagedAttention paper (SOSP 2023, figure 11) gives
# them; the spread is chosen so that p99 over median is about 16 for prompts and 9 for outputs.
SHAREGPT_PROMPT_MEAN: Final = 161.0
SHAREGPT_PROMPT_SIGMA: Final = 1.2
SHAREGPT_OUTPUT_MEAN: Final = 338.0
SHAREGPT_OUTPUT_SIGMA: Final = 0.95
SHAREGPT_MAX_TOKENS: Final = 2048
SHAREGPT_MIN_TOKENS: Final = 4

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


def sharegpt(count: int, seed: int) -> list[Lengths]:
    """Log-normal lengths with ShareGPT's means, cut to [4, 2048]."""
    rng = np.random.default_rng(seed)
    prompts = _log_normal(rng, count, SHAREGPT_PROMPT_MEAN, SHAREGPT_PROMPT_SIGMA)
    outputs = _log_normal(rng, count, SHAREGPT_OUTPUT_MEAN, SHAREGPT_OUTPUT_SIGMA)
    return [Lengths(p, o) for p, o in zip(prompts, outputs, strict=True)]


def spread(count: int, mean_output: float, sigma: float, seed: int) -> list[Lengths]:
    """Outputs that differ by `sigma` (of the logarithm) around one mean, after short prompts."""
    rng = np.random.default_rng(seed)
    return [Lengths(16, o) for o in _log_normal(rng, count, mean_output, sigma)]


def _log_normal(rng: np.random.Generator, count: int, mean: float, sigma: float) -> list[int]:
    drawn = rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)
    clipped = np.clip(np.rint(drawn), SHAREGPT_MIN_TOKENS, SHAREGPT_MAX_TOKENS)
    return [int(tokens) for tokens in clipped]


# ---- arrivals


def closed(lengths: Iterable[Lengths]) -> list[Request]:
    """All there at the start."""
    return [Request(0, *each) for each in lengths]


def every(lengths: Iterable[Lengths], period_ms: float) -> list[Request]:
    """One by one, evenly."""
    return [
        Request(round(index * period_ms * _MS_NS), *each) for index, each in enumerate(lengths)
    ]


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

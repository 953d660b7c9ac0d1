"""The reference's tokens from the whole mesh, all cases at once: two budgets, two block sizes,
cold, with prefix hits, and after forced preemptions.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from services.client import Client
from tests.process.mesh import MODEL, Answer, Mesh, ask, greedy, heartbeats

pytestmark = [pytest.mark.nats, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(240)]

MAX_TOKENS = 64
Cases = list[dict[str, Any]]


async def _over_nats(url: str, cases: Cases, prompt_field: str) -> list[Answer]:
    async with Client(url) as client:
        return await asyncio.gather(
            *(
                ask(
                    client,
                    max_tokens=MAX_TOKENS,
                    temperature=0.0,
                    ignore_eos=True,
                    **{prompt_field: case[prompt_field]},
                )
                for case in cases
            )
        )


async def _over_http(url: str, cases: Cases, prompt_field: str) -> list[dict[str, Any]]:
    """Whole answers; their `logprobs` are those of the chosen tokens."""
    async with httpx.AsyncClient(base_url=url, timeout=200) as client:
        responses = await asyncio.gather(
            *(
                client.post(
                    "/v1/completions",
                    json={
                        "model": MODEL,
                        "prompt": case[prompt_field],
                        "max_tokens": MAX_TOKENS,
                        "temperature": 0,
                        "ignore_eos": True,
                        "logprobs": 0,
                    },
                )
                for case in cases
            )
        )
    assert [response.status_code for response in responses] == [200] * len(cases)
    return [response.json() for response in responses]


def _check_tokens(cases: Cases, answers: list[Answer]) -> None:
    wrong = [
        case["name"]
        for case, answer in zip(cases, answers, strict=True)
        if answer.token_ids != case["greedy_token_ids"]
    ]
    assert not wrong
    for case, answer in zip(cases, answers, strict=True):
        assert answer.last["finish_reason"] == "length"
        assert answer.usage["prompt_tokens"] == len(case["prompt_token_ids"])
        assert answer.usage["completion_tokens"] == MAX_TOKENS


def _check_http(cases: Cases, texts: dict[str, str], answers: list[dict[str, Any]]) -> None:
    """The same text as over NATS, and the reference's own log-probabilities."""
    for case, answer in zip(cases, answers, strict=True):
        [choice] = answer["choices"]
        assert choice["text"] == texts[case["name"]], case["name"]
        assert choice["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == MAX_TOKENS
        found = choice["logprobs"]["token_logprobs"]
        assert found == pytest.approx(case["logprobs"], abs=1e-3), case["name"]


def _check_hits(cases: Cases, cached: list[int], block_size: int) -> bool:
    """Every whole block of the prompts, but for the last token, which has to be computed; or
    nothing, where the ledger's answer took longer than a sequence waits for it -> whether there
    were hits.
    """
    whole = [(len(case["prompt_token_ids"]) - 1) // block_size * block_size for case in cases]
    wrong = [(got, most) for got, most in zip(cached, whole, strict=True) if got not in (0, most)]
    assert not wrong
    return any(cached)


async def test_small_steps_cold_then_with_prefix_hits(
    small_steps_mesh: Mesh, golden_cases: Cases
) -> None:
    cold = await _over_nats(small_steps_mesh.nats_url, golden_cases, "prompt_token_ids")
    _check_tokens(golden_cases, cold)
    texts = {case["name"]: a.text for case, a in zip(golden_cases, cold, strict=True)}
    hits = False
    while not hits:
        warm = await _over_http(small_steps_mesh.http_url, golden_cases, "prompt")
        _check_http(golden_cases, texts, warm)
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in warm]
        hits = _check_hits(golden_cases, cached, block_size=16)


async def test_large_steps_with_forced_preemptions_then_hits(
    small_pool_mesh: Mesh, golden_cases: Cases
) -> None:
    async with heartbeats(small_pool_mesh.nats_url) as beats:
        first = await _over_nats(small_pool_mesh.nats_url, golden_cases, "prompt")
        _check_tokens(golden_cases, first)
        await beats.until(lambda beats: beats.engine.num_running == 0)
        assert beats.engine.num_preemptions > 0
    short = [case for case in golden_cases if 32 < len(case["prompt_token_ids"]) < 100]
    again = await _over_nats(small_pool_mesh.nats_url, short, "prompt_token_ids")
    _check_tokens(short, again)
    assert sum(answer.usage["cached_tokens"] for answer in again) > 0
    async with httpx.AsyncClient(base_url=small_pool_mesh.http_url) as http:
        metrics = (await http.get("/metrics")).text
    [line] = [s for s in metrics.splitlines() if s.startswith("vllm:num_preemptions_total{")]
    assert float(line.rpartition(" ")[2]) > 0


async def test_case_22_a_seed_gives_the_same_tokens_alone_and_among_neighbours(
    small_steps_mesh: Mesh,
) -> None:
    """Draws depend on (seed, position) only (vLLM issue 51226), penalties on the own tokens."""
    sampled = {"max_tokens": 16, "ignore_eos": True, "temperature": 0.8, "top_p": 0.95}
    penalties = {"min_p": 0.01, "repetition_penalty": 1.1, "presence_penalty": 0.5}
    seeded = {"prompt": "One two three", "seed": 42, **sampled, **penalties}
    async with Client(small_steps_mesh.nats_url) as client:
        alone = await ask(client, **seeded)
        runs = []
        for _ in range(3):
            together = await asyncio.gather(
                ask(client, prompt="One two three", **sampled),
                ask(client, **seeded),
                ask(client, prompt="Four five six seven", **sampled),
            )
            runs.append(together)
        other = await ask(client, **(seeded | {"seed": 43}))
        unlike = await ask(client, **(seeded | {"frequency_penalty": -2.0}))
    assert all(together[1].token_ids == alone.token_ids for together in runs)
    assert other.token_ids != alone.token_ids != unlike.token_ids
    assert len({tuple(together[0].token_ids) for together in runs}) > 1, "no seed means a new one"


async def test_prompt_logprobs_are_equal_with_and_without_a_prefix_hit(
    small_pool_mesh: Mesh,
) -> None:
    """One token more than a block (vLLM issue 8268); a block of this mesh has 32."""
    async with Client(small_pool_mesh.nats_url) as client:
        asked = {"prompt_logprobs": 1, "logprobs": 2}
        first, second = [await greedy(client, list(range(33)), 1, **asked) for _ in range(2)]
        plain = await greedy(client, list(range(33)), 1)
    assert plain.usage["cached_tokens"] == 32, "the prompt is in the cache, so this test can fail"
    assert plain.frames[0]["prompt_logprobs"] is None
    entries = first.frames[0]["prompt_logprobs"]
    assert len(entries) == 33
    assert entries[0] is None
    assert [entry["token_id"] for entry in entries[1:]] == list(range(1, 33))
    assert all(len(entry["top"]) == 1 and entry["logprob"] <= 0.0 for entry in entries[1:])
    assert all(entry["top"][0]["logprob"] >= entry["logprob"] for entry in entries[1:])
    assert second.frames[0]["prompt_logprobs"] == entries
    assert first.token_ids == second.token_ids == plain.token_ids
    assert first.logprobs == second.logprobs
    [entry] = first.logprobs
    assert entry["token_id"] == first.token_ids[0] == entry["top"][0]["token_id"]


async def test_stop_strings(small_steps_mesh: Mesh, golden_cases: Cases) -> None:
    """A stop that spans several tokens; with and without the stop itself; one that never comes."""
    case = next(case for case in golden_cases if case["name"] == "list")
    asked = {"prompt": case["prompt"], "max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    async with Client(small_steps_mesh.nats_url) as client:
        whole = await ask(client, **asked)
        stop = whole.text[20:29]
        stopped, included, unmatched = await asyncio.gather(
            ask(client, **asked, stop=[stop, "never"]),
            ask(client, **asked, stop=stop, include_stop_str_in_output=True),
            ask(client, **asked, stop=["never"] * 16),
        )
    at = whole.text.index(stop)
    assert stopped.text == whole.text[:at]
    assert included.text == whole.text[: at + len(stop)]
    assert stopped.last["finish_reason"] == included.last["finish_reason"] == "stop"
    assert stopped.token_ids == included.token_ids == whole.token_ids[: len(stopped.token_ids)]
    assert stopped.usage["completion_tokens"] == len(stopped.token_ids) < 24
    assert (unmatched.text, unmatched.token_ids) == (whole.text, whole.token_ids)
    assert unmatched.last["finish_reason"] == "length"


async def test_end_of_sequence_and_stop_token_ids(
    small_steps_mesh: Mesh, golden_cases: Cases
) -> None:
    case = next(case for case in golden_cases if case["name"] == "raw-short")
    expected = case["greedy_token_ids"]
    stop_id = expected[9]
    first = expected.index(stop_id)
    async with Client(small_steps_mesh.nats_url) as client:
        answer = await greedy(client, case["prompt_token_ids"], 64, stop_token_ids=[stop_id])
    assert answer.last["finish_reason"] == "stop"
    assert answer.token_ids[:first] == expected[:first]
    assert len(answer.token_ids) <= first + 1


async def test_text_in_pieces_is_the_text_as_a_whole(small_steps_mesh: Mesh) -> None:
    """Characters that no single token holds never show as replacement characters."""
    prompt = "Repeat: 🙂🙃 日本語 été naïve 👩‍👩‍👧 – done.\nRepeat: 🙂🙃 日本語 été"
    asked = {"prompt": prompt, "max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    async with Client(small_steps_mesh.nats_url) as client:
        streamed, whole = await asyncio.gather(
            ask(client, **asked), ask(client, **asked, stream=False)
        )
    assert len(streamed.frames) > len(whole.frames) == 1
    assert streamed.text == whole.text
    assert streamed.token_ids == whole.token_ids
    assert json.loads(json.dumps(streamed.text)) == streamed.text
    assert "\ufffd" not in streamed.text[:-1]

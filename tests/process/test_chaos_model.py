"""The real model in float32 under faults: every service dies once while twelve streams run, and
every stream is the reference's, token for token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from services.client import Client
from services.runtime.cluster import Cluster
from services.runtime.settings import Settings
from services.simulator.drill.faults import Injector
from services.simulator.drill.schedule import SERVICES, Fault, Kind
from services.simulator.drill.watch import Watch
from tests.process.mesh import MODEL, Answer

pytestmark = [pytest.mark.nats, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(300)]

MAX_TOKENS: Final = 64
BETWEEN: Final = 8
"""Tokens that the streams have in the mean between two deaths."""


async def _follow(client: Client, case: dict[str, Any], answer: Answer) -> None:
    fields = {"max_tokens": MAX_TOKENS, "temperature": 0.0, "ignore_eos": True}
    async for frame in client.generate(
        MODEL, prompt_token_ids=case["prompt_token_ids"], request_id=case["name"], **fields
    ):
        answer.add(frame)


async def _until_each_has(answers: Sequence[Answer], tasks: Sequence[Any], mean: int) -> None:
    while sum(len(answer.token_ids) for answer in answers) < mean * len(answers):
        for task in tasks:
            if task.done():
                task.result()
        await asyncio.sleep(0.01)


async def test_every_service_dies_once_in_mid_stream(
    tmp_path: Path, cache: Path, model_path: Path, golden_cases: list[dict[str, Any]]
) -> None:
    assert len(golden_cases) == 12
    settings = Settings(
        model=MODEL,
        served_name=MODEL,
        dtype="float32",
        num_admissions=2,
        max_num_seqs=16,
        cache_dir=str(cache),
        run_dir=str(tmp_path),
    )
    watch = Watch()
    answers = [Answer() for _ in golden_cases]
    async with Cluster(settings, watch) as cluster, Client(cluster.nats_url) as client:
        injector = Injector(cluster, watch, 0)
        tasks = [
            asyncio.create_task(_follow(client, case, answer))
            for case, answer in zip(golden_cases, answers, strict=True)
        ]
        for number, service in enumerate(SERVICES, start=1):
            await _until_each_has(answers, tasks, number * BETWEEN)
            assert any(not task.done() for task in tasks), f"{service} was to die in mid-stream"
            outcome = await injector.inject(Fault(service, Kind.KILL))
            assert outcome.verified, outcome.evidence
        async with asyncio.timeout(120):
            await asyncio.gather(*tasks)
    wrong = [
        case["name"]
        for case, answer in zip(golden_cases, answers, strict=True)
        if answer.token_ids != case["greedy_token_ids"]
    ]
    assert not wrong
    assert all(answer.last["finish_reason"] == "length" for answer in answers)

"""The commands that bring their own cluster, or none: `bench mesh`, `demo`, `check`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from services.cli.serving.workload import jobs
from tests.process.mesh import run

pytestmark = [pytest.mark.nats, pytest.mark.slow, pytest.mark.timeout(240)]


def test_bench_mesh(tmp_path: Path, cache: Path) -> None:
    """No bar here: only that the figures agree with each other and with the step asked for."""
    arguments = ("--lanes", "16", "--step-ms", "4", "--seconds", "2", "--json")
    done = run("bench", "mesh", *arguments, cwd=tmp_path, STREETCAR_CACHE_DIR=str(cache))
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout)
    period = figures["step_period_ms"]
    assert period.keys() == {"mean", "p50", "p99"}
    assert 4.0 <= period["p50"] <= period["p99"]
    assert figures["scheduler_us_per_step"].keys() == {"p50", "p99"}
    assert 0 < figures["scheduler_us_per_step"]["p50"] < 1000 * period["p99"]
    assert figures["plan_bytes"].keys() == {"p50", "max"}
    assert 0 < figures["plan_bytes"]["p50"] <= figures["plan_bytes"]["max"]
    assert figures["tokens_per_s"] == pytest.approx(16_000 / period["mean"], rel=0.01)
    assert figures["client_tokens_per_s"] == pytest.approx(figures["tokens_per_s"], rel=0.2)


def test_bench_serve(tmp_path: Path, cache: Path) -> None:
    """Closed and open loop through the gateway: every token that was asked for is counted."""
    arguments = ("--worker", "stub", "--step-ms", "1", "--requests", "12", "--turns", "2")
    loads = ("--users", "4", "--rate", "50", "--json")
    done = run("bench", "serve", *arguments, *loads, cwd=tmp_path, STREETCAR_CACHE_DIR=str(cache))
    assert done.returncode == 0, done.stdout + done.stderr
    closed, opened = json.loads(done.stdout)["results"]
    assert (closed["load"], opened["load"]) == ("4 users", "50 requests/s")
    for row in (closed, opened):
        assert row["failed"] == {} and row["ratio"] is None
        for turn, seed in zip(row["turns"], (7, 8), strict=True):
            assert turn["output_tokens"] == sum(job.max_tokens for job in jobs(12, seed))
            assert 0 < turn["ttft_ms"]["p50"] <= turn["ttft_ms"]["p99"]


@pytest.mark.model
def test_demo(tmp_path: Path, cache: Path, model_path: Path) -> None:
    """Eight answers in the default type (bfloat16 where the processor has it), and a clean end."""
    done = run("demo", "--json", cwd=tmp_path, STREETCAR_CACHE_DIR=str(cache))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    result = json.loads(done.stdout)
    assert len(result["requests"]) == 8
    assert all(request["text"].strip() for request in result["requests"])
    tokens = [request["completion_tokens"] for request in result["requests"]]
    assert result["completion_tokens"] == sum(tokens)
    assert result["prefix_hits"] > 0
    assert 1.0 < result["mean_batch_size"] <= 8.0
    assert result["steps"] >= max(tokens)


@pytest.mark.model
def test_check_reference(
    tmp_path: Path, cache: Path, model_path: Path, golden_cases: list[dict[str, Any]]
) -> None:
    """The short cases, in float32: the reference's own log-probabilities."""
    short = [case for case in golden_cases if len(case["prompt_token_ids"]) < 15]
    assert short
    path = tmp_path / "reference.json"
    path.write_text(json.dumps({"cases": short}))
    arguments = ("check", "--dtype", "float32", "--reference", str(path), "--json")
    done = run(*arguments, cwd=tmp_path, STREETCAR_CACHE_DIR=str(cache))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    expected = math.fsum(math.fsum(case["logprobs"]) for case in short) / (64 * len(short))
    assert result["dtype"] == "float32"
    assert result["mean_logprob"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.model
def test_check_text(tmp_path: Path, cache: Path, model_path: Path) -> None:
    """Repetition is easy to foretell, so that the figure is small; nonsense is not."""
    path = tmp_path / "text.txt"
    path.write_text("The cat sat on the mat. " * 60)
    arguments = ("check", "--text", str(path), "--tokens", "256", "--json")
    done = run(*arguments, cwd=tmp_path, STREETCAR_CACHE_DIR=str(cache))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["tokens"] == 256
    assert 1.0 < result["perplexity"] < 3.0


@pytest.mark.parametrize("arguments", [["--reference", "absent"], ["--text", "absent"], []])
def test_check_refuses_what_is_not_there(tmp_path: Path, cache: Path, arguments: list[str]) -> None:
    done = run("check", *arguments, "--json", cwd=tmp_path, STREETCAR_CACHE_DIR=str(cache))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout)["error"]["cause"]

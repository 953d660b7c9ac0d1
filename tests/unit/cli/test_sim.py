"""`streetcar sim` as a person or a script calls it."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from services.cli.main import build_app
from services.cli.sim_options import SimOptions
from services.runtime.problem import Problem
from services.simulator.capacity.presets import DEEP_DIVE, FIVE_REQUESTS
from services.simulator.capacity.step_time import LinearStepTime, RooflineStepTime


def _sim(*arguments: str) -> Any:
    return build_app()(["sim", *arguments], exit_on_error=False, print_error=False)


def test_json_gives_the_numbers_by_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert _sim("five-requests", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["preset"] == "five-requests"
    policies = report["policies"]
    assert {name: row["steps"] for name, row in policies.items()} == {
        "static": 12,
        "dynamic": 12,
        "continuous": 8,
    }
    for row in policies.values():
        assert row["output_tokens_per_s"] > 0
        assert {"preemptions", "recomputed_tokens"} <= row.keys()
        for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
            assert {"p50", "p90", "p99"} <= row[name].keys()


def test_flags_change_the_workload_the_engine_and_the_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = "--workload fixed --requests 6 --prompt-tokens 20 --output-tokens 4"
    more = "--max-num-seqs 2 --base-ms 7 --token-ms 0 --only continuous --no-prefix-caching --json"
    assert _sim("deep-dive", *flags.split(), *more.split()) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report["policies"]) == ["continuous"]
    row = report["policies"]["continuous"]
    assert (row["requests"], row["output_tokens"], row["steps"]) == (6, 24, 12)
    assert row["itl_ms"]["max"] == 7.0
    assert report["title"] == "deep-dive, varied"


def test_a_trace_is_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival_ms": 5, "prompt_tokens": 4, "output_tokens": 3}\n' * 4)
    assert _sim("five-requests", "--trace", str(trace), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["workload"] == "4 recorded requests"
    assert report["policies"]["continuous"]["output_tokens"] == 12


def test_the_table_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert _sim("five-requests") == 0
    out = capsys.readouterr().out
    assert "continuous" in out and "TTFT" in out


def test_fault_histories_are_still_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    assert _sim("faults", "--seed", "3", "--json") == 0
    history = json.loads(capsys.readouterr().out)
    assert history["seed"] == 3 and history["failure"] == ""


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["five-requests", "--only", "nobody"], "nobody"),
        (["five-requests", "--requests", "9"], "--workload"),
        (["five-requests", "--trace", "no-such-file"], "no-such-file"),
        (["deep-dive", "--max-num-seqs", "4096"], "max_num_batched_tokens is 2048"),
        (["deep-dive", "--gpu", "h100", "--size", "70b"], "140 GB of weights"),
        (["deep-dive", "--gpu", "h100", "--token-ms", "1"], "--base-ms"),
        (["deep-dive", "--kv-tokens", "-1"], "--kv-tokens is -1"),
        (["deep-dive", "--requests", "0"], "--requests is 0"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_cause(arguments: list[str], cause: str) -> None:
    with pytest.raises(Problem) as problem:
        _sim(*arguments)
    assert cause in problem.value.cause


def test_without_matplotlib_the_way_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.setattr("services.simulator.page.data.collect", lambda *_: {})
    with pytest.raises(Problem) as problem:
        _sim("five-requests", "--png", str(tmp_path))
    assert "streetcar[report]" in problem.value.fix


def test_a_machine_and_a_model_make_a_roofline_with_its_own_pool() -> None:
    setup = SimOptions(gpu="h200", size="70b", num_gpus=2).apply(DEEP_DIVE.setup)
    assert isinstance(setup.engine.step_time, RooflineStepTime)
    assert setup.engine.kv_tokens == setup.engine.step_time.max_kv_tokens > 300_000


def test_flags_that_were_not_given_change_nothing() -> None:
    assert SimOptions().apply(DEEP_DIVE.setup) == DEEP_DIVE.setup
    fitted = LinearStepTime(3.0)
    assert SimOptions().apply(FIVE_REQUESTS.setup, fitted).engine.step_time == fitted

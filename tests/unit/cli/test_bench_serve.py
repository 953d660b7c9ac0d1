"""`streetcar bench serve`: a fixed workload, figures that follow from times, checked options."""

from __future__ import annotations

import hashlib

import pytest

from services.cli.bench_serve import _target, serve
from services.cli.serving.figures import Answer, Slo, figures, medians, ratios
from services.cli.serving.workload import arrivals, jobs
from services.runtime.problem import Problem


def test_a_seed_is_one_workload_for_ever() -> None:
    drawn = jobs(96, seed=7)
    text = "\n".join(f"{job.max_tokens} {job.prompt}" for job in drawn)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "4cc45ee9759d4cf6"
    assert sum(job.max_tokens for job in drawn) == 6608
    assert all(16 <= job.max_tokens <= 192 for job in drawn)
    assert all(32 <= len(job.prompt.split()) <= 256 for job in drawn)
    assert jobs(96, seed=8) != drawn


def test_arrivals_have_the_rate_asked_for() -> None:
    times = arrivals(4000, rate=20.0, seed=1)
    assert times[0] == 0.0 and times == sorted(times)
    assert 4000 / times[-1] == pytest.approx(20.0, rel=0.05)


def _answer(started: float, *texts: float, tokens: int) -> Answer:
    return Answer(started, list(texts), prompt_tokens=10, completion_tokens=tokens)


def test_figures_from_times() -> None:
    answers = [
        _answer(0.0, 0.1, 0.2, 0.4, tokens=4),  # TTFT 100, TPOT 100, gaps 100 and 200
        _answer(0.5, 0.8, 0.9, tokens=2),  # TTFT 300, TPOT 100, gap 100
        Answer(0.0, error="HTTP 503"),
    ]
    got = figures(answers, seconds=2.0, slo=Slo(ttft_ms=200.0))
    assert (got["requests"], got["failed"]) == (3, {"HTTP 503": 1})
    assert (got["output_tokens"], got["output_tokens_per_s"]) == (6, 3.0)
    assert got["goodput_per_s"] == 0.5
    assert got["ttft_ms"] == {"p50": 300.0, "p99": 300.0, "max": 300.0}
    assert got["tpot_ms"]["max"] == pytest.approx(100.0)
    assert got["itl_ms"] == {"p50": 100.0, "p99": 200.0, "max": 200.0}


def test_a_turn_in_which_everything_failed_has_figures_too() -> None:
    got = figures([Answer(0.0, error="HTTP 503")], seconds=1.0, slo=Slo())
    assert got["output_tokens_per_s"] == 0.0 and got["itl_ms"]["p99"] == 0.0


def test_medians_and_ratios_are_over_turns_that_share_a_seed() -> None:
    def turn(rate: int) -> dict[str, object]:
        answer = _answer(0.0, 1.0 / rate, 2.0 / rate, tokens=rate)
        return figures([answer], seconds=1.0, slo=Slo())

    ours, theirs = [turn(20), turn(40), turn(90)], [turn(10), turn(20), turn(30)]
    assert medians(ours)["output_tokens_per_s"] == 40.0
    assert ratios(ours, theirs)["output_tokens_per_s"] == 2.0
    assert ratios(ours, theirs)["ttft_p50"] == 0.5


def test_servers_are_named() -> None:
    named = _target("llama=http://127.0.0.1:8080/v1/", ('llama={"cache_prompt": false}',))
    assert (named.name, named.url) == ("llama", "http://127.0.0.1:8080")
    assert named.extra == {"cache_prompt": False}
    plain = _target("http://127.0.0.1:8000", ('{"seed": 1}', 'llama={"seed": 2}'))
    assert (plain.name, plain.url) == ("127.0.0.1:8000", "http://127.0.0.1:8000")
    assert plain.extra == {"seed": 1}


@pytest.mark.parametrize(
    "wrong",
    [{"requests": 0}, {"turns": 0}, {"users": (0,)}, {"rate": (0.0,)}, {"rate": (float("nan"),)}],
)
def test_impossible_loads_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(Problem, match="out of range"):
        serve(url=("http://127.0.0.1:9",), **wrong)  # type: ignore[arg-type]


def test_extra_must_be_an_object() -> None:
    with pytest.raises(Problem, match="no JSON object"):
        _target("a=http://h", ("a=[1]",))


def test_a_server_that_is_not_there_is_a_problem() -> None:
    with pytest.raises(Problem, match="does not answer"):
        serve(url=("http://127.0.0.1:9",), requests=1)

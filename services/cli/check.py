"""`streetcar check`: how well the worker computes, on texts whose answer is known.

Shell: loads a model in this process; no bus, no services.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.cli.model_runner import load_runner, model_path
from services.cli.options import ClusterOptions
from services.cli.output import print_json
from services.runtime.problem import Problem

if TYPE_CHECKING:
    from services.runtime.settings import Settings


def check(
    options: ClusterOptions | None = None,
    *,
    reference: Path | None = None,
    text: Path | None = None,
    tokens: int = 4096,
    json: bool = False,
) -> int:
    """Score reference tokens under teacher forcing, or measure the perplexity of a text.

    Parameters
    ----------
    reference
        JSON file of reference completions: mean log-probability of their tokens.
    text
        Text file: perplexity of its first tokens.
    tokens
        How many tokens of the text.
    json
        Print the result as one object.
    """
    if (reference is None) == (text is None):
        raise Problem(
            "E105",
            "Nothing to check",
            cause="exactly one of --reference and --text is needed",
            fix="streetcar check --text FILE --tokens 4096",
        )
    settings = (options or ClusterOptions()).settings()
    if reference is not None:
        result = _score_reference(settings, reference)
    else:
        assert text is not None
        result = _measure_text(settings, text, tokens)
    if json:
        print_json(result)
        return 0
    for name, value in result.items():
        print(f"{name:<20} {value:.6g}" if isinstance(value, float) else f"{name:<20} {value}")
    return 0


def _score_reference(settings: Settings, reference: Path) -> dict[str, Any]:
    from gpu_worker.check import teacher_forced_logprobs

    _require_file(reference)
    runner, dtype = load_runner(settings)
    try:
        return {**_precision(settings, dtype), **teacher_forced_logprobs(runner, reference)}
    except ValueError as error:
        raise Problem("E106", "Reference refused", cause=str(error)) from error


def _measure_text(settings: Settings, text: Path, tokens: int) -> dict[str, Any]:
    from gpu_worker.check import perplexity
    from services.admission.tokenizer import load_tokenizer

    _require_file(text)
    try:
        content = text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Problem("E106", "Text refused", cause=f"{text}: {error}") from error
    runner, dtype = load_runner(settings)
    tokenizer = load_tokenizer(model_path(settings))
    token_ids = tokenizer.encode(content)
    try:
        value = perplexity(runner, token_ids, tokens)
    except ValueError as error:
        raise Problem("E105", "Text cannot be scored", cause=str(error)) from error
    scored = {"tokens": min(len(token_ids), tokens), "perplexity": value}
    return {**_precision(settings, dtype), **scored}


def _precision(settings: Settings, dtype: str) -> dict[str, str]:
    return {
        "dtype": dtype,
        "quantization": settings.quantization,
        "kv_cache_dtype": settings.kv_cache_dtype,
    }


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise Problem("E106", "File not found", cause=f"{path} is not a file")

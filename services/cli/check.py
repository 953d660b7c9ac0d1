"""`streetcar check`: how well the worker computes, on texts whose answer is known.

Shell: loads a model in this process; no bus, no services.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.cli.options import ClusterOptions
from services.cli.output import ProgressLine, print_json
from services.runtime.problem import Problem

if TYPE_CHECKING:
    from gpu_worker.runner import ModelRunner
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
    runner, dtype = _load(settings)
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
    runner, dtype = _load(settings)
    tokenizer = load_tokenizer(_model_path(settings))
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


def _load(settings: Settings) -> tuple[ModelRunner, str]:
    from gpu_worker.runner import ModelRunner, default_dtype
    from services.models.errors import ModelFileError

    dtype = default_dtype() if settings.dtype == "auto" else settings.dtype
    try:
        runner = ModelRunner(
            _model_path(settings),
            dtype,
            num_blocks=settings.num_blocks,
            block_size=settings.block_size,
            max_model_len=settings.max_model_len or None,
            progress=ProgressLine("model").update,
            num_threads=settings.threads or None,
            native_cache=settings.native_path,
            quantization=settings.quantization,
            kv_cache_dtype=settings.kv_cache_dtype,
            batch_invariant=settings.batch_invariant == "on",
        )
    except ModelFileError as error:
        raise Problem("E301", "Model file refused", cause=str(error)) from error
    except ValueError as error:
        raise Problem("E101", "Settings refused", cause=str(error)) from error
    return runner, dtype


def _model_path(settings: Settings) -> Path:
    from services.models import catalog

    return catalog.path(settings.model, settings.cache_path)


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise Problem("E106", "File not found", cause=f"{path} is not a file")

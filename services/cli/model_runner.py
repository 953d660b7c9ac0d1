"""A model in this process, as settings describe it, for the commands that need no services.

Shell: reads model files, draws a progress line.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from services.cli.output import ProgressLine
from services.runtime.problem import Problem

if TYPE_CHECKING:
    from gpu_worker.runner import ModelRunner
    from services.runtime.settings import Settings


def load_runner(settings: Settings) -> tuple[ModelRunner, str]:
    """The model that the settings name, ready to run, and its dtype; raises Problem."""
    from gpu_worker.runner import ModelRunner, default_dtype
    from services.models.errors import ModelFileError

    try:
        dtype = default_dtype(settings.device) if settings.dtype == "auto" else settings.dtype
        runner = ModelRunner(
            model_path(settings),
            dtype,
            num_blocks=settings.num_blocks,
            block_size=settings.block_size,
            max_model_len=settings.max_model_len or None,
            progress=ProgressLine("model").update,
            num_threads=settings.threads or None,
            native_cache=settings.native_path,
            weights_cache=settings.weights_path,
            quantization=settings.quantization,
            kv_cache_dtype=settings.kv_cache_dtype,
            batch_invariant=settings.batch_invariant == "on",
            device=settings.device,
            max_num_seqs=settings.max_num_seqs,
        )
    except ModelFileError as error:
        raise Problem("E301", "Model file refused", cause=str(error)) from error
    except ValueError as error:
        raise Problem("E101", "Settings refused", cause=str(error)) from error
    return runner, dtype


def model_path(settings: Settings) -> Path:
    """Where the model that the settings name lies; raises Problem."""
    from services.models import catalog

    return catalog.path(settings.model, settings.cache_path)

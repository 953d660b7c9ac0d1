"""What executes plans, made from settings: the model on its device, or the stub.

Shell. Loading blocks, for seconds, and says how far it is.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from services.models import catalog
from services.models.errors import ModelFileError
from services.runtime.log import get_logger, report_progress
from services.runtime.problem import Problem
from services.runtime.settings import Settings

from .executor import EngineShape, Executor, Model
from .poison import PoisonedModel
from .shadow import ShadowModel
from .stub import StubModel

if TYPE_CHECKING:
    from .runner import ModelRunner

STUB_VOCAB_SIZE: Final = 32_768
STUB_MODEL_LEN: Final = 8192


def build_executor(settings: Settings, generation: int) -> Executor:
    """Load the model, or make the stub. Raises Problem where the model file or a setting is
    wrong.
    """
    if settings.worker == "stub":
        shadow = ShadowModel(
            num_blocks=settings.num_blocks,
            block_size=settings.block_size,
            vocab_size=STUB_VOCAB_SIZE,
            verify=False,
            host_blocks=settings.host_blocks,
        )
        model: Model = StubModel(shadow, settings.step_ms / 1000)
        if settings.poison_token >= 0:
            model = PoisonedModel(model, [settings.poison_token], _die_of_poison)
        copy_block_us, device = 0, None
        max_model_len, vocab_size = settings.max_model_len or STUB_MODEL_LEN, STUB_VOCAB_SIZE
    else:
        runner = _load_model(settings)
        model, max_model_len = runner, runner.max_model_len
        device = runner if runner.computes_ahead else None
        vocab_size, copy_block_us = runner.config.vocab_size, runner.copy_block_us
    shape = EngineShape(
        max_num_seqs=settings.max_num_seqs,
        max_model_len=max_model_len,
        block_size=settings.block_size,
        num_blocks=settings.num_blocks,
        vocab_size=vocab_size,
        host_blocks=settings.host_blocks,
        copy_block_us=copy_block_us,
    )
    return Executor(model, generation, shape, device)


def _die_of_poison() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a process does not survive SIGKILL")


def _load_model(settings: Settings) -> ModelRunner:
    # torch takes seconds to import; the stub needs none of it.
    from gpu_worker.runner import ModelRunner, default_dtype

    path: Path = catalog.path(settings.model, settings.cache_path)
    try:
        runner = ModelRunner(
            path,
            default_dtype(settings.device) if settings.dtype == "auto" else settings.dtype,
            num_blocks=settings.num_blocks,
            block_size=settings.block_size,
            max_model_len=settings.max_model_len or None,
            progress=report_progress,
            num_threads=settings.threads or None,
            host_blocks=settings.host_blocks,
            native_cache=settings.native_path,
            weights_cache=settings.weights_path,
            quantization=settings.quantization,
            kv_cache_dtype=settings.kv_cache_dtype,
            batch_invariant=settings.batch_invariant == "on",
            device=settings.device,
            max_num_seqs=settings.max_num_seqs,
        )
    except ModelFileError as error:
        raise Problem("E301", "Model cannot be loaded", cause=str(error)) from None
    except ValueError as error:
        raise Problem("E103", "Settings do not fit the model", cause=str(error)) from None
    log = get_logger("gpu_worker")
    for notice in runner.notices:
        log.warning("slower_path", reason=notice)
    log.info("model_loaded", device=str(runner.device), instruction_set=runner.instruction_set)
    report_progress(1.0, "warming up")
    runner.warm_up()
    return runner

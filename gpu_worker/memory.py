"""Where the device or the host has no memory for a step: one exception, whoever says so.

Device: frees what torch keeps for itself.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

# Where torch says no more than RuntimeError: its CPU allocator, and the libraries under CUDA.
_SIGNS: Final = ("DefaultCPUAllocator", "out of memory", "ALLOC_FAILED")


def is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def raises_memory_error(method: Callable[P, R]) -> Callable[P, R]:
    """What `method` raises for lack of memory becomes a MemoryError, once all that it had taken,
    and what torch keeps unused, has been given back. Other errors pass.
    """

    @functools.wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            cause = str(error)
        # The exception is gone, and with it the frames that held what there was of the step.
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        raise MemoryError(cause)

    return guarded

"""The loaded library: one function for each operation, for the chosen instruction set.

Device: calls native code.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from kernels.native.build import NativeUnavailable, build_library

INSTRUCTION_SETS = ("baseline", "avx2", "avx512", "avx512vnni", "avx512bf16")
"""From what every processor has to the fastest; each includes those before it."""

OPERATIONS = (
    "varlen_paged_attention",
    "rope_write_kv",
    "rms_norm",
    "silu_mul",
    "quantise",
    "linear",
    "linear_int8",
    "decoder",
    "greedy",
    "read_memory",
    "multiply_registers",
)

DTYPES = (torch.float32, torch.bfloat16)
"""What the native operations take."""

OUT_OF_MEMORY, BLOCK_OUT_OF_RANGE = 1, 2
"""Results of an operation other than 0; ``library.h`` has the same numbers."""


class NativeKernels:
    """The native operations for one instruction set; safe to use from several threads.

    path: the shared library
    isa:  one of INSTRUCTION_SETS that the processor has; None takes the fastest

    Raises NativeUnavailable where the library cannot be loaded, ValueError for the isa.
    """

    def __init__(self, path: Path, isa: str | None = None) -> None:
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeUnavailable(f"{path} cannot be loaded: {error}") from error
        library.best_isa.restype = ctypes.c_char_p
        best = library.best_isa().decode()
        available = INSTRUCTION_SETS[: INSTRUCTION_SETS.index(best) + 1]
        if isa is not None and isa not in available:
            raise ValueError(f"instruction set {isa!r} is not one of {', '.join(available)}")
        self.isa = best if isa is None else isa
        self.available = available
        self._operations = {name: getattr(library, f"{name}_{self.isa}") for name in OPERATIONS}

    def takes(self, *tensors: torch.Tensor) -> bool:
        """Whether all are on the CPU, of one dtype that the library knows, with last stride 1."""
        dtype = tensors[0].dtype
        if dtype not in DTYPES:
            return False
        # A loop, and not a generator: this runs several times in each layer of each step.
        for tensor in tensors:
            if not tensor.is_cpu or tensor.dtype != dtype:
                return False
            if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
                return False
        return True

    def run(self, operation: str, arguments: ctypes.Structure) -> None:
        """Run one operation; raises MemoryError, or ValueError for a block outside the pool."""
        result = self._operations[operation](ctypes.byref(arguments))
        if result == OUT_OF_MEMORY:
            raise MemoryError(f"{operation} found no memory for its tasks")
        if result == BLOCK_OUT_OF_RANGE:
            raise ValueError(f"{operation} was given a block outside the pool")
        assert result == 0, f"{operation} returned {result}"


def load_native(cache_dir: Path | None = None, isa: str | None = None) -> NativeKernels:
    """Build the library if need be, and load it.

    cache_dir: where built libraries are kept; None is a directory of the user's cache
    isa:       see NativeKernels

    Raises NativeUnavailable, with the reason, where there is no compiler or it fails; ValueError
    for an isa that the processor does not have.
    """
    directory = Path.home() / ".cache" / "streetcar" / "native" if cache_dir is None else cache_dir
    return NativeKernels(build_library(directory), isa)

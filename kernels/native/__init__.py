"""Native code for CPUs: built from the C files of this package on first use, then loaded.

Invariants: the library is loaded once torch is, so that both use one pool of threads; only an
instruction set that the processor has is ever called.

Device: runs native code on the memory of tensors.
"""

from __future__ import annotations

from kernels.native.build import NativeUnavailable
from kernels.native.loader import INSTRUCTION_SETS, NativeKernels, load_native

__all__ = ["INSTRUCTION_SETS", "NativeKernels", "NativeUnavailable", "load_native"]

"""Root-mean-square normalisation, alone and fused with the residual addition.

Device: pure functions of their tensors. Source of the formula: Zhang and Sennrich 2019,
arXiv 1910.07467, with the rounding points of the Llama reference implementation.
"""

from __future__ import annotations

import torch

from kernels.native import NativeKernels
from kernels.native.arguments import RmsNormArguments, address
from kernels.quantise import QuantisedRows, row_addresses, write_rows


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    native: NativeKernels | None = None,
    into: QuantisedRows | None = None,
) -> torch.Tensor:
    """y = round(x / sqrt(mean(x^2) + epsilon)) * weight.

    x:       (..., hidden_size) float32|bfloat16|float16
    weight:  (hidden_size), dtype of x
    native:  the loaded library, used for rows (two axes) of a dtype that it takes
    into:    written if given: y, quantised (two axes)
    returns: shape and dtype of x

    The mean is taken in float32; the normalised value is rounded to the dtype of x before it meets
    the weight, as Llama checkpoints were trained (a float32 product gives other bits in bfloat16).
    """
    assert weight.dtype == x.dtype, f"weight {weight.dtype} and x {x.dtype} differ"
    if native is not None and x.dim() == 2 and native.takes(x, weight):
        return _run_native(native, x, None, weight, epsilon, into)[0]
    wide = x.float()
    variance = wide.square().mean(dim=-1, keepdim=True)
    normed = (wide * torch.rsqrt(variance + epsilon)).to(x.dtype) * weight
    if into is not None:
        write_rows(normed, into)
    return normed


def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    native: NativeKernels | None = None,
    into: QuantisedRows | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual' = residual + x; y = rms_norm(residual'); returns (y, residual').

    x, residual: (..., hidden_size), one dtype; both results have it too
    into:        written if given: y, quantised (two axes)
    """
    takes = native is not None and x.dim() == 2 and residual.is_contiguous()
    if takes and native is not None and native.takes(x, residual, weight):
        return _run_native(native, x, residual, weight, epsilon, into)
    total = residual + x
    return rms_norm(total, weight, epsilon, into=into), total


def _run_native(
    native: NativeKernels,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    into: QuantisedRows | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, residual'); without a residual the second is x itself."""
    num_rows, hidden_size = x.shape
    assert weight.shape == (hidden_size,), f"weight {weight.shape} for rows of {hidden_size}"
    assert residual is None or residual.shape == x.shape, "x and residual differ in shape"
    out = torch.empty(x.shape, dtype=x.dtype)
    total = x if residual is None else torch.empty(x.shape, dtype=x.dtype)
    arguments = RmsNormArguments(
        x.data_ptr(),
        address(residual),
        weight.data_ptr(),
        total.data_ptr(),
        out.data_ptr(),
        *row_addresses(into, x.shape),
        x.stride(0),
        num_rows,
        hidden_size,
        x.dtype == torch.bfloat16,
        torch.get_num_threads(),
        epsilon,
    )
    native.run("rms_norm", arguments)
    return out, total

"""Multiplication by a fixed weight matrix, packed once for the processor where that is possible.

Invariants: a packed matrix gave the plain operator's answer on a probe before it was accepted; with
packing, a row's result has the same bits whatever the other rows (tests check it), which the plain
float32 operator does not promise.

Device: pure functions of their tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

Linear: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""(rows, in_features) -> (rows, out_features)."""

PROBE_ROWS = 4
PROBE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest relative error of the probe: sums of a few thousand terms in another order."""


def make_linear(weight: torch.Tensor) -> Linear:
    """A function x -> x @ weight.T.

    weight:  (out_features, in_features) float32|bfloat16|float16
    returns: function from (rows, in_features) to (rows, out_features), dtype of weight
    """
    packed = _pack(weight)
    return _plain(weight) if packed is None else packed


def _plain(weight: torch.Tensor) -> Linear:
    def linear(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight)

    return linear


def _pack(weight: torch.Tensor) -> Linear | None:
    """oneDNN's own weight layout, or None where this build, processor or dtype has none.

    Packed matrices are 1.2 to 2.4 times as fast up to 16 rows on an AVX-512 core. The operators are
    private to torch, hence the probe.
    """
    if weight.device.type != "cpu" or weight.dtype not in PROBE_TOLERANCE:
        return None
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    try:
        layout = torch.ops.mkldnn._reorder_linear_weight(weight)
        packed = _packed(layout)
        probe = weight[:PROBE_ROWS]
        expected = torch.nn.functional.linear(probe, weight).float()
        error = (packed(probe).float() - expected).norm()
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    sound = bool(error <= PROBE_TOLERANCE[weight.dtype] * expected.norm())
    return packed if sound else None


def _packed(layout: torch.Tensor) -> Linear:
    multiply = torch.ops.mkldnn._linear_pointwise

    def linear(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            # A single row takes another code path, with other rounding; two rows cost no more.
            product: torch.Tensor = multiply(x.expand(2, -1), layout, None, "none", [], "")[:1]
            return product
        product = multiply(x, layout, None, "none", [], "")
        return product

    return linear

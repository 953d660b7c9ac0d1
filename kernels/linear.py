"""Multiplication by a fixed weight matrix, packed once for the processor where that is possible.

Three forms, the first that the machine has: our own panels and native code; oneDNN's layout; the
plain operator.

Invariants: a matrix packed by oneDNN gave the plain operator's answer on a probe before it was
accepted; with either packing, a row's result has the same bits whatever the other rows (tests check
it), which the plain float32 operator does not promise.

Device: pure functions of their tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from kernels.huge_pages import in_huge_pages
from kernels.native import NativeKernels
from kernels.native.arguments import LinearArguments

Linear: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""(rows, in_features) -> (rows, out_features)."""

PROBE_ROWS = 4
PROBE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest relative error of the probe: sums of a few thousand terms in another order."""

PANEL = 64
"""Output features of a packed panel; the same as in ``library.h``."""

NATIVE_SETS = {
    torch.float32: ("avx512", "avx512vnni", "avx512bf16"),
    torch.bfloat16: ("avx512bf16",),
}
"""Where the native code was measured to be at least as fast as oneDNN at every number of rows."""


def make_linear(
    weight: torch.Tensor, native: NativeKernels | None = None, invariant: bool = False
) -> Linear:
    """A function x -> x @ weight.T.

    weight:    (out_features, in_features) float32|bfloat16|float16
    native:    the loaded library, used where it is the fastest
    invariant: use it wherever it takes the weight: a row has the same bits in any company, by
               construction
    returns:   function from (rows, in_features) to (rows, out_features), dtype of weight
    """
    takes = native is not None and _takes_native(native, weight)
    if native is not None and takes and (invariant or _is_fastest(native, weight.dtype)):
        return NativeLinear(native, pack_panels(weight), weight.shape)
    packed = _pack(weight)
    return _plain(weight) if packed is None else packed


def _takes_native(native: NativeKernels, weight: torch.Tensor) -> bool:
    has_products = weight.dtype == torch.float32 or native.isa == "avx512bf16"
    whole = weight.shape[1] % 2 == 0 and weight.numel() > 0
    return has_products and whole and native.takes(weight)


def _is_fastest(native: NativeKernels, dtype: torch.dtype) -> bool:
    # Matrix tiles (AMX) are several times as fast as vectors for many rows, and oneDNN uses them.
    has_tiles = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return native.isa in NATIVE_SETS.get(dtype, ()) and not has_tiles()


def pack_panels(weight: torch.Tensor) -> torch.Tensor:
    """(panels, in_features / pair, PANEL, pair), the last one padded with zeros.

    weight: (out_features, in_features); a pair is two bfloat16 or one float32
    """
    out_features, in_features = weight.shape
    pair = 2 if weight.dtype == torch.bfloat16 else 1
    num_panels = -(-out_features // PANEL)
    padded = torch.zeros(num_panels * PANEL, in_features, dtype=weight.dtype)
    padded[:out_features] = weight
    words = padded.view(num_panels, PANEL, in_features // pair, pair)
    return in_huge_pages(words.permute(0, 2, 1, 3))


class NativeLinear:
    """x -> x @ weight.T by the native code."""

    def __init__(self, native: NativeKernels, panels: torch.Tensor, shape: tuple[int, ...]) -> None:
        """panels: what ``pack_panels`` makes of a weight of this shape."""
        num_panels, steps, width, self._pair = panels.shape
        self.out_features, self.in_features = shape
        assert width == PANEL and steps * self._pair == self.in_features, "panels of its rows"
        assert num_panels == -(-self.out_features // PANEL), "panels of all its columns"
        self._native = native
        self.panels = panels

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[1] == self.in_features, f"rows of {x.shape[1]} for {self.in_features}"
        assert self._native.takes(x, self.panels), "rows of the dtype of the weight"
        assert x.stride(0) % self._pair == 0, "rows that begin with a whole word"
        out = torch.empty(x.shape[0], self.out_features, dtype=x.dtype)
        arguments = LinearArguments(
            x.data_ptr(),
            self.panels.data_ptr(),
            out.data_ptr(),
            x.stride(0),
            self.out_features,
            x.shape[0],
            self.in_features,
            self.out_features,
            x.dtype == torch.bfloat16,
            torch.get_num_threads(),
        )
        self._native.run("linear", arguments)
        return out


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

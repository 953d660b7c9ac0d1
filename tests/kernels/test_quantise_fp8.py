from __future__ import annotations

import torch

from kernels.quantise_fp8 import quantise_rows_fp8


def test_rows_come_back_within_half_a_step_of_their_own() -> None:
    x = torch.randn(6, 80) * torch.randn(6, 1).exp()
    x[1] = 0
    x[2, 7] = float("nan")
    values, scales = quantise_rows_fp8(x)
    assert scales[1] == 0 and not values[1].float().any() and scales[2].isnan()
    kept = [0, 3, 4, 5]
    restored = values.float() * scales[:, None]
    peaks = x.abs().amax(dim=1, keepdim=True)
    # 3 bits behind the point of each power of two, of which the least is 448 / 2^15.
    step = torch.maximum(x.abs(), peaks / 448 / 64) / 8
    assert ((restored - x).abs() <= step * 0.5001)[kept].all()
    assert (values.float().abs().amax(dim=1)[kept] == 448).all()


def test_a_row_is_the_same_in_any_company() -> None:
    x = torch.randn(5, 32).bfloat16()
    together, alone = quantise_rows_fp8(x), quantise_rows_fp8(x[3:4])
    assert torch.equal(together.values[3:4].float(), alone.values.float())
    assert torch.equal(together.scales[3:4], alone.scales)

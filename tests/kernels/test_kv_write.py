from __future__ import annotations

import pytest
import torch

from kernels.kv_write import write_kv


def caches(head_major: bool) -> list[torch.Tensor]:
    if head_major:
        return [torch.zeros(4, 2, 16, 8).permute(0, 2, 1, 3) for _ in range(2)]
    return [torch.zeros(4, 16, 2, 8) for _ in range(2)]


@pytest.mark.parametrize("head_major", [True, False])
def test_rows_land_in_their_slots_and_negative_slots_are_skipped(head_major: bool) -> None:
    k_cache, v_cache = caches(head_major)
    k, v = torch.randn(2, 4, 2, 8).unbind(0)
    write_kv(k, v, k_cache, v_cache, torch.tensor([35, -1, 16, 63]))
    for cache, rows in ((k_cache, k), (v_cache, v)):
        assert torch.equal(cache[2, 3], rows[0])
        assert torch.equal(cache[1, 0], rows[2])
        assert torch.equal(cache[3, 15], rows[3])
        assert int((cache != 0).any(dim=-1).any(dim=-1).sum()) == 3


def test_nothing_to_write() -> None:
    k_cache, v_cache = caches(True)
    empty = torch.zeros(0, 2, 8)
    write_kv(empty, empty, k_cache, v_cache, torch.zeros(0, dtype=torch.int64))
    rows = torch.ones(2, 2, 8)
    write_kv(rows, rows, k_cache, v_cache, torch.tensor([-1, -1]))
    assert not k_cache.any() and not v_cache.any()

"""The rows of a table that tokens name.

Device: pure function of its tensors.
"""

from __future__ import annotations

import torch


def embed(table: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """table[token_ids].

    table:     (vocab_size, hidden_size)
    token_ids: (num_tokens) int32|int64
    returns:   (num_tokens, hidden_size), dtype of the table

    Raises IndexError for an id outside the table.
    """
    return table.index_select(0, token_ids)

from __future__ import annotations

import numpy as np

from gpu_worker.token_counts import MIN_ROOM, TokenCounts


def as_dict(counts: TokenCounts) -> dict[int, int]:
    ids, held = counts.columns()
    assert len(set(ids.tolist())) == len(ids)
    return dict(zip(ids.tolist(), held.tolist(), strict=True))


def test_prompt_tokens_are_listed_and_output_tokens_counted() -> None:
    tokens = np.array([5, 7, 5, 9, 7, 7], dtype=np.int32)
    assert as_dict(TokenCounts(tokens, 3)) == {5: 0, 7: 2, 9: 1}
    assert as_dict(TokenCounts(tokens[:3], 3)) == {5: 0, 7: 0}


def test_however_the_tokens_came_the_counts_are_the_same() -> None:
    """A preempted lane, or one of a new worker, joins again with its output among its tokens."""
    tokens = np.random.default_rng(0).integers(0, 3 * MIN_ROOM, 5 * MIN_ROOM).astype(np.int32)
    whole = as_dict(TokenCounts(tokens, 10))
    for joined in (10, 11, 4 * MIN_ROOM):
        counts = TokenCounts(tokens[:joined], 10)
        for token in tokens[joined:].tolist():
            counts.add(token)
        assert as_dict(counts) == whole

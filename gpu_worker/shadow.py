"""A stub in the model's place: remembers (token, position) for every slot, and answers from what it
reads back.

The next token is a hash of the sequence's tokens and positions as found through the block table, so
a wrong slot, block, length or mask changes the stream, and `expected_token_ids` says what the
stream must be. No tensors, no weights.

Pure: numpy only.
"""

from __future__ import annotations

import numpy as np

from gpu_worker.inputs import (
    CopyLists,
    Int32s,
    Int64s,
    StepInputs,
    StepOutputs,
    TokenLogprobs,
    UInt64s,
)

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_UNWRITTEN = np.int32(-1)
# The shadow is sure of its token, and knows no other.
_CERTAIN = TokenLogprobs(0.0, np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32))


class ShadowModel:
    """`verify`: re-read every slot of a sequence on every step (O(length)); else trust the slot
    before (O(1)).
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        verify: bool = True,
        host_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.verify = verify
        num_slots = num_blocks * block_size
        self._tokens: Int32s = np.full(num_slots, _UNWRITTEN, dtype=np.int32)
        self._positions: Int32s = np.full(num_slots, _UNWRITTEN, dtype=np.int32)
        self._prefix: UInt64s = np.zeros(num_slots, dtype=np.uint64)
        host = (host_blocks, block_size)
        self._host_tokens: Int32s = np.full(host, _UNWRITTEN, dtype=np.int32)
        self._host_positions: Int32s = np.full(host, _UNWRITTEN, dtype=np.int32)
        self._host_prefix: UInt64s = np.zeros(host, dtype=np.uint64)

    def copy_blocks(self, copies: CopyLists) -> None:
        """Move what is remembered between blocks and host slots, outs before ins."""
        for pool, host in (
            (self._tokens, self._host_tokens),
            (self._positions, self._host_positions),
            (self._prefix, self._host_prefix),
        ):
            blocks = pool.reshape(-1, self.block_size)
            host[copies.out_slots] = blocks[copies.out_blocks]
            blocks[copies.in_blocks] = host[copies.in_slots]

    def execute(self, inputs: StepInputs) -> StepOutputs:
        slots = inputs.slot_mapping
        assert len(np.unique(slots)) == len(slots), "two tokens are written to one slot"
        assert bool((slots >= self.block_size).all()), "the null block is written"
        self._tokens[slots] = inputs.input_ids
        self._positions[slots] = inputs.positions
        prefix = self._reread(inputs) if self.verify else self._extend(inputs)
        token_ids = _token(prefix[self._rows_of(inputs)], self.vocab_size)
        wanted = (inputs.sampling.num_logprobs >= 0).tolist()
        return StepOutputs(
            token_ids=token_ids,
            finite=np.ones(len(token_ids), dtype=np.bool_),
            logprobs=[_CERTAIN if asked else None for asked in wanted],
            prompt_logprobs=[[_CERTAIN] * request.num_rows for request in inputs.prompt_logprobs],
        )

    def _rows_of(self, inputs: StepInputs) -> Int32s:
        """Which sequence each sampled packed row ends."""
        return (np.searchsorted(inputs.cu_seqlens_q, inputs.logits_rows, side="right") - 1).astype(
            np.int32
        )

    def _slots(self, inputs: StepInputs, row: int, length: int) -> Int64s:
        at = np.arange(length)
        blocks = inputs.block_table[row, at // self.block_size].astype(np.int64)
        slots: Int64s = blocks * self.block_size + at % self.block_size
        return slots

    def _reread(self, inputs: StepInputs) -> UInt64s:
        """Hash of every sequence as it stands in the pool -> uint64 [B]."""
        prefix = np.zeros(len(inputs.seqlens_k), dtype=np.uint64)
        for row, length in enumerate(inputs.seqlens_k.tolist()):
            slots = self._slots(inputs, row, length)
            # A slot that holds another position or nothing is another sequence's: let it change the
            # answer.
            wrong = self._positions[slots] - np.arange(length, dtype=np.int32)
            prefix[row] = _hash_tokens(self._tokens[slots] + wrong * 7919)
        return prefix

    def _extend(self, inputs: StepInputs) -> UInt64s:
        """Hash of each sequence from the hash kept at the slot before its new tokens -> uint64
        [B].
        """
        starts, ends = inputs.cu_seqlens_q[:-1], inputs.cu_seqlens_q[1:]
        first = inputs.positions[starts]
        before = np.maximum(first - 1, 0)
        rows = np.arange(len(first))
        slot = inputs.block_table[rows, before // self.block_size].astype(np.int64)
        slot = slot * self.block_size + before % self.block_size
        prefix = np.where(first > 0, self._prefix[slot], np.uint64(0))
        decodes = inputs.num_decodes
        prefix[:decodes] = _step(prefix[:decodes], inputs.input_ids[:decodes])
        self._prefix[inputs.slot_mapping[:decodes]] = prefix[:decodes]
        for row in range(decodes, len(first)):
            for index in range(int(starts[row]), int(ends[row])):
                prefix[row : row + 1] = _step(
                    prefix[row : row + 1], inputs.input_ids[index : index + 1]
                )
                self._prefix[inputs.slot_mapping[index]] = prefix[row]
        return prefix


def expected_token_ids(prompt: Int32s, count: int, vocab_size: int) -> list[int]:
    """What a sequence with this prompt must get: `count` tokens, from the definition alone."""
    tokens = [int(token) for token in prompt]
    for _ in range(count):
        prefix = _hash_tokens(np.array(tokens, dtype=np.int32))
        tokens.append(int(_token(np.array([prefix], dtype=np.uint64), vocab_size)[0]))
    return tokens[len(prompt) :]


def _step(prefix: UInt64s, token_ids: Int32s) -> UInt64s:
    """hash(prefix + token) for each of n sequences; wraps around 2**64."""
    with np.errstate(over="ignore"):
        return prefix * _MULTIPLIER + token_ids.astype(np.uint64) + np.uint64(1)


def _hash_tokens(token_ids: Int32s) -> np.uint64:
    """The polynomial that `_step` evaluates token by token: sum of (token_i + 1) * M**(n-1-i), mod
    2**64.
    """
    with np.errstate(over="ignore"):
        powers = np.ones(len(token_ids), dtype=np.uint64)
        if len(token_ids) > 1:
            powers[1:] = _MULTIPLIER
            powers = np.multiply.accumulate(powers)[::-1]
        terms = (token_ids.astype(np.int64).astype(np.uint64) + np.uint64(1)) * powers
        return np.uint64(np.add.reduce(terms))


def _token(prefix: UInt64s, vocab_size: int) -> Int32s:
    with np.errstate(over="ignore"):
        mixed = (prefix ^ (prefix >> np.uint64(31))) * _MIX
    mixed ^= mixed >> np.uint64(29)
    return (mixed % np.uint64(vocab_size)).astype(np.int32)

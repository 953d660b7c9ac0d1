"""The arguments of the native operations, field by field as ``library.h`` declares them.

Device: addresses of tensors; a structure keeps nothing alive.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import torch

Fields = list[tuple[str, Any]]


def _fields(pointers: str, integers: str, floats: str = "") -> Fields:
    return [
        *((name, ctypes.c_void_p) for name in pointers.split()),
        *((name, ctypes.c_int64) for name in integers.split()),
        *((name, ctypes.c_double) for name in floats.split()),
    ]


class AttentionArguments(ctypes.Structure):
    _fields_: ClassVar[Fields] = _fields(
        "q k v out lse values scales cu_seqlens_q seqlens_k block_table alibi_slopes sinks",
        "q_row q_head k_block k_slot k_head v_block v_slot v_head out_row out_head lse_row "
        "table_row table_width num_seqs num_heads num_kv_heads head_dim num_blocks block_size "
        "window causal is_bf16 kv_bytes num_threads",
        "scale softcap",
    )


class RopeWriteKvArguments(ctypes.Structure):
    _fields_: ClassVar[Fields] = _fields(
        "qkv cos_sin k v slots",
        "qkv_row cos_sin_row k_block k_slot k_head v_block v_slot v_head num_tokens num_heads "
        "num_kv_heads head_dim rotary_dim num_blocks block_size is_bf16 kv_bytes num_threads",
    )


class RmsNormArguments(ctypes.Structure):
    _fields_: ClassVar[Fields] = _fields(
        "x residual weight total out values scales",
        "x_row num_rows hidden_size is_bf16 num_threads",
        "epsilon",
    )


class SiluMulArguments(ctypes.Structure):
    _fields_: ClassVar[Fields] = _fields(
        "gate_up out values scales", "gate_up_row num_rows size is_bf16 num_threads"
    )


class LinearArguments(ctypes.Structure):
    _fields_: ClassVar[Fields] = _fields(
        "x packed out", "x_row out_row num_rows in_features out_features is_bf16 num_threads"
    )


class QuantiseArguments(ctypes.Structure):
    _fields_: ClassVar[Fields] = _fields(
        "x values scales", "x_row num_rows size is_bf16 num_threads"
    )


class LinearInt8Arguments(ctypes.Structure):
    _fields_: ClassVar[Fields] = _fields(
        "x_values x_scales packed start scales out",
        "out_row num_rows in_features out_features is_bf16 num_threads",
    )


class MatrixArguments(ctypes.Structure):
    _fields_: ClassVar[Fields] = _fields("panels start scales", "in_features out_features")


class LayerArguments(ctypes.Structure):
    _fields_: ClassVar[Fields] = [
        *_fields("input_norm feed_forward_norm k v", ""),
        *((name, MatrixArguments) for name in ("qkv", "attention_output", "gate_up", "down")),
    ]


class DecoderArguments(ctypes.Structure):
    _fields_: ClassVar[Fields] = _fields(
        "layers final_norm cos_sin slots cu_seqlens_q seqlens_k block_table residual normed qkv "
        "mixed moved gate_up activated normed_values normed_scales mixed_values mixed_scales "
        "activated_values activated_scales",
        "num_layers num_tokens num_seqs table_row table_width hidden_size intermediate_size "
        "num_heads num_kv_heads head_dim rotary_dim k_block k_slot k_head v_block v_slot v_head "
        "num_blocks block_size is_bf16 kv_bytes num_threads",
        "epsilon scale",
    )


class GreedyArguments(ctypes.Structure):
    _fields_: ClassVar[Fields] = _fields(
        "logits tokens finite", "logits_row num_rows vocab_size is_bf16 num_threads"
    )


class ReadMemoryArguments(ctypes.Structure):
    _fields_: ClassVar[Fields] = _fields("memory sum", "num_bytes num_threads")


class MultiplyRegistersArguments(ctypes.Structure):
    _fields_: ClassVar[Fields] = _fields("sum products", "kind rounds num_threads")


def address(tensor: torch.Tensor | None) -> int | None:
    """Of the tensor's first element; None stays None."""
    return None if tensor is None else tensor.data_ptr()

from __future__ import annotations

import random
from pathlib import Path

import gguf
import numpy as np
import pytest

from services.models.errors import ModelFileError
from services.models.gguf_file import GgufFile, read_metadata
from services.models.source import open_model
from tests.models.tiny import Tiny, write_gguf

Quantisation = gguf.GGMLQuantizationType
K_QUANTS = [
    Quantisation.Q2_K,
    Quantisation.Q3_K,
    Quantisation.Q4_K,
    Quantisation.Q5_K,
    Quantisation.Q6_K,
]


def test_config(tmp_path: Path) -> None:
    config = GgufFile(write_gguf(tmp_path / "tiny.gguf", Tiny(theta=1e5))).config
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (96, 64, 96)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 4, 2)
    assert (config.head_dim, config.max_position_embeddings) == (8, 128)
    assert config.rope_theta == 1e5 and config.rms_norm_eps == pytest.approx(1e-5)
    assert config.rope_factors is None and not config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


def test_weights_come_back_in_the_order_of_the_checkpoint(tmp_path: Path) -> None:
    tiny = Tiny()
    file = GgufFile(write_gguf(tmp_path / "tiny.gguf", tiny))
    for name, values in tiny.weights.items():
        loaded = file.tensor(name)
        assert loaded.dtype == np.float32 and loaded.flags.writeable
        assert np.array_equal(loaded, values), name


def test_case_55_rope_factors_are_read(tmp_path: Path) -> None:
    tiny = Tiny(factors=[1.0, 1.0, 4.0, 8.0])
    config = GgufFile(write_gguf(tmp_path / "tiny.gguf", tiny)).config
    assert config.rope_factors == (1.0, 1.0, 4.0, 8.0)


def test_a_missing_output_matrix_means_tied_embeddings(tmp_path: Path) -> None:
    file = GgufFile(write_gguf(tmp_path / "tiny.gguf", Tiny(tied=True)))
    assert file.config.tie_word_embeddings
    with pytest.raises(ModelFileError, match=r"output\.weight"):
        file.tensor("lm_head.weight")


@pytest.mark.parametrize(
    "quantisation, tolerance",
    [
        (Quantisation.F16, 1e-3),
        (Quantisation.BF16, 1e-2),
        (Quantisation.Q8_0, 1e-2),
        (Quantisation.Q5_0, 6e-2),
        (Quantisation.Q5_1, 6e-2),
        (Quantisation.Q4_0, 0.12),
        (Quantisation.Q4_1, 0.12),
    ],
)
def test_quantised_weights(
    tmp_path: Path, quantisation: gguf.GGMLQuantizationType, tolerance: float
) -> None:
    tiny = Tiny()
    file = GgufFile(write_gguf(tmp_path / "tiny.gguf", tiny, quantisation))
    for name, values in tiny.weights.items():
        error = np.linalg.norm(file.tensor(name) - values) / np.linalg.norm(values)
        assert error < tolerance, name


@pytest.mark.parametrize("quantisation", K_QUANTS)
def test_k_quants_are_read_block_by_block(
    tmp_path: Path, quantisation: gguf.GGMLQuantizationType
) -> None:
    """The writer cannot make them: any bytes are a valid block, so random ones do."""
    block_bytes = gguf.GGML_QUANT_SIZES[quantisation][1]
    generator = np.random.default_rng(0)
    raw = generator.integers(0, 60, (64, 2 * block_bytes), dtype=np.uint8)
    path = tmp_path / "k.gguf"
    _write_with_tensor(path, raw, quantisation)
    loaded = GgufFile(path).tensor("model.layers.0.mlp.down_proj.weight")
    assert loaded.shape == (64, 512)
    assert np.array_equal(loaded, gguf.quants.dequantize(raw, quantisation))


def _write_with_tensor(
    path: Path, raw: np.ndarray, quantisation: gguf.GGMLQuantizationType
) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(512)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((8, 64), dtype=np.float32))
    writer.add_tensor("blk.0.ffn_down.weight", raw, raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_tokenizer_metadata(tmp_path: Path) -> None:
    metadata = read_metadata(write_gguf(tmp_path / "tiny.gguf", Tiny()))
    assert metadata.model == "gpt2" and metadata.pre == "smollm"
    assert metadata.tokens[:2] == ["t0", "t1"] and len(metadata.tokens) == 96
    assert metadata.merges == ["t 1", "t 2"]
    assert metadata.token_types.tolist() == [3, *[1] * 95]
    assert (metadata.bos_token_id, metadata.eos_token_id) == (1, 2)
    assert metadata.unknown_token_id is None and metadata.scores is None
    assert metadata.add_bos_token is False and metadata.add_space_prefix is None
    assert metadata.chat_template == "{{ messages }}"


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "other.gguf", Tiny(), architecture="mamba")
    with pytest.raises(ModelFileError, match=r"mamba.*supported: llama"):
        open_model(path)


@pytest.mark.parametrize("key", ["llama.block_count", "llama.embedding_length"])
def test_missing_metadata_is_named(tmp_path: Path, key: str) -> None:
    whole = write_gguf(tmp_path / "tiny.gguf", Tiny()).read_bytes()
    path = tmp_path / "renamed.gguf"
    path.write_bytes(whole.replace(key.encode(), key[:-1].encode() + b"X"))
    with pytest.raises(ModelFileError, match=key):
        open_model(path)


def test_a_directory_of_pickles_or_a_loose_shard_is_refused(tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "model.pt", "model.safetensors"):
        path = tmp_path / name
        path.write_bytes(b"x")
        with pytest.raises(ModelFileError, match="by itself"):
            open_model(path)


def test_damaged_files_never_give_another_exception(tmp_path: Path) -> None:
    """Flipped bytes in the header: refused, or read with every weight where it should be."""
    tiny = Tiny()
    whole = write_gguf(tmp_path / "tiny.gguf", tiny).read_bytes()
    path = tmp_path / "flipped.gguf"
    generator = random.Random(8)
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[generator.randrange(4000)] = generator.randrange(256)
        path.write_bytes(damaged)
        try:
            read_metadata(path)
            file = GgufFile(path)
            for name in tiny.weights:
                file.tensor(name)
        except ModelFileError:
            continue

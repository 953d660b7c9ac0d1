from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from services.models.errors import ModelFileError
from services.models.hf_dir import INDEX_FILE, HfDirectory
from services.models.source import open_model
from tests.models.tiny import Tiny, write_directory


def test_config_and_weights(tmp_path: Path) -> None:
    tiny = Tiny()
    source = open_model(write_directory(tmp_path / "model", tiny))
    config = source.config
    assert (config.architecture, config.num_layers, config.head_dim) == ("LlamaForCausalLM", 2, 8)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 3))
    for name, values in tiny.weights.items():
        assert np.array_equal(source.tensor(name), values)


def test_newer_configs_keep_rope_together(tmp_path: Path) -> None:
    parameters = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}
    path = write_directory(tmp_path / "model", Tiny(), rope_parameters=parameters)
    config = HfDirectory(path).config
    assert config.rope_theta == 5e5 and config.rope_factors == (4.0,) * 4


def test_defaults_of_older_configs(tmp_path: Path) -> None:
    changes = {"head_dim": None, "num_key_value_heads": None, "rope_theta": 1e4}
    config = HfDirectory(write_directory(tmp_path / "model", Tiny(), **changes)).config
    assert (config.head_dim, config.num_kv_heads) == (16, 4)


def test_half_precision_weights(tmp_path: Path) -> None:
    tiny = Tiny()
    path = write_directory(
        tmp_path / "model",
        tiny,
        {name: values.astype(np.float16) for name, values in tiny.weights.items()},
    )
    name = "model.norm.weight"
    loaded = HfDirectory(path).tensor(name)
    assert loaded.dtype == np.float32
    assert np.array_equal(loaded, tiny.weights[name].astype(np.float16).astype(np.float32))


def test_bfloat16_weights(tmp_path: Path) -> None:
    path = write_directory(tmp_path / "model", Tiny())
    header = {"model.norm.weight": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}
    encoded = json.dumps(header).encode()
    # 1.5 is 0x3fc0 and -2 is 0xc000 in bfloat16.
    data = np.array([0x3FC0, 0xC000], dtype="<u2").tobytes()
    (path / "model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    assert HfDirectory(path).tensor("model.norm.weight").tolist() == [1.5, -2.0]


def shard(path: Path, tiny: Tiny) -> None:
    """Replace the single file by two shards and an index."""
    (path / "model.safetensors").unlink()
    names = sorted(tiny.weights)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, members in parts.items():
        save_file({name: tiny.weights[name] for name in members}, path / file)
    weight_map = {name: file for file, members in parts.items() for name in members}
    (path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


def test_shards(tmp_path: Path) -> None:
    tiny = Tiny()
    path = write_directory(tmp_path / "model", tiny)
    shard(path, tiny)
    source = HfDirectory(path)
    for name, values in tiny.weights.items():
        assert np.array_equal(source.tensor(name), values)
    (path / "b.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"b\.safetensors.*does not exist"):
        HfDirectory(path)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "Qwen2ForCausalLM.*LlamaForCausalLM"),
        ({"architectures": []}, "missing"),
        ({"hidden_act": "gelu"}, "gelu.*silu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
        ({"rope_scaling": [1]}, "not an object"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_heads"),
        ({"rms_norm_eps": True}, "rms_norm_eps"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id"),
    ],
)
def test_unsupported_configs_are_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelFileError, match=message):
        HfDirectory(write_directory(tmp_path / "model", Tiny(), **changes))


@pytest.mark.parametrize("content", ["", "[]", "{", "\ud800", "[" * 100_000])
def test_config_that_is_no_object_is_refused(tmp_path: Path, content: str) -> None:
    path = write_directory(tmp_path / "model", Tiny())
    (path / "config.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(ModelFileError, match=r"config\.json"):
        HfDirectory(path)


def test_missing_parts(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="does not exist"):
        HfDirectory(tmp_path / "absent")
    path = write_directory(tmp_path / "model", Tiny())
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelFileError, match="no weights"):
        HfDirectory(path)
    (path / "config.json").unlink()
    with pytest.raises(ModelFileError, match=r"config\.json.*does not exist"):
        HfDirectory(path)


def test_links_and_names_that_leave_the_directory_are_refused(tmp_path: Path) -> None:
    tiny = Tiny()
    outside = write_directory(tmp_path / "outside", tiny)
    path = write_directory(tmp_path / "model", tiny)
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").symlink_to(outside / "model.safetensors")
    with pytest.raises(ModelFileError, match="outside"):
        HfDirectory(path)
    (path / "model.safetensors").unlink()
    for name in ("../outside/model.safetensors", str(outside / "model.safetensors")):
        index = {"weight_map": {"model.norm.weight": name}}
        (path / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")
        with pytest.raises(ModelFileError, match="outside"):
            HfDirectory(path)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": [1]}', '{"weight_map": {"a": 3}}'])
def test_bad_index_is_refused(tmp_path: Path, index: str) -> None:
    path = write_directory(tmp_path / "model", Tiny())
    (path / INDEX_FILE).write_text(index, encoding="utf-8")
    with pytest.raises(ModelFileError, match="weight_map"):
        HfDirectory(path)


def test_pickled_shards_are_refused(tmp_path: Path) -> None:
    path = write_directory(tmp_path / "model", Tiny())
    (path / "a.bin").write_bytes(b"x")
    (path / INDEX_FILE).write_text('{"weight_map": {"a": "a.bin"}}', encoding="utf-8")
    with pytest.raises(ModelFileError, match="safetensors"):
        HfDirectory(path)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    path = write_directory(tmp_path / "model", Tiny(), {"model.norm.weight": np.ones(4, np.int8)})
    with pytest.raises(ModelFileError, match="dtype I8"):
        HfDirectory(path).tensor("model.norm.weight")


def test_damaged_shards_never_give_another_exception(tmp_path: Path) -> None:
    tiny = Tiny()
    path = write_directory(tmp_path / "model", tiny)
    file = path / "model.safetensors"
    whole = file.read_bytes()
    generator = random.Random(4)
    for step in range(200):
        damaged = bytearray(whole)
        if step % 4 == 0:
            del damaged[generator.randrange(len(damaged)) :]
        else:
            damaged[generator.randrange(1500)] = generator.randrange(256)
        file.write_bytes(damaged)
        try:
            source = HfDirectory(path)
            for name in tiny.weights:
                source.tensor(name)
        except ModelFileError:
            continue

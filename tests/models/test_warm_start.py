"""Prepared weights: the second start has the first one's bits, and no file can spoil a start."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from gpu_worker.check import token_logprobs
from gpu_worker.model import prepared
from gpu_worker.model.prepared import DamagedFileError, PreparedWeights, key_of
from gpu_worker.runner import ModelRunner
from tests.models.tiny import Tiny, write_directory, write_gguf

TOKENS = list(range(3, 40))


def load(path: Path, cache: Path, dtype: str, quantization: str = "none") -> ModelRunner:
    runner = ModelRunner(
        path,
        dtype,
        num_blocks=40,
        block_size=4,
        max_model_len=None,
        progress=lambda fraction, text: None,
        quantization=quantization,
        weights_cache=cache,
    )
    if runner.native is None:
        pytest.skip(f"needs native kernels: {runner.notices}")
    return runner


def some_tensors() -> dict[str, torch.Tensor]:
    return {
        "odd": torch.randn(5).bfloat16(),
        "panels": torch.randint(-128, 127, (3, 64), dtype=torch.int8),
        "start": torch.arange(64, dtype=torch.int32),
        "scales": torch.randn(1, 16),
    }


@pytest.mark.parametrize(
    "dtype, quantization", [("bfloat16", "none"), ("float32", "int8"), ("bfloat16", "int8")]
)
def test_a_second_start_has_the_same_bits(tmp_path: Path, dtype: str, quantization: str) -> None:
    path, cache = write_gguf(tmp_path / "tiny.gguf", Tiny(tied=True)), tmp_path / "weights"
    first = load(path, cache, dtype, quantization)
    expected = token_logprobs(first, TOKENS)
    files = list(cache.glob("*"))
    if not files:
        pytest.skip(f"{first.instruction_set} has no packed {dtype} weights")
    written = files[0].stat().st_ino
    second = load(path, cache, dtype, quantization)
    assert not second.notices and token_logprobs(second, TOKENS) == expected
    assert [file.stat().st_ino for file in cache.glob("*")] == [written]


def test_another_model_or_precision_has_a_file_of_its_own(tmp_path: Path) -> None:
    cache = tmp_path / "weights"
    path = write_directory(tmp_path / "tiny", Tiny())
    load(path, cache, "float32", "int8")
    load(path, cache, "bfloat16", "int8")
    assert len(list(cache.glob("*"))) == 2
    fresh = write_directory(tmp_path / "fresh", Tiny(seed=1))
    shutil.copytree(fresh, path, dirs_exist_ok=True)
    changed = token_logprobs(load(path, cache, "float32", "int8"), TOKENS)
    assert changed == token_logprobs(load(fresh, tmp_path / "none", "float32", "int8"), TOKENS)


@pytest.mark.parametrize("damage", ["a bit", "cut", "longer", "header", "empty"])
def test_a_damaged_file_is_made_anew_with_a_notice(tmp_path: Path, damage: str) -> None:
    path, cache = write_gguf(tmp_path / "tiny.gguf", Tiny()), tmp_path / "weights"
    expected = token_logprobs(load(path, cache, "float32", "int8"), TOKENS)
    (file,) = cache.glob("*")
    content = bytearray(file.read_bytes())
    if damage == "a bit":
        content[-100] ^= 1
    elif damage == "header":
        content[20] ^= 1
    else:
        changed = {"cut": content[:-1], "longer": content + b"\0", "empty": content[:0]}
        content = bytearray(changed[damage])
    file.write_bytes(content)
    runner = load(path, cache, "float32", "int8")
    (notice,) = runner.notices
    assert "made anew" in notice and token_logprobs(runner, TOKENS) == expected
    assert not load(path, cache, "float32", "int8").notices


def test_tensors_come_back_as_they_were(tmp_path: Path) -> None:
    files = PreparedWeights(tmp_path / "weights")
    tensors = some_tensors()
    assert files.load("k") is None
    assert files.save("k", tensors)
    kept = files.load("k")
    assert kept is not None and kept.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert kept[name].dtype == tensor.dtype and torch.equal(kept[name], tensor)
    assert kept["panels"].data_ptr() % 64 == 0


def test_a_file_under_another_key_and_a_directory_of_others_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    files = PreparedWeights(folder)
    files.save("k", some_tensors())
    (folder / "k.safetensors").rename(folder / "other.safetensors")
    with pytest.raises(DamagedFileError, match="something else"):
        files.load("other")
    folder.chmod(0o777)
    for use in (lambda: files.load("other"), lambda: files.save("k", some_tensors())):
        with pytest.raises(DamagedFileError, match="others can write"):
            use()


def test_the_least_lately_used_files_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, tensors = PreparedWeights(tmp_path / "weights"), some_tensors()
    for age, key in ((3, "a"), (2, "b"), (1, "c")):
        files.save(key, tensors)
        os.utime(tmp_path / "weights" / f"{key}.safetensors", ns=(0, 10**18 - age))
    assert files.load("a") is not None
    size = (tmp_path / "weights" / "a.safetensors").stat().st_size
    monkeypatch.setattr(prepared, "MAX_TOTAL_BYTES", 3 * size)
    assert files.save("d", tensors)
    assert {file.stem for file in (tmp_path / "weights").glob("*")} == {"a", "c", "d"}
    monkeypatch.setattr(prepared, "MAX_TOTAL_BYTES", 100)
    assert not files.save("e", tensors) and files.load("d") is not None


def test_a_key_follows_the_files_of_a_directory(tmp_path: Path) -> None:
    model, code = tmp_path / "model", tmp_path / "code.py"
    model.mkdir()
    (model / "a").write_text("1")
    code.write_text("1")
    keys = {key_of(model, [code], "avx2"), key_of(model, [code], "avx512")}
    (model / "a").write_text("11")
    keys.add(key_of(model, [code], "avx2"))
    code.write_text("2")
    keys.add(key_of(model, [code], "avx2"))
    assert len(keys) == 4

"""Building and loading the native library."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch

from kernels.native import NativeKernels, NativeUnavailable, arguments, build, load_native


def fake_compiler(tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that counts its calls in the file returned."""
    calls = tmp_path / "calls"
    compiler = tmp_path / "gcc"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\necho x >> {calls}\n{script}\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(build.shutil, "which", lambda name: str(compiler))
    return calls


def test_the_library_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = 'while [ "$1" != -o ]; do shift; done; echo library > "$2"'
    calls = fake_compiler(tmp_path, script, monkeypatch)
    cache = tmp_path / "new" / "cache"
    first = build.build_library(cache)
    assert build.build_library(cache) == first
    assert first.read_text() == "library\n"
    assert calls.read_text() == "x\n"
    assert [path.name for path in cache.iterdir()] == [first.name]
    assert cache.stat().st_mode & 0o777 == 0o700


def test_other_flags_are_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = 'while [ "$1" != -o ]; do shift; done; echo library > "$2"'
    fake_compiler(tmp_path, script, monkeypatch)
    first = build.build_library(tmp_path / "cache")
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    assert build.build_library(tmp_path / "cache") != first


def test_no_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.raises(NativeUnavailable, match="no C compiler"):
        load_native(tmp_path / "cache")


def test_a_failing_compiler_is_quoted_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler(tmp_path, "echo no such flag >&2; exit 3", monkeypatch)
    with pytest.raises(NativeUnavailable, match="failed with 3: no such flag"):
        build.build_library(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_compiler_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiler(tmp_path, "exec tail -f /dev/null", monkeypatch)
    monkeypatch.setattr(build, "COMPILER_TIMEOUT_S", 0.2)
    with pytest.raises(NativeUnavailable, match="did not finish"):
        build.build_library(tmp_path / "cache")


def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(NativeUnavailable, match="others can write"):
        load_native(cache)


def test_a_file_that_is_no_library_is_said(tmp_path: Path) -> None:
    path = tmp_path / "broken.so"
    path.write_text("not a library")
    with pytest.raises(NativeUnavailable, match="cannot be loaded"):
        NativeKernels(path)


def test_an_unknown_instruction_set_is_refused(native: NativeKernels) -> None:
    with pytest.raises(ValueError, match="'sse9' is not one of baseline"):
        load_native(isa="sse9")
    assert native.isa == native.available[-1]


def test_threads_are_those_of_torch(native: NativeKernels) -> None:
    """Two OpenMP libraries in one process are two pools that fight for the same cores."""
    loaded = {
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if re.search(r"lib(g|i|)omp[^/]*$", line)
    }
    assert len(loaded) == 1, loaded


@pytest.mark.parametrize(
    "structure, name",
    [
        (arguments.AttentionArguments, "attention_arguments"),
        (arguments.RopeWriteKvArguments, "rope_write_kv_arguments"),
        (arguments.RmsNormArguments, "rms_norm_arguments"),
        (arguments.SiluMulArguments, "silu_mul_arguments"),
        (arguments.LinearArguments, "linear_arguments"),
        (arguments.QuantiseArguments, "quantise_arguments"),
        (arguments.LinearInt8Arguments, "linear_int8_arguments"),
        (arguments.MatrixArguments, "matrix_arguments"),
        (arguments.LayerArguments, "layer_arguments"),
        (arguments.DecoderArguments, "decoder_arguments"),
        (arguments.GreedyArguments, "greedy_arguments"),
        (arguments.ReadMemoryArguments, "read_memory_arguments"),
        (arguments.MultiplyRegistersArguments, "multiply_registers_arguments"),
    ],
)
def test_structures_are_declared_alike(structure: type[ctypes.Structure], name: str) -> None:
    """Same fields in the same order, every one 8 bytes wide, in Python and in C."""
    header = (build.SOURCE_DIRECTORY / "library.h").read_text()
    declared = re.search(r"typedef struct \{([^}]*)\} " + name, header)
    assert declared is not None
    text = re.sub(r"/\*.*?\*/", "", declared.group(1))
    # Quantised rows are two addresses within the structure, called after what they hold.
    text = re.sub(r"quantised_rows to;", "*values, *scales;", text)
    text = re.sub(r"quantised_rows x;", "*x_values, *x_scales;", text)
    text = re.sub(
        r"quantised_rows ([^;]*);",
        lambda found: " ".join(
            f"*{name.strip().removesuffix('_bytes')}_{part};"
            for name in found.group(1).split(",")
            for part in ("values", "scales")
        ),
        text,
    )
    fields = re.findall(r"(\w+)\s*[,;]", text)
    assert [field[0] for field in structure._fields_] == fields
    sizes = [ctypes.sizeof(field[1]) for field in structure._fields_]
    assert all(size == 8 or name == "layer_arguments" for size in sizes)
    assert ctypes.sizeof(structure) == sum(sizes)


def test_what_the_library_takes(native: NativeKernels) -> None:
    x = torch.zeros(4, 6)
    assert native.takes(x, x.bfloat16().float())
    assert not native.takes(x, x.bfloat16())
    assert not native.takes(x.half())
    assert not native.takes(x.T)

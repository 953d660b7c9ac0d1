"""File < environment < flag, and refusals that say what to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.runtime.settings import Settings, SettingsError, knobs, load


def test_defaults_stay_on_this_machine() -> None:
    settings = load(environ={})
    assert settings.http_host == settings.nats_host == "127.0.0.1"
    assert settings.http_port == settings.nats_port == 0
    assert settings.embedded_nats


def test_flag_beats_environment_beats_file(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text('block_size = 32\nnum_blocks = 300\nlog_level = "debug"\n')
    environ = {"STREETCAR_CONFIG": str(file), "STREETCAR_NUM_BLOCKS": "400"}
    environ["STREETCAR_LOG_LEVEL"] = "error"
    settings = load(environ=environ, flags={"log_level": "warning"})
    assert (settings.block_size, settings.num_blocks, settings.log_level) == (32, 400, "warning")
    assert settings.origin("block_size") == str(file)
    assert settings.origin("num_blocks") == "STREETCAR_NUM_BLOCKS"
    assert settings.origin("log_level") == "--log-level"
    assert settings.origin("dtype") == "default"


def test_streetcar_toml_of_the_working_directory_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "streetcar.toml").write_text("max_num_seqs = 7\n")
    assert load(environ={}).max_num_seqs == 7


def test_environment_for_children_gives_the_same_settings(tmp_path: Path) -> None:
    settings = load(
        environ={}, flags={"step_ms": 0.1, "nats_url": "nats://h:1", "run_dir": str(tmp_path)}
    )
    assert load(environ=settings.to_env()) == settings
    assert set(settings.to_env()) == {f"STREETCAR_{k.name.upper()}" for k in knobs()}


@pytest.mark.parametrize(
    ("environ", "nearest"),
    [
        ({"STREETCAR_MAX_NUM_SEQ": "3"}, "STREETCAR_MAX_NUM_SEQS"),
        ({"STREETCAR_BLOCKSIZE": "3"}, "STREETCAR_BLOCK_SIZE"),
    ],
)
def test_misspelt_variable_names_the_nearest(environ: dict[str, str], nearest: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(environ=environ)
    assert nearest in caught.value.fix
    assert next(iter(environ)) in caught.value.cause


def test_misspelt_key_in_a_file_names_the_nearest_and_the_file(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text("max_model_length = 3\n")
    with pytest.raises(SettingsError) as caught:
        load(config=str(file), environ={})
    assert "max_model_len?" in caught.value.fix
    assert str(file) in caught.value.cause


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"max_num_seqs": 65, "max_num_batched_tokens": 64}, ["65", "64", "max_num_seqs"]),
        ({"block_size": 24}, ["block_size", "24", "power of two"]),
        ({"max_model_len": 1000, "num_blocks": 10}, ["1000", "10", "144"]),
        ({"nats_url": "nats://h:4222", "nats_port": 4222}, ["nats_url", "nats_port"]),
        ({"num_blocks": 1}, ["num_blocks", "1", "--num-blocks"]),
        ({"http_port": 65_536}, ["http_port", "65536"]),
        ({"step_ms": float("nan")}, ["step_ms", "nan"]),
        ({"step_ms": float("inf")}, ["step_ms", "inf"]),
        ({"dtype": "float23"}, ["dtype", "float32"]),
        ({"engine_id": "a.b"}, ["engine_id", "a.b"]),
        ({"subject_prefix": "a..b"}, ["subject_prefix"]),
        ({"nats_url": "http://h"}, ["nats_url"]),
        ({"max_num_seqs": True}, ["max_num_seqs", "an integer"]),
        ({"model": 3}, ["model", "text"]),
    ],
)
def test_bad_value_is_refused_with_its_numbers(
    flags: dict[str, str | int | float], words: list[str]
) -> None:
    with pytest.raises(SettingsError) as caught:
        load(environ={}, flags=flags)
    for word in words:
        assert word in str(caught.value)


def test_text_that_is_no_number_names_the_variable() -> None:
    with pytest.raises(SettingsError, match="STREETCAR_BLOCK_SIZE must be an integer"):
        load(environ={"STREETCAR_BLOCK_SIZE": "many"})


@pytest.mark.parametrize("content", [b"block_size = ", b"\xff\xfe", b"x" * ((1 << 20) + 1)])
def test_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "s.toml"
    file.write_bytes(content)
    with pytest.raises(SettingsError, match=r"s\.toml"):
        load(config=str(file), environ={})


def test_missing_file_that_was_named_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot read"):
        load(config=str(tmp_path / "none.toml"), environ={})


def test_replace_checks_again_and_remembers_who() -> None:
    settings = Settings().replace("a test", max_num_seqs=3)
    assert settings.origin("max_num_seqs") == "a test"
    with pytest.raises(SettingsError):
        settings.replace("a test", max_num_seqs=0)

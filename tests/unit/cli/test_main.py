"""The command line: instant help, settings with their origins, problems without tracebacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[3]
HEAVY = ("torch", "numpy", "nats", "starlette", "tokenizers", "asyncio")


def _run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    captured = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, captured.out, captured.err


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    script = (
        "import sys\n"
        "from services.cli.main import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "finally:\n"
        f"    print([n for n in {HEAVY!r} if n in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stderr.strip() == "[]"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = _run("--help", capsys=capsys)
    assert status == 0
    assert all(name in out for name in COMMANDS)


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_has_help_and_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = _run(command, "--help", capsys=capsys)
    assert status == 0
    if "Commands" not in out:
        assert "--json" in out


def test_config_show_names_origins(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREETCAR_BLOCK_SIZE", "32")
    status, out, _ = _run("config", "show", "--json", "--max-num-seqs", "5", capsys=capsys)
    shown = json.loads(out)
    assert status == 0
    assert shown["block_size"] == {"value": 32, "origin": "STREETCAR_BLOCK_SIZE"}
    assert shown["max_num_seqs"] == {"value": 5, "origin": "--max-num-seqs"}
    assert shown["dtype"]["origin"] == "default"


def test_refused_setting_is_told_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["up", "--max-num-seqs", "600", "--max-num-batched-tokens", "512"]
    status, out, err = _run(*arguments, capsys=capsys)
    assert (status, out) == (1, "")
    assert err.startswith("E101 Settings refused\n  cause  max_num_batched_tokens = 512")
    assert "600" in err
    assert "Traceback" not in err


def test_problem_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = _run("models", "path", "no-such-model", "--json", capsys=capsys)
    assert (status, err) == (1, "")
    assert json.loads(out)["error"]["code"] == "E302"


def test_missing_model_ends_up_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    missing = str(tmp_path / "none.gguf")
    status, _, err = _run("up", "--model", missing, capsys=capsys)
    assert status == 1
    assert missing in err
    assert "smollm2-135m" in err


def test_misspelt_flag_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = _run("up", "--max-num-sequ", "3", capsys=capsys)
    assert status == 2
    assert "--max-num-seqs" in err


def test_models_list_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STREETCAR_CACHE_DIR", str(tmp_path))
        status, out, _ = _run("models", "list", "--json", capsys=capsys)
    assert status == 0
    listed = json.loads(out)
    assert listed["name"] == "smollm2-135m"
    assert listed["pulled"] is False
    assert listed["path"].startswith(str(tmp_path))


def test_doctor_names_a_fix_for_a_missing_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, out, _ = _run("doctor", "--json", "--cache-dir", str(tmp_path), capsys=capsys)
    findings = {finding["name"]: finding for finding in map(json.loads, out.splitlines())}
    assert findings["model"]["ok"] is False
    assert "models pull" in findings["model"]["fix"]
    assert findings["Python"]["ok"] is True

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from services.models import catalog
from tests.models.tiny import Tiny, write_directory, write_gguf

# OpenMP's threads spin while they wait, which on a busy machine costs the working ones most of
# their time. The library reads this when torch is first imported, which is after this file.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# Triton's kernels run in its interpreter here, which must be chosen before triton is imported.
os.environ["TRITON_INTERPRET"] = "1"

GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2-greedy.json"


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The embedded model; `make setup` puts it into the cache."""
    try:
        return catalog.path("smollm2-135m")
    except catalog.CatalogError as error:
        pytest.skip(f"needs the embedded model: {error}")


@pytest.fixture(scope="session")
def golden_path() -> Path:
    return GOLDEN


@pytest.fixture(scope="session")
def golden_cases() -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]
    return cases


@pytest.fixture
def tiny_directory(tmp_path: Path) -> Path:
    return write_directory(tmp_path / "tiny", Tiny())


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", Tiny())

"""Meshes that several tests share, each started once as a real process and stopped with Ctrl-C."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.client import Client
from services.models import catalog
from services.runtime.settings import Settings
from tests.process.mesh import Beats, Mesh, heartbeats

GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2-greedy.json"


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory of the tests' own, with the user's pulled models, native code and prepared
    weights in it.
    """
    folder = tmp_path_factory.mktemp("cache")
    (folder / "models").symlink_to(Settings().cache_path / "models")
    for path in (Settings().native_path, Settings().weights_path):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The embedded model; `make setup` puts it into the cache."""
    try:
        return catalog.path("smollm2-135m")
    except catalog.CatalogError as error:
        pytest.skip(f"needs the embedded model: {error}")


@pytest.fixture(scope="session")
def golden_cases() -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]
    return cases


def running(folder: Path, cache: Path, *arguments: str) -> Iterator[Mesh]:
    """A mesh for as long as a fixture lives; it must stop cleanly and leave no traceback."""
    mesh = Mesh.up(*arguments, folder=folder, STREETCAR_CACHE_DIR=str(cache))
    yield mesh
    assert mesh.interrupt() == 0, mesh.stderr
    assert "Traceback" not in mesh.logs() + mesh.stderr
    assert mesh.violations() == []


@pytest.fixture(scope="session")
def stub_mesh(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Mesh]:
    """No model; 64 lanes, steps of 5 ms, 1,023 blocks of 16 tokens."""
    yield from running(tmp_path_factory.mktemp("stub"), cache, "--worker", "stub")


@pytest.fixture(scope="session")
def narrow_mesh(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Mesh]:
    """No model; one lane, one place in the queue, 15 blocks of 16 tokens, slow steps."""
    yield from running(
        tmp_path_factory.mktemp("narrow"),
        cache,
        *("--worker", "stub", "--step-ms", "20", "--num-blocks", "16"),
        *("--max-num-seqs", "1", "--max-waiting-seqs", "1"),
    )


@pytest.fixture(scope="session")
def small_steps_mesh(
    tmp_path_factory: pytest.TempPathFactory, cache: Path, model_path: Path
) -> Iterator[Mesh]:
    """The embedded model in float32; 48 tokens a step, blocks of 16."""
    yield from running(
        tmp_path_factory.mktemp("small-steps"),
        cache,
        *("--dtype", "float32", "--max-num-batched-tokens", "48", "--block-size", "16"),
        *("--max-num-seqs", "16", "--num-blocks", "512"),
    )


@pytest.fixture(scope="module")
def small_pool_mesh(
    tmp_path_factory: pytest.TempPathFactory, cache: Path, model_path: Path
) -> Iterator[Mesh]:
    """The embedded model in float32; 2,048 tokens a step, 99 blocks of 32.

    The golden cases join with 85 blocks, one more each as a margin, and end with 107: some of them
    have to give way.
    """
    yield from running(
        tmp_path_factory.mktemp("small-pool"),
        cache,
        *("--dtype", "float32", "--max-num-batched-tokens", "2048", "--block-size", "32"),
        *("--max-num-seqs", "16", "--num-blocks", "100"),
    )


@pytest.fixture
async def stub_client(stub_mesh: Mesh) -> AsyncIterator[Client]:
    async with Client(stub_mesh.nats_url) as client:
        yield client


@pytest.fixture
async def stub_beats(stub_mesh: Mesh) -> AsyncIterator[Beats]:
    async with heartbeats(stub_mesh.nats_url) as beats:
        yield beats

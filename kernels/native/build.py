"""Compiles the C files with the system's compiler, into a cache of the user's own.

Invariants: a library's name is a digest of everything that shaped it, so a stale one is never
loaded; a half-written one is never visible; nothing is loaded from a directory that others can
write to.

Device: runs a compiler, reads and writes the cache directory.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

SOURCE_DIRECTORY = Path(__file__).parent
MAIN_FILE = "library.c"
COMPILERS = ("gcc", "cc")
COMPILER_TIMEOUT_S = 180.0
"""A build takes some 25 s on a core of 2023."""

FLAGS = (
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-shared",
    "-fopenmp",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
)
"""No -march: the instruction set is chosen when the library is loaded."""

MAX_ERROR_CHARACTERS = 500


class NativeUnavailable(Exception):
    """There is no native library here; the text says why, and what would help."""


def build_library(cache_dir: Path) -> Path:
    """The library's path, compiled if it is not there yet; raises NativeUnavailable."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NativeUnavailable("no C compiler was found; install gcc")
    try:
        _make_private(cache_dir)
        target = cache_dir / f"streetcar-{_digest(compiler)}.so"
        if not target.exists():
            _compile(compiler, target)
    except OSError as error:
        raise NativeUnavailable(f"{cache_dir} cannot be used: {error}") from error
    return target


def _make_private(cache_dir: Path) -> None:
    cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = cache_dir.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NativeUnavailable(f"others can write to {cache_dir}; make it the user's own")


def _digest(compiler: str) -> str:
    """Of the sources, the flags, the compiler and the machine."""
    version = _run([compiler, "--version"])
    parts = [compiler, version, platform.machine(), platform.system(), *FLAGS]
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in sorted(SOURCE_DIRECTORY.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def _compile(compiler: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        built = Path(directory) / "library.so"
        source = str(SOURCE_DIRECTORY / MAIN_FILE)
        _run([compiler, *FLAGS, source, "-o", str(built), "-lm"])
        # A rename within a directory is atomic; of two builders the last one wins, with the same.
        built.replace(target)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILER_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise NativeUnavailable(
            f"{command[0]} did not finish within {COMPILER_TIMEOUT_S:.0f} s"
        ) from None
    if done.returncode != 0:
        problem = done.stderr.strip()[:MAX_ERROR_CHARACTERS]
        raise NativeUnavailable(f"{command[0]} failed with {done.returncode}: {problem}")
    return done.stdout

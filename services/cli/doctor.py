"""`streetcar doctor`: what this machine has, what is missing, and how to mend it.

Shell: looks at the machine; changes nothing.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from services.cli.options import ClusterOptions
from services.cli.output import print_json
from services.models import catalog
from services.runtime.nats_server import find_binary, server_version
from services.runtime.problem import Problem
from services.runtime.settings import Settings

MIN_PYTHON: Final = (3, 11)
MIN_MEMORY_GIB: Final = 2.0
MIN_DISK_GIB: Final = 1.0
_GIB: Final = 1 << 30
_CPU_FEATURES: Final = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "neon", "asimd", "bf16")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `needed` is False where Streetcar runs without it."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
    needed: bool = True


def doctor(options: ClusterOptions | None = None, *, json: bool = False) -> int:
    """Check this machine and say what to mend; status 1 if something needed is missing.

    Parameters
    ----------
    json
        Print one object per finding.
    """
    settings = (options or ClusterOptions()).settings()
    checks: list[Callable[[], Finding]] = [
        _python,
        _packages,
        _cpu,
        _memory,
        lambda: _disk(settings),
        lambda: _model(settings),
        _nats_server,
        lambda: _port("HTTP port", settings.http_host, settings.http_port, "--http-port"),
        lambda: _port("NATS port", settings.nats_host, settings.nats_port, "--nats-port"),
        _compiler,
    ]
    findings = [check() for check in checks]
    for finding in findings:
        if json:
            print_json(asdict(finding))
            continue
        mark = "ok" if finding.ok else ("MISSING" if finding.needed else "absent")
        print(f"{mark:<8} {finding.name:<12} {finding.detail}")
        if finding.fix and not finding.ok:
            print(f"{'':<8} {'':<12} fix: {finding.fix}")
    return int(any(finding.needed and not finding.ok for finding in findings))


def _python() -> Finding:
    version = platform.python_version()
    wanted = ".".join(map(str, MIN_PYTHON))
    ok = sys.version_info >= MIN_PYTHON
    return Finding("Python", ok, f"{version} at {sys.executable}", f"install Python {wanted}")


def _packages() -> Finding:
    """Every package that the distribution requires, extras apart."""
    try:
        requirements = importlib.metadata.requires("streetcar") or []
    except importlib.metadata.PackageNotFoundError:
        return Finding("packages", False, "streetcar itself is not installed", "make setup")
    names = [
        re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]
        for line in requirements
        if "extra ==" not in line
    ]
    missing = [name for name in names if not _is_installed(name)]
    torch = importlib.metadata.version("torch") if "torch" not in missing else "none"
    detail = f"{len(names)} installed, torch {torch}"
    if missing:
        detail = "not installed: " + ", ".join(missing)
    return Finding("packages", not missing, detail, "make setup")


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _cpu() -> Finding:
    """Vector extensions; without bfloat16 the worker computes in float32."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    line = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.M)
    flags = set(line[1].split()) if line else set()
    found = [feature for feature in _CPU_FEATURES if feature in flags]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    dtype = "bfloat16" if {"avx512_bf16", "amx_bf16"} & flags else "float32"
    detail = f"{cores} cores, {platform.machine()}, {' '.join(found) or 'no known extension'}"
    return Finding("CPU", True, f"{detail}; default dtype {dtype}")


def _memory() -> Finding:
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return Finding("memory", True, "unknown on this system")
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.M)
    free = int(found[1]) * 1024 / _GIB if found else 0.0
    fix = "close something, or lower --num-blocks"
    return Finding("memory", free >= MIN_MEMORY_GIB, f"{free:.1f} GiB free", fix)


def _disk(settings: Settings) -> Finding:
    path = settings.cache_path
    while not path.exists():
        path = path.parent
    free = shutil.disk_usage(path).free / _GIB
    writable = os.access(path, os.W_OK)
    detail = f"{free:.1f} GiB free at {settings.cache_path}"
    if not writable:
        detail += ", not writable"
    fix = "free some space, or set --cache-dir"
    return Finding("disk", writable and free >= MIN_DISK_GIB, detail, fix)


def _model(settings: Settings) -> Finding:
    try:
        return Finding("model", True, str(catalog.path(settings.model, settings.cache_path)))
    except Problem as problem:
        return Finding("model", False, problem.cause, problem.fix)


def _nats_server() -> Finding:
    try:
        binary = find_binary()
        return Finding("nats-server", True, f"{server_version(binary)} at {binary}")
    except Problem as problem:
        return Finding("nats-server", False, problem.cause, problem.fix)


def _port(name: str, host: str, port: int, flag: str) -> Finding:
    if port == 0:
        return Finding(name, True, "0: a free one is picked")
    try:
        with socket.create_server((host, port)):
            return Finding(name, True, f"{host}:{port} is free")
    except OSError as error:
        return Finding(name, False, f"{host}:{port}: {error.strerror}", f"{flag} 0 picks another")


def _compiler() -> Finding:
    """A C compiler; the native kernels are built with it where there is one."""
    for name in ("cc", "gcc", "clang"):
        found = shutil.which(name)
        if found:
            return Finding("C compiler", True, found, needed=False)
    return Finding("C compiler", False, "none on PATH", "apt install gcc", needed=False)

"""What processes use of the machine, as the kernel counts it.

Shell: reads /proc; elsewhere than on Linux there is nothing to read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_MIB = 1024 * 1024


class Usage(NamedTuple):
    """cpu_s: of all threads, since its start; memory_mib: resident."""

    cpu_s: float
    memory_mib: float


def usage_of(pids: Mapping[str, int]) -> dict[str, Usage]:
    """By name; those that run no more, or cannot be read, are left out."""
    found = {name: _read(pid) for name, pid in pids.items()}
    return {name: usage for name, usage in found.items() if usage is not None}


def _read(pid: int) -> Usage | None:
    try:
        # The command's name, in parentheses, may hold anything: count from behind it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    user, system, resident_pages = int(fields[11]), int(fields[12]), int(fields[21])
    return Usage(
        cpu_s=(user + system) / os.sysconf("SC_CLK_TCK"),
        memory_mib=resident_pages * os.sysconf("SC_PAGE_SIZE") / _MIB,
    )

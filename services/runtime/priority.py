"""Who gives way where cores are short: a step must not wait for text.

Shell: asks the kernel.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

NICENESS: Final = 5
"""A third of the share of a process that does not give way, and late to interrupt one."""

_AUTOGROUP: Final = Path("/proc/self/autogroup")


def give_way() -> None:
    """From now on this process lets the others of the mesh go first, where the system allows."""
    os.nice(NICENESS)
    # Where Linux groups tasks by session, what `nice` says counts only within the session; this
    # counts between them. A session that somebody else leads is not ours to slow down.
    if os.getsid(0) == os.getpid():
        try:
            _AUTOGROUP.write_text(str(NICENESS))
        except OSError:
            return

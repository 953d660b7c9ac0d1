"""Times on the clock of `now_ns`, in nanoseconds.

Pure.
"""

from __future__ import annotations

from typing import Final

NEVER_NS: Final = 2**62

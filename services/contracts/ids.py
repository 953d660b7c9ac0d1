"""The ids that appear in subjects, and what they may contain.

Pure.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

MAX_ID_LENGTH = 64
ID_PATTERN = rf"^[A-Za-z0-9_-]{{1,{MAX_ID_LENGTH}}}\Z"

_ID = re.compile(ID_PATTERN)

Id = Annotated[str, msgspec.Meta(pattern=ID_PATTERN, max_length=MAX_ID_LENGTH)]
MaybeId = Annotated[str, msgspec.Meta(max_length=MAX_ID_LENGTH)]
"""An id, or "" for nobody; it is compared, and never part of a subject."""


def is_id(text: str) -> bool:
    """True where `text` may stand as one token of a subject (no dot, wildcard, space or NUL)."""
    # `$` would also accept a trailing newline, which is a subject injection.
    return _ID.fullmatch(text) is not None

"""The page: data, style and script in one file that loads nothing.

Pure: but for reading its own parts, which are installed beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any, Final

_PARTS: Final = {"/*STYLE*/": "page.css", "/*SCRIPT*/": "page.js"}
_DATA: Final = "/*DATA*/"


def render(data: Mapping[str, Any]) -> str:
    """HTML of the pictures of `collect`'s data."""
    parts = resources.files(__package__)
    page = (parts / "page.html").read_text(encoding="utf-8")
    for mark, name in _PARTS.items():
        page = page.replace(mark, (parts / name).read_text(encoding="utf-8"))
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Nothing in the data may end the script element that carries it.
    return page.replace(_DATA, text.replace("<", "\\u003c"))

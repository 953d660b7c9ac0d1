"""How much every container inside an object holds, for tests that nothing grows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

_PLAIN: Final = (str, bytes, int, float, bool, type(None), type, np.generic)
_CONTAINERS: Final = (list, dict, set, frozenset, tuple, deque, bytearray, np.ndarray)
_OURS: Final = ("scheduler_svc", "kv_store", "services", "gpu_worker")


def container_sizes(roots: dict[str, Any]) -> dict[str, int]:
    """Lengths of all lists, tables, sets, queues and arrays within `roots`, by where they are."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    todo = list(roots.items())
    while todo:
        path, value = todo.pop()
        if isinstance(value, _PLAIN) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(
            value, list | dict | set | frozenset | tuple | deque | bytearray | np.ndarray
        ):
            found[path] = len(value)
        todo.extend((f"{path}{name}", part) for name, part in _parts(value))
    return found


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What is inside; elements of a container share one name, so that only sizes count."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items() if isinstance(key, str))
        return
    if isinstance(value, np.ndarray | bytearray | set | frozenset | deque):
        return
    if isinstance(value, list | tuple):
        yield from ((f"[{at}]", part) for at, part in enumerate(value[:8]))
        return
    if not type(value).__module__.startswith(_OURS):
        return
    names = {name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())}
    names |= set(getattr(value, "__dict__", ()))
    yield from (
        (f".{name}", getattr(value, name)) for name in sorted(names) if hasattr(value, name)
    )

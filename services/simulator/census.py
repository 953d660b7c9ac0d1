"""How many entries every container of a core has, found by walking its attributes: a table of what
may be left when nothing is going on says the rest.

Invariant: a container that the table does not name must be empty at rest, so one that is added to
a core is watched from its first day.

Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final
from weakref import WeakValueDictionary

from kv_store.ledger import MAX_OPEN_REQUESTS
from scheduler_svc.forgotten import MAX_FORGOTTEN
from scheduler_svc.policies.margin import WINDOW
from services.contracts.limits import KEPT_PLANS, MAX_NAMES

from .options import Options

MAX_DEPTH: Final = 8
_CONTAINERS: Final = (dict, list, set, deque)
_OURS: Final = ("scheduler_svc.", "kv_store.", "gpu_worker.", "services.admission.")
_OURS_TOO: Final = ("services.contracts.streams",)


def census(root: object) -> dict[str, int]:
    """Entries by path, as `roster._log`; values of containers are walked too, under `path[]`, and
    the largest counts.
    """
    counts: dict[str, int] = {}
    seen: set[int] = set()
    todo: deque[tuple[str, Any, int]] = deque([("", root, 0)])
    while todo:
        path, value, depth = todo.popleft()
        if id(value) in seen or depth > MAX_DEPTH:
            continue
        seen.add(id(value))
        if _is_container(value):
            counts[path] = max(counts.get(path, 0), len(value))
            todo.extend((f"{path}[]", item, depth + 1) for item in _items(value))
        elif _is_ours(value):
            todo.extend(
                (f"{path}.{name}".lstrip("."), item, depth + 1) for name, item in _fields(value)
            )
    return counts


def _is_container(value: object) -> bool:
    # An abstract base class has its own, slow idea of its instances.
    return isinstance(value, _CONTAINERS) or type(value) is WeakValueDictionary


def _is_ours(value: object) -> bool:
    module = type(value).__module__
    return module.startswith(_OURS) or module in _OURS_TOO


def _items(value: Any) -> Iterator[Any]:
    items = value.values() if hasattr(value, "values") else value
    return (item for item in list(items) if _is_container(item) or _is_ours(item))


def _fields(value: object) -> Iterator[tuple[str, Any]]:
    for name, item in getattr(value, "__dict__", {}).items():
        yield name, item
    for kind in type(value).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(value, name):
                yield name, getattr(value, name)


Cap = Callable[[Options], int]


def _blocks(options: Options) -> int:
    return options.num_blocks


def _lanes(options: Options) -> int:
    return options.max_num_seqs


def _both(options: Options) -> int:
    return options.num_blocks + options.host_blocks


def _chains(options: Options) -> int:
    """What is cached keeps those before it, whether they are cached still or not."""
    return _both(options) * -(-options.max_model_len // options.block_size)


def _host(options: Options) -> int:
    return options.host_blocks


def _tenants(options: Options) -> int:
    return options.num_salts


def _some(count: int) -> Cap:
    return lambda options: count


_POOL: Final = "ledgers[].pool."
# What may be left at rest, by role and path; everything else must be empty.
CAPS: Final[dict[str, dict[str, Cap]]] = {
    "admission": {
        "vocabularies": _some(1),
        "engines.engines": _some(1),
    },
    "scheduler": {
        "batch.lanes.sequences": _lanes,
        "batch.lanes._free": _lanes,
        "batch.lease.spare": _blocks,
        # Copies wait for the next plan.
        "batch.lease.copies._outs": _both,
        "batch.lease.copies._ins": _both,
        "batch.lease.copies._requests": _both,
        "batch._leaving": _lanes,
        "batch.pipeline.plans": _some(KEPT_PLANS),
        "experience.outputs._recent": _some(WINDOW),
        "experience.forgotten._hashes": _some(MAX_FORGOTTEN),
        "experience.times._moments": _some(9),
        "experience.times._fit": _some(3),
        "experience.counters.served": _tenants,
        "waiting.load._decode": _some(3),
        "waiting.load._prefill": _some(3),
        "owners._admissions": _some(MAX_NAMES),
        "updates.index": _some(MAX_NAMES),
        "updates._boxes": _some(MAX_NAMES),
        "updates._ids": _some(MAX_NAMES),
        "updates._free": _some(MAX_NAMES),
    },
    "kv_store": {
        "ledgers": _some(1),
        "ledgers[].granted": _some(MAX_OPEN_REQUESTS),
        "ledgers[].granted[]": _blocks,
        "ledgers[].copies": _both,
        "ledgers[].copies[].outs": _host,
        "ledgers[].copies[].ins": _host,
        _POOL + "_free": _blocks,
        _POOL + "_surplus": _blocks,
        _POOL + "_holds": _blocks,
        _POOL + "_content": _blocks,
        _POOL + "_arriving": _blocks,
        _POOL + "_cached._tenant_of": _blocks,
        _POOL + "_cached._by_tenant": _tenants,
        _POOL + "_cached._by_tenant[]": _blocks,
        _POOL + "_cached._by_count": _tenants,
        _POOL + "_cached._by_count[]": _tenants,
        _POOL + "_index._entries": _chains,
        _POOL + "host._free": _host,
        _POOL + "host._writing": _host,
        _POOL + "host._content": _host,
        _POOL + "host._pins": _host,
        _POOL + "host._lru._tenant_of": _host,
        _POOL + "host._lru._by_tenant": _tenants,
        _POOL + "host._lru._by_tenant[]": _host,
        _POOL + "host._lru._by_count": _tenants,
        _POOL + "host._lru._by_count[]": _tenants,
    },
    "worker": {
        "_results": _some(KEPT_PLANS),
        "dropped": _some(4),
    },
}


def excess(role: str, counts: dict[str, int], options: Options) -> dict[str, int]:
    """Containers that are fuller than they may be at rest."""
    caps = CAPS[role]
    return {
        path: count
        for path, count in sorted(counts.items())
        if count > (caps[path](options) if path in caps else 0)
    }

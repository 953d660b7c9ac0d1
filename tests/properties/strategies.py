"""Hypothesis strategies for wire messages, made from the types themselves."""

from __future__ import annotations

import re
from typing import Any

import msgspec.inspect as mi
from hypothesis import strategies as st

from services.contracts.ids import ID_PATTERN

_MAX_ITEMS = 3
_MAX_BYTES = 24
_MAX_CHARS = 12
_IDS = st.from_regex(re.compile(r"[A-Za-z0-9_-]{1,12}\Z"), fullmatch=True)


def _integers(kind: mi.IntType) -> st.SearchStrategy[int]:
    low = kind.ge if kind.ge is not None else (kind.gt + 1 if kind.gt is not None else -(2**63))
    high = kind.le if kind.le is not None else (kind.lt - 1 if kind.lt is not None else 2**64 - 1)
    return st.integers(low, high) | st.sampled_from([low, high])


def _floats(kind: mi.FloatType) -> st.SearchStrategy[float]:
    low = kind.ge if kind.ge is not None else kind.gt
    high = kind.le if kind.le is not None else kind.lt
    return st.floats(
        low, high, allow_nan=False, allow_infinity=False, exclude_min=kind.gt is not None
    )


def of_type(kind: mi.Type) -> st.SearchStrategy[Any]:
    """Values of `kind`, within the bounds that its annotations name."""
    match kind:
        case mi.IntType():
            return _integers(kind)
        case mi.FloatType():
            return _floats(kind)
        case mi.BoolType():
            return st.booleans()
        case mi.NoneType():
            return st.none()
        case mi.StrType(pattern=pattern):
            if pattern and pattern != ID_PATTERN:
                return st.from_regex(re.compile(pattern), fullmatch=True)
            if pattern:
                return _IDS
            least = kind.min_length or 0
            return st.text(min_size=least, max_size=max(least, _MAX_CHARS))
        case mi.BytesType():
            return st.binary(max_size=min(_MAX_BYTES, kind.max_length or _MAX_BYTES))
        case mi.EnumType():
            return st.sampled_from(list(kind.cls))
        case mi.LiteralType():
            return st.sampled_from(kind.values)
        case mi.ListType():
            return st.lists(of_type(kind.item_type), max_size=_MAX_ITEMS)
        case mi.DictType():
            keys, values = of_type(kind.key_type), of_type(kind.value_type)
            return st.dictionaries(keys, values, max_size=_MAX_ITEMS)
        case mi.UnionType():
            return st.one_of([of_type(member) for member in kind.types])
        case mi.StructType():
            fields = {field.name: of_type(field.type) for field in kind.fields}
            return st.builds(kind.cls, **fields)
    raise AssertionError(f"no strategy for {kind}")


def messages(kind: type[Any]) -> st.SearchStrategy[Any]:
    return of_type(mi.type_info(kind))

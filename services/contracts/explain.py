"""Says in plain words what is wrong with a message that did not decode.

msgspec names the fault for a programmer ("Expected `str` of length >= 1 - at `$.stop`"); a client
gets the field, the rule and, for a name that is not known, the nearest one that is.

Pure.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Final

from .ids import MAX_ID_LENGTH

_WHERE: Final = re.compile(r" - at `(?P<path>[^`]*)`\Z")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(?P<name>.*)`\Z", re.DOTALL)
_MISSING: Final = re.compile(r"Object missing required field `(?P<name>[^`]*)`\Z")
_TYPE: Final = re.compile(r"Expected `(?P<wanted>[^`]*)`, got `(?P<got>[^`]*)`\Z")
_LENGTH: Final = re.compile(
    r"Expected `(?P<kind>str|array|bytes)` of length (?P<sign><=|>=) (?P<bound>\d+)\Z"
)
_BOUND: Final = re.compile(r"Expected `\w+` (?P<sign><=|>=|<|>) (?P<bound>\S+)\Z")
_ENUM: Final = re.compile(r"Invalid enum value (?P<value>.*)\Z", re.DOTALL)

_SIGNS: Final = {"<=": "at most", ">=": "at least", "<": "less than", ">": "greater than"}
_TYPES: Final = {
    "str": "text",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_UNITS: Final = {"str": "characters", "array": "entries", "bytes": "bytes"}
_MAX_QUOTED_CHARS: Final = 80


def explain(fault: str, fields: Iterable[str]) -> str:
    """msgspec's `fault` for a client; `fields` are the known names of the outermost object."""
    where = _WHERE.search(fault)
    path = where["path"].removeprefix("$").removeprefix(".") if where else ""
    rule = fault[: where.start()] if where else fault
    name = f"`{path}`" if path else "the request"
    if found := _UNKNOWN.match(rule):
        return _unknown_field(found["name"], path, fields)
    if found := _MISSING.match(rule):
        return f"{name} has no field `{found['name']}`, which is required"
    if found := _TYPE.match(rule):
        return f"{name} must be {_types(found['wanted'])}, not {_types(found['got'])}"
    if found := _LENGTH.match(rule):
        return _length_fault(name, path, found["kind"], found["sign"], found["bound"])
    if found := _BOUND.match(rule):
        return f"{name} must be {_SIGNS[found['sign']]} {_number(found['bound'])}"
    if found := _ENUM.match(rule):
        return f"{name} may not be {_quoted(found['value'])}"
    if rule.startswith("Expected `str` matching regex"):
        return f"{name} must be 1 to {MAX_ID_LENGTH} characters of A-Z, a-z, 0-9, _ and -"
    return f"{name}: {_quoted(rule)}" if path else _quoted(rule)


def _unknown_field(unknown: str, path: str, fields: Iterable[str]) -> str:
    place = f" in `{path}`" if path else ""
    # The known names are those of the outermost object only.
    near = [] if path else difflib.get_close_matches(unknown[:_MAX_QUOTED_CHARS], list(fields), n=1)
    hint = f"; did you mean `{near[0]}`?" if near else ""
    return f"unknown field `{_quoted(unknown)}`{place}{hint}"


def _length_fault(name: str, path: str, kind: str, sign: str, bound: str) -> str:
    if (sign, bound) == (">=", "1"):
        if path.partition("[")[0] == "stop":
            return f"{name}: a stop string may not be empty"
        return f"{name} may not be empty"
    return f"{name} must have {_SIGNS[sign]} {_number(bound)} {_UNITS[kind]}"


def _types(names: str) -> str:
    return " or ".join(_TYPES.get(name, name) for name in names.split(" | "))


def _number(text: str) -> str:
    return text.removesuffix(".0")


def _quoted(text: str) -> str:
    return text if len(text) <= _MAX_QUOTED_CHARS * 4 else text[: _MAX_QUOTED_CHARS * 4] + "..."

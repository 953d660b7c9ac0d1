"""API keys of the gateway, kept as hashes in a file that may change while it runs.

Invariants: no key is in a file or a log; what is presented is compared with every key, in constant
time; a file that is gone or damaged lets nobody in. A key has 256 random bits, so a plain SHA-256
is hash enough.

Shell: one small file.
"""

from __future__ import annotations

import hmac
import re
import secrets
from hashlib import sha256
from pathlib import Path
from typing import Final

from services.runtime.log import get_logger
from services.runtime.private_file import write_private
from services.runtime.problem import Problem

MAX_KEYS: Final = 1024
MAX_FILE_BYTES: Final = 256 * 1024
MAX_KEY_CHARS: Final = 256
KEY_BYTES: Final = 32
KEY_PREFIX: Final = "sk-streetcar-"

_LINE: Final = re.compile(r"([A-Za-z0-9_-]{1,64})\s+sha256:([0-9a-f]{64})")
_SCHEME: Final = "bearer "

_Stamp = tuple[int, int, int]


class ApiKeys:
    """The keys in `path` as they are at this moment."""

    def __init__(self, path: Path) -> None:
        """Raises Problem where the file cannot be read, or is damaged."""
        self._path = path
        self._stamp = _stamp(path)
        self._digests = tuple(read_keys(path).values())

    def allow(self, authorization: str) -> bool:
        """Whether an `Authorization` header holds a key that is valid now."""
        self._refresh()
        is_bearer = authorization[: len(_SCHEME)].lower() == _SCHEME
        key = authorization[len(_SCHEME) :].strip() if is_bearer else ""
        presented = sha256(key[: MAX_KEY_CHARS + 1].encode(errors="replace")).digest()
        known = False
        for digest in self._digests:
            known |= hmac.compare_digest(digest, presented)
        return known

    def _refresh(self) -> None:
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._digests = tuple(read_keys(self._path).values())
            get_logger("gateway").info("api_keys_read", num_keys=len(self._digests))
        except Problem as problem:
            self._digests = ()
            get_logger("gateway").error("api_keys_unreadable", reason=problem.cause)


def read_keys(path: Path) -> dict[str, bytes]:
    """SHA-256 of every key by its name. Raises Problem that names the line, not its text."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1).decode()
    except OSError as error:
        raise _problem(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise _problem(f"{path} is not text") from None
    lines = text.splitlines()
    if len(text) > MAX_FILE_BYTES or len(lines) > MAX_KEYS:
        raise _problem(f"{path} has more than {MAX_KEYS} lines or {MAX_FILE_BYTES} bytes")
    keys: dict[str, bytes] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        found = _LINE.fullmatch(line.strip())
        if found is None or found[1] in keys:
            reason = "is no `NAME sha256:HEX`" if found is None else "names a key a second time"
            raise _problem(f"line {number} of {path} {reason}")
        keys[found[1]] = bytes.fromhex(found[2])
    return keys


def write_keys(path: Path, keys: dict[str, bytes]) -> None:
    """Replace the file at once, so that a gateway never sees half of it. Raises Problem."""
    partial = path.with_name(f"{path.name}.partial")
    lines = [f"{name} sha256:{digest.hex()}\n" for name, digest in keys.items()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_private(partial, "".join(lines))
        partial.replace(path)
    except OSError as error:
        raise _problem(f"cannot write {path}: {error.strerror}") from error


def draw_key() -> tuple[str, bytes]:
    """A fresh key, to be shown once, and the hash that is kept of it."""
    key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    return key, sha256(key.encode()).digest()


def _stamp(path: Path) -> _Stamp | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _problem(cause: str) -> Problem:
    return Problem("E108", "API keys cannot be used", cause=cause, fix="streetcar keys new NAME")

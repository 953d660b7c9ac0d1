"""What is in the address of a bus, and what of it may be shown.

Invariant: a password that an address holds never leaves through `without_password`.

Pure.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def user_of(url: str) -> str:
    """The user's name in a bus URL, the first of several; "" where there is none."""
    return urlsplit(url.split(",")[0]).username or ""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def without_password(urls: str) -> str:
    """Comma-separated bus URLs as they may be shown and logged."""
    return ",".join(_bare(url) for url in urls.split(","))


def _bare(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}" if separator else rest or url

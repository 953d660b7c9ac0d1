"""The listening socket of the HTTP gateway, which outlives each process that accepts from it.

Invariant: as long as one process holds it open, a connection that arrives waits in its queue and is
refused by nobody.

Shell: sockets.
"""

from __future__ import annotations

import errno
import socket
from typing import Final

from services.runtime.problem import Problem

BACKLOG: Final = 2048
SEND_BUFFER_BYTES: Final = 512 * 1024

KEEP_ALIVE: Final = (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))
"""Seconds, seconds, tries: a client that vanished without a word is noticed after 40 s."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 picks a free one. Raises Problem."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it: what a reader that does not read can pile up in the system.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEP_ALIVE:
            if option := getattr(socket, name, None):
                listener.setsockopt(socket.IPPROTO_TCP, option, value)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _refusal(host, port, error) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Where it listens, as the address of an HTTP server."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _refusal(host: str, port: int, error: OSError) -> Problem:
    taken = error.errno == errno.EADDRINUSE
    return Problem(
        "E410",
        "Gateway cannot run",
        cause=f"cannot listen on {host}:{port}: {error.strerror or error}",
        fix="--http-port 0 picks a free one" if taken else "--http-host 127.0.0.1",
    )

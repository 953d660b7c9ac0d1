"""Users and limits of the bus as nats-server is told them, from the one table of permissions.

Invariants: no password is ever in a configuration: it names variables, which the server finds in
its environment; a password of an embedded bus is new at each start of a cluster, and lies in no
file but the observer's own.

Shell: randomness.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Self

from services.contracts.limits import MAX_PAYLOAD_BYTES
from services.contracts.permissions import User, grants
from services.contracts.subjects import Subjects

MAX_PENDING_BYTES: Final = 64 * 1024 * 1024
MAX_CONNECTIONS: Final = 1024
MAX_SUBSCRIPTIONS: Final = 1024
"""Of one connection. A service has some twenty; a program with one inbox per request has more."""

MAX_CONTROL_LINE_BYTES: Final = 2048
"""The longest line of ours names a subject and an inbox: below 1,024 with the longest prefix."""

PING_INTERVAL_S: Final = 2
MAX_PINGS_OUT: Final = 2
WRITE_DEADLINE_S: Final = 5
AUTH_TIMEOUT_S: Final = 5
"""Long for a machine that starts eight processes at once."""

_PASSWORD_BYTES: Final = 24


@dataclass(frozen=True, slots=True)
class BusAccess:
    """Who may use one bus. anonymous: a connection without a password is a `client`."""

    subjects: Subjects
    passwords: Mapping[User, str]
    anonymous: bool

    @classmethod
    def draw(cls, subjects: Subjects, *, anonymous: bool) -> Self:
        """Fresh passwords for every user."""
        # The server reads a variable as a value of its configuration: it must not be a number.
        passwords = {user: f"s{secrets.token_hex(_PASSWORD_BYTES)}" for user in User}
        return cls(subjects, passwords, anonymous)

    def configuration(self) -> list[str]:
        """Lines for the server's configuration file."""
        open_door = [f"no_auth_user: {User.CLIENT}"] if self.anonymous else []
        return [*limits(), *authorization(self.subjects), *open_door]

    def variables(self) -> dict[str, str]:
        """What `configuration` reads from the server's environment."""
        return {password_variable(user): password for user, password in self.passwords.items()}

    def url(self, address: str, user: User) -> str:
        """`nats://host:port` with the user's name and password in it: a secret."""
        return f"nats://{user}:{self.passwords[user]}@{address.removeprefix('nats://')}"


def password_variable(user: User) -> str:
    """Environment variable of nats-server with the password of `user`."""
    return f"NATS_PASSWORD_{user.upper()}"


def limits() -> list[str]:
    """The limits of the wire, as configuration lines."""
    return [
        f"max_payload: {MAX_PAYLOAD_BYTES}",
        f"max_pending: {MAX_PENDING_BYTES}",
        f"max_connections: {MAX_CONNECTIONS}",
        f"max_subscriptions: {MAX_SUBSCRIPTIONS}",
        f"max_control_line: {MAX_CONTROL_LINE_BYTES}",
        f'ping_interval: "{PING_INTERVAL_S}s"',
        f"ping_max: {MAX_PINGS_OUT}",
        f'write_deadline: "{WRITE_DEADLINE_S}s"',
    ]


def authorization(subjects: Subjects) -> list[str]:
    """The `authorization` block: every user, its password's variable, its subjects."""
    lines = ["authorization {", f"  timeout: {AUTH_TIMEOUT_S}", "  users: ["]
    for user, grant in grants(subjects).items():
        lines += [
            "    {",
            f"      user: {user}, password: ${password_variable(user)}",
            "      allowed_connection_types: [STANDARD]",
            "      permissions: {",
            f"        publish: {{ {_rights(grant.publish)} }}",
            f"        subscribe: {{ {_rights(grant.subscribe)} }}",
            "      }",
            "    }",
        ]
    return [*lines, "  ]", "}"]


def _rights(subjects: Iterable[str]) -> str:
    quoted = ", ".join(f'"{subject}"' for subject in subjects)
    return f"allow: [{quoted}]" if quoted else 'deny: [">"]'

from __future__ import annotations

import pytest

from services.contracts.permissions import User, inbox_prefix, takes_frames
from services.runtime.bus_url import is_loopback, user_of, without_password
from services.runtime.settings import SettingsError, load


@pytest.mark.parametrize(
    ("url", "user", "shown"),
    [
        ("nats://h:4222", "", "nats://h:4222"),
        ("nats://alice:se:cr@et@h:4222", "alice", "nats://h:4222"),
        ("nats://token@h", "token", "nats://h"),
        ("nats://a:p@h:1,nats://b:q@i:2", "a", "nats://h:1,nats://i:2"),
        ("", "", ""),
    ],
)
def test_what_an_address_says(url: str, user: str, shown: str) -> None:
    assert user_of(url) == user
    assert without_password(url) == shown


def test_settings_show_no_password() -> None:
    settings = load(environ={}, flags={"nats_url": "nats://alice:secret@h:4222"})
    assert settings.to_dict()["nats_url"] == "nats://h:4222"
    assert settings.to_env()["STREETCAR_NATS_URL"] == "nats://alice:secret@h:4222"
    for wrong in ({"nats_port": 4222}, {"nats_url": "nats://alice:secret@h:4222 x"}):
        with pytest.raises(SettingsError) as caught:
            load(environ={}, flags={"nats_url": "nats://alice:secret@h:4222"} | wrong)
        assert "secret" not in caught.value.cause
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "", "127.0.0.1.org"])
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


def test_inboxes_belong_to_users() -> None:
    prefixes = [inbox_prefix(user) for user in User]
    assert len(set(prefixes)) == len(prefixes)
    assert inbox_prefix("client") == inbox_prefix("somebody") == inbox_prefix("") == "_INBOX"
    assert takes_frames("_INBOX.a.b") and takes_frames("_INBOX_gateway.a")
    for forged in ("", "_INBOX", "_INBOX_scheduler.a", "_INBOXES.a", "streetcar.v1.x", "$SRV.PING"):
        assert not takes_frames(forged)

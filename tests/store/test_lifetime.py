"""The end of stores with their process: each step runs, whatever the others do."""

from __future__ import annotations

import sys

import pytest

from dist2.store import lifetime


class Part:
    """A user or a server of a store that fails to end."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.lingered_s = -1.0

    def close(self) -> None:
        self.calls.append("close")
        raise OSError("of the user")

    def wait_until_idle(self, timeout_s: float) -> bool:
        self.calls.append("wait_until_idle")
        self.lingered_s = timeout_s
        raise OSError("of the server")

    def stop(self) -> None:
        self.calls.append("stop")
        raise OSError("of the server's stop")

    def abandon(self) -> None:
        raise AssertionError("in no child")


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Part], list[Part]]:
    users, servers = [Part(), Part()], [Part(), Part()]
    monkeypatch.setattr(lifetime, "_users", users)
    monkeypatch.setattr(lifetime, "_servers", servers)
    monkeypatch.delattr(sys, "last_value", raising=False)
    return users, servers


def test_one_store_that_fails_to_close_keeps_no_other_from_it(
    parts: tuple[list[Part], list[Part]],
) -> None:
    users, servers = parts
    with pytest.raises(OSError, match="of the"):
        lifetime._at_exit()
    assert [each.calls for each in users] == [["close"]] * 2
    assert [each.calls for each in servers] == [["wait_until_idle", "stop"]] * 2


@pytest.mark.parametrize(("at_a_prompt", "lingers"), [(True, True), (False, False)])
def test_a_server_stays_for_others_unless_an_error_ends_the_process(
    at_a_prompt: bool, lingers: bool, parts: tuple[list[Part], list[Part]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a prompt the last error is of an earlier command."""
    monkeypatch.setattr(sys, "last_value", ValueError("of a command"), raising=False)
    if at_a_prompt:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(OSError, match="of the"):
        lifetime._at_exit()
    assert [each.lingered_s > 0 for each in parts[1]] == [lingers] * 2

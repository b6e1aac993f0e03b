"""How all tests begin."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Take Ctrl-C, also in the background, where it is ignored: what tests start would ignore it as well."""
    signal.signal(signal.SIGINT, signal.default_int_handler)

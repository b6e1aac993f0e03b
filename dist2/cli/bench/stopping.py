"""Signals that ask a program to stop act like Ctrl-C: it ends its processes and removes its files."""

from __future__ import annotations

import signal

_REQUESTS = (signal.SIGTERM, signal.SIGHUP)


def stop_as_by_ctrl_c() -> None:
    """Have SIGTERM and SIGHUP raise `KeyboardInterrupt` in the main thread, where nobody minds them yet."""
    for request in _REQUESTS:
        if signal.getsignal(request) is signal.SIG_DFL:  # nohup ignores one
            signal.signal(request, signal.default_int_handler)

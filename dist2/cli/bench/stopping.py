"""What asks a program to stop does so as Ctrl-C does: its processes end, and what it had made goes."""

from __future__ import annotations

import signal

_REQUESTS = (signal.SIGTERM, signal.SIGHUP)


def stop_as_by_ctrl_c() -> None:
    """Have SIGTERM and SIGHUP raise `KeyboardInterrupt` in the main thread, where nobody minds them yet."""
    for request in _REQUESTS:
        if signal.getsignal(request) is signal.SIG_DFL:  # nohup ignores one
            signal.signal(request, signal.default_int_handler)

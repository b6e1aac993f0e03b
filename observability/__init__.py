"""Observe the process groups of a process: metrics, flight recorder, traces, logs, an HTTP control plane.

The flight recorder and the counters are always on: dist2 loads them with its first group (entry points
``dist2.instruments``). `start` adds the control plane. Importing this package starts nothing, and each
name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from dist2.runtime.signals import package_holds_locks

if TYPE_CHECKING:
    from observability.client import fetch
    from observability.dumps import dump_on
    from observability.flight_recorder import FlightRecorder, dump_flight_recorder
    from observability.logs import LogInstrument, bind_operation, configure_logs, log_context
    from observability.metrics import Metrics
    from observability.scrape import Scrape, parse_metrics, read_metrics, slowest_rank
    from observability.server import Server, start
    from observability.server.handlers import register_handler
    from observability.steps import step, steps_of
    from observability.stragglers import Straggler
    from observability.tracing import record_parts, write_trace

package_holds_locks(__spec__)  # of instruments, which are called when a group ends

_HOME = {
    "FlightRecorder": "flight_recorder",
    "LogInstrument": "logs",
    "Straggler": "stragglers",
    "Metrics": "metrics",
    "Scrape": "scrape",
    "Server": "server",
    "bind_operation": "logs",
    "configure_logs": "logs",
    "dump_on": "dumps",
    "dump_flight_recorder": "flight_recorder",
    "fetch": "client",
    "log_context": "logs",
    "parse_metrics": "scrape",
    "read_metrics": "scrape",
    "record_parts": "tracing",
    "register_handler": "server.handlers",
    "slowest_rank": "scrape",
    "start": "server",
    "step": "steps",
    "steps_of": "steps",
    "write_trace": "tracing",
}

__all__ = [
    "FlightRecorder",
    "LogInstrument",
    "Metrics",
    "Scrape",
    "Server",
    "Straggler",
    "bind_operation",
    "configure_logs",
    "dump_flight_recorder",
    "dump_on",
    "fetch",
    "log_context",
    "parse_metrics",
    "read_metrics",
    "record_parts",
    "register_handler",
    "slowest_rank",
    "start",
    "step",
    "steps_of",
    "write_trace",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)

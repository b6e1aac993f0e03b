"""Rendezvous of the global API: by URL, with handlers that users add for schemes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

from torch.distributed import Store

from dist2.errors import ArgumentTypeError
from dist2.legacy.names import default_pg_timeout
from dist2.rendezvous import Located, call_handler, locate, register_rendezvous_handler
from dist2.rendezvous.endpoints import FileEndpoint
from dist2.runtime.deadline import seconds

__all__ = ["register_rendezvous_handler", "rendezvous"]


def rendezvous(
    url: str, rank: int = -1, world_size: int = -1, **kwargs: Any
) -> Iterator[tuple[Store, int, int]]:
    """Meet the other ranks at a URL; yield ``(store, rank, world_size)``.

    Wrong arguments raise here, and not when the first value is taken. A file needs no server: its store
    exists at once, before other ranks have called.

    Args:
        url: ``env://``, ``tcp://host:port``, ``file:///path``, or of a registered scheme.
        rank: The caller's rank, if the URL does not contain it.
        world_size: Number of ranks, if the URL does not contain it.
        **kwargs: ``timeout``, a `timedelta`; for a registered handler, its arguments.
    """
    if not isinstance(url, str):
        raise ArgumentTypeError(f"`url` must be a string. {type(url)}: {url!r}")
    handled = call_handler(url, rank, world_size, **kwargs)
    if handled is not None:
        return handled  # type: ignore[return-value]  # torch's contract for handlers
    limit_s = seconds(kwargs.get("timeout", default_pg_timeout))
    return _meet(locate(url, rank, world_size), timedelta(seconds=limit_s))


def rank_told(url: str | None, rank: int) -> int | None:
    """Return the rank in the arguments of `init_process_group`, or None."""
    if rank >= 0 or not isinstance(url, str):
        return rank if rank >= 0 else None
    told = parse_qs(urlsplit(url).query).get("rank", [""])[0]
    return int(told) if told.isdecimal() else None


def _meet(located: Located, timeout: timedelta) -> Iterator[tuple[Store, int, int]]:
    endpoint, rank, world_size = located.endpoint, located.rank, located.world_size
    if isinstance(endpoint, FileEndpoint):
        yield endpoint.open(rank, world_size, timeout), rank, world_size
    else:
        met = located.meet(timeout)
        yield met.store, met.rank, met.world_size

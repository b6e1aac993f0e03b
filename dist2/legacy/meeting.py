"""Rendezvous of the global API: by URL, with handlers that users add for schemes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

from torch.distributed import Store

from dist2.clock import seconds
from dist2.errors import ArgumentTypeError, InvalidUsageError
from dist2.legacy._world import RendezvousHandler, worlds
from dist2.legacy.names import default_pg_timeout
from dist2.rendezvous import rendezvous as meet

BUILTIN_SCHEMES = frozenset({"env", "tcp", "file"})


def register_rendezvous_handler(scheme: str, handler: RendezvousHandler) -> None:
    """Have ``handler(url, timeout=…)`` meet for URLs of a scheme; it yields ``(store, rank, world_size)``.

    Raises:
        InvalidUsageError: The scheme has a handler, is no text, or nothing can call the new one.
    """
    if not isinstance(scheme, str):
        raise ArgumentTypeError(f"scheme must be a str, got {scheme!r} ({type(scheme).__name__})")
    if scheme in BUILTIN_SCHEMES or scheme in worlds.handlers:
        raise InvalidUsageError(f"Rendezvous handler for {scheme}:// already registered")
    if not callable(handler):
        raise ArgumentTypeError(f"handler must be callable, got {handler!r} ({type(handler).__name__})")
    worlds.handlers[scheme] = handler


def rendezvous(
    url: str, rank: int = -1, world_size: int = -1, **kwargs: Any
) -> Iterator[tuple[Store, int, int]]:
    """Meet the other ranks at a URL; yield ``(store, rank, world_size)``.

    Args:
        url: ``env://``, ``tcp://host:port``, ``file:///path``, or of a registered scheme.
        rank: The caller's, where the URL does not say it.
        world_size: Likewise.
        **kwargs: ``timeout``, a `timedelta`; for a handler, whatever it takes.
    """
    if not isinstance(url, str):
        raise ArgumentTypeError(f"`url` must be a string. {type(url)}: {url!r}")
    scheme = urlsplit(url).scheme
    if scheme in worlds.handlers:
        return worlds.handlers[scheme](_with_query(url, rank, world_size), **kwargs)
    limit_s = seconds(kwargs.get("timeout", default_pg_timeout))
    return _meet(url, rank, world_size, timedelta(seconds=limit_s))


def meeting(url: str, rank: int, world_size: int, timeout: timedelta) -> dict[str, Any]:
    """Return what `dist2.new_group` takes to meet at a URL: that, or what the handler of its scheme gives."""
    if isinstance(url, str) and urlsplit(url).scheme not in worlds.handlers:
        given = {"rank": None if rank < 0 else rank, "world_size": None if world_size < 0 else world_size}
        return {"init_method": url, **given}
    store, rank, world_size = next(rendezvous(url, rank, world_size, timeout=timeout))
    return {"store": store, "rank": rank, "world_size": world_size}


def rank_told(url: str | None, rank: int) -> int | None:
    """Return the rank that the arguments of `init_process_group` say, or None."""
    if rank >= 0 or not isinstance(url, str):
        return rank if rank >= 0 else None
    told = parse_qs(urlsplit(url).query).get("rank", [""])[0]
    return int(told) if told.isdecimal() else None


def _meet(url: str, rank: int, world_size: int, timeout: timedelta) -> Iterator[tuple[Store, int, int]]:
    met = meet(
        url,
        rank=None if rank < 0 else rank,
        world_size=None if world_size < 0 else world_size,
        timeout=timeout.total_seconds(),
    )
    yield met.store, met.rank, met.world_size


def _with_query(url: str, rank: int, world_size: int) -> str:
    """Return a URL that tells rank and world size in its query, where handlers look for them."""
    parts = urlsplit(url)
    told = [f"{name}={value}" for name, value in (("rank", rank), ("world_size", world_size)) if value >= 0]
    query = "&".join(([parts.query] if parts.query else []) + told)
    return parts._replace(query=query).geturl()

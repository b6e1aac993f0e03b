"""torch's protocol for workers, ``POST /handler/<name>``, so that torch's debug server lists our ranks.

Each handler gets the parameters of the request, and returns the answer. Those below come first; then
those that the program has registered here; then those that it, or torch, has registered with torch. torch's
frontend knows no token: it reads an address of each rank from a store. So the address that `offer_to_torch`
writes holds a capability, from which the token cannot be found, and which opens the handlers only.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from typing import Any

import attrs
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from dist2.errors import InvalidUsageError
from dist2.runtime.config import environment_value
from dist2.runtime.torch_versions import BINDING
from dist2.store import PrefixStore, TCPStore
from observability.flight_recorder import Recording, encode
from observability.job.pyspy import pyspy_dump
from observability.job.stacks import stacks
from observability.server.answers import as_json, bytes_of, heavy_answer
from observability.server.threads import Heavy, on_thread

Handler = Callable[[Mapping[str, str]], "str | bytes | dict[str, Any]"]
"""Returns text, bytes, or plain data that is sent as JSON."""

PREFIX = "/torch/"
PYSPY = "pyspy_dump"
_KEYS = "debug_server"
"""The prefix of the keys of torch's frontend."""

_c10d: Any = BINDING

_registered: dict[str, Handler] = {}


def register_handler(name: str, handler: Handler) -> Callable[[], None]:
    """Answer ``POST /handler/<name>`` of this process's control planes; return a callable that removes it.

    Args:
        name: Of letters, digits and ``_``.
        handler: Called on a thread of its own with the parameters of the request, each a text.

    Raises:
        InvalidUsageError: The name cannot be one or is taken, or the handler cannot be called.

    Examples:
        >>> queue = ["first"]
        >>> name = f"queue_length_{pg.rank()}"
        >>> remove = observability.register_handler(name, lambda parameters: {"length": len(queue)})
        >>> remove()
    """
    if not isinstance(name, str) or not name.isidentifier() or not name.isascii():
        raise InvalidUsageError(f"name must be of letters, digits and _, got {name!r}")
    if not callable(handler):
        raise InvalidUsageError(f"handler must be callable, got {handler!r}")
    if name in OWN or name == PYSPY or name in _registered:
        raise InvalidUsageError(f"name {name!r} is taken by another handler")
    _registered[name] = handler

    def remove() -> None:
        _registered.pop(name, None)

    return remove


def capability(token: str) -> str:
    """Return the part of an address that opens the handlers of a control plane."""
    return hmac.new(token.encode(), b"dist2 control plane handlers", sha256).hexdigest()


def offer_to_torch(url: str, token: str, rank: int) -> None:
    """Enter a control plane where torch's debug server looks for its workers.

    Raises:
        InvalidUsageError: ``MASTER_ADDR`` and ``MASTER_PORT``, which that server needs too, are not set.
        StoreError: The store there cannot be reached.
    """
    host, port = environment_value("MASTER_ADDR"), environment_value("MASTER_PORT")
    if host is None or port is None or not port.isdecimal():
        raise InvalidUsageError(
            f"torch's debug server finds its workers at MASTER_ADDR:MASTER_PORT, got {host}:{port}"
        )
    store = TCPStore(host, int(port), is_master=False)
    try:
        PrefixStore(_KEYS, store).set(f"rank{rank}", f"{url}{PREFIX}{capability(token)}")
    finally:
        store.close()


class HandlerEndpoints:
    """Answers ``/handler/<name>``.

    Args:
        recording: Returns the recording of this rank.
    """

    def __init__(self, recording: Callable[[], Recording]) -> None:
        self._recording = recording
        self._heavy = Heavy()

    async def names(self, request: Request) -> Response:
        """The names of the handlers."""
        return as_json({"handlers": sorted({*OWN, PYSPY, *_registered, *_names_of_torch()})})

    async def handle(self, request: Request) -> Response:
        """The answer of the handler of that name."""
        name, parameters = request.path_params["name"], dict(request.query_params)
        body = await bytes_of(request)
        answer: str | bytes | dict[str, Any]
        if name in OWN:
            make, kind = OWN[name]
            return await heavy_answer(request, self._heavy, make, self._recording, media_type=kind)
        if name == PYSPY:
            told = tuple(parameters.items())
            return await heavy_answer(request, self._heavy, _pyspy_dump, told, media_type="text/plain")
        if name in _registered:
            answer = await on_thread(_registered[name], parameters)
        elif name in _names_of_torch():
            answer = await on_thread(_ask_torch, name, parameters, body)
        else:
            raise HTTPException(404, f"no handler {name!r}: GET /handler/ lists them")
        if isinstance(answer, dict):
            return as_json(answer)
        kind = "text/plain" if isinstance(answer, str) else "application/octet-stream"
        return Response(answer, media_type=kind, headers={"Cache-Control": "no-store"})


def _pyspy_dump(parameters: Iterable[tuple[str, str]]) -> bytes:
    return pyspy_dump(dict(parameters)).encode(errors="replace")


def _dump_traceback(recording: Callable[[], Recording]) -> bytes:
    """Return the stacks of all Python threads in the form of Python's faulthandler."""
    parts = []
    for thread in stacks():
        lines = [
            f'  File "{each["file"]}", line {each["line"]} in {each["name"]}' for each in thread["frames"]
        ]
        handling = f", handling {thread['exception']}" if thread["exception"] else ""
        parts.append("\n".join([f"Thread {thread['name']}{handling} (most recent call first):", *lines]))
    return ("\n\n".join(parts) + "\n").encode(errors="replace")


def _trace(recording: Callable[[], Recording]) -> bytes:
    return encode(recording(), "json")


def _nccl_trace(recording: Callable[[], Recording]) -> bytes:
    held = recording()
    of_nccl = tuple(each for each in held.operations if "nccl" in each.signature.group.backend)
    return encode(attrs.evolve(held, operations=of_nccl), "json")


OWN: dict[str, tuple[Callable[[Callable[[], Recording]], bytes], str]] = {
    "dump_traceback": (_dump_traceback, "text/plain"),
    "fr_trace_json": (_trace, "application/json"),
    "dump_nccl_trace_json": (_nccl_trace, "application/json"),
}
"""Handlers that torch's debug server calls and that a dist2 process answers from its own records."""


def _names_of_torch() -> list[str]:
    names: Callable[[], list[str]] | None = getattr(_c10d, "_get_handler_names", None)
    return [] if names is None else names()  # an older torch has none


def _ask_torch(name: str, parameters: Mapping[str, str], body: bytes) -> str | bytes:
    """Return the answer of a handler that is registered with torch."""

    class Asked(_c10d._Request):  # type: ignore[misc]  # torch's stubs lack it
        def body(self) -> bytes:
            return body

        def get_param(self, key: str) -> str:
            return parameters.get(key, "")

    class Answered(_c10d._Response):  # type: ignore[misc]  # torch's stubs lack it
        content: str | bytes = ""
        status = 200

        def set_content(self, content: str | bytes, content_type: str) -> None:
            self.content = content

        def set_status(self, status: int) -> None:
            self.status = status

    answered = Answered()
    _c10d._get_handler(name)(Asked(), answered)
    if answered.status != 200:
        content = answered.content
        reason = content.decode(errors="replace") if isinstance(content, bytes) else content
        raise HTTPException(answered.status, reason or f"torch's handler {name} failed")
    return answered.content

"""Shared by all endpoints: the body of a request within limits, parameters, answers and errors as JSON."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Hashable
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from observability.server.threads import Heavy

Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]

log = logging.getLogger("dist2.control_plane")

MAX_BODY = 4 << 20
"""Bytes: the addresses of 10,000 ranks are about 1 MiB."""
BODY_S = 10.0


async def body_of(request: Request) -> Any:
    """Return the JSON of a request; an empty object where it has no body.

    Raises:
        HTTPException: It is too long, too slow, or no JSON.
    """
    data = await bytes_of(request)
    try:
        return json.loads(data or b"{}")
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is no JSON: {error}") from error


async def bytes_of(request: Request) -> bytes:
    """Return the body of a request.

    Raises:
        HTTPException: It is too long, or too slow.
    """
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                data += part
                if len(data) > MAX_BODY:
                    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
                    raise HTTPException(status, f"the body has more than {MAX_BODY} bytes")
    except TimeoutError as error:
        raise HTTPException(408, f"the body did not arrive within {BODY_S} s") from error
    return bytes(data)


def guarded(answer: Endpoint) -> Endpoint:
    """Turn an unexpected exception into an answer and a log line, instead of a closed connection."""

    async def guarded(request: Request) -> Response:
        try:
            return await answer(request)
        except HTTPException:
            raise
        except Exception as error:
            log.exception("no answer to %s", request.scope["path"])
            return _error(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")

    return guarded


async def http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    reason = error.detail
    if status is HTTPStatus.NOT_FOUND and reason == status.phrase:
        reason = f"nothing at {request.scope['path']!r}"
    return _error(status, reason, dict(error.headers or {}))


def _error(status: HTTPStatus, reason: str, headers: dict[str, str] | None = None) -> Response:
    return as_json({"error": status.name.lower(), "reason": reason}, status, headers)


def as_json(
    document: object, status: HTTPStatus = HTTPStatus.OK, headers: dict[str, str] | None = None
) -> Response:
    """Answer with ASCII JSON, which any text survives, also half a surrogate pair."""
    return Response(
        json.dumps(document, allow_nan=False),
        status_code=status,
        headers={"Cache-Control": "no-store", **(headers or {})},
        media_type="application/json",
    )


async def heavy_answer(
    request: Request,
    heavy: Heavy,
    make: Callable[..., bytes],
    *arguments: Hashable,
    name: str = "",
    media_type: str = "application/json",
) -> Response:
    """Answer with the result of a function that takes long; with a name, as a file to save."""
    zipped = "gzip" in request.headers.get("accept-encoding", "")
    body = await heavy(make, *arguments, zipped=zipped)
    headers = {"Cache-Control": "no-store", "Vary": "Accept-Encoding"}
    headers |= {"Content-Encoding": "gzip"} if zipped else {}
    headers |= {"Content-Disposition": f'attachment; filename="{name}"'} if name else {}
    return Response(body, headers=headers, media_type=media_type)


def number(request: Request, name: str, default: int, most: int) -> int:
    """Return a query parameter that counts."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(most)) and int(text) <= most):
        raise HTTPException(400, f"{name} must be a number from 0 to {most}, got {text!r}")
    return int(text)

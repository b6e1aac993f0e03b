"""The body of a request, within limits of size and time."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

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

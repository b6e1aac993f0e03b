"""The endpoints as an OpenAPI document, from their table and docstrings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from observability.exposition import dist2_version
from observability.server.answers import Endpoint

PARAMETERS = {
    "/works": ("group", "limit"),
    "/flight_recorder": ("format", "rank"),
    "/summary": ("rank",),
    "/history": ("rank",),
    "/trace": ("seconds", "rank"),
    "/timeline": ("ms", "most"),
    "/job": ("limit_ms",),
    "/desync": ("after_ms", "limit_ms"),
    "/stacks": ("rank", "limit_ms"),
}
"""The query parameters of each path."""


@attrs.frozen
class Operation:
    """One endpoint.

    Attributes:
        path: With its parameters in braces.
        method: ``GET`` or ``POST``.
        answer: The endpoint; its docstring describes it.
    """

    path: str
    method: str
    answer: Endpoint


def document(operations: Iterable[Operation]) -> dict[str, Any]:
    """Return the OpenAPI document of these endpoints."""
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        paths.setdefault(each.path, {})[each.method.lower()] = _described(each)
    return {
        "openapi": "3.1.0",
        "info": {"title": "dist2 control plane", "version": dist2_version()},
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{"token": []}],
        "paths": paths,
    }


def _described(operation: Operation) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "query", "schema": {"type": "string"}}
        for name in PARAMETERS.get(operation.path, ())
    ]
    if "{name}" in operation.path:
        parameters.append({"name": "name", "in": "path", "required": True, "schema": {"type": "string"}})
    described: dict[str, Any] = {
        "summary": " ".join((operation.answer.__doc__ or "").split()),
        "parameters": parameters,
        "responses": {
            "200": {"description": "the answer"},
            "401": {"description": "no token, or a wrong one"},
        },
    }
    if operation.method == "POST":
        described["requestBody"] = {"content": {"application/json": {"schema": {"type": "object"}}}}
    return described

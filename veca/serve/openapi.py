"""The OpenAPI description: bodies that the app reads by itself, answers that are not JSON, and the service's bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

from veca.serve.service import Service

REASONS = {
    400: "The request or its form is damaged.",
    401: "The bearer token is missing or wrong.",
    404: "There is nothing at this address.",
    405: "This address does not know this method.",
    408: "The upload took too long.",
    413: "Too many bytes, or too many pixels.",
    415: "Not an image.",
    422: "A parameter is wrong, the image or scan is damaged, missing or another, or too elongated for this size.",
    503: "Too busy (see Retry-After) or shutting down.",
    504: "It took longer than the service allows.",
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["reason", "message"],
            "properties": {
                "reason": {"type": "string", "description": "For programs: a word that does not change."},
                "message": {"type": "string", "description": "For people."},
            },
        }
    },
}
BINARY = {"type": "string", "format": "binary"}
PAIR = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
USED = {
    "model": {"type": "string"},
    "size": {"type": "integer", "description": "Shorter side that was used."},
    "spent": {"type": "number", "description": "Share of the grid's patches that was spent."},
    "cores": {"type": "integer", "description": "Budget that was used."},
    "lowered": {"type": "boolean", "description": "Whether load made the service choose less than usual."},
    "grid": {**PAIR, "description": "Rows and columns of patches."},
    "image": {**PAIR, "description": "Width and height of the upright photo."},
}
NUMBERS = {"type": "array", "items": {"type": "number"}}
FEATURES = {
    "type": "object",
    "required": [*USED, "cls"],
    "properties": {**USED, "cls": NUMBERS, "patches": {"type": "array", "items": {"type": "array", "items": NUMBERS}}},
}
SIMILARITY = {
    "type": "object",
    "required": [*USED, "low", "high", "map"],
    "properties": {
        **USED,
        "low": {"type": "number"},
        "high": {"type": "number"},
        "global": {"type": "number", "description": "Cosine of the two global features."},
        "map": {"type": "array", "items": NUMBERS},
    },
}
LOOK = {
    "type": "object",
    "required": ["model", "cores", "share", "image", "stride", "box", "centres", "inside", "features"],
    "properties": {
        "model": {"type": "string"},
        "cores": {"type": "integer", "description": "Budget of the scan."},
        "share": {"type": "number", "description": "How many of the patches the scan read."},
        "image": {**PAIR, "description": "Width and height of the scanned picture, in whose pixels all places are."},
        "stride": {"type": "integer"},
        "box": {**PAIR, "minItems": 4, "maxItems": 4, "description": "x, y, width, height that were looked at."},
        "centres": {"type": "array", "description": "The middle of each patch: h×w×2, of points n×2."},
        "inside": {"type": "array", "description": "Whether the mask of the scan includes it: h×w or n."},
        "features": {"type": "array", "description": "h×w×D, of points n×D."},
    },
}
UPLOADS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "/v1/features": (("image",), {"application/json": {"schema": FEATURES}, "application/x-npz": {"schema": BINARY}}),
    "/v1/similarity": (
        ("image", "other"),
        {
            "image/png": {"schema": BINARY},
            "application/json": {"schema": SIMILARITY},
            "application/x-npz": {"schema": BINARY},
        },
    ),
    "/v1/scan": (("image",), {"application/octet-stream": {"schema": BINARY}}),
    "/v1/look": (("image", "scan"), {"application/json": {"schema": LOOK}, "application/x-npz": {"schema": BINARY}}),
    "/v1/explore": (("image",), {"text/html": {"schema": {"type": "string"}}}),
}


def describe(api: FastAPI, service: Service, asks_token: bool) -> None:
    """Complete the description that FastAPI makes of the routes."""
    made: Callable[[], dict[str, Any]] = api.openapi

    def complete() -> dict[str, Any]:
        if api.openapi_schema is not None:
            return api.openapi_schema
        schema = made()
        schema["components"] = {"schemas": {"Error": ERROR}}
        for path, (fields, answers) in UPLOADS.items():
            operation = schema["paths"][path]["post"]
            needed = [name for name in fields if name != "other"]
            form = {"type": "object", "properties": dict.fromkeys(fields, BINARY), "required": needed}
            content = {"application/octet-stream": {"schema": BINARY}, "multipart/form-data": {"schema": form}}
            if len(needed) > 1:
                del content["application/octet-stream"]
            operation["requestBody"] = {"required": True, "content": content}
            operation["responses"] = {"200": {"description": "Done.", "content": answers}, **problems(asks_token)}
            for parameter in operation["parameters"]:
                bound(parameter, service)
            if asks_token:
                operation["security"] = [{"token": []}]
        for path, kind in (
            ("/healthz", "application/json"),
            ("/readyz", "application/json"),
            ("/metrics", "text/plain"),
        ):
            operation = schema["paths"][path]["get"]
            operation["responses"] = {"200": {"description": "Yes.", "content": {kind: {}}}}
            if path != "/metrics":
                operation["responses"]["503"] = {"description": "No.", "content": {kind: {}}}
            elif asks_token:
                operation["responses"]["401"] = problems(True)["401"]
                operation["security"] = [{"token": []}]
        if asks_token:
            schema["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        api.openapi_schema = schema
        return schema

    api.openapi = complete  # type: ignore[method-assign]


def problems(asks_token: bool) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        str(status): {"description": text, "content": content}
        for status, text in REASONS.items()
        if asks_token or status != 401
    }


def bound(parameter: dict[str, Any], service: Service) -> None:
    """State the bounds that only the running service knows."""
    numbers = [kind for kind in parameter["schema"].get("anyOf", ()) if kind.get("type") == "integer"]
    for kind in numbers:
        if parameter["name"] == "size":
            kind.update(minimum=service.patch_size, maximum=service.settings.max_size)
        if parameter["name"] == "cores":
            kind.update(minimum=1, maximum=service.bank)
        if parameter["name"] == "stride":
            kind.update(minimum=1, maximum=service.patch_size)

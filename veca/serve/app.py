"""The routes. Each one is short: what it takes, what the service does with it, what it gives."""

from __future__ import annotations

import asyncio
from importlib.resources import files
from typing import Annotated, Any, Literal

import numpy as np
import torch
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from veca._version import __version__
from veca.analysis.similarity import cosine_map, patch_at
from veca.errors import InputError
from veca.serve.answers import MEDIA, encode_json, encode_npz, encode_png
from veca.serve.gate import Gate
from veca.serve.memory import HeldResponse
from veca.serve.openapi import describe
from veca.serve.problems import ClientGone, Problem
from veca.serve.scans import read_box, read_points
from veca.serve.service import Hand, Result, Service


class Wishes(BaseModel):
    """What a request may fix; unknown names are refused, so that a typing error does not pass for a wish."""

    model_config = ConfigDict(extra="forbid")
    size: int | None = Field(None, ge=1, description="Shorter side in pixels. Without it the service chooses.")


class FeatureWishes(Wishes):
    cores: int | None = Field(None, ge=1, description="Core budget. Without it the service's own.")
    dense: bool = Field(False, description="Also a feature for every patch.")
    format: Literal["json", "npz"] = "json"


class SimilarityWishes(Wishes):
    cores: int | None = Field(None, ge=1, description="Core budget. Without it the service's own.")
    x: float | None = Field(None, ge=0, description="Point in the first image, in its pixels from the left.")
    y: float | None = Field(None, ge=0, description="… and from the top.")
    format: Literal["png", "npz", "json"] = "png"


class ExploreWishes(Wishes):
    cores: int | None = Field(None, ge=1, description="Core budget. Without it the page holds several, and a slider.")


class ScanWishes(Wishes):
    size: int | None = Field(None, ge=1, description="Shorter side in pixels. Without it the photo's own size.")
    cores: int | None = Field(None, ge=1, description="Core budget. Without it the service's own.")
    share: float = Field(1.0, gt=0, le=1, description="The cores read an even share of the patches.")


class LookWishes(Wishes):
    size: int | None = Field(None, ge=1, description="As it was for the scan.")
    box: str | None = Field(None, description="x,y,width,height in pixels. Without it the whole picture.")
    points: str | None = Field(None, description="x,y of each in pixels, a space between two; instead of a box.")
    stride: int | None = Field(None, ge=1, description="Pixels from feature to feature. Without it the patch size.")
    format: Literal["json", "npz"] = "json"


def create_app(service: Service, token: bytes | None = None) -> ASGIApp:
    # FastAPI's own pages load their scripts from a CDN; ours work offline.
    api = FastAPI(title="VECA", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    pages = {name: page(name, service, token is not None) for name in ("upload", "docs")}

    @api.exception_handler(Problem)
    @api.exception_handler(ClientGone)
    @api.exception_handler(RequestValidationError)
    @api.exception_handler(HTTPException)
    @api.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        problem = problem_of(error)
        service.metrics.rejected.labels(problem.reason).inc()
        return Response(problem.body(), problem.status, problem.headers, MEDIA["json"])

    @api.post("/v1/features")
    async def features(request: Request, wishes: Annotated[FeatureWishes, Query()]) -> Response:
        """Global, and on request dense, features of one image."""
        check(service, wishes.size, wishes.cores)
        async with service.hand(request, ("image",)) as hand:
            result = await service.features(hand, "image", wishes.size, wishes.cores, wishes.dense)
            values = {**used(service, result), "cls": result.cls}
            if result.patches is not None:
                values["patches"] = result.patches
            body = await service.encode(hand, encode_npz if wishes.format == "npz" else encode_json, values)
        return HeldResponse(service.memory, body, MEDIA[wishes.format], headers(service, result))

    @api.post("/v1/similarity")
    async def similarity(request: Request, wishes: Annotated[SimilarityWishes, Query()]) -> Response:
        """Cosine similarity to every patch: of a point's patch, or of the first image's global feature.

        With one image and a point, the map covers that image. With two images (form fields `image` and `other`) it
        covers the second, and a point is a point in the first.
        """
        check(service, wishes.size, wishes.cores)
        if (wishes.x is None) != (wishes.y is None):
            raise Problem(422, "bad_parameter", "a point needs both x and y")
        async with service.hand(request, ("image", "other")) as hand:
            if "other" not in hand.images and wishes.x is None:
                message = "give a point (x and y), or a second image as the form field 'other'"
                raise Problem(422, "missing_point", message)
            first, second = await both(service, hand, wishes)
            query = first.cls
            if wishes.x is not None and wishes.y is not None:
                query = patch_of(first, wishes.x, wishes.y)
            values = cosine(query, second)
            about = {**used(service, second), "low": float(values.min()), "high": float(values.max())}
            if second is not first:
                about["global"] = float(cosine_map(tensor(first.cls), tensor(second.cls[None]))[0])
            if wishes.format == "png":
                body = await service.encode(hand, encode_png, values, second.picture.pixels.shape[:2])
            else:
                encoder = encode_npz if wishes.format == "npz" else encode_json
                body = await service.encode(hand, encoder, {**about, "map": values})
        extra = {"X-Veca-Range": f"{about['low']:.6f} {about['high']:.6f}"}
        return HeldResponse(service.memory, body, MEDIA[wishes.format], {**headers(service, second), **extra})

    @api.post("/v1/explore", response_class=HTMLResponse)
    async def explore(request: Request, wishes: Annotated[ExploreWishes, Query()]) -> Response:
        """The explorer: one page, whole in itself, on which to play with the features of the photo."""
        check(service, wishes.size, wishes.cores)
        size = wishes.size or service.page_size
        async with service.hand(request, ("image",)) as hand:
            text = await service.page(hand, "image", size, wishes.cores)
        used = {"X-Veca-Model": ascii_only(service.name), "X-Veca-Size": str(size)}
        return HeldResponse(service.memory, text.encode(), "text/html; charset=utf-8", used)

    @api.post("/v1/scan")
    async def scan(request: Request, wishes: Annotated[ScanWishes, Query()]) -> Response:
        """The scan of a photo, a file for the client to keep: with it, /v1/look gives any part of the photo."""
        check(service, wishes.size, wishes.cores)
        async with service.hand(request, ("image",)) as hand:
            body, picture = await service.scan(hand, wishes.size, wishes.cores, wishes.share)
        height, width = picture.pixels.shape[:2]
        used = {
            "X-Veca-Model": ascii_only(service.name),
            "X-Veca-Image": f"{width}x{height}",
            "X-Veca-Cores": str(wishes.cores or service.cores),
            "X-Veca-Grid": "{}x{}".format(*picture.grid),
        }
        return HeldResponse(service.memory, body, MEDIA["scan"], used)

    @api.post("/v1/look")
    async def look(request: Request, wishes: Annotated[LookWishes, Query()]) -> Response:
        """Features of any part of a scanned photo, as the whole pass gives them.

        A form with the photo (`image`) and its scan (`scan`).
        """
        check(service, wishes.size, None)
        stride = wishes.stride or service.patch_size
        if stride > service.patch_size:
            raise Problem(422, "bad_parameter", f"stride: must lie between 1 and {service.patch_size}, not {stride}")
        box, points = read_box(wishes.box), read_points(wishes.points)
        if box is not None and points is not None:
            raise Problem(422, "bad_parameter", "look at a box or at points, not both")
        async with service.hand(request, ("image", "scan")) as hand:
            found, scan = await service.look(hand, wishes.size, box, points, stride)
            values = {
                "model": service.name,
                "cores": len(scan.cores),
                "share": scan.share,
                "image": list(scan.size),
                "stride": stride,
                "box": list(found.box),
                **{name: getattr(found, name).numpy() for name in ("centres", "inside", "features")},
            }
            body = await service.encode(hand, encode_npz if wishes.format == "npz" else encode_json, values)
        used = {"X-Veca-Model": ascii_only(service.name), "X-Veca-Cores": str(len(scan.cores))}
        return HeldResponse(service.memory, body, MEDIA[wishes.format], used)

    @api.get("/healthz")
    async def healthz() -> Response:
        """Whether the process works: 503 means that it should be restarted."""
        alive = service.alive
        return JSONResponse({"alive": alive}, 200 if alive else 503)

    @api.get("/readyz")
    async def readyz() -> Response:
        """Whether it takes requests: 503 while it shuts down."""
        return JSONResponse({"ready": service.ready, "model": service.name}, 200 if service.ready else 503)

    @api.get("/metrics")
    async def metrics() -> Response:
        """Numbers for Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @api.get("/", include_in_schema=False)
    async def upload() -> Response:
        return HTMLResponse(pages["upload"])

    @api.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(pages["docs"])

    describe(api, service, token is not None)
    return Gate(api, service, token)


def problem_of(error: Exception) -> Problem:
    """What a client is told of an exception; nothing of an unexpected one, which is in the log."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, ClientGone):
        return Problem(499, "client_gone", "the client closed the connection")  # never arrives, only counts
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:]) or "request"
        return Problem(422, "bad_parameter", f"{where}: {first['msg']}"[:500])
    if isinstance(error, HTTPException):
        reason = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "bad_request")
        return Problem(error.status_code, reason, str(error.detail), error.headers)
    return Problem(500, "internal", "the service failed; its log says why")


def page(name: str, service: Service, asks_token: bool) -> str:
    """A page of the package, with this service's bounds filled in."""
    settings = service.settings
    text = (files("veca.serve") / f"{name}.html").read_text(encoding="utf-8")
    for key, value in {
        "MODEL": service.name,
        "MAX_BYTES": str(settings.max_bytes),
        "MAX_PIXELS": str(settings.max_pixels),
        "TOKEN": "true" if asks_token else "false",
        "SIZE": str(service.page_size),
        "MAX_SIZE": str(settings.max_size),
        "PATCH": str(service.patch_size),
        "BANK": str(service.bank),
    }.items():
        text = text.replace(f"{{{{{key}}}}}", value.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;"))
    return text


def check(service: Service, size: int | None, cores: int | None) -> None:
    """The bounds that depend on the model and the operator."""
    least, most = service.patch_size, service.settings.max_size
    if size is not None and not least <= size <= most:
        raise Problem(422, "bad_parameter", f"size: must lie between {least} and {most}, not {size}")
    if cores is not None and cores > service.bank:
        raise Problem(422, "bad_parameter", f"cores: must lie between 1 and {service.bank}, not {cores}")


async def both(service: Service, hand: Hand, wishes: SimilarityWishes) -> tuple[Result, Result]:
    """Features of the first and the second image (the same where there is one), at one and the same level."""
    level = service.engine.level()
    if "other" not in hand.images:
        result = await service.features(hand, "image", wishes.size, wishes.cores, True, level)
        return result, result
    tasks = [
        asyncio.ensure_future(service.features(hand, name, wishes.size, wishes.cores, dense, level))
        for name, dense in (("image", wishes.x is not None), ("other", True))
    ]
    try:
        first, second = await asyncio.gather(*tasks)
        return first, second
    finally:  # neither outlives the request when the other fails
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def patch_of(result: Result, x: float, y: float) -> np.ndarray[Any, Any]:
    """The feature of the patch under a point of the uploaded photo."""
    assert result.patches is not None
    try:
        index = patch_at(x, y, (result.picture.width, result.picture.height), result.picture.grid)
    except InputError as error:
        raise Problem(422, "bad_parameter", str(error)) from None
    return np.asarray(result.patches.reshape(-1, result.patches.shape[-1])[index])


def cosine(query: np.ndarray[Any, Any], result: Result) -> np.ndarray[Any, Any]:  # h×w
    assert result.patches is not None
    patches = tensor(result.patches).flatten(0, 1)
    return cosine_map(tensor(query), patches).reshape(result.picture.grid).numpy()


def tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(array)


def used(service: Service, result: Result) -> dict[str, Any]:
    """What the features were made with."""
    return {
        "model": service.name,
        "size": result.level.size,
        "spent": result.level.patches,
        "cores": result.cores,
        "lowered": result.lowered,
        "grid": list(result.picture.grid),
        "image": [result.picture.width, result.picture.height],
    }


def ascii_only(text: str) -> str:
    """A header holds nothing else."""
    return text.encode("ascii", "replace").decode()


def headers(service: Service, result: Result) -> dict[str, str]:
    return {
        "X-Veca-Model": ascii_only(service.name),
        "X-Veca-Size": str(result.level.size),
        "X-Veca-Patches": f"{result.level.patches:g}",
        "X-Veca-Cores": str(result.cores),
        "X-Veca-Lowered": str(result.lowered).lower(),
        "X-Veca-Grid": "{}x{}".format(*result.picture.grid),
    }

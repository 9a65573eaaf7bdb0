"""The routes of the viewer, for one person at this machine.

The address holds a secret, made anew at every start: without it there is nothing here, for other users of the machine
as for other pages of the browser. Requests that name another host (DNS rebinding) or come from another site are
refused. Nothing is written, nothing is uploaded: every request is a short GET, and what it may cost has a bound.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from typing import Any, TypeVar

import numpy as np
from PIL import Image
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from veca._version import __version__
from veca.errors import InputError
from veca.viewer.pyramid import TILE
from veca.viewer.scans import Box, Scans, Seen, Stopped, unit

T = TypeVar("T")
HOSTS = {"localhost", "127.0.0.1", "[::1]"}
FILES = {  # name: (package, media type)
    "page.css": ("veca.viewer", "text/css"),
    "page.js": ("veca.viewer", "text/javascript"),
    "words.js": ("veca.viewer", "text/javascript"),
    "openseadragon.min.js": ("veca.viewer", "text/javascript"),
    "colours.js": ("veca.explorer", "text/javascript"),
}
WAITING = {"look": 8, "tile": 64}  # requests in hand of each kind; beyond that they are refused
PLACES = 12
HEADERS = {
    "content-security-policy": (
        # The hash is of the one style that OpenSeadragon 6.1.1 puts into the page.
        "default-src 'none'; script-src 'self'; "
        "style-src 'self' 'sha256-9xTiqzfwFaL2SGb1rmr8gysEwVVjIvqWAgmZgqFqpEE='; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class Refusal(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Viewer:
    """What the routes share: the scans, what is being done with them, and the threads that do it."""

    def __init__(self, scans: Scans, name: str, model: str) -> None:
        self.scans, self.name, self.model = scans, name, model
        self.doing, self.share, self.problem = "opening", 0.0, ""
        self.pools = {"look": ThreadPoolExecutor(1, "veca-look"), "tile": ThreadPoolExecutor(2, "veca-tile")}
        self.waiting = dict.fromkeys(self.pools, 0)

    def start(self, report: Callable[[str, float], None]) -> None:
        """Begin to scan."""

        def told(what: str, share: float) -> None:
            self.doing, self.share = what, share
            report(what, share)

        def work() -> None:
            try:
                self.scans.run(told)
            except (InputError, OSError, RuntimeError, MemoryError) as error:
                self.problem = " ".join(str(error).split())[:500] or "no memory"
                told("", 1)
            except Stopped:
                pass

        self.scanning = threading.Thread(target=work, name="veca-scan", daemon=True)
        self.scanning.start()

    def stop(self) -> None:
        """What is being done ends with its next piece."""
        self.scans.stopped = True
        for pool in self.pools.values():
            pool.shutdown(wait=True, cancel_futures=True)
        self.scanning.join(timeout=30)
        self.scans.pyramid.close()

    async def do(self, kind: str, request: Request, work: Callable[..., T], *arguments: Any) -> T:
        """In a thread of its kind; not at all if the page has moved on by the time it would begin."""
        if self.waiting[kind] >= WAITING[kind]:
            raise Refusal(503, "too many requests are waiting")
        self.waiting[kind] += 1
        gone = asyncio.ensure_future(disconnected(request))

        def unless_gone() -> T:
            if gone.done():
                raise Refusal(499, "nobody waits for this any more")
            return work(*arguments)

        try:
            return await asyncio.get_running_loop().run_in_executor(self.pools[kind], unless_gone)
        finally:
            gone.cancel()
            self.waiting[kind] -= 1

    def state(self) -> dict[str, Any]:
        scans = self.scans
        return {
            "name": self.name,
            "model": self.model,
            "version": __version__,
            "size": scans.pyramid.sizes[0],
            "sizes": scans.pyramid.sizes,
            "downsample": scans.pyramid.picture.downsample,
            "tile": TILE,
            "patch": scans.patch,
            "cores": scans.cores,
            "shown": scans.pyramid.ready,
            "ready": [level.number for level in scans.ready],
            "levels": len(scans.levels),
            "doing": self.doing,
            "share": self.share,
            "problem": self.problem,
        }


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def create_app(viewer: Viewer, secret: str) -> ASGIApp:
    scans = viewer.scans

    async def page(_: Request) -> Response:
        return static("veca.viewer", "page.html", "text/html")

    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in FILES:
            raise Refusal(404, "there is nothing here")
        return static(FILES[name][0], name, FILES[name][1])

    async def state(_: Request) -> Response:
        return JSONResponse(viewer.state())

    async def tile(request: Request) -> Response:
        level, column, row = (request.path_params[name] for name in ("level", "column", "row"))
        if level >= len(scans.pyramid.sizes):
            raise Refusal(404, "there is no such level")
        width, height = scans.pyramid.sizes[level]
        x, y = column * TILE, row * TILE
        if x >= width or y >= height:
            raise Refusal(404, "there is no such tile")
        box = x, y, min(TILE, width - x), min(TILE, height - y)
        return Response(await viewer.do("tile", request, encoded_tile, scans, level, *box), media_type="image/jpeg")

    async def look(request: Request) -> Response:
        query = Query(request, ("x", "y", "width", "height", "at"))
        box, at = query.box(scans), query.point(scans)
        began = time.perf_counter()
        body = await viewer.do("look", request, lambda: packed(scans.look(box, at)))
        spent = (time.perf_counter() - began) * 1000
        timing = {"server-timing": f"look;dur={spent:.1f}"}
        return Response(body, media_type="application/octet-stream", headers=timing)

    async def features(request: Request) -> Response:
        query = Query(request, ("x", "y", "width", "height", "level"))
        box, level = query.box(scans), query.whole("level", 0, len(scans.levels) - 1)
        body = await viewer.do("look", request, lambda: npy(scans.features(box, level)))
        name = f"features-{'-'.join(map(str, scans.in_file(box)))}-level{level}.npy"
        kept = {"content-disposition": f'attachment; filename="{name}"'}
        return Response(body, media_type="application/octet-stream", headers=kept)

    async def places(request: Request) -> Response:
        query = Query(request, ("x", "y", "width", "height", "level"))
        box, number = query.box(scans), query.whole("level", 0, len(scans.levels) - 1)
        level, found = await viewer.do("look", request, scans.places, box, number, PLACES)
        answer = [{"box": box, "file": scans.in_file(box), "cosine": round(cosine, 4)} for box, cosine in found]
        return JSONResponse({"level": level.number, "factor": level.factor, "places": answer})

    app = Starlette(
        routes=[
            Route("/", page),
            Route("/state", state),
            Route("/tile/{level:int}/{column:int}/{row:int}.jpg", tile),
            Route("/look", look),
            Route("/features.npy", features),
            Route("/places", places),
            Route("/{name}", file),
        ],
        exception_handlers={Refusal: failed, InputError: failed},
    )
    return Gate(app, f"/{secret}")


class Gate:
    """Who may enter, and the headers of every answer."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self.app, self.prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *own]
            await send(message)

        refusal = self.refusal(scope)
        if refusal is not None:
            await refused(refusal)(scope, receive, answer)
            return
        inner = {**scope, "path": scope["path"][len(self.prefix) :], "raw_path": b"", "root_path": ""}
        await self.app(inner, receive, answer)

    def refusal(self, scope: Scope) -> Refusal | None:
        headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
        host = re.sub(r":\d+$", "", headers.get("host", ""))
        if host.lower() not in HOSTS:
            return Refusal(421, "this page is served to this machine only")
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return Refusal(403, "asked from another site")
        origin = headers.get("origin")
        if origin is not None and re.sub(r"^http://", "", origin) != headers["host"]:
            return Refusal(403, "asked from another site")
        if scope["method"] not in ("GET", "HEAD"):
            return Refusal(405, "only GET is answered here")
        if "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
            return Refusal(413, "no request here has a body")
        if not scope["path"].startswith(f"{self.prefix}/"):  # a wrong guess and an unknown address look the same
            return Refusal(404, "there is nothing here; open the address that veca view printed")
        return None


async def failed(_: Request, error: Exception) -> Response:
    return refused(error)


def refused(error: Exception) -> Response:
    status = error.status if isinstance(error, Refusal) else 422
    return JSONResponse({"error": str(error)[:500]}, status)


class Query:
    """The numbers of a request, each inside its bounds; unknown names are refused."""

    def __init__(self, request: Request, names: tuple[str, ...]) -> None:
        self.given = dict(request.query_params)
        if unknown := set(self.given) - set(names) or len(request.query_params.multi_items()) != len(self.given):
            raise Refusal(422, f"takes {', '.join(names)}, each once" + (f", not {unknown!r}"[:80] if unknown else ""))

    def whole(self, name: str, low: int, high: int) -> int:
        text = self.given.get(name, "")
        if not re.fullmatch(r"[0-9]{1,12}", text, re.ASCII) or not low <= int(text) <= high:
            raise Refusal(422, f"{name} is a whole number from {low} to {high}")
        return int(text)

    def box(self, scans: Scans) -> Box:
        width, height = scans.pyramid.sizes[0]
        x, y = self.whole("x", 0, width - 1), self.whole("y", 0, height - 1)
        return x, y, self.whole("width", 1, width - x), self.whole("height", 1, height - y)

    def point(self, scans: Scans) -> tuple[float, float] | None:
        text = self.given.get("at")
        if text is None:
            return None
        found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?),([0-9]{1,12}(?:\.[0-9]{1,6})?)", text, re.ASCII)
        width, height = scans.pyramid.sizes[0]
        if not found or not (float(found[1]) <= width and float(found[2]) <= height):
            raise Refusal(422, "at is x,y in pixels of the image")
        return float(found[1]), float(found[2])


def static(package: str, name: str, kind: str) -> Response:
    return Response((files(package) / name).read_bytes(), media_type=f"{kind}; charset=utf-8")


def encoded_tile(scans: Scans, level: int, x: int, y: int, width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(scans.pyramid.read(level, x, y, width, height)).save(file, "JPEG", quality=88)
    return file.getvalue()


def npy(features: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, features)
    return file.getvalue()


def packed(seen: Seen) -> bytes:
    """For the page: the length of a table in JSON, the table, and arrays after each other.

    Features are unit vectors in 8 bits (of 1000 patches 0.4 MB): cosines are off by a few thousandths.
    """
    level = seen.level
    assert level.scan is not None
    assert level.palette is not None
    height, width, depth = seen.rows.shape
    rows = seen.rows.reshape(-1, depth)
    cores = unit(level.scan.cores.numpy())
    shown = level.size[0] * level.factor, level.size[1] * level.factor
    table = {
        "level": level.number,
        "factor": level.factor,
        "stride": seen.stride,
        "box": seen.box,
        "grid": [height, width],
        "depth": depth,
        "cores": len(cores),
        "coords": [[(x + 1) / 2 * shown[0], (y + 1) / 2 * shown[1]] for x, y in level.scan.coords.tolist()],
        "asked": seen.query is not None,
        "low": level.palette.low,
        "overall": level.palette.overall,
    }
    head = json.dumps(table).encode()
    parts = [
        small(rows),
        small(cores),
        small(seen.query[None]) if seen.query is not None else np.empty(0, np.int8),
        level.palette(rows),
        seen.inside.astype(np.uint8),
    ]
    return b"".join([len(head).to_bytes(4, "little"), head, *(part.tobytes() for part in parts)])


def small(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Rows as whole numbers, each as large as 8 bits allow: a cosine does not mind the length."""
    largest = np.maximum(np.abs(rows).max(-1, keepdims=True), 1e-9)
    found: np.ndarray[Any, Any] = (rows / largest * 127).round().astype(np.int8)
    return found

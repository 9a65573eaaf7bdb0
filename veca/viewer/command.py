"""`veca view`: open an image, scan it in the background, and serve the page on which to look around in it."""

from __future__ import annotations

import secrets
import signal
import socket
import sys
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from veca.analysis.command import has_screen
from veca.cli import parse
from veca.devices import Dtype, pick_device, pick_dtype
from veca.errors import InputError, require
from veca.large.options import ViewOptions, check_inputs
from veca.progress import progress_bar
from veca.scan_file import scan_header, viewed


@dataclass(kw_only=True)
class ViewSettings(ViewOptions):
    """Move through an image of any size on a local page, and ask anywhere which other places resemble that one.

    The page opens at once; the image is scanned meanwhile, from a coarse copy to full resolution. Scans are kept, so
    that the next start is quick. Only this machine reaches the page; from another one use a tunnel, as in
    ssh -L 8400:localhost:8400 HOST, with --port 8400 there.

    Examples:
      veca view slide.tif
      veca view slide.svs --mpp 1
      veca view slide.tif --scan scans/slide.tif.scan
      veca view photo.jpg --cores 16 --port 8400 --no-open
    """

    image: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="IMAGE")]
    """a slide, GeoTIFF, TIFF, Zarr, .npy (H×W×3), or any other format"""
    scan: Annotated[Path | None, tyro.conf.arg(metavar="FILE.scan")] = None
    """what `veca scan` made of it: full resolution is not scanned again; its mask, budget, resolution and bands hold"""
    cores: int | None = None
    """the budget: how many cores are active; None: all"""
    model: str | None = None
    """a bundled name, a model folder, a .safetensors, an authors' .pt or a hub id; None: the scan's, or veca-s14"""
    port: int = 0
    """0: one that is free"""
    browse: Annotated[bool, tyro.conf.arg(name="open")] = True
    """open the page in the browser"""
    dtype: Dtype = "auto"
    """as for `veca scan`"""
    device: str = "auto"
    """as for `veca scan`"""


def main(arguments: list[str]) -> int:
    settings = parse(ViewSettings, arguments, "veca view")
    for module in ("starlette", "uvicorn"):
        require(module, "serve")
    import uvicorn

    from veca.viewer.app import Viewer, create_app
    from veca.viewer.pyramid import Pyramid
    from veca.viewer.scans import Scans
    from veca.weights import load

    if not 0 <= settings.port <= 65535:
        raise InputError(f"--port lies between 0 and 65535, not {settings.port}")
    if settings.scan is not None and (settings.cores is not None or settings.view()):
        raise InputError("a scan has its own budget, resolution and bands; give --scan or those, not both")
    check_inputs((settings.image,), None, "view")
    about = {} if settings.scan is None else scan_header(settings.scan)
    name = settings.model or str(about.get("model") or "veca-s14")
    with listen(settings.port) as listener:
        device = pick_device(settings.device)
        dtype = pick_dtype(settings.dtype, device)
        model = load(name, cores=settings.cores, device=device, dtype=dtype).requires_grad_(False).eval()
        if settings.scan is None:
            picture = settings.open(settings.image)
        else:
            picture = viewed(settings.image, about.get("view") or {}, str(settings.scan))
        pyramid = Pyramid(picture, model.patch_size)
        scans = Scans(model, pyramid, settings.cores, settings.image, settings.scan)
        viewer = Viewer(scans, settings.image.name, name.rstrip("/").split("/")[-1])
        print(picture.describe(), file=sys.stderr)
        secret = secrets.token_urlsafe(16)
        config = uvicorn.Config(
            create_app(viewer, secret),
            ws="none",
            lifespan="off",
            access_log=False,
            log_level="error",
            server_header=False,
            proxy_headers=False,
            limit_concurrency=128,
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)

        def leave(*_: object) -> None:
            server.should_exit = True

        for number in (signal.SIGTERM, signal.SIGINT):  # also before the server runs, and when it raises them again
            signal.signal(number, leave)
        listener.listen(64)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/{secret}/"
        print(f"{settings.image} at {address}", flush=True)
        with progress_bar() as progress:
            task = progress.add_task("opening", total=1.0)

            def report(what: str, share: float) -> None:
                progress.update(task, description=what or viewer.problem or "scanned", completed=share)

            viewer.start(report)
            if settings.browse and has_screen():
                webbrowser.open(address)
            server.run(sockets=[listener])
            viewer.stop()
    return 0


def listen(port: int) -> socket.socket:
    """The bound socket; a port that is taken is said before the model is loaded."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        raise InputError(f"cannot listen at port {port}: {error.strerror or error}") from error
    return listener

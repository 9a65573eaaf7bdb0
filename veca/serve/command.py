"""`veca serve`: load the model, listen, and on SIGTERM finish what was accepted."""

from __future__ import annotations

import faulthandler
import ipaddress
import logging
import os
import signal
import socket
from typing import TYPE_CHECKING

from veca.cli import parse
from veca.errors import InputError, require
from veca.serve.settings import ServeSettings

if TYPE_CHECKING:
    from veca.serve.protocol import DrainingServer
    from veca.serve.service import Service


def main(arguments: list[str]) -> int:
    settings = parse(ServeSettings, arguments, "veca serve")
    settings.check()
    for module in ("fastapi", "uvicorn", "python_multipart", "prometheus_client"):
        require(module, "serve")
    from veca.devices import pick_device, pick_dtype
    from veca.serve.service import Service
    from veca.weights import load

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of every damaged form
    token = settings.token()
    with listen(settings) as listener:
        device = pick_device(settings.device)
        model = load(settings.model, device=device, dtype=pick_dtype(settings.dtype, device)).requires_grad_(False)
        settings.check_model(model.config)
        service = Service(model, settings)
        service.start()
        server = server_of(service, token)
        # uvicorn raises the signal again once it is done; by then there is nothing left for it to do.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        listener.listen(settings.connections)  # before the address is told: who reads it may connect at once
        print(f"{settings.model} at {address(listener)}", flush=True)
        warn(settings, token)
        server.run(sockets=[listener])
    service.stop()
    print("stopped", flush=True)
    if service.pages:  # a thread that builds a page for a client who has left would be waited for
        os._exit(0)
    faulthandler.cancel_dump_traceback_later()
    return 0


def server_of(service: Service, token: bytes | None) -> DrainingServer:
    """uvicorn with every choice made: what else is installed must not change how the service speaks HTTP."""
    import uvicorn

    from veca.serve.app import create_app
    from veca.serve.protocol import DrainingServer, GuardedProtocol

    settings = service.settings
    GuardedProtocol.client_seconds = settings.client_timeout
    GuardedProtocol.max_connections = settings.connections
    config = uvicorn.Config(
        create_app(service, token),
        http=GuardedProtocol,
        ws="none",
        lifespan="off",
        loop="asyncio",
        interface="asgi3",
        access_log=False,
        log_level="error",  # not a line for every client that speaks no HTTP
        server_header=False,
        proxy_headers=False,
        # Longer than any accepted request may take, and an end even so.
        timeout_graceful_shutdown=int(settings.timeout + settings.client_timeout) + 1,
    )
    server = DrainingServer(config, service.drain)
    service.metrics.connections.set_function(lambda: len(server.server_state.connections))
    return server


def listen(settings: ServeSettings) -> socket.socket:
    """The bound socket; a port that is taken is said before the model is loaded."""
    try:
        family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
    except OSError as error:
        raise InputError(f"cannot listen at {settings.host}:{settings.port}: {error.strerror or error}") from error
    return listener


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def warn(settings: ServeSettings, token: bytes | None) -> None:
    try:
        open_to_all = not ipaddress.ip_address(settings.host).is_loopback
    except ValueError:
        open_to_all = settings.host != "localhost"
    if open_to_all and token is None:
        logging.getLogger("veca.serve").warning(
            "anyone who reaches %s can use this service: set VECA_TOKEN or --token-file", settings.host
        )

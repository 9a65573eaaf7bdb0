"""Connections that cannot be held for ever: uvicorn's HTTP/1.1 protocol with a time limit on each thing a client does.

uvicorn bounds the pause between two requests, the service bounds the time of an upload. What is left, and bounded here:
a head sent byte by byte, a body that goes on after its request was refused, an answer that is never read, and the
number of connections. A client that closes its own direction after a whole request gets its answer.

No server has all of these as settings, so this leans on the inside of uvicorn's h11 protocol: pyproject.toml allows the
versions that were tried, and tests/serve/test_protocol.py says so when another is installed.
"""

from __future__ import annotations

import asyncio
import faulthandler
import socket
import struct
from collections.abc import Callable

import h11
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from veca.serve.problems import problem_body

LAST = 6.0  # seconds for everything after the grace of SIGTERM
LINGER = 5.0  # seconds that the rest of a refused upload is read and thrown away, so that the client sees the answer
PROBE = 0.5  # seconds between questions whether a client that has stopped sending is still there
GRACE = 0.3  # seconds after SIGTERM in which requests already on the wire are still taken


class GuardedProtocol(H11Protocol):
    client_seconds = 30.0
    max_connections = 256

    guard: asyncio.TimerHandle | None = None
    guarded: str = ""  # what the timer is running for
    half_closed = False  # the client sends no more; it may still read
    refused = False  # answered outside any request; what still comes is thrown away

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(503, "Service Unavailable", "too_many_connections", "too many connections are open; try again")
        self._watch()

    def data_received(self, data: bytes) -> None:
        if not self.refused and not self.transport.is_closing():
            super().data_received(data)
            self._watch()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        if not self._answering() or self.cycle.more_body:
            return None  # nothing is owed to it: the connection is closed
        self.half_closed = True
        self._probe()
        return True

    def _probe(self) -> None:
        """Whether a client that has stopped sending has left: then a write is answered by a reset, and the next fails.

        An interim answer is the one thing that may be written before the answer is known.
        """
        if self._answering() and not self.cycle.response_started and not self.transport.is_closing():
            if self.scope["http_version"] == "1.1":
                self.transport.write(b"HTTP/1.1 102 Processing\r\n\r\n")
            self.loop.call_later(PROBE, self._probe)

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.half_closed and not self._answering() and not self.transport.is_closing():
            self.transport.close()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._set("", 0)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "Bad Request", "bad_http", msg)

    def _refuse(self, status: int, phrase: str, reason: str, message: str) -> None:
        """Answer outside any request, and hang up.

        Only our direction is closed at first: to close both while the client still sends would reset the connection,
        and the answer with it. Where too many are open even for that, they are closed at once.
        """
        body = problem_body(reason, message)
        again = "Retry-After: 1\r\n" if status == 503 else ""
        head = f"HTTP/1.1 {status} {phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{again}"
        self.refused = True
        if self.cycle is not None:  # a request whose body went wrong: what the app still sends is dropped
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write(f"{head}Connection: close\r\n\r\n".encode() + body)
        if len(self.connections) > 2 * self.max_connections:
            self.transport.close()
        else:
            self.transport.write_eof()
        self._watch()

    def _watch(self) -> None:
        """Start the timer that fits what the connection is waiting for; a client's next byte does not restart it."""
        if self.transport.is_closing() or self.flow.write_paused:
            self._set("taking the answer", self.client_seconds)
        elif self.refused:
            self._set("the rest of a refused request", LINGER)
        elif self._answering():
            self._set("", 0)
        elif self.conn.their_state is h11.SEND_BODY:
            self._set("the rest of a refused request", LINGER)
        elif self.cycle is None or self.conn.trailing_data[0]:
            self._set("the head of a request", self.client_seconds)
        elif self.transport.get_write_buffer_size():
            self._set("taking the answer", self.client_seconds)
        else:
            self._set("", 0)  # idle: uvicorn's keep-alive timer runs

    def _set(self, what: str, seconds: float) -> None:
        if what == self.guarded:
            return
        if self.guard is not None:
            self.guard.cancel()
        self.guarded = what
        self.guard = self.loop.call_later(seconds, self._expire) if what else None

    def _expire(self) -> None:
        if self.guarded == "the head of a request" and not self.transport.is_closing():
            self._refuse(408, "Request Timeout", "slow_request", "the request took too long")
            return
        if not self.transport.get_write_buffer_size():
            self.transport.close()
            return
        # A close would wait for the client to read, here and, for what is sent already, in the kernel.
        connection = self.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


class DrainingServer(Server):
    """On SIGTERM: not ready, take what is on the wire for a moment, finish what was accepted, exit in any case."""

    def __init__(self, config: Config, on_drain: Callable[[], None]) -> None:
        super().__init__(config)
        self.on_drain = on_drain

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.on_drain()
        # The last resort, a thread of C that nothing here can hold up: it says what hangs, and ends it.
        faulthandler.dump_traceback_later((self.config.timeout_graceful_shutdown or 0) + LAST, exit=True)
        await asyncio.sleep(GRACE)
        await super().shutdown(sockets)

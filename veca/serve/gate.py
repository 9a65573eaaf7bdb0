"""The outermost layer of the app: who may enter, what is counted, and that every failure is an answer in JSON."""

from __future__ import annotations

import hmac
import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from veca.serve.problems import Problem
from veca.serve.service import Service

log = logging.getLogger("veca.serve")
ROUTES = {
    *("/", "/docs", "/openapi.json", "/healthz", "/readyz", "/metrics"),
    *("/v1/features", "/v1/similarity", "/v1/explore", "/v1/scan", "/v1/look"),
}

# Pages are whole in themselves: a browser is told to load nothing from anywhere, and to talk to this service only.
POLICY = (
    b"content-security-policy",
    b"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
)
SECURITY = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]


class Gate:
    def __init__(self, app: ASGIApp, service: Service, token: bytes | None) -> None:
        self.app, self.service, self.token = app, service, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        metrics, path = self.service.metrics, scope["path"]
        route = path if path in ROUTES else "other"
        started, status = time.monotonic(), 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                html = any(name == b"content-type" and b"html" in value for name, value in message["headers"])
                message["headers"] = [*message["headers"], *SECURITY, *([POLICY] if html else [])]
                if self.service.draining:
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        try:
            if self.token is not None and (path.startswith("/v1/") or path == "/metrics"):
                self.admit(scope)
            await self.app(scope, receive, answer)
        except Problem as problem:
            metrics.rejected.labels(problem.reason).inc()
            await send_problem(problem, answer)
        except Exception:  # the app has answered 500; the traceback is for the operator
            log.exception("%s %s failed", scope["method"], route)
        metrics.requests.labels(route, str(status)).inc()
        metrics.seconds.labels(route).observe(time.monotonic() - started)

    def admit(self, scope: Scope) -> None:
        """401 without the token; compared in constant time."""
        assert self.token is not None
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, word = given.partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(word.strip(), self.token):
            message = "this service asks for its bearer token: send the header Authorization: Bearer TOKEN"
            raise Problem(401, "unauthorised", message, {"WWW-Authenticate": "Bearer"})


async def send_problem(problem: Problem, send: Send) -> None:
    body = problem.body()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **problem.headers}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})

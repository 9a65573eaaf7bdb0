"""What a client is told when it does not get its features: a status, a reason for programs, a sentence for people."""

from __future__ import annotations

import json
from collections.abc import Mapping


class Problem(Exception):
    """Becomes the response {"error": {"reason": …, "message": …}}."""

    def __init__(self, status: int, reason: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        return problem_body(self.reason, self.message)


class ClientGone(Exception):
    """The client closed the connection; nobody reads an answer any more."""


def problem_body(reason: str, message: str) -> bytes:
    return json.dumps({"error": {"reason": reason, "message": message}}, ensure_ascii=False).encode()

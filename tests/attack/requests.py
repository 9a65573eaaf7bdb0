"""Hostile requests, as the bytes that go over the wire."""

from __future__ import annotations

import random

from .images import damaged, hostile_image, photo

PATHS = (
    *("/v1/features", "/v1/features", "/v1/similarity?x=3&y=4", "/v1/explore?size=64", "/healthz", "/", "/docs"),
    *("/v1/features/", "/v1/features?size=0", "/v1/features?cores=-1", "/v1/features?size=1e9", "/v1/features?what=1"),
    *("/v1/similarity?x=nan&y=inf", "/..%2f..%2fetc/passwd", "/%00", "/metrics", "/openapi.json", "//evil.example/"),
    *("/v1/features?format=npz&dense=true", "/v1/features?size=99999999999999999999", "/v1/explore"),
)
HEADERS = (
    *("Host: evil.example", "Content-Type: multipart/form-data", "Content-Type: multipart/form-data; boundary=x"),
    *(
        "Expect: 100-continue",
        "Transfer-Encoding: chunked",
        "Content-Length: 5",
        "Content-Length: -1",
        "Range: bytes=0-",
    ),
    *(
        "Upgrade: websocket",
        "Connection: close",
        "Authorization: Bearer x",
        "X: " + 9000 * "y",
        "Content-Encoding: gzip",
    ),
)


def hostile_request(seed: int) -> bytes:
    chance = random.Random(seed)
    body = hostile_image(seed) if chance.random() < 0.7 else photo("PNG", seed=seed % 7)
    if chance.random() < 0.2:
        names = (b"image", b"other", b"size", b"\xff", b'a"b')
        parts = [
            b'--x\r\nContent-Disposition: form-data; name="%s"; filename="a"\r\n\r\n%s\r\n'
            % (chance.choice(names), body)
            for _ in range(chance.choice((1, 2, 12)))
        ]
        body = b"".join(parts)[: 10**7] + chance.choice((b"--x--\r\n", b""))
    lines = [f"{chance.choice(('POST', 'POST', 'POST', 'GET', 'PUT', 'X'))} {chance.choice(PATHS)} HTTP/1.1"]
    lines += ["Host: localhost", f"Content-Length: {len(body)}"]
    lines += chance.sample(HEADERS, chance.choice((0, 0, 1, 3)))
    whole = "\r\n".join([*lines, "", ""]).encode() + body
    return damaged(whole, chance) if chance.random() < 0.2 else whole

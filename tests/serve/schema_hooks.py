"""Read by schemathesis: half of what it uploads is a real image, so that it also reaches what lies behind decoding."""

from __future__ import annotations

import io

import hypothesis.strategies as st
import schemathesis
from PIL import Image


def image(kind: str) -> bytes:
    file = io.BytesIO()
    Image.linear_gradient("L").resize((40, 30)).convert("RGB").save(file, kind)
    return file.getvalue()


uploads = st.binary(max_size=200) | st.sampled_from([image(kind) for kind in ("PNG", "JPEG", "GIF", "WEBP")])
schemathesis.openapi.media_type("application/octet-stream", uploads)
schemathesis.openapi.format("binary", uploads)

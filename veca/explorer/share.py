"""What a chat or a feed shows of a link to the page: a title, a sentence, and a picture beside the page."""

from __future__ import annotations

import html
import io
from urllib.parse import quote

import numpy as np
from PIL import Image

SIZE = (1200, 630)  # what most of them show whole
GAP, PAPER = 24, (247, 247, 245)


def share_tags(title: str, description: str, picture: str, url: str) -> str:
    """Tags for the head of the page; the address of the picture should be whole, which takes the folder's `url`."""
    base = url.rstrip("/") + "/" if url else ""
    tags = {
        "og:type": "website",
        "og:title": title,
        "og:description": description,
        **({"og:image": base + quote(picture), "twitter:card": "summary_large_image"} if picture else {}),
    }
    lines = [f'<meta name="description" content="{html.escape(description)}">']
    lines += [f'<meta property="{name}" content="{html.escape(value)}">' for name, value in tags.items()]
    return "\n".join(lines)


def share_picture(photo: Image.Image, colours: np.ndarray) -> bytes:  # h×w×3 uint8
    """The photo beside its features as colours, one above the other where it is wide: a JPEG of SIZE."""
    sheet = Image.new("RGB", SIZE, PAPER)
    wide = photo.width / photo.height > SIZE[0] / SIZE[1]
    columns, rows = (1, 2) if wide else (2, 1)
    room = (SIZE[0] - (columns + 1) * GAP) // columns, (SIZE[1] - (rows + 1) * GAP) // rows
    scale = min(room[0] / photo.width, room[1] / photo.height)
    width, height = (max(1, round(side * scale)) for side in photo.size)
    across, down = (0, height + GAP) if wide else (width + GAP, 0)
    left, top = (SIZE[0] - width - across) // 2, (SIZE[1] - height - down) // 2
    sheet.paste(photo.resize((width, height), Image.Resampling.LANCZOS), (left, top))
    painted = Image.fromarray(colours).resize((width, height), Image.Resampling.NEAREST)
    sheet.paste(painted, (left + across, top + down))
    data = io.BytesIO()
    sheet.save(data, "JPEG", quality=85)
    return data.getvalue()

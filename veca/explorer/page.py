"""`build_page`: photos and models in, one HTML text out. The disk is not touched, except to read the template."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any, NamedTuple

from PIL import Image

from veca._version import __version__
from veca.analysis.core_figures import usable_budgets
from veca.analysis.photos import Photo, open_photo
from veca.backbones import Backbone
from veca.errors import InputError
from veca.explorer.pack import LEVELS, Blob
from veca.explorer.panes import look, pack_views, reduced
from veca.explorer.share import share_picture, share_tags
from veca.images import SIZE, Source, grid_size
from veca.model import Veca
from veca.teachers import Teacher

PARTS = ("page.html", "page.css", "colours.js", "data.js", "words.js", "keep.js", "build.js", "page.js")
LONGEST = 1100  # pixels of the photo in the page
PATCHES = 4096  # at most, in a pane: more would make the page heavy and the patches too small to point at
FINE = 4 * PATCHES  # on a finer lattice, which only the last layer's features have


class Page(NamedTuple):
    html: str
    picture: bytes  # the photo beside its features, a JPEG to lie where `picture` said


def build_page(
    photos: Sequence[Source | Photo],
    models: Sequence[Veca | Teacher | Backbone],
    *,
    size: int | None = None,
    budgets: Sequence[int] = (8, 16, 32, 64),
    stride: int | None = None,
) -> str:
    """The explorer of one or two panes: two photos through one model, or one photo through two models.

    Photos are anything `veca.preprocess` takes (bytes of an upload too); wrap one in `Photo`, or a model in `Backbone`,
    to name it. `size` is the shorter side in pixels (448; 336 with two panes, to keep the page small), `budgets` the
    stops of the slider. `stride` is the distance in pixels of the last layer's features (half the patch size: maps
    twice as fine); models without cores keep to their patches.
    """
    return make_page(photos, models, size=size, budgets=budgets, stride=stride).html


def make_page(
    photos: Sequence[Source | Photo],
    models: Sequence[Veca | Teacher | Backbone],
    *,
    size: int | None = None,
    budgets: Sequence[int] = (8, 16, 32, 64),
    stride: int | None = None,
    picture: str = "",
    url: str = "",
    between: Callable[[], None] = lambda: None,
) -> Page:
    """The page, and the picture that is shown where a link to it is shared.

    `picture` is where that will lie, relative to the page; `url` the address of the page's folder, without which most
    places that show such pictures do not find them. `between` is called between the parts of the work, each of about a
    second: what it raises ends it.
    """
    if not photos or not models or len(photos) * len(models) > 2:
        raise InputError(
            f"the page shows one photo, two photos with one model, or one photo with two models, not {len(photos)} "
            f"and {len(models)}"
        )
    size = size or (SIZE if len(photos) * len(models) == 1 else 336)
    named = [photo if isinstance(photo, Photo) else open_photo(photo) for photo in photos]
    backbones = [model if isinstance(model, Backbone) else Backbone(name_of(model), model) for model in models]
    blob, panes, seen = Blob(), [], []
    for backbone in backbones:
        model = backbone.model
        own = usable_budgets(model, budgets) if isinstance(model, Veca) else []
        finer = check_stride(model, stride)
        for photo in named:
            check_grid(photo, size, model.patch_size, finer)
        views = [look(backbone, photo, size, own, finer, between) for photo in named]
        between()
        views = reduced(views)
        between()
        for index, table in enumerate(pack_views(views, blob)):
            dense = isinstance(model, Veca) and model.config.attention == "dense"
            about = {"photo": named[index].name, "image": index, "model": backbone.name, "dense": dense}
            panes.append(about | table)
            if backbone is backbones[0]:
                seen.append((table["layers"][-1][-1]["colours"], table.get("fine") or table["grid"]))
    page = {
        "version": __version__,
        "levels": LEVELS,
        "linked": "photos" if len(named) == 2 else "models" if len(backbones) == 2 else "",
        "images": [image_url(photo.image) for photo in named],
        "panes": panes,
    }
    title, who = (" and ".join(one.name for one in several) for several in (named, backbones))
    about_it = (
        f"Point at a patch of {title} and see which others are alike to {who}, layer by layer and core by core. "
        "One file, computed in your browser."
    )
    share = share_tags(f"{title}, inside VECA", about_it, picture, url)
    shown = share_picture(named[0].image, blob.bytes_at(*seen[0])) if picture else b""
    return Page(fill(page, blob.text(), title, share), shown)


def check_stride(model: Veca | Teacher, stride: int | None) -> int | None:
    """The stride, where it is one of this model's."""
    if stride is None or not isinstance(model, Veca) or stride == model.patch_size:
        return None
    if not 1 <= stride < model.patch_size:
        raise InputError(f"the stride lies between 1 and the patch size {model.patch_size}, not {stride}")
    return stride


def check_grid(photo: Photo, size: int, patch_size: int, stride: int | None) -> None:
    rows, columns = grid_size(photo.image.width, photo.image.height, size, patch_size)
    most, step = PATCHES, patch_size
    if rows * columns <= PATCHES and stride is not None:
        most, step = FINE, stride
        rows, columns = (-(-side * patch_size // stride) for side in (rows, columns))
    if rows * columns > most:
        raise InputError(
            f"{photo.name} at size {size} has {columns}×{rows} patches"
            f"{f' at a stride of {step}' if stride else ''}, more than the {most} a page holds; use a smaller size"
            f"{' or a larger stride' if step == stride else ''}"
        )


def name_of(model: Veca | Teacher) -> str:
    """What the page calls a model that came without a name: where its weights came from."""
    if isinstance(model, Teacher):
        return model.name.rstrip("/").rsplit("/", 1)[-1]
    return str(model.card.get("source", "VECA")).rstrip("/").rsplit("/", 1)[-1]


def image_url(image: Image.Image) -> str:
    """The photo inside the page."""
    scale = min(1.0, LONGEST / max(image.size))
    width, height = (max(1, round(side * scale)) for side in image.size)
    data = io.BytesIO()
    image.resize((width, height), Image.Resampling.LANCZOS).save(data, "WEBP", quality=80, method=4)
    return "data:image/webp;base64," + base64.b64encode(data.getvalue()).decode("ascii")


def fill(page: dict[str, Any], blob: str, title: str, share: str) -> str:
    """The template with its styles, script and data; names from outside cannot become markup."""
    parts = {name: resources.files("veca.explorer").joinpath(name).read_text("utf-8") for name in PARTS}
    table = json.dumps(page, ensure_ascii=False, separators=(",", ":"))
    table = table.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    values = {
        "TITLE": html.escape(title),
        "SHARE": share,
        "STYLE": parts["page.css"],
        "SCRIPT": "\n".join(parts[name] for name in PARTS if name.endswith(".js")),
        "TABLE": table,
        "BLOB": blob,
    }
    text = parts["page.html"]
    head, *pieces = text.split("<!--VECA:")
    for piece in pieces:  # in one pass, so that a value is never searched for other names
        name, rest = piece.split("-->", 1)
        head += values[name] + rest
    return head

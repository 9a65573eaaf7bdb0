"""What the page is given says the same as the model, within what it rounds away."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from veca import InputError
from veca.analysis.contributions import contributions
from veca.analysis.photos import Photo, features, photo_tensor
from veca.backbones import Backbone
from veca.explorer import build_page
from veca.explorer.pack import LEVELS, Blob, basis, quantised, shares, unpack
from veca.explorer.page import make_page


def read(page: str) -> tuple[dict, bytes]:
    table = re.search(r'<script type="application/json" id="table">(.*?)</script>', page, re.S)
    blob = re.search(r'<script type="text/plain" id="blob">(.*?)</script>', page, re.S)
    assert table
    assert blob
    return json.loads(table[1]), unpack(blob[1])


@pytest.fixture(scope="module")
def page(photo: Photo, backbone: Backbone) -> str:
    return build_page([photo], [backbone], size=160, budgets=(4, 16))


def patches_in(pane: dict, blob: bytes, layer: int, budget: int) -> torch.Tensor:
    row, count = pane["layers"][layer][budget], pane["grid"][0] * pane["grid"][1]
    values = np.frombuffer(blob, np.int8, row["directions"] * count, row["patches"])
    return torch.from_numpy(values.reshape(-1, count).T.astype(np.float32))


def test_cosines_survive(page: str, photo: Photo, backbone: Backbone) -> None:
    table, blob = read(page)
    (pane,) = table["panes"]
    assert pane["grid"] == [10, 15]
    assert pane["budgets"] == [4, 16]
    for column, budget in enumerate((4, 16)):
        own = torch.nn.functional.normalize(features(backbone, photo, 160, budget).patches, dim=-1)
        stored = torch.nn.functional.normalize(patches_in(pane, blob, 3, column), dim=-1)
        assert (own @ own.T - stored @ stored.T).abs().max() < 0.03
        cores = np.frombuffer(blob, np.int8, budget * 48, pane["layers"][3][column]["cores"]).reshape(budget, 48)
        cls = torch.nn.functional.normalize(torch.from_numpy(cores[0].astype(np.float32)), dim=-1)
        expected = torch.cosine_similarity(features(backbone, photo, 160, budget).cls[None], own, dim=-1)
        assert (stored @ cls - expected).abs().max() < 0.03


@torch.no_grad()
def test_maps_and_places_survive(page: str, photo: Photo, backbone: Backbone) -> None:
    table, blob = read(page)
    (pane,) = table["panes"]
    images, _ = photo_tensor(photo, backbone.model, 160, torch.device("cpu"))
    layers = backbone.veca.forward_layers(images, 16)
    for index, layer in enumerate(contributions(backbone.veca, images, layers)):
        row = pane["layers"][index][1]
        for name, maps in (("reads", layer.reads[0]), ("readBy", layer.read_by[0])):
            stored = np.frombuffer(blob, np.uint8, maps.numel(), row[name]).reshape(16, 150)
            values = (np.cumsum(stored, 1, dtype=np.uint8) / LEVELS) ** 2 * row[name + "Top"]
            np.testing.assert_allclose(np.sqrt(values), maps.sqrt(), atol=float(maps.max()) ** 0.5 * 0.51 / LEVELS)
        coords = np.frombuffer(blob, np.int16, 32, row["coords"]).reshape(16, 2) / 32767
        np.testing.assert_allclose(coords, layers.coords[index][0], atol=1e-4)


def test_upload_bytes_and_arrays_make_the_same_page(photo: Photo, backbone: Backbone) -> None:
    data = io.BytesIO()
    photo.image.save(data, "PNG")
    from_bytes, from_array = (
        build_page([source], [backbone.veca], size=96, budgets=(8,))
        for source in (data.getvalue(), np.asarray(photo.image))
    )
    assert from_bytes == from_array
    assert read(from_bytes)[0]["panes"][0]["photo"] == "photo"


def test_nothing_in_the_page_points_outside(page: str) -> None:
    text = page.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    outside = re.compile(r"""https?:|["'(=]//|@import|url\(|srcset|<iframe|<link(?! rel="icon" href="data:,")""")
    assert not outside.search(text.split('id="blob"')[0])
    assert "default-src 'none'" in page
    assert len(page) < 400_000  # 150 patches


def test_names_cannot_become_markup(photo: Photo, backbone: Backbone) -> None:
    evil = "</script><script>alert(1)</script><!--VECA:BLOB-->&\u2028"
    page = build_page([Photo(evil, photo.image)], [Backbone(evil, backbone.model)], size=64, budgets=(4,))
    assert page.count("<script") == build_page([photo], [backbone], size=64, budgets=(4,)).count("<script")
    assert read(page)[0]["panes"][0]["model"] == evil


def test_what_is_shown_of_a_link(photo: Photo, backbone: Backbone) -> None:
    page = make_page([photo], [backbone], size=64, budgets=(4,), picture="my page.jpg", url="https://example.org/x")
    tags = dict(re.findall(r'<meta (?:property|name)="([\w:]+)" content="([^"]*)">', page.html))
    assert tags["og:title"] == "shapes, inside VECA"
    assert tags["description"] == tags["og:description"]
    assert "shapes" in tags["description"]
    assert "small" in tags["description"]
    assert tags["og:image"] == "https://example.org/x/my%20page.jpg"
    picture = Image.open(io.BytesIO(page.picture))
    assert (picture.format, picture.size) == ("JPEG", (1200, 630))
    left = np.asarray(picture.crop((24, 125, 588, 505)).resize((240, 160)), float)
    assert np.abs(left - np.asarray(photo.image, float)).mean() < 25  # the photo, then its features
    without = make_page([photo], [backbone], size=64, budgets=(4,))
    assert without.picture == b""
    assert "og:image" not in without.html
    assert "og:title" in without.html


def test_a_finer_lattice_is_bounded_and_keeps_the_page_small(photo: Photo, backbone: Backbone, page: str) -> None:
    fine = build_page([photo], [backbone], size=160, budgets=(4, 16), stride=8)
    (pane,) = read(fine)[0]["panes"]
    assert (pane["grid"], pane["fine"]) == ([10, 15], [20, 30])
    assert len(fine) < 2 * len(page)
    assert read(build_page([photo], [backbone], size=160, budgets=(4,), stride=16))[0]["panes"][0].get("fine") is None
    with pytest.raises(InputError, match="between 1 and the patch size 16, not 20"):
        build_page([photo], [backbone], size=160, stride=20)
    with pytest.raises(InputError, match=r"at a stride of 1, more than the 16384 a page holds.*larger stride"):
        build_page([photo], [backbone], size=160, stride=1)


def test_two_photos_share_a_basis_and_two_models_do_not(photo: Photo, other: Photo, backbone: Backbone) -> None:
    table, blob = read(build_page([photo, other], [backbone], size=80, budgets=(16,)))
    assert table["linked"] == "photos"
    first, second = (torch.nn.functional.normalize(patches_in(pane, blob, 3, 0), dim=-1) for pane in table["panes"])
    own = [torch.nn.functional.normalize(features(backbone, p, 80).patches, dim=-1) for p in (photo, other)]
    assert (first @ second.T - own[0] @ own[1].T).abs().max() < 0.03
    assert read(build_page([photo], [backbone, backbone], size=80, budgets=(16,)))[0]["linked"] == "models"
    with pytest.raises(InputError, match="one photo with two models"):
        build_page([photo, other], [backbone, backbone])


def test_a_teacher_has_features_but_no_cores(shared: Path, photo: Photo, backbone: Backbone) -> None:
    from veca.teachers import load_teacher

    teacher = load_teacher(shared / "teacher" / "dav2-small-encoder")
    table, blob = read(build_page([photo], [backbone, teacher], size=56, budgets=(4, 16)))
    ours, theirs = table["panes"]
    assert theirs["model"] == "dav2-small-encoder"
    assert theirs["budgets"] == []
    assert len(theirs["layers"]) == 1
    assert "reads" not in theirs["layers"][0][0]
    own = torch.nn.functional.normalize(features(Backbone("t", teacher), photo, 56).patches, dim=-1)
    stored = torch.nn.functional.normalize(patches_in(theirs, blob, 0, 0), dim=-1)
    assert (own @ own.T - stored @ stored.T).abs().max() < 0.05
    assert len(ours["layers"]) == 4


def test_the_basis_keeps_what_can_be_kept() -> None:
    rows = torch.randn(300, 6) @ torch.randn(6, 80)  # six directions of eighty
    axes = basis(rows, 12)
    torch.testing.assert_close(axes.T @ axes, torch.eye(12), rtol=0, atol=1e-4)
    torch.testing.assert_close(rows @ axes @ axes.T, rows, rtol=1e-3, atol=1e-3)
    assert basis(rows, 200).shape == (80, 80)


def test_quantities_at_their_ends() -> None:
    assert quantised(torch.tensor([1.0, -1.0, 0.0, 9.0]), 60).tolist() == [60, -60, 0, 127]
    levels, top = shares(torch.zeros(2, 4))
    assert levels.tolist() == [[0] * 4] * 2
    assert top == 0
    blob = Blob()
    places = [blob.add(np.arange(n, dtype=np.uint8)) for n in (3, 4, 1)]
    assert places == [0, 4, 8]
    assert unpack(blob.text())[4:8] == bytes(range(4))

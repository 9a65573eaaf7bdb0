"""Overlapping windows, blended."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from large.test_formats import small
from large.test_picture import photo

from veca import InputError, open_source
from veca.images import open_image, to_tensor
from veca.large.picture import Strips
from veca.windows import starts, tent, window_pixels, windowed


def test_windows_are_the_weighted_mean_of_forward_passes() -> None:
    model, values = small(), photo(16 * 7 + 5, 16 * 11 + 3)
    picture = open_source(values)
    found = np.concatenate([rows for _, rows in windowed(model, Strips(picture, 16), 64, cores=5)])
    total, weights = np.zeros((7, 11, 48)), np.zeros((7, 11, 1))
    for top in (0, 2, 3):
        for left in (0, 2, 4, 6, 7):
            part = values[top * 16 : top * 16 + 64, left * 16 : left * 16 + 64]
            with torch.no_grad():
                out = model(to_tensor(open_image(part))[None], cores=5).patches[0].view(4, 4, 48).numpy()
            weight = np.outer([1, 2, 2, 1], [1, 2, 2, 1])[..., None]
            total[top : top + 4, left : left + 4] += out * weight
            weights[top : top + 4, left : left + 4] += weight
    np.testing.assert_allclose(found, total / weights, atol=1e-4)


def test_a_window_as_large_as_the_image_is_the_forward_pass_and_masks_hold() -> None:
    model, values = small(), photo(64, 96)
    picture = open_source(values)
    ((top, rows),) = windowed(model, Strips(picture, 16), 4096)
    assert top == 0
    np.testing.assert_allclose(rows.reshape(24, 48), model.stream(values).patches[0].numpy(), atol=1e-4)
    inside = torch.zeros(4, 6, dtype=torch.bool)
    inside[:2, :2] = True
    masked = np.concatenate([rows for _, rows in windowed(model, Strips(picture, 16), 32, inside=inside)])
    assert masked.shape == (4, 6, 48)
    assert masked[:2, :2].any(-1).all()
    assert not masked[2:].any()


def test_windows_cover_an_axis() -> None:
    for length in range(1, 40):
        for window in range(1, length + 1):
            places = starts(length, window)
            covered = np.zeros(length)
            for place in places:
                covered[place : place + window] += tent(window)
            assert (covered > 0).all()
            assert places[0] == 0
            assert sorted(set(places)) == places


def test_a_window_is_pixels_or_a_length() -> None:
    picture = open_source(photo(64, 64))
    assert window_pixels("448", picture) == 448
    with pytest.raises(InputError, match="does not tell its physical scale"):
        window_pixels("500um", picture)
    picture.source.mpp = 0.5
    assert window_pixels("500um", picture) == 1000
    for wrong in ("0", "wide", "-3", "1e9m"):
        with pytest.raises(InputError, match="--window is a"):
            window_pixels(wrong, picture)

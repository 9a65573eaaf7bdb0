"""`veca features` and `veca scan` of videos: files, or folders of frames, one result a frame (docs/video.md)."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from veca.devices import pick_device, pick_dtype
from veca.errors import InputError
from veca.files import refuse_file
from veca.images import resize_to_patches, to_tensor
from veca.progress import progress
from veca.scan_file import digest_of, scan_header
from veca.video import Frames, is_video, read_frames
from veca.weights import load

if TYPE_CHECKING:
    from veca.extract.command import FeaturesSettings
    from veca.scan_command import ScanSettings

NO_PATCHES = "--patches is for photos: of a video, --share reads a part of each frame"


def clips_of(paths: Sequence[str | Path]) -> list[Path]:
    """The videos that were named, absolute; what is none is refused before the first is decoded."""
    for path in map(Path, paths):
        if not path.exists():
            raise InputError(f"{path}: no such file or folder")
        if not (path.is_dir() or is_video(path)):
            raise InputError(f"{path}: neither a video nor a folder of frames; photos and videos need separate runs")
    clips = [Path(os.path.abspath(path)) for path in paths]  # noqa: PTH100  (a link keeps its own name)
    if len({clip.name for clip in clips}) < len(clips):
        raise InputError("two of the videos have the same name; write them to different folders")
    return clips


def features(settings: FeaturesSettings) -> int:
    """One .npz a frame, by the number of the frame; a folder that a second run continues, as for photos."""
    from veca.extract.command import made_with
    from veca.extract.extractor import Extractor
    from veca.extract.folder import FeatureFolder

    clips = clips_of(settings.paths)
    if settings.patches != 1:
        raise InputError(NO_PATCHES)
    if settings.stride is not None:
        raise InputError("--stride is for photos: frames of a video have one feature a patch")
    if settings.engine != "local" or settings.format == "parquet" or settings.shard is not None:
        raise InputError("--engine, --format and --shard are for photos, not for videos")
    extractor = Extractor(settings.model, cores=settings.cores, dtype=settings.dtype, device=settings.device)
    model, device, dtype = extractor.backbone.veca, extractor.backbone.device, extractor.backbone.dtype
    frames = Frames(model, settings.cores, settings.share, settings.carry)
    tally = Tally(Path(settings.out))
    with FeatureFolder(settings.out, made_with(extractor, settings)) as folder:
        for name, image, seen_before in tally.frames(clips, folder.has, frames):
            pixels = resize_to_patches(image, settings.size, model.patch_size, name=str(name))
            out = frames(to_tensor(pixels)[None].to(device, dtype))
            if seen_before:
                continue
            found = {"cls": out.cls[0].float().cpu().numpy()}
            if settings.dense:
                found["patches"] = out.patches[0].unflatten(0, out.grid).float().cpu().numpy()
            folder.add(name, found, image.size, out.grid)
    return tally.finish("done")


def scans(settings: ScanSettings) -> int:
    """DIR/CLIP/<frame>.scan for every frame."""
    clips = clips_of(settings.paths)
    if settings.patches != 1:
        raise InputError(NO_PATCHES)
    if settings.where is not None or settings.spill is not None or settings.tokens != "float32":
        raise InputError("--where, --tokens and --spill are for single images, not for videos")
    refuse_file(settings.out)
    device = pick_device(settings.device)
    dtype = pick_dtype(settings.dtype, device)
    model = load(settings.model, cores=settings.cores, device=device, dtype=dtype)
    frames = Frames(model, settings.cores, settings.share, settings.carry)
    tally = Tally(settings.out)
    same = {
        **{"weights": digest_of(model), "dtype": str(dtype).removeprefix("torch.")},
        **{"cores": settings.cores, "share": settings.share, "carry": settings.carry},
    }

    def target(name: Path) -> Path:
        return settings.out / name.parent.name / f"{name.name}.scan"

    def is_done(name: Path) -> bool:
        try:
            about = scan_header(target(name))
        except InputError:  # not there, or damaged
            return False
        return all(about.get(key) == value for key, value in {**same, **origin(name)}.items())

    for name, image, seen_before in tally.frames(clips, is_done, frames):
        scan = frames.scan(np.asarray(image))
        if not seen_before:
            scan.save(target(name), model=settings.model, carry=settings.carry, **origin(name))
    return tally.finish("scanned")


def origin(name: Path) -> dict[str, Any]:
    """Where a frame came from: its own file, or its place in a video's."""
    file = name if name.is_file() else name.parent
    stat = file.stat()
    place = {} if file == name else {"frame": name.name}
    return {"image": str(file), "stamp": [stat.st_size, stat.st_mtime_ns], **place}


def frame_at(video: Path, name: str) -> Image.Image:
    """One frame of a video, by the name that `read_frames` gives it."""
    for here, image in read_frames(video):
        if here == name:
            return image
    raise InputError(f"{video}: has no frame {name}")


def last_missing(clip: Path, is_done: Callable[[Path], bool]) -> int:
    """The number, from 1, of the last frame that is not done; 0 if all are."""
    last = 0
    with contextlib.suppress(InputError):  # what cannot be read is told later
        for number, (name, _) in enumerate(read_frames(clip), 1):
            last = last if is_done(clip / name) else number
    return last


class Tally:
    """Frames to be done, and how many were."""

    def __init__(self, out: Path) -> None:
        self.out, self.done, self.before, self.failed = out, 0, 0, list[str]()

    def frames(
        self, clips: list[Path], is_done: Callable[[Path], bool], frames: Frames
    ) -> Iterator[tuple[Path, Image.Image, bool]]:
        """(clip/name, image, False) of every frame that an earlier run did not finish; a video that fails ends there.

        What carried cores know comes from all frames before: those come again, with True, and need no writing.
        """
        for clip in clips:
            frames.reset()
            needed = last_missing(clip, is_done) if frames.carry else 0
            try:
                for number, (name, image) in enumerate(progress(read_frames(clip), clip.name), 1):
                    if is_done(clip / name):
                        self.before += 1
                        if number < needed:
                            yield clip / name, image, True
                        continue
                    yield clip / name, image, False
                    self.done += 1
            except InputError as error:
                self.failed.append(str(error))

    def finish(self, verb: str) -> int:
        print(
            f"{self.out}: {self.done} frames {verb}"
            + (f", {self.before} were there before" if self.before else "")
            + (f", {len(self.failed)} videos could not be read to their end:" if self.failed else "")
        )
        for line in self.failed:
            print(f"  {line}", file=sys.stderr)
        return 1 if self.failed else 0

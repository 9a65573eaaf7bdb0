"""What happens to a request between its arrival and its answer, with every bound applied."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from PIL import Image
from starlette.requests import Request

from veca.errors import InputError
from veca.extract.extractor import Extractor
from veca.images import SIZE
from veca.model import Veca
from veca.scan import Look, Scan
from veca.scan_file import digest_of, opened, pack
from veca.serve.bodies import images_of, read_body
from veca.serve.decode import Picture
from veca.serve.elastic import Controller, Level, ladder
from veca.serve.engine import Engine
from veca.serve.memory import Memory, Share
from veca.serve.metrics import Metrics
from veca.serve.problems import ClientGone, Problem
from veca.serve.scans import Box, largest_scan, looks
from veca.serve.settings import ServeSettings
from veca.serve.workers import Workers

T = TypeVar("T")
Array = np.ndarray[Any, Any]
LARGE = 12_500_000  # pixels
PAGES = 8  # explorer pages in hand; each takes seconds, one at a time


class Result(NamedTuple):
    cls: Array  # D′ float32
    patches: Array | None  # h×w×D′ float32, where they were asked for
    cores: int
    picture: Picture
    level: Level
    lowered: bool  # whether the service chose less than it would have when idle


class Hand:
    """One admitted request: the deadline it has, and the steps that are cut short when it passes or the client goes."""

    def __init__(self, request: Request, share: Share, seconds: float) -> None:
        self.request, self.share, self.seconds = request, share, seconds
        self.images: dict[str, bytes] = {}  # by form field; each is let go of as soon as it is decoded
        self.more = 0  # bytes held instead of them
        self.deadline = time.monotonic() + seconds
        self.gone: asyncio.Task[None] | None = None

    async def wait(self, work: Awaitable[T]) -> T:
        """The result of `work`; 504 when the time is up, ClientGone when nobody waits any more. Both cancel it."""
        task = asyncio.ensure_future(work)
        if self.gone is None:
            self.gone = asyncio.ensure_future(self._gone())
        try:
            rest = max(0.0, self.deadline - time.monotonic())
            await asyncio.wait({task, self.gone}, timeout=rest, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if self.gone.done():
                raise ClientGone
            raise Problem(504, "timeout", f"this took longer than {self.seconds:g} s", {"Retry-After": "1"})
        finally:
            task.cancel()

    def replace(self, name: str, count: int) -> None:
        """An upload is no longer held, but so many bytes that were made of it, or will be."""
        del self.images[name]
        self.more += count
        self.share.hold(self.more + sum(map(len, self.images.values())))

    async def _gone(self) -> None:
        while (await self.request.receive())["type"] != "http.disconnect":
            pass


class Service:
    def __init__(self, model: Veca, settings: ServeSettings) -> None:
        config = model.config
        self.model, self.settings, self.name = model, settings, settings.model.rstrip("/").split("/")[-1]
        self.patch_size, self.bank = config.patch_size, config.bank
        self.extractor = Extractor(model)
        self.weights = digest_of(model)
        self.metrics = Metrics()
        largest = 4 * settings.max_size**2
        self.most = max(1, largest // self.patch_size**2)  # patches of one picture
        self.cores = settings.cores or model.default_cores  # of requests that do not say
        levels = ladder(settings.size, settings.min_size or settings.size, self.patch_size)
        controller = Controller(levels, settings.slo, patience=(settings.slo or 1.0) / 2)
        self.engine = Engine(controller, self.metrics, self.patch_size, settings.threads)
        self.workers = Workers(settings.decoders, self.patch_size, settings.max_pixels, largest)
        self.large = asyncio.Lock()  # photos of many pixels are decoded one at a time: each takes much memory
        self.memory = Memory(settings.max_held, self.metrics)
        self.decoders = ThreadPoolExecutor(settings.decoders, "veca-decode")  # each waits for a process
        self.encoders = ThreadPoolExecutor(settings.decoders, "veca-encode")
        self.explorer = ThreadPoolExecutor(1, "veca-explore")
        self.in_hand = self.pages = 0
        self.draining = False

    def start(self) -> None:
        """Two images at first: the first is slower than any later one, so the rate is learned from the second."""
        self.engine.start()
        side = max(1, self.settings.size // self.patch_size) * self.patch_size
        blank = np.zeros((side, side, 3), np.uint8)
        for _ in range(2):
            self.engine.rate = 0.0
            patches = (side // self.patch_size) ** 2
            self.engine.submit(lambda: self.extractor.compute(blank[None], self.cores), patches).result()
        self.workers.start()

    def stop(self) -> None:
        """At once: what was accepted has been answered by now, or its time is up."""
        self.workers.stop()
        for pool in (self.decoders, self.encoders, self.explorer):
            pool.shutdown(wait=False, cancel_futures=True)
        self.engine.stop()

    def drain(self) -> None:
        self.draining = True

    @property
    def alive(self) -> bool:
        """Whether work can be done: uploads are decoded, and the model ends within the time that anybody waits."""
        return self.engine.alive and self.engine.busy() <= self.settings.timeout and not self.workers.broken

    @property
    def ready(self) -> bool:
        return self.alive and not self.draining

    @asynccontextmanager
    async def hand(self, request: Request, names: tuple[str, ...]) -> AsyncIterator[Hand]:
        """Read the upload, take a place in the queue, and find the images in it."""
        with self.memory.share() as share:
            body = await read_body(request, share, self.settings.max_bytes, self.settings.client_timeout)
            if self.in_hand >= self.settings.queue:
                raise Problem(503, "queue_full", "too many requests are waiting; try again later", self._retry())
            self._change(1)
            hand = Hand(request, share, self.settings.timeout)
            try:
                hand.images = await hand.wait(
                    self._in(self.encoders, images_of, body, request.headers.get("content-type", ""), names)
                )
                del body
                yield hand
            finally:
                if hand.gone is not None:
                    hand.gone.cancel()
                self._change(-1)

    async def features(
        self, hand: Hand, name: str, size: int | None, cores: int | None, dense: bool, affordable: Level | None = None
    ) -> Result:
        """Decode, then run.

        `size` and `cores` are the client's own wishes: a size that it names is seen with all patches. What it leaves
        to us is what we can afford when it is decoded, or `affordable`.
        """
        level, budget = Level(size) if size else affordable or self.engine.level(), cores or self.cores
        picture = await self._picture(hand, name, level.size)
        # A number of a dense feature takes 4 bytes, and about 12 more once it is written out.
        held = 16 * picture.grid[0] * picture.grid[1] * self.model.num_features if dense else 0
        hand.replace(name, picture.pixels.nbytes + held)
        work = partial(self._compute, picture.pixels, budget, level.patches, dense)
        cls, dense_feature = await hand.wait(asyncio.wrap_future(self.engine.submit(work, level.tokens(picture.grid))))
        return Result(cls, dense_feature, budget, picture, level, level.cost < Level(size or self.settings.size).cost)

    def _compute(self, pixels: Array, cores: int, patches: float, dense: bool) -> tuple[Array, Array | None]:
        try:
            out = self.extractor.compute(pixels[None], cores, patches)
        except InputError as error:  # not enough memory: no mistake of the client's
            raise RuntimeError(str(error)) from error
        # A copy of the first: a view would keep all cores in memory for as long as it is being sent.
        dense_feature = out.patches[0].cpu().numpy().reshape(*out.grid, -1) if dense else None
        return out.cls[0].cpu().numpy().copy(), dense_feature

    async def scan(self, hand: Hand, size: int | None, cores: int | None, share: float) -> tuple[bytes, Picture]:
        """The scan file of a photo, in its own size unless another is asked for, and the picture."""
        picture = await self._picture(hand, "image", size)
        hand.replace("image", picture.pixels.nbytes)

        def work() -> bytes:
            return pack(self.model.scan(picture.pixels, cores=cores or self.cores, share=share), self.weights)

        patches = max(1, round(share * picture.grid[0] * picture.grid[1]))
        job = self.engine.submit(work, patches)
        return await unless_refused("cannot_scan", hand.wait(asyncio.wrap_future(job))), picture

    async def look(
        self, hand: Hand, size: int | None, box: Box | None, points: list[tuple[float, float]] | None, stride: int
    ) -> tuple[Look, Scan]:
        """A part of a photo along the scan that was sent with it."""
        file = hand.images.get("scan")
        if file is None:
            raise Problem(422, "missing_scan", "no scan: send the file that /v1/scan gave as the form field 'scan'")
        limit = largest_scan(self.model, self.most)
        if len(file) > limit:
            raise Problem(413, "too_many_bytes", f"a scan of this model has at most {limit} bytes, not {len(file)}")
        picture = await self._picture(hand, "image", size)
        hand.replace("image", picture.pixels.nbytes)
        count = looks(box, points, stride, picture.pixels, self.patch_size)
        if count > self.most:
            message = f"these are {count} features, and at most {self.most} are answered at once: take a smaller box"
            raise Problem(422, "too_many_features", message)
        opening = self._in(self.encoders, opened, file, picture.pixels, self.model, self.weights)
        scan = await unless_refused("wrong_scan", hand.wait(opening))
        hand.replace("scan", 2 * len(file) + 16 * count * self.model.num_features)  # as for a dense feature
        job = self.engine.submit(lambda: scan.look(box, points, stride), count)
        found = hand.wait(asyncio.wrap_future(job))
        return await unless_refused("bad_parameter", found), scan

    @property
    def page_size(self) -> int:
        """Of an explorer page, for requests that do not say."""
        return min(SIZE, self.settings.max_size)

    async def page(self, hand: Hand, name: str, size: int, cores: int | None) -> str:
        """The explorer page, of one budget or several; built one at a time beside the engine: it takes seconds."""
        if self.pages >= PAGES:
            raise Problem(503, "queue_full", "too many explorer pages are being made; try again later", self._retry())
        self.pages += 1
        try:
            photo = await self._decoded(hand, self.workers.photo, name, size)
            hand.replace(name, photo.nbytes)
            left = threading.Event()
            page = self.explorer.submit(self._build_page, photo, size, cores, left)
        except BaseException:
            self.pages -= 1
            raise
        # A page ends at the next part of its work once nobody waits for it. Its place is free then, and not before.
        loop = asyncio.get_running_loop()
        page.add_done_callback(lambda _: loop.call_soon_threadsafe(self._page_is_done))
        try:
            return await hand.wait(asyncio.wrap_future(page))
        except InputError as error:
            raise Problem(422, "too_elongated", str(error)) from None
        finally:
            left.set()

    def _page_is_done(self) -> None:
        self.pages -= 1

    async def _picture(self, hand: Hand, name: str, size: int | None) -> Picture:
        self.engine.ahead += 1
        try:
            started = time.monotonic()
            picture = await self._decoded(hand, self.workers.picture, name, size)
            self.metrics.decode_seconds.observe(time.monotonic() - started)
            return picture
        finally:
            self.engine.ahead -= 1

    async def _decoded(self, hand: Hand, function: Callable[..., T], name: str, size: int | None) -> T:
        """An upload decoded in one of the processes, in no more time than the request has left."""

        def work(function: Callable[..., Any]) -> Any:
            rest = hand.deadline - time.monotonic()
            if rest <= 0 or (hand.gone is not None and hand.gone.done()):  # while it waited for a thread
                raise ClientGone
            return function(hand.images[name], size, name, rest)

        def over(task: asyncio.Future[T]) -> None:
            self.large.release()
            if not task.cancelled():
                task.exception()  # nobody may be left to hear of it

        pixels = await hand.wait(self._in(self.decoders, work, self.workers.pixels))
        if pixels <= LARGE:
            return await hand.wait(self._in(self.decoders, work, function))
        await hand.wait(self.large.acquire())
        task = asyncio.ensure_future(self._in(self.decoders, work, function))
        task.add_done_callback(over)  # when the process is done, whether or not its client still waits
        return await hand.wait(asyncio.shield(task))

    def _build_page(self, pixels: Array, size: int, cores: int | None, left: threading.Event) -> str:
        from veca.analysis.photos import Photo
        from veca.backbones import Backbone
        from veca.explorer.page import make_page

        def between() -> None:
            if left.is_set():
                raise ClientGone

        budgets = [cores] if cores else sorted({min(budget, self.bank) for budget in (8, 16, 32, 64)})
        photos, models = [Photo("photo", Image.fromarray(pixels))], [Backbone(self.name, self.model)]
        return make_page(photos, models, size=size, budgets=budgets, between=between).html

    async def encode(self, hand: Hand, function: Callable[..., bytes], *arguments: Any) -> bytes:
        """Run an encoder of answers off the event loop."""
        return await hand.wait(self._in(self.encoders, function, *arguments))

    def _in(self, pool: ThreadPoolExecutor, function: Callable[..., T], *arguments: Any) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(pool, function, *arguments)

    def _retry(self) -> dict[str, str]:
        return {"Retry-After": str(max(1, math.ceil(self.engine.expected())))}

    def _change(self, count: int) -> None:
        self.in_hand += count
        self.metrics.queue.set(self.in_hand)


async def unless_refused(reason: str, work: Awaitable[T]) -> T:
    """The library's own line becomes the problem's."""
    try:
        return await work
    except InputError as error:
        raise Problem(422, reason, str(error)[:500]) from None

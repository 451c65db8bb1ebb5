"""Make missing variants of images: once in the cluster, in a child without privileges.

The first usable owner of a variant's key makes it. Another node requests that by a hop for the
original with the variant's query, and makes the variant itself if the owner does not. In a node, a
lock file and a look into the object store keep its workers from making the same variant. Concurrent
requests of a worker wait for one result. A request that waits too long gets 503. The work
continues, so a later request finds the variant.

The original is read through the cache, in one version. A child that dies is replaced and the work
is repeated once: two deaths are the fault of the original, except by SIGKILL. Refused originals are
remembered for a minute.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import signal
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

from headrace.engines.blobs import BlobsDown
from headrace.kernel.errors import require_extra
from headrace.kernel.logs import logger
from headrace.kernel.metrics import bound, counter, histogram
from headrace.kernel.sandbox import Child, ChildGone
from headrace.kernel.single_flight import SingleFlight
from headrace.media.cluster import Generations
from headrace.media.cluster.routing import Router
from headrace.media.errors import ObjectUnknown, VariantRefused, VariantsBusy
from headrace.media.model import BLOCK_BYTES, Shape
from headrace.media.service import Media
from headrace.media.sources import OriginSource, Source, Span, store_down
from headrace.media.variants import Variant, hop_target, outdated, variant_key, version_name

log = logger(__name__)
ORIGINAL_BYTES_MAX: Final = 64 * 2**20
PIXELS_MAX: Final = 100_000_000
MEMORY_BYTES_MAX: Final = 2 * 2**30
"""Of address space; an AVIF of 100 megapixels needs 1 GB."""
CPU_S_MAX: Final = 8.0
WALL_S_MAX: Final = 60.0
"""Wall-clock limit; on a busy machine 8 s of CPU time take longer than 8 s."""
WAITING_MAX: Final = 64
"""Variants of a worker that are made or wait; requests for more get 503."""
READ_MAX: Final = 2
"""Originals of a worker in memory: one in the child's hands and the next one."""
REFUSED_S: Final = 60.0
REFUSED_MAX: Final = 1000
_LOCK_LOOK_S: Final = 0.02
_HEAD: Final = struct.Struct("!II8s8sI")
_CHILD: Final = Path(__file__).with_name("variant_child.py")
OUTCOMES: Final = ("made", "refused", "died", "busy")
VARIANTS: Final = counter(
    "media_variants_total",
    "Variants of images, by outcome: made, refused (the original), died (the child), busy.",
    outcome=OUTCOMES,
)
VARIANT_SECONDS: Final = histogram(
    "media_variant_seconds", "Time to read an original, make a variant of it and store it."
)


class _Work(NamedTuple):
    """A variant to make of one version of an original, and the key to store it under."""

    key: str
    shape: Shape
    version: str
    variant: Variant
    stored_key: str


class VariantMaker:
    """Makes the variants of one worker. `run` is the node's folder.

    `source` returns the source of an object, `router` is None without a cluster.
    """

    def __init__(
        self,
        media: Media,
        *,
        run: Path | None,
        source: Callable[[str], Source],
        router: Router | None,
        generations: Generations,
    ) -> None:
        """Raises: ExtraMissing if variants are configured and the library is not installed."""
        if media.config.variants is not None:
            require_extra("variants", "pyvips")
        self._blobs = media.blobs
        self._stored = OriginSource(media.blobs, timeout_s=media.config.origin_timeout_s)
        self._timeout_s = media.config.origin_timeout_s
        self._run = run
        self._source = source
        self._router = router
        self._generations = generations
        self._flights: SingleFlight[tuple[str, bool], None] = SingleFlight()
        self._refused: dict[str, tuple[float, str]] = {}
        self._readers = asyncio.Semaphore(READ_MAX)
        self._encoder = _Encoder()

    def version(self, key: str, shape: Shape) -> str:
        """The version of an original as part of the keys of its variants."""
        return version_name(shape, self._generations.generation(key))

    async def make(self, key: str, shape: Shape, variant: Variant, *, is_hop: bool) -> None:
        """Make and store a variant of `key` in version `shape`; `is_hop`: do it on this node.

        Raises: VariantRefused, VariantsBusy, SourceCut, StoreUnavailable.
        """
        version = self.version(key, shape)
        work = _Work(key, shape, version, variant, variant_key(key, version, variant))
        until_s, reason = self._refused.get(work.stored_key, (0.0, ""))
        if time.monotonic() < until_s:
            raise VariantRefused(reason)
        # Apart by `is_hop`: two nodes with different health tables must not wait for each other.
        flight = work.stored_key, is_hop
        if flight not in self._flights and len(self._flights) >= WAITING_MAX:
            raise _busy(f"{WAITING_MAX} variants are being made")
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._flights.call(flight, lambda: self._make(work, is_hop=is_hop))
        except TimeoutError as error:
            raise _busy("the variant is not ready yet") from error
        except VariantRefused as error:
            self._remember(work.stored_key, error.text)
            raise

    async def close(self) -> None:
        """Cancel pending work and end the child."""
        await self._flights.cancel()
        await self._encoder.close()

    async def _make(self, work: _Work, *, is_hop: bool) -> None:
        if not is_hop and await self._made_by_owner(work):
            return
        async with self._node_lock(work.stored_key):
            if await self._is_stored(work.stored_key):
                return
            began_s = time.monotonic()
            async with self._readers:
                data = await self._encoder.encode(await self._original(work), work.variant)
            try:
                await self._blobs.put(work.stored_key, data)
            except BlobsDown as error:
                raise store_down(error) from error
        bound(VARIANTS, "media_variants_total", outcome="made").inc()
        VARIANT_SECONDS.observe(time.monotonic() - began_s)
        await self._remove_outdated(work)

    async def _made_by_owner(self, work: _Work) -> bool:
        """Whether the first owner of the variant's key, another node, made it."""
        owner = self._router.first_owner(work.stored_key) if self._router is not None else None
        if owner is None or self._router is None:
            return False
        target = hop_target(work.key, work.version, work.variant)
        return await self._router.peer_source.request_variant(owner, work.key, target)

    @asynccontextmanager
    async def _node_lock(self, stored_key: str) -> AsyncIterator[None]:
        """Keep the other workers of the node from the same work; the kernel drops it at a crash."""
        if self._run is None:
            yield
            return
        name = hashlib.sha256(stored_key.encode()).hexdigest()[:2]
        descriptor = os.open(self._run / f"variant-{name}.lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            while True:
                if _try_lock(descriptor):
                    break
                await asyncio.sleep(_LOCK_LOOK_S)
            yield
        finally:
            os.close(descriptor)

    async def _is_stored(self, stored_key: str) -> bool:
        try:
            await self._stored.shape(stored_key)
        except ObjectUnknown:
            return False
        return True

    async def _original(self, work: _Work) -> bytes:
        """The bytes of the original, all of one version."""
        size_bytes = work.shape.size_bytes
        if size_bytes > ORIGINAL_BYTES_MAX:
            raise VariantRefused(
                f"the original has {size_bytes} bytes: variants are made of at most"
                f" {ORIGINAL_BYTES_MAX}"
            )
        source, blocks = self._source(work.key), []
        for number, start in enumerate(range(0, size_bytes, BLOCK_BYTES)):
            span = Span(0, min(BLOCK_BYTES, size_bytes - start))
            blocks.append(await source.block(work.key, work.shape, number, span))
        return b"".join(blocks)

    async def _remove_outdated(self, work: _Work) -> None:
        """Remove variants of earlier versions, which no request finds."""
        try:
            for key in await outdated(self._blobs, work.key, work.version):
                await self._blobs.delete(key)
        except BlobsDown as error:
            log.warning("variants_not_removed", key=work.key, reason=error.text)

    def _remember(self, stored_key: str, reason: str) -> None:
        if len(self._refused) >= REFUSED_MAX:
            self._refused.clear()
        self._refused[stored_key] = time.monotonic() + REFUSED_S, reason


class _Encoder:
    """The child process, which makes one variant at a time."""

    def __init__(self) -> None:
        self._child: Child | None = None
        self._is_closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="variants")

    async def encode(self, data: bytes, variant: Variant) -> bytes:
        """The variant of an original. Raises: VariantRefused, VariantsBusy."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, self._encode, data, variant)
        except VariantRefused:
            bound(VARIANTS, "media_variants_total", outcome="refused").inc()
            raise

    async def close(self) -> None:
        """End the child, also in the middle of its work."""
        self._is_closed = True
        self._drop()
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    def _encode(self, data: bytes, variant: Variant) -> bytes:
        texts = variant.fit.encode(), variant.format.encode()
        head = _HEAD.pack(variant.width, variant.height, *texts, len(data))
        is_killed = False
        for _ in range(2):
            try:
                answer = self._running_child().request(head, data, timeout_s=WALL_S_MAX)
            except ChildGone as gone:
                self._drop()
                _note_death(gone, len(data))
                # Its own limits end it otherwise: this was the kernel, out of memory, or a person.
                is_killed = is_killed or gone.status == -signal.SIGKILL
                if gone.status == -signal.SIGPROF:
                    raise _refused(f"it takes more than {CPU_S_MAX:g} s") from gone
            else:
                if answer[:1] == b"+":
                    return answer[1:]
                raise _refused(answer[1:].decode(errors="replace"))
        if is_killed:
            raise _busy("the process that makes variants was killed")
        raise _refused("the decoder failed twice")

    def _running_child(self) -> Child:
        if self._is_closed:
            raise VariantsBusy("the node stops", retry_after_s=1)
        if self._child is None:
            try:
                self._child = _start_child()
            except (OSError, ChildGone) as error:
                raise VariantsBusy(
                    f"the process that makes variants cannot be started ({error}): check free"
                    " memory, and that the extra `variants` is installed",
                    retry_after_s=10,
                ) from error
        return self._child

    def _drop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()


def _start_child() -> Child:
    """A new child; one that is killed while it starts is replaced. Raises: OSError, ChildGone."""
    limits = MEMORY_BYTES_MAX, CPU_S_MAX, PIXELS_MAX
    try:
        return Child(sys.executable, _CHILD, limits)
    except ChildGone as gone:
        if gone.status is None:
            raise
        _note_death(gone, 0)
    return Child(sys.executable, _CHILD, limits)


def _note_death(gone: ChildGone, size_bytes: int) -> None:
    bound(VARIANTS, "media_variants_total", outcome="died").inc()
    log.warning("variant_child_died", how=str(gone), size_bytes=size_bytes)


def _busy(reason: str) -> VariantsBusy:
    bound(VARIANTS, "media_variants_total", outcome="busy").inc()
    return VariantsBusy(f"{reason}: try again later", retry_after_s=1)


def _refused(reason: str) -> VariantRefused:
    return VariantRefused(f"the original cannot be made into a variant: {reason}")


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

"""What all nodes trace: switched on for a while, and off."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from headrace.engines.blobs import Blobs
from headrace.kernel.errors import LimitExceeded
from headrace.media.cluster.documents import Document
from headrace.media.tracing import (
    TRACE,
    WATCH_S_MAX,
    WATCHES_MAX,
    TraceInvalid,
    Watch,
    Watches,
    parse_selector,
)


class TooManyWatches(LimitExceeded):
    """As many things are traced as may be at once."""

    code, retryable = "media.too_many_watches", False


class Traces:
    """The watches of the whole cluster; `Media.traces`."""

    def __init__(self, blobs: Blobs) -> None:
        self._document = Document(blobs, TRACE)

    async def start(self, selector: str, *, for_s: float) -> Watch:
        """Let every node log the requests that match `user=42` (or request, object, trace) for `for_s`.

        One that is traced already gets the new end. Nodes begin within two seconds.
        Raises: TraceInvalid, TooManyWatches, BlobsDown.
        """
        name, value = parse_selector(selector)
        if not 1 <= for_s <= WATCH_S_MAX:
            raise TraceInvalid(
                f"cannot trace for {for_s:g} s: expected 1 s to {WATCH_S_MAX / 3600:g} hours"
            )
        now = datetime.now(UTC)
        watch = Watch(name=name, value=value, ends_at=now + timedelta(seconds=for_s))

        def add(old: Watches) -> Watches:
            kept = [w for w in _current(old, now) if (w.name, w.value) != (name, value)]
            if len(kept) >= WATCHES_MAX:
                raise TooManyWatches(
                    f"{WATCHES_MAX} things are traced already: end one with `headrace media trace off`"
                )
            return Watches(version=old.version, watches=(*kept, watch))

        await self._document.change(add)
        return watch

    async def stop(self, selector: str | None = None) -> Sequence[Watch]:
        """End the watch on `selector`, or all; those that were ended. Raises: TraceInvalid, BlobsDown."""
        named = None if selector is None else parse_selector(selector)
        now = datetime.now(UTC)
        ended: list[Watch] = []

        def take(old: Watches) -> Watches:
            found = _current(old, now)
            ended[:] = [w for w in found if named in (None, (w.name, w.value))]
            left = tuple(w for w in found if w not in ended)
            return Watches(version=old.version, watches=left)

        await self._document.change(take)
        return ended

    async def list(self) -> Sequence[Watch]:
        """What is traced now. Raises: BlobsDown."""
        return _current(await self._document.read(), datetime.now(UTC))


def _current(document: Watches, now: datetime) -> list[Watch]:
    return [watch for watch in document.watches if not watch.is_over(now)]

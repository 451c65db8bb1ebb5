"""The objects that clients ask the node of this data folder for most."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace.kernel.metrics import STALE_S
from headrace.media.errors import NodeNotHere
from headrace.media.hottest import TOLD_MAX, read_hottest

OBJECTS_MAX: Final = TOLD_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class HotObject:
    """An object and how often clients ask for it: requests a second of the last minutes, out of a sample."""

    key: str
    requests_per_s: float


async def hottest_of(folder: Path | None, *, objects_max: int) -> Sequence[HotObject]:
    """The hottest first, at most `objects_max` (to 100). Raises: NodeNotHere."""
    rows = None
    if folder is not None:
        rows = await asyncio.to_thread(read_hottest, folder, within_s=STALE_S)
    if rows is None:
        raise NodeNotHere(
            "no node runs on this data folder: start `headrace media serve`, or run this where the node runs"
        )
    return [HotObject(key=key, requests_per_s=round(per_s, 2)) for key, per_s in rows[:objects_max]]

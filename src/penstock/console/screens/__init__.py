"""The rooms of the console, in the order of its menu."""

from __future__ import annotations

from typing import Final

from penstock.console.screens import feed, fetch, jobs, media, overview, views
from penstock.console.seeing import Room

ROOMS: Final[tuple[Room, ...]] = (
    overview.ROOM,
    jobs.ROOM,
    fetch.ROOM,
    views.ROOM,
    feed.ROOM,
    media.ROOM,
)

"""The rooms of the console, in the order of its menu."""

from __future__ import annotations

from typing import Final

from headrace.console.screens import feed, fetch, jobs, media, overview, views
from headrace.console.seeing import Room

ROOMS: Final[tuple[Room, ...]] = (
    overview.ROOM,
    jobs.ROOM,
    fetch.ROOM,
    views.ROOM,
    feed.ROOM,
    media.ROOM,
)

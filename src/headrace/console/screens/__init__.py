"""Rooms of the console, in menu order."""

from __future__ import annotations

from typing import Final

from headrace.console.screens import feed, fetch, jobs, media, overview, views
from headrace.console.views import Room

ROOMS: Final[tuple[Room, ...]] = (
    overview.ROOM,
    jobs.ROOM,
    fetch.ROOM,
    views.ROOM,
    feed.ROOM,
    media.ROOM,
)

"""Tracks by granian's file range: `granian --interface rsgi bench.apps.media_granian:app`."""

from __future__ import annotations

import os
import re
from typing import Any

TRACKS = os.environ.get("BENCH_TRACKS", ".")
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_SIZES: dict[str, int] = {}


async def app(scope: Any, protocol: Any) -> None:
    """One track or a range of it; sizes are looked up once."""
    if scope.proto != "http":
        return
    path = TRACKS + scope.path.removeprefix("/m")
    size = _SIZES.get(path)
    if size is None:
        try:
            size = _SIZES[path] = os.stat(path).st_size  # noqa: PTH116 - once a track
        except OSError:
            protocol.response_empty(404, [])
            return
    found = _RANGE.fullmatch(scope.headers.get("range", ""))
    if found is None:
        protocol.response_file(200, [("content-length", str(size))], path)
        return
    first, last = int(found[1]), min(int(found[2]), size - 1)
    fields = [
        ("content-length", str(last - first + 1)),
        ("content-range", f"bytes {first}-{last}/{size}"),
    ]
    protocol.response_file_range(206, fields, path, first, last + 1)

"""Tracks by aiohttp's FileResponse.

`python -m bench.apps.media_aiohttp PORT`, files in BENCH_TRACKS.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import uvloop
from aiohttp import web

TRACKS = Path(os.environ.get("BENCH_TRACKS", "."))


async def track(request: web.Request) -> web.FileResponse:
    """One track or a range of it."""
    return web.FileResponse(TRACKS / request.match_info["key"])


def main(port: int) -> None:
    """Serve until SIGTERM."""
    app = web.Application()
    app.router.add_get("/m/{key:.+}", track)
    web.run_app(
        app,
        host="127.0.0.1",
        port=port,
        access_log=None,
        print=None,
        backlog=4096,
        loop=uvloop.new_event_loop(),
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))

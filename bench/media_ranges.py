"""How many ranges does one worker serve, what does a GiB cost in CPU, and where does the time go?

Closed loop on loopback, tracks of 5 MiB in the page cache, ranges of 256 KiB and 16 KiB at random;
64 connections, for the large ones also 1 and 1,000. Server on one core, generator on the other. A
quick run measures the servers that have a goal or sign, and no other number of connections.
Ours checks a signed URL per listener: 20,480 distinct ones over the same blocks; beside them 64.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

from bench.figures import Figure, Goal, Runs, figure
from bench.harness import Run
from bench.media_objects import Track, make_tracks
from bench.media_stage import (
    LISTENERS,
    Pressed,
    Serving,
    blobs_folder,
    disk_of,
    hot_times,
    listener_targets,
    our_node,
    press,
    read_all,
)
from bench.peers import media_servers as peers
from bench.systems import OURS, Cell

LARGE, SMALL = 256 * 1024, 16 * 1024
FILES = "headrace, files"
"""Our node without disks: the object store is a folder and is sent from directly."""
CONNECTIONS = (64, 1, 1_000)
FEW_URLS = 64
NOTE = f"{peers.NGINX} and all peers but {peers.SECURE} get plain URLs: they check no signature"
WHY = {
    LARGE: "most of an answer is the kernel's copy into the socket, which is the same for all",
    SMALL: "each answer includes the HMAC of its URL and a lookup in a table that processes share",
}
"""Why a goal of these ranges may be missed."""
Serve = Callable[[Cell, Sequence[Track]], AbstractAsyncContextManager[Serving]]
Found = Mapping[str, Mapping[str, Runs]]
STAGE = re.compile(r'media_stage_seconds_(sum|count)\{[^}]*stage="(\w+)"[^}]*\} ([\d.e+-]+)')


async def measure(run: Run) -> list[Figure]:
    """Ours, in front of an object store and over files, and every peer in turns."""
    serves: dict[str, Serve] = {
        OURS.name: our_cache,
        peers.NGINX: peers.nginx_static,
        peers.SECURE: peers.nginx_secure,
        peers.SLICE: peers.nginx_slice,
        FILES: our_node,
    }
    slower: dict[str, Serve] = {
        peers.VARNISH: peers.varnish,
        peers.AIOHTTP: peers.aiohttp_files,
        peers.GRANIAN: peers.granian_files,
    }
    if run.quick:
        run.leave_out(*slower)
    else:
        serves |= slower
    cells = {name: partial(_serve, run, name, serve) for name, serve in serves.items()}
    found = await run.alternate({**cells, peers.BARE: partial(_bare, run)})
    return [
        *_rates(found),
        *_urls(found),
        *_files(found),
        *_costs(found),
        *_firsts(found),
        *_stages(found),
    ]


@asynccontextmanager
async def our_cache(cell: Cell, tracks: Sequence[Track], **settings: str) -> AsyncIterator[Serving]:
    """Our node with a store of blocks that holds all tracks."""
    more = {"HEADRACE_MEDIA_DISKS": disk_of(cell), **settings}
    async with our_node(cell, tracks, **more) as serving:
        yield serving


async def _serve(run: Run, name: str, serve: Serve) -> Mapping[str, float]:
    async with run.cell() as cell:
        tracks = make_tracks(blobs_folder(cell), run.sized(64, 16))
        async with serve(cell, tracks) as server:
            await read_all(server)
            found: dict[str, float] = {}
            serving, few = server, None
            if name in (OURS.name, FILES):
                serving = server.with_targets(listener_targets(cell, tracks))
                few = server.with_targets(listener_targets(cell, tracks, FEW_URLS))
            for range_bytes, connections in _loads(run):
                load = partial(_press, run, cell, range_bytes, connections)
                pressed = await load(serving)
                size = f"{range_bytes} {connections}"
                found[f"rate {size}"] = pressed.rate_per_s
                if few is not None and connections == CONNECTIONS[0]:
                    found[f"few {size}"] = (await load(few)).rate_per_s
                    found[f"urls {size}"] = found[f"rate {size}"] / found[f"few {size}"]
                found[f"cpu {size}"] = pressed.cpu_s_a_gib
                found[f"first p50 {size}"] = pressed.report["first_us"]["p50"]
                found[f"first p99 {size}"] = pressed.report["first_us"]["p99"]
            return found | stages_of(cell.folder / "data" / "run" / "metrics")


async def _press(
    run: Run, cell: Cell, range_bytes: int, connections: int, serving: Serving
) -> Pressed:
    return await press(
        cell,
        serving,
        "hot",
        range_bytes=range_bytes,
        connections=connections,
        **hot_times(run),
    )


async def _bare(run: Run) -> Mapping[str, float]:
    async with run.cell() as cell:
        tracks = make_tracks(blobs_folder(cell), run.sized(64, 16))
        found = {}
        for range_bytes in (LARGE, SMALL):
            async with peers.bare_loop(cell, tracks, range_bytes) as serving:
                pressed = await press(
                    cell, serving, "hot", range_bytes=range_bytes, **hot_times(run)
                )
                found[f"rate {range_bytes} 64"] = pressed.rate_per_s
                found[f"cpu {range_bytes} 64"] = pressed.cpu_s_a_gib
    return found


def _loads(run: Run) -> list[tuple[int, int]]:
    large = [(LARGE, connections) for connections in CONNECTIONS]
    return [*(large[:1] if run.quick else large), (SMALL, 64)]


def stages_of(folder: Path) -> dict[str, float]:
    """Mean microseconds of each stage of a request, out of the node's own histogram."""
    sums: dict[tuple[str, str], float] = {}
    for file in sorted(folder.glob("media-*.prom")) if folder.exists() else []:
        for kind, stage, value in STAGE.findall(file.read_text()):
            sums[stage, kind] = sums.get((stage, kind), 0.0) + float(value)
    return {
        f"stage {stage}": total / sums[stage, "count"] * 1e6
        for (stage, kind), total in sums.items()
        if kind == "sum" and sums.get((stage, "count"))
    }


def split(found: Found, metric: str) -> tuple[Runs | None, dict[str, Runs], dict[str, float]]:
    """Ours, the peers', and the limit's values of a metric."""
    rows = dict(found.get(metric, {}))
    bare = rows.pop(peers.BARE, None)
    return rows.pop(OURS.name, None), rows, {peers.BARE: bare.median} if bare else {}


def _rates(found: Found) -> list[Figure]:
    goals = {
        (LARGE, 64): Goal(times={peers.NGINX: 1.05, peers.SLICE: 1.1, peers.VARNISH: 1.5}),
        (SMALL, 64): Goal(times={peers.NGINX: 1.0}),
    }
    figures = []
    for range_bytes, connections in (*((LARGE, each) for each in CONNECTIONS), (SMALL, 64)):
        ours, others, limit = split(found, f"rate {range_bytes} {connections}")
        if ours is None and (range_bytes, connections) not in goals:
            continue
        figures.append(
            figure(
                f"hot ranges of {range_bytes // 1024} KiB, one worker",
                "answers/s",
                f"{connections:,} connections, {LISTENERS:,} URLs",
                ours=ours,
                peers=others,
                limit=limit,
                goal=goals.get((range_bytes, connections)),
                why=WHY[range_bytes],
                not_measured=[NOTE],
            )
        )
    return figures


def _urls(found: Found) -> list[Figure]:
    """Ours with few URLs, and what many cost beside them in the same cell."""
    figures = []
    for range_bytes in (LARGE, SMALL):
        size = f"{range_bytes // 1024} KiB, 64 connections"
        few, share = (found.get(f"{kind} {range_bytes} 64", {}) for kind in ("few", "urls"))
        figures += [
            figure(
                f"the same with {FEW_URLS} URLs",
                "answers/s",
                size,
                ours=few.get(OURS.name),
                peers={FILES: few[FILES]} if FILES in few else None,
            ),
            figure(
                f"{LISTENERS:,} URLs beside {FEW_URLS}",
                "x",
                size,
                ours=share.get(OURS.name),
                peers={FILES: share[FILES]} if FILES in share else None,
                goal=Goal(at_least=0.95),
                why="the requests and heads of so many URLs do not stay in the CPU's caches",
            ),
        ]
    return figures


def _files(found: Found) -> list[Figure]:
    """Ours without disks beside nginx, which keeps its files open for ten minutes."""
    figures = []
    for range_bytes in (LARGE, SMALL):
        rows = found.get(f"rate {range_bytes} 64", {})
        others = {name: rows[name] for name in (peers.NGINX, peers.SECURE) if name in rows}
        figures.append(
            figure(
                f"files of a folder, ranges of {range_bytes // 1024} KiB",
                "answers/s",
                f"64 connections, {LISTENERS:,} URLs",
                ours=rows.get(FILES),
                peers=others,
                goal=Goal(times={peers.NGINX: 0.9}),
                why="each answer compares the open file with its path, nginx does it rarely",
            )
        )
    return figures


def _costs(found: Found) -> list[Figure]:
    figures = []
    for range_bytes in (LARGE, SMALL):
        ours, others, limit = split(found, f"cpu {range_bytes} 64")
        figures.append(
            figure(
                f"CPU of the server, ranges of {range_bytes // 1024} KiB",
                "CPU s/GiB",
                "64 connections",
                ours=ours,
                peers=others,
                limit=limit,
                is_less_better=True,
            )
        )
    return figures


def _firsts(found: Found) -> list[Figure]:
    figures = []
    for share in ("p50", "p99"):
        ours, others, _ = split(found, f"first {share} {LARGE} 1")
        if ours is not None:
            figures.append(
                figure(
                    f"time to the first byte of 256 KiB, {share}",
                    "us",
                    "1 connection",
                    ours=ours,
                    peers=others,
                    is_less_better=True,
                )
            )
    return figures


def _stages(found: Found) -> list[Figure]:
    return [
        figure(
            f"stage of a request: {metric.removeprefix('stage ')}",
            "us",
            "mean of all loads",
            ours=rows[OURS.name],
        )
        for metric, rows in found.items()
        if metric.startswith("stage ") and OURS.name in rows
    ]

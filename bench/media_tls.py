"""What does HTTPS cost: ranges on kept connections, and new connections, full or resumed?

As `media_ranges`: one worker on one core, the generator on the other, 64 connections. Both servers
have the same certificate (EC P-256) and suite (TLS 1.3, AES-128-GCM), and none has kernel TLS. The
generator decrypts on its core, which limits the rates of the cheaper server: compare the CPU.
"""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Final

from bench.figures import Figure, Goal, Runs, figure
from bench.harness import Run
from bench.media_objects import Track, make_tracks
from bench.media_ranges import LARGE, SMALL, our_cache
from bench.media_stage import Serving, blobs_folder, hot_times, our_node, press, read_all
from bench.peers import media_servers as peers
from bench.systems import OURS, Cell
from bench.views_stage import free_port

FILES: Final = "headrace, files, HTTPS"
Serve = Callable[[Cell, Sequence[Track]], AbstractAsyncContextManager[tuple[Serving, int]]]
Found = Mapping[str, Mapping[str, Runs]]


async def measure(run: Run) -> list[Figure]:
    """Ours, in front of an object store and over files, and nginx, in turns."""
    serves: dict[str, Serve] = {
        OURS.name: _our_cache,
        peers.NGINX_TLS: _nginx,
        FILES: _our_files,
    }
    cells = {name: partial(_serve, run, serve) for name, serve in serves.items()}
    found = await run.alternate(cells)
    return [*_ranges(found), *_handshakes(found)]


def _certificate(cell: Cell) -> dict[str, str]:
    """New files of a self-signed certificate."""
    files = {name: str(cell.folder / f"{name}.pem") for name in ("cert", "key")}
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    words += ["-nodes", "-days", "2", "-subj", "/CN=bench.test"]
    subprocess.run(
        [*words, "-keyout", files["key"], "-out", files["cert"]], check=True, capture_output=True
    )
    return files


def _our_settings(cell: Cell, port: int) -> dict[str, str]:
    files = _certificate(cell)
    return {
        "HEADRACE_MEDIA_LISTEN_TLS": f"127.0.0.1:{port}",
        "HEADRACE_MEDIA_TLS_CERT": files["cert"],
        "HEADRACE_MEDIA_TLS_KEY": files["key"],
    }


@asynccontextmanager
async def _our_cache(cell: Cell, tracks: Sequence[Track]) -> AsyncIterator[tuple[Serving, int]]:
    port = free_port()
    async with our_cache(cell, tracks, **_our_settings(cell, port)) as serving:
        yield serving, port


@asynccontextmanager
async def _our_files(cell: Cell, tracks: Sequence[Track]) -> AsyncIterator[tuple[Serving, int]]:
    port = free_port()
    async with our_node(cell, tracks, **_our_settings(cell, port)) as serving:
        yield serving, port


@asynccontextmanager
async def _nginx(cell: Cell, tracks: Sequence[Track]) -> AsyncIterator[tuple[Serving, int]]:
    port = free_port()
    async with peers.nginx_tls(cell, tracks, tls_port=str(port), **_certificate(cell)) as serving:
        yield serving, port


async def _serve(run: Run, serve: Serve) -> Mapping[str, float]:
    async with run.cell() as cell:
        tracks = make_tracks(blobs_folder(cell), run.sized(64, 16))
        async with serve(cell, tracks) as (serving, port):
            await read_all(serving)
            load = {**hot_times(run), "tls": 1, "port": port}
            found: dict[str, float] = {}
            for range_bytes in (LARGE, SMALL):
                pressed = await press(cell, serving, "hot", range_bytes=range_bytes, **load)
                found[f"rate {range_bytes}"] = pressed.rate_per_s
                found[f"cpu {range_bytes}"] = pressed.cpu_s_a_gib
            for kind, resume in (("full", 0), ("resumed", 1)):
                pressed = await press(
                    cell, serving, "dial", range_bytes=1024, resume=resume, **load
                )
                found[f"dial {kind}"] = pressed.rate_per_s
                found[f"dial cpu {kind}"] = pressed.cpu_s / pressed.report["done"] * 1e6
            return found


def _split(found: Found, metric: str) -> tuple[Runs | None, dict[str, Runs]]:
    rows = dict(found.get(metric, {}))
    return rows.pop(OURS.name, None), rows


def _ranges(found: Found) -> list[Figure]:
    figures = []
    for range_bytes in (LARGE, SMALL):
        size = f"{range_bytes // 1024} KiB"
        ours, others = _split(found, f"rate {range_bytes}")
        figures.append(
            figure(
                f"hot ranges of {size} over HTTPS, one worker",
                "answers/s",
                "64 connections",
                ours=ours,
                peers=others,
                goal=Goal(times={peers.NGINX_TLS: 0.9}),
            )
        )
        ours, others = _split(found, f"cpu {range_bytes}")
        figures.append(
            figure(
                f"CPU of the server, ranges of {size} over HTTPS",
                "CPU s/GiB",
                "64 connections",
                ours=ours,
                peers=others,
                is_less_better=True,
            )
        )
    return figures


def _handshakes(found: Found) -> list[Figure]:
    figures = []
    for kind in ("full", "resumed"):
        what = f"connections with a {kind} handshake and one answer of 1 KiB"
        ours, others = _split(found, f"dial {kind}")
        figures.append(figure(what, "connections/s", "64 at once", ours=ours, peers=others))
        ours, others = _split(found, f"dial cpu {kind}")
        figures.append(
            figure(
                f"CPU of the server, {what}",
                "us",
                "64 at once",
                ours=ours,
                peers=others,
                is_less_better=True,
            )
        )
    return figures

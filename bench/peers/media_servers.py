"""The servers that media is measured against, each in its best documented setting for ranges.

nginx three times, with `tcp_nopush off`, which halves it on loopback when it is on: over files,
with open files kept; the same with `secure_link_md5`, its own signed URLs, one per listener; and as
a cache with slices of the size of the ranges. Varnish with its memory store. aiohttp's FileResponse
and granian's file range over RSGI, from the environment of the peers. And what no server can
exceed: a loop that does nothing but sendfile.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from bench.children import BenchFault, Child
from bench.machine import ROOT
from bench.media_objects import Track, make_tracks, native_program, write_targets
from bench.media_stage import (
    LISTENERS,
    SERVER_CORE,
    SIGNED_S,
    Serving,
    blobs_folder,
    listened,
    pinned,
    served,
)
from bench.systems import PEER_PYTHON, Cell
from bench.views_stage import free_port

NGINX = "nginx static"
SECURE = "nginx secure_link"
NGINX_TLS = "nginx TLS"
SLICE = "nginx proxy_cache + slice"
VARNISH = "Varnish"
AIOHTTP = "aiohttp FileResponse"
GRANIAN = "granian RSGI"
BARE = "bare sendfile loop"
BARE_TRACK = 60_000
"""The number of the one large object that the bare loop sends from."""
SETTINGS = {
    NGINX: "1 worker, sendfile, tcp_nopush off, open_file_cache, no logs, no signatures",
    SECURE: "as nginx static, secure_link_md5 with expiry: one URL per listener",
    NGINX_TLS: "as nginx static; TLS 1.3 with AES-128-GCM, EC P-256, tickets; no kernel TLS",
    SLICE: (
        "1 worker, slices of 256 KiB, cache on disk (in the page cache), tcp_nopush off, no logs"
    ),
    VARNISH: "malloc store, 200 threads ready, default.vcl, no signatures",
    AIOHTTP: "FileResponse, uvloop, 1 process, no access log, no signatures",
    GRANIAN: "RSGI response_file_range, uvloop, 1 worker, no access log, no signatures",
    BARE: "C, epoll, sendfile; reads the place out of the request and nothing else",
}
_NGINX_HEAD = """
daemon off; worker_processes 1; worker_rlimit_nofile {files}; {user}
pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections {connections}; multi_accept on; }}
http {{
  access_log off; sendfile on; tcp_nopush off; tcp_nodelay on; default_type audio/mpeg;
  keepalive_requests 1000000000; keepalive_timeout 600s;
  open_file_cache max=100000 inactive=600s; open_file_cache_valid 600s; open_file_cache_min_uses 1;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
"""
_STATIC = """
  server {{ listen 127.0.0.1:{port} backlog=8192; location /m/ {{ alias {blobs}/; }} }}
}}
"""
_SECRET = "of-this-benchmark"
_SECURED = """
  server {{ listen 127.0.0.1:{port} backlog=8192; location /m/ {{
    secure_link $arg_md5,$arg_expires; secure_link_md5 "$secure_link_expires$uri {secret}";
    if ($secure_link = "") {{ return 403; }}
    if ($secure_link = "0") {{ return 403; }}
    alias {blobs}/;
  }} }}
}}
"""
_TLS = """
  ssl_certificate {cert}; ssl_certificate_key {key};
  ssl_protocols TLSv1.2 TLSv1.3; ssl_conf_command Ciphersuites TLS_AES_128_GCM_SHA256;
  server {{
    listen 127.0.0.1:{port} backlog=8192; listen 127.0.0.1:{tls_port} ssl backlog=8192;
    location /m/ {{ alias {blobs}/; }}
  }}
}}
"""
_SLICED = """
  proxy_cache_path {folder}/cache levels=1:2 keys_zone=tracks:64m max_size=8g inactive=60m
    use_temp_path=off;
  upstream origin {{ server 127.0.0.1:{origin}; keepalive 64; }}
  server {{ listen 127.0.0.1:{origin} backlog=8192; location /m/ {{ alias {blobs}/; }} }}
  server {{
    listen 127.0.0.1:{port} backlog=8192;
    location /m/ {{
      slice 256k; proxy_cache tracks; proxy_cache_key $uri$slice_range;
      proxy_cache_valid 200 206 1h;
      proxy_set_header Range $slice_range; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_pass http://origin;
    }}
  }}
}}
"""
_VCL = """vcl 4.1;
backend default {{ .host = "127.0.0.1"; .port = "{origin}"; }}
sub vcl_backend_response {{ set beresp.ttl = 1h; }}
"""


@asynccontextmanager
async def nginx_static(
    cell: Cell, tracks: Sequence[Track], *, core: int | None = SERVER_CORE, name: str = "nginx"
) -> AsyncIterator[Serving]:
    """nginx over the files themselves."""
    async with _nginx(cell, tracks, _STATIC, core=core, name=name) as serving:
        yield serving


@asynccontextmanager
async def nginx_secure(cell: Cell, tracks: Sequence[Track]) -> AsyncIterator[Serving]:
    """nginx over the files, with a signed URL per listener."""
    of_listeners = listened(tracks, LISTENERS)
    expires_s = int(time.time() + SIGNED_S)
    urls = [_secure_url(track, expires_s + number) for number, track in enumerate(of_listeners)]
    targets = write_targets(cell.folder / "secure-listeners", of_listeners, urls)
    async with _nginx(cell, tracks, _SECURED, core=SERVER_CORE, name="secure") as serving:
        yield serving.with_targets(targets)


def _secure_url(track: Track, expires_s: int) -> str:
    path = f"/m/{track.key}"
    digest = hashlib.md5(f"{expires_s}{path} {_SECRET}".encode(), usedforsecurity=False).digest()
    md5 = base64.urlsafe_b64encode(digest).decode().rstrip("=")
    return f"{path}?md5={md5}&expires={expires_s}"


@asynccontextmanager
async def nginx_tls(cell: Cell, tracks: Sequence[Track], **files: str) -> AsyncIterator[Serving]:
    """The same over HTTPS, at `tls_port` with the files `cert` and `key`."""
    async with _nginx(
        cell, tracks, _TLS, core=SERVER_CORE, name="nginx-tls", values=files
    ) as serving:
        yield serving


@asynccontextmanager
async def nginx_slice(cell: Cell, tracks: Sequence[Track]) -> AsyncIterator[Serving]:
    """nginx as a cache of slices in front of itself."""
    async with _nginx(cell, tracks, _SLICED, core=SERVER_CORE, name="slice") as serving:
        yield serving


@asynccontextmanager
async def varnish(cell: Cell, tracks: Sequence[Track]) -> AsyncIterator[Serving]:
    """Varnish in front of nginx, whole objects in memory."""
    program, port = _installed("varnishd", "varnish"), free_port()
    folder = cell.folder / "varnish"
    folder.mkdir()
    async with nginx_static(cell, tracks, core=None, name="origin") as origin:
        vcl = folder / "bench.vcl"
        vcl.write_text(_VCL.format(origin=origin.port))
        words = [
            program,
            "-F",
            "-n",
            str(folder / "work"),
            "-a",
            f"127.0.0.1:{port}",
            "-f",
            str(vcl),
        ]
        words += ["-s", "malloc,3G", "-p", "thread_pool_min=200", "-p", "thread_pools=1"]
        words += ["-j", "none"] if os.geteuid() == 0 else []
        child = Child(pinned(words, SERVER_CORE), folder=folder, env={}, name="varnish")
        async with served(child, port, origin.targets, tracks) as serving:
            yield serving


@asynccontextmanager
async def aiohttp_files(cell: Cell, tracks: Sequence[Track]) -> AsyncIterator[Serving]:
    """aiohttp's FileResponse."""
    port = free_port()
    words = [str(_peer_python()), "-m", "bench.apps.media_aiohttp", str(port)]
    async with _python_peer(cell, tracks, words, port=port, name="aiohttp") as serving:
        yield serving


@asynccontextmanager
async def granian_files(cell: Cell, tracks: Sequence[Track]) -> AsyncIterator[Serving]:
    """granian's file range over RSGI."""
    port = free_port()
    words = [str(_peer_python().with_name("granian")), "--interface", "rsgi", "--port", str(port)]
    words += ["--workers", "1", "--loop", "uvloop", "--no-ws", "--no-access-log", "--log-level"]
    words += ["error", "--http", "1", "bench.apps.media_granian:app"]
    async with _python_peer(cell, tracks, words, port=port, name="granian") as serving:
        yield serving


@asynccontextmanager
async def bare_loop(
    cell: Cell, tracks: Sequence[Track], answer_bytes: int
) -> AsyncIterator[Serving]:
    """The loop, over one object of the size of all tracks together."""
    folder, port = cell.folder / "bare", free_port()
    size = sum(track.size_bytes for track in tracks)
    [track] = make_tracks(folder, 1, size_bytes=size, first=BARE_TRACK)
    program = native_program("media_bare", cell.folder.parent)
    words = [str(program), str(port), str(folder / track.key), str(answer_bytes)]
    child = Child(pinned(words, SERVER_CORE), folder=folder, env={}, name="bare")
    targets = write_targets(folder / "targets", [track], ["/m/bare"])
    async with served(child, port, targets, [track]) as serving:
        yield serving


@asynccontextmanager
async def _nginx(
    cell: Cell,
    tracks: Sequence[Track],
    servers: str,
    *,
    core: int | None,
    name: str,
    values: Mapping[str, str] | None = None,
) -> AsyncIterator[Serving]:
    program, folder = _installed("nginx", "nginx-core"), cell.folder / name
    folder.mkdir()
    port = free_port()
    values = {
        **(values or {}),
        "folder": str(folder),
        "blobs": str(blobs_folder(cell)),
        "port": str(port),
        "origin": str(free_port()),
        "secret": _SECRET,
        "files": "20000",
        "connections": "16384",
        # Its worker would be another user, who may not read this run's folder.
        "user": "user root;" if os.geteuid() == 0 else "",
    }
    file = folder / "nginx.conf"
    file.write_text((_NGINX_HEAD + servers).format(**values))
    words = [program, "-p", str(folder), "-c", str(file)]
    child = Child(pinned(words, core), folder=folder, env={}, name=name)
    targets = write_targets(folder / "targets", tracks, [f"/m/{track.key}" for track in tracks])
    async with served(child, port, targets, tracks) as serving:
        yield serving


@asynccontextmanager
async def _python_peer(
    cell: Cell, tracks: Sequence[Track], words: Sequence[str], *, port: int, name: str
) -> AsyncIterator[Serving]:
    env = {"PYTHONPATH": str(ROOT), "BENCH_TRACKS": str(blobs_folder(cell))}
    child = Child(pinned(words, SERVER_CORE), folder=cell.folder, env=env, name=name)
    targets = write_targets(
        cell.folder / f"{name}-targets", tracks, [f"/m/{track.key}" for track in tracks]
    )
    async with served(child, port, targets, tracks) as serving:
        yield serving


def _peer_python() -> Path:
    if not PEER_PYTHON.exists():
        raise BenchFault("the environment of the peers is not there: `make bench` makes it")
    return PEER_PYTHON


def _installed(name: str, package: str) -> str:
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise BenchFault(f"{name} is not installed (Debian: apt-get install {package})")
    return found

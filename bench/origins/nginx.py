"""nginx with the photos' files, on 60 addresses of loopback: the fastest seller's host there is.

Its access log has the time of each answer; it is what peers are timed by, since it leaves out
their start. Without nginx on the machine there is no such origin, and the figures note it.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.children import BenchFault, Child, wait_for

ADDRESSES = 60
READY_S = 10.0
CONFIGURATION = """
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 8192; }}
http {{
  log_format moments '$msec $status $request_time $server_addr $uri';
  access_log {folder}/access.log moments;
  sendfile on; keepalive_requests 1000000; keepalive_timeout 60s;
  types {{ image/jpeg jpg; }}
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{
    {listens}
    root {photos};
  }}
}}
"""


@dataclass(frozen=True)
class Nginx:
    """A running one."""

    folder: Path
    child: Child
    port: int

    def url(self, number: int) -> str:
        """Of a photo; photos are spread over the addresses."""
        return f"http://127.0.0.{1 + number % ADDRESSES}:{self.port}/{number}.jpg"

    def sent_s(self) -> list[float]:
        """The moments (wall clock) at which photos were sent whole, in order."""
        rows = [line.split() for line in (self.folder / "access.log").read_text().splitlines()]
        return sorted(float(row[0]) for row in rows if row[1] == "200")

    def has_sent(self) -> bool:
        """Whether its log has an answer."""
        return (self.folder / "access.log").stat().st_size > 0

    @property
    def settings(self) -> dict[str, str]:
        """The settings of a process that requests it."""
        return {
            "HEADRACE_FETCH_ALLOW_NETWORKS": "127.0.0.0/8",
            "HEADRACE_FETCH_ALLOW_PORTS": str(self.port),
        }


def nginx_path() -> str | None:
    """Where nginx is, if it is installed."""
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


@asynccontextmanager
async def nginx(folder: Path, photos: Path) -> AsyncIterator[Nginx]:
    """Serve `photos` while the block lasts. Raises: BenchFault."""
    program = nginx_path()
    if program is None:
        raise BenchFault("nginx is not installed (Debian: apt-get install nginx-core)")
    port = _free_port()
    file = _configure(folder, photos, port)
    words = [program, "-p", str(folder), "-c", str(file)]
    child = Child(words, folder=folder, env={}, name="nginx")
    try:
        await wait_for(lambda: _answers(port), "nginx to answer", READY_S, child)
        yield Nginx(folder, child, port)
    finally:
        await child.end()


def _configure(folder: Path, photos: Path, port: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    listens = " ".join(f"listen 127.0.0.{1 + n}:{port} backlog=4096;" for n in range(ADDRESSES))
    file = folder / "nginx.conf"
    file.write_text(CONFIGURATION.format(folder=folder, photos=photos, listens=listens))
    # nginx's worker is another user where we are root.
    folder.chmod(0o777)
    return file


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True

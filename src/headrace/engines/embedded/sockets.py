"""Unix sockets whose path is longer than the 107 bytes that an address holds (unix(7)).

The servers bind a short relative path, since they run inside the folder. A client elsewhere opens the
folder itself (O_PATH) and reaches the socket through `/proc/self/fd/<n>/`, which has no limit. That
descriptor stays open for the process's life: pools reconnect through it at any time. The same way serves
paths with characters that a URL of several hosts would split on.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final
from urllib.parse import quote

from headrace.engines.endpoints import Endpoints

ADDRESS_BYTES_MAX: Final = 107
POSTGRES_PORT: Final = 5432
POSTGRES_SOCKET: Final = f".s.PGSQL.{POSTGRES_PORT}"
VALKEY_SOCKET: Final = "valkey.sock"
_PLAIN: Final = re.compile(r"[A-Za-z0-9/._ +~=-]+")
_opened: dict[str, int] = {}


def reachable_folder(run: Path) -> str:
    """A path of `run` that is short and plain enough to name the sockets in it, for this process."""
    text = str(run)
    if len(os.fsencode(run / POSTGRES_SOCKET)) <= ADDRESS_BYTES_MAX and _PLAIN.fullmatch(text):
        return text
    here = run.stat()
    known = _opened.get(text)
    if known is None or not os.path.samestat(os.fstat(known), here):
        # An outdated descriptor is left open: connections of a folder since replaced may still use it.
        known = _opened[text] = os.open(run, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/self/fd/{known}"


def endpoints_of(folder: Path) -> Endpoints:
    """The URLs of the engines in the data folder `folder`, for this process."""
    run = reachable_folder(folder / "run")
    # Port and TLS are spelled out, so that PGPORT and PGSSLMODE of the environment have no say.
    options = f"host={quote(run, safe='/')}&port={POSTGRES_PORT}&sslmode=disable"
    return Endpoints(
        postgres_url=f"postgresql://headrace@/headrace?{options}",
        valkey_url=f"unix://{quote(f'{run}/{VALKEY_SOCKET}', safe='/')}?db=0",
        blobs_url=(folder / "blobs").as_uri(),
    )

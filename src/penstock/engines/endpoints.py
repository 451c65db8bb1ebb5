"""Where the engines answer: three URLs, whoever started them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The URLs that `Postgres`, `Valkey` and `Blobs` open.

    Those of embedded engines may go through a descriptor of this process (see
    `embedded.sockets`): another process asks `running_endpoints` for its own.
    """

    postgres_url: str
    valkey_url: str
    blobs_url: str

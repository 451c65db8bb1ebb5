"""Where a connection leads and what is said on it first, read off the URL by the stock client's own parser."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from typing import Any

from valkey.asyncio.connection import SSLConnection, parse_url


@dataclass(frozen=True, slots=True, repr=False)
class Address:
    """One node; holds a password, so it is never shown."""

    host: str
    port: int
    path: str | None
    """A unix socket; then host and port mean nothing."""
    tls: ssl.SSLContext | None
    greeting: tuple[tuple[str, ...], ...]
    """Commands that must be answered well before any other is sent."""

    async def connect(self, make: Any) -> Any:
        """Open a connection whose protocol `make()` makes; returns the protocol. Raises: OSError."""
        loop = asyncio.get_running_loop()
        if self.path is not None:
            _, protocol = await loop.create_unix_connection(make, self.path)
        else:
            _, protocol = await loop.create_connection(make, self.host, self.port, ssl=self.tls)
        return protocol


def address_of(url: str) -> Address:
    """The node that `url` means."""
    options: dict[str, Any] = dict(parse_url(url))
    words: list[tuple[str, ...]] = []
    if options.get("password"):
        user = (options["username"],) if options.get("username") else ()
        words.append(("AUTH", *user, options["password"]))
    if int(options.get("db") or 0):
        words.append(("SELECT", str(options["db"])))
    is_tls = issubclass(options.get("connection_class", object), SSLConnection)
    return Address(
        host=options.get("host") or "localhost",
        port=int(options.get("port") or 6379),
        path=options.get("path"),
        tls=_tls_of(options) if is_tls else None,
        greeting=(*words, ("PING",)),
    )


def _tls_of(options: dict[str, Any]) -> ssl.SSLContext:
    """The context that the stock client would make of the URL's `ssl_...` parameters."""
    context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"))
    wanted = str(options.get("ssl_cert_reqs") or "required").lower()
    if wanted in ("none", "optional") or options.get("ssl_check_hostname") in (False, "False"):
        context.check_hostname = False
    if wanted in ("none", "optional"):
        context.verify_mode = ssl.CERT_NONE if wanted == "none" else ssl.CERT_OPTIONAL
    if options.get("ssl_certfile"):
        context.load_cert_chain(options["ssl_certfile"], options.get("ssl_keyfile"))
    return context

"""The options in a URL of Valkey, the same for pooled and for multiplexed connections.

The stock client verifies a server's certificate, but not that it is for the host of the URL. Both
kinds of connections verify it here, unless the URL has `ssl_check_hostname=false` or no
`ssl_cert_reqs=required`.
"""

from __future__ import annotations

import ssl
from typing import Any, Final

from valkey.asyncio.connection import SSLConnection, parse_url

_NO: Final = ("false", "no", "off", "0")


def options_of(url: str) -> dict[str, Any]:
    """Options of the stock client's connections to `url`."""
    options: dict[str, Any] = dict(parse_url(url))
    if is_tls(options):
        wanted = str(options.get("ssl_cert_reqs") or "required").lower()
        named = str(options.get("ssl_check_hostname", True)).lower()
        options["ssl_check_hostname"] = wanted == "required" and named not in _NO
    return options


def is_tls(options: dict[str, Any]) -> bool:
    """Whether connections with these options use TLS."""
    return issubclass(options.get("connection_class", object), SSLConnection)


def refused_certificate(error: BaseException) -> str:
    """Why the server's certificate is not accepted, also below a client's error; else empty."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is not accepted: {cause.verify_message.rstrip('.')}"
        cause = cause.__cause__ or cause.__context__
    return ""

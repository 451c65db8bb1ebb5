"""The options in a URL of Valkey, the same for pooled and for multiplexed connections.

Both kinds of connections verify that a server's certificate is signed by an authority of the
operating system, or of the file `ssl_ca_certs` alone, and that it is for the host of the URL. The
stock client would not check the host, and would trust the system's authorities beside the file.
`ssl_cert_reqs=none` verifies nothing; `ssl_check_hostname=false` skips the host.
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
        options["connection_class"] = TlsConnection
    return options


class TlsConnection(SSLConnection):
    """A pooled connection with the TLS context of `tls_context`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.ssl_context.context = tls_context(options)


def tls_context(options: dict[str, Any]) -> ssl.SSLContext:
    """The TLS context for a URL's `ssl_...` parameters. Raises: OSError."""
    context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"))
    if options.get("ssl_certfile"):
        context.load_cert_chain(options["ssl_certfile"], options.get("ssl_keyfile"))
    wanted = str(options.get("ssl_cert_reqs") or "required").lower()
    context.check_hostname = options["ssl_check_hostname"]
    if wanted in ("none", "optional"):
        context.verify_mode = ssl.CERT_NONE if wanted == "none" else ssl.CERT_OPTIONAL
    return context


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

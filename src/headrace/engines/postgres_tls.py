"""What the driver lacks for TLS: the system's authorities, and errors that name the file.

`sslrootcert=system` trusts the authorities of the operating system, as with libpq 16, and verifies
the host name. Other values of `sslmode` and `sslrootcert` are the driver's.

Source: PostgreSQL's documentation of libpq, "SSL Support".
"""

from __future__ import annotations

import os
import ssl
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import asyncpg

_FILES: Final = ("sslrootcert", "sslcert", "sslkey", "sslcrl")
SYSTEM: Final = "system"


def tls_options(url: str) -> dict[str, Any]:
    """Options of the driver for a connection to the server of `url`.

    Raises: asyncpg.ClientConfigurationError.
    """
    found = {name: values[-1] for name, values in parse_qs(urlsplit(url).query).items()}
    is_system = found.get("sslrootcert") == SYSTEM
    for name in _FILES:
        path = found.get(name)
        if path and not (is_system and name == "sslrootcert") and not os.access(path, os.R_OK):
            raise asyncpg.ClientConfigurationError(
                f"{name} is {path!r}, a file that does not exist or cannot be read"
            )
    if not is_system:
        return {}
    if found.get("sslmode", "verify-full") != "verify-full":
        raise asyncpg.ClientConfigurationError("sslrootcert=system requires sslmode=verify-full")
    context = ssl.create_default_context()
    if "sslcert" in found:
        password = found.get("sslpassword", "")
        context.load_cert_chain(found["sslcert"], found.get("sslkey"), lambda: password)
    return {"ssl": context}


def unusable_file(error: BaseException) -> str:
    """Why OpenSSL cannot use a file that the URL names; empty for other errors."""
    if isinstance(error, ssl.SSLError) and error.library in ("X509", "PEM"):
        return f"a certificate or key of the URL cannot be used: {error.reason}"
    return ""

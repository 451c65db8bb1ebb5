"""The address of the S3 store, from the environment variables that its driver reads.

The driver panics on an address without scheme, and reports a missing AWS_ALLOW_HTTP as a "builder
error", so both are checked here before a client is created.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from headrace.kernel.config import InvalidConfig

NAMES: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_TRUE: Final = ("1", "true", "on", "yes", "y")


@dataclass(frozen=True, slots=True)
class BucketEndpoint:
    """Where requests for a bucket are sent; `setting` is the variable that determines it."""

    url: str
    setting: str

    @property
    def host(self) -> str:
        """Its host name or address."""
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        """Its TCP port."""
        parts = urlsplit(self.url)
        return parts.port or (443 if parts.scheme == "https" else 80)


def allows_http(env: Mapping[str, str] = os.environ) -> bool:
    """Whether requests without TLS are allowed, as the driver reads it."""
    return env.get("AWS_ALLOW_HTTP", "").strip().lower() in _TRUE


def find_endpoint(env: Mapping[str, str] = os.environ) -> BucketEndpoint:
    """The endpoint of these variables, AWS's own by default. Raises: InvalidConfig."""
    name = next((name for name in NAMES if name in env), None)
    if name is None:
        region = env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or "us-east-1"
        return BucketEndpoint(f"https://s3.{region}.amazonaws.com", "AWS_REGION")
    url = env[name]
    if not _is_address(url):
        example = f"http://{url}" if url and "/" not in url else "http://10.0.0.4:9000"
        raise InvalidConfig(
            f"{name} is {url!r}, expected a URL with http:// or https:// and a host: set"
            f" {name}={example} and AWS_ALLOW_HTTP=true, or an https:// URL"
        )
    if url.startswith("http://") and not allows_http(env):
        raise InvalidConfig(
            f"{name} is {url!r}, and AWS_ALLOW_HTTP is {env.get('AWS_ALLOW_HTTP', 'unset')}:"
            " requests without TLS are refused. Set AWS_ALLOW_HTTP=true, or use an https:// URL"
        )
    return BucketEndpoint(url, name)


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False

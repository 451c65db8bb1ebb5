"""Alerts to somebody else's address: a signed POST, with a deadline and without following redirects.

The body is signed with a key of its own, derived from the root secret, and the moment of sending: the receiver computes
HMAC-SHA256 of `<t>.<body>` and compares it with `v1` of the header `Headrace-Signature: t=...,key=...,v1=...`.
Its key in hex: `derive_key(SECRET, "alerts-webhook").secret.hex()` of `headrace.kernel.signing`.
"""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any, Final

import msgspec

from headrace.jobs.fleet.alerts import Alert
from headrace.kernel.errors import PeerFailed
from headrace.kernel.signing import Key

TIMEOUT_S: Final = 5.0
USE: Final = "alerts-webhook"


class WebhookFailed(PeerFailed):
    """The webhook for alerts did not take one; it is sent again for an hour."""

    code = "jobs.webhook_failed"


async def send_alert(url: str, key: Key, alert: Alert, *, is_raise: bool) -> None:
    """Send one alert and wait until it is taken. The receiver may see it twice: its `event` says which it is.

    Raises: WebhookFailed.
    """
    word = "raised" if is_raise else "cleared"
    document = {"event": f"{alert.id}-{word}", "state": word, **msgspec.to_builtins(alert)}
    body = msgspec.json.encode(document)
    try:
        status = await asyncio.to_thread(_post, url, body, signature(key, body, time.time()))
    except (OSError, HTTPException, ValueError) as error:
        raise WebhookFailed(
            f"the webhook for alerts does not answer ({type(error).__name__}): check"
            " jobs.alerts_webhook_url and whoever listens there"
        ) from error
    if not 200 <= status < 300:
        raise WebhookFailed(
            f"the webhook for alerts answered {status}: expected 2xx; redirects are not followed"
        )


def signature(key: Key, body: bytes, at_s: float) -> str:
    """The value of the header `Headrace-Signature`."""
    moment = str(int(at_s))
    signed = key.sign(moment.encode() + b"." + body).hex()
    return f"t={moment},key={key.id},v1={signed}"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Leaves a redirect as the answer: an address that we were not given is not asked."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_opener: Final = urllib.request.build_opener(_NoRedirects)


def _post(url: str, body: bytes, signed: str) -> int:
    request = urllib.request.Request(  # noqa: S310 - the setting takes http and https alone
        url,
        data=body,
        method="POST",
        headers={"Content-Type": "application/json", "Headrace-Signature": signed},
    )
    try:
        with _opener.open(request, timeout=TIMEOUT_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return int(error.code)

"""Examples of `headrace.testing`."""

from __future__ import annotations

from headrace import Headrace
from headrace.testing import assert_enqueued, drain, refute_enqueued

app = Headrace()


@app.task("mail")
async def send_mail(to: str) -> None:
    """Send one mail."""


async def main() -> None:
    """Every call."""
    #: headrace.testing.assert_enqueued
    await send_mail.enqueue(to="ann")
    await assert_enqueued(app, "mail", payload={"to": "ann"})
    #: headrace.testing.drain
    assert await drain(app) == {"done": 1}
    #: headrace.testing.refute_enqueued
    await refute_enqueued(app, "mail")
    #: -
    await app.close()

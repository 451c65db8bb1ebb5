"""A buffer before an API: visitors never wait for it, and it never receives too many requests."""

from __future__ import annotations

import asyncio
import json
import os
import urllib.error
import urllib.request

from headrace import Headrace
from headrace.jobs import Fail, Retry

app = Headrace()
API = os.environ.get("CRM_URL", "http://127.0.0.1:8600/contacts")
app.limiter("crm", rate="600/m", concurrency=4)


@app.task("contacts", limiter="crm", retries=12, timeout="30s")
def send_contact(name: str, email: str) -> None:
    """Send one contact. The handler is sync, so any client library can be used."""
    body = json.dumps({"name": name, "email": email}).encode()
    request = urllib.request.Request(API, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10):
            print(f"{name} is in the CRM", flush=True)
    except urllib.error.HTTPError as error:
        if error.code in (429, 503):
            wait_s = error.headers.get("Retry-After", "")
            raise Retry(float(wait_s) if wait_s.isdigit() else None, "API is busy") from error
        if error.code < 500:
            raise Fail(f"API refuses {email}: {error.code}") from error
        raise


async def sign_up(name: str, email: str) -> None:
    """What a visitor's request does: one INSERT. All jobs share one lane."""
    await send_contact.enqueue(name=name, email=email, lane="crm", unique=f"contact:{email}")


async def main() -> None:
    """Thirty visitors at once."""
    await asyncio.gather(*(sign_up(f"user-{n}", f"{n}@example.com") for n in range(30)))
    await app.close()


if __name__ == "__main__":
    asyncio.run(main())

"""A moderation queue for people: they take photos and decide, and code handles the decision."""

from __future__ import annotations

import asyncio

from headrace import Headrace

app = Headrace()
moderation = app.queue("moderation", decisions={"approve": "approved", "reject": "rejected"})
"""A queue without code: moderators decide in the console, over HTTP or on the command line."""


@app.task("approved")
async def show(photo: str, author: str) -> None:
    """A moderator decided to approve."""
    print(f"{photo} of {author} is public", flush=True)


@app.task("rejected")
async def notify_author(photo: str, author: str) -> None:
    """A moderator decided to reject."""
    print(f"notify {author}: {photo} was rejected", flush=True)


async def main() -> None:
    """Enqueue three photos. The one with priority 0 comes first."""
    await moderation.enqueue(photo="cat.jpg", author="ann", priority=5)
    await moderation.enqueue(photo="dog.jpg", author="bob", priority=5)
    await moderation.enqueue(photo="fish.jpg", author="carol", priority=0)
    print("photos to decide:", (await app.jobs.queues.get("moderation")).ready)
    await app.close()


if __name__ == "__main__":
    asyncio.run(main())

"""Fan-out and fan-in.

Each photo of an album runs on any free slot; one job runs after all have ended.
"""

from __future__ import annotations

import asyncio

import msgspec

from headrace import Headrace
from headrace.jobs import Batch

app = Headrace()


class Photo(msgspec.Struct):
    """A photo of an album."""

    album: int
    number: int


@app.task("thumbnails", batch=20, retries=0)
def make_thumbnails(photos: Batch[Photo]) -> None:
    """Make thumbnails. Photo 13 is broken: only its job fails."""
    for photo in photos:
        if photo.payload.number == 13:
            photo.fail("the file is cut off")


@app.task("albums")
async def publish_album(album: int, group: dict[str, int]) -> None:
    """Runs once, after the last photo has ended. Headrace passes the counts as `group`."""
    print(f"album {album}: {group['done']} photos, {group['failed']} broken", flush=True)


async def main() -> None:
    """Add the photos to the group. The first may run before the last are added."""
    async with app.group(on_done=publish_album.job(album=1)) as group:
        await make_thumbnails.enqueue_many((Photo(1, n) for n in range(100)), group=group)
    await app.close()


if __name__ == "__main__":
    asyncio.run(main())

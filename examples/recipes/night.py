"""Load moved to the night.

Jobs that are not urgent run when the machines are idle, spread over hours.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, time, timedelta

import msgspec

from headrace import Headrace
from headrace.jobs import Batch, NewJob

app = Headrace()
NIGHT = time(1, 0, tzinfo=UTC)
SPREAD = "5h"


class Photo(msgspec.Struct):
    """A photo to encode again."""

    id: int


@app.task("recode", batch=50, importance=9, slots=(0, 20))
def recode(photos: Batch[Photo]) -> None:
    """Make smaller files of old photos."""
    print(f"recoded {len(photos)} photos", flush=True)


def tonight(now: datetime) -> datetime:
    """The next beginning of the night."""
    begins_at = datetime.combine(now.date(), NIGHT)
    return begins_at if begins_at > now else begins_at + timedelta(days=1)


def for_tonight(photo_id: int) -> NewJob:
    """A job at a random time of the night, after all urgent jobs of its queue."""
    at = tonight(datetime.now(UTC))
    return recode.job(Photo(photo_id), at=at, spread=SPREAD, priority=9)


async def main() -> None:
    """Enqueue ten thousand jobs for the night, in one statement."""
    ids = await recode.enqueue_many(for_tonight(photo_id) for photo_id in range(10_000))
    print(f"{len(ids)} jobs; the first {(await ids[0].why()).text}")
    await app.close()


if __name__ == "__main__":
    asyncio.run(main())

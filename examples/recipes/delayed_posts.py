"""Delayed posts: written now, published at a set time, moved or cancelled until then."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

from headrace import Headrace
from headrace.jobs import JobRef, Transaction

app = Headrace()


@app.task("publish", retries=10, importance=1)
async def publish(post_id: int) -> None:
    """Show the post. A second run has no further effect."""
    print(f"post {post_id} is public", flush=True)


async def plan_post(post_id: int, at: datetime, tx: Transaction | None = None) -> JobRef:
    """Publish the post at `at`; keep the id of the job beside the post."""
    return await publish.enqueue(post_id=post_id, at=at, unique=f"post:{post_id}", tx=tx)


async def move_post(job_id: int, post_id: int, at: datetime) -> JobRef:
    """Publish the post at another time. Raises: JobNotWaiting if its job runs or has ended."""
    async with app.engines.postgres.transaction() as tx:
        await app.jobs.cancel(job_id, tx=tx)
        return await plan_post(post_id, at, tx)


async def main() -> None:
    """Schedule two posts, move one, cancel the other."""
    soon = datetime.now(UTC) + timedelta(seconds=2)
    later = soon + timedelta(hours=3)
    first = await plan_post(1, later)
    second = await plan_post(2, later)
    again = await plan_post(1, soon)
    print("one job for one post:", again == first)
    print((await first.why()).text)
    await move_post(first, 1, soon)
    await second.cancel()
    await app.close()


if __name__ == "__main__":
    asyncio.run(main())

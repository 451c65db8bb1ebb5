"""A report every night, in the editors' time zone.

No scheduled time runs twice; all missed times together cause one run.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

from headrace import Headrace
from headrace.jobs import Batch

app = Headrace()


@app.task("orders", batch=100)
async def handle_order(orders: Batch[dict[str, int]]) -> None:
    """Handle orders. The report counts these jobs."""


@app.cron("0 4 * * *", tz="Europe/Moscow", retries=3, timeout="10m")
async def daily_report() -> None:
    """Print the activity of each queue in the last 24 hours, from the statistics per minute."""
    until_at = datetime.now(UTC) + timedelta(minutes=1)
    for status in await app.jobs.queues.all():
        minutes = await app.jobs.queues.minutes(
            status.queue, from_at=until_at - timedelta(days=1), to_at=until_at
        )
        done, failed = sum(m.done for m in minutes), sum(m.failed for m in minutes)
        if done or failed:
            print(f"{status.queue}: {done} done, {failed} failed", flush=True)


async def main() -> None:
    """Enqueue some orders. The report runs at night, or with `headrace crons run daily_report`."""
    await handle_order.enqueue_many({"order": number} for number in range(1_000))
    await app.close()


if __name__ == "__main__":
    asyncio.run(main())

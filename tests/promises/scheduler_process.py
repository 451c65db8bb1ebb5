"""A scheduler for the kill tests.

`python scheduler_process.py URL NAME PERIOD_S`, until it is killed.
"""

from __future__ import annotations

import asyncio
import sys

from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.jobs import Jobs, JobsConfig, Registry
from headrace.jobs.fleet.scheduler import Scheduler


async def main(url: str, name: str, period_s: float) -> None:
    """Schedule until killed; hosts of the test need not report again."""
    postgres = Postgres(url, PostgresConfig())
    config = JobsConfig(plan_every_s=period_s, cron_every_s=0.05, host_silent_s=3600.0)
    jobs = Jobs(postgres, config, Registry())
    await Scheduler(postgres, jobs, name=name).run(asyncio.Event())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))

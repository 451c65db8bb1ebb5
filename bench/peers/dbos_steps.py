"""dbos: workflows of ten steps that do nothing, twenty at once, in one process.

`steps N` starts N workflows and waits for their ends. It prints what `bench.harness.produce` reads.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time

from dbos import DBOS, DBOSConfig

from bench.peers.driver import url

STEPS = 10
CONCURRENCY = 20
WARM_UP = 20


@DBOS.step()
async def nothing() -> None:
    """The function of each step."""


@DBOS.workflow()
async def steps(number: int) -> int:
    """Ten steps, one after another."""
    for _ in range(STEPS):
        await nothing()
    return number


async def run_all(workflows: int) -> float:
    """Run workflows, twenty at once. Return the seconds."""
    free = asyncio.Semaphore(CONCURRENCY)

    async def one(number: int) -> None:
        async with free:
            handle = await DBOS.start_workflow_async(steps, number)
            await handle.get_result()

    began_s = time.monotonic()
    await asyncio.gather(*[one(number) for number in range(workflows)])
    return time.monotonic() - began_s


async def measure(workflows: int) -> None:
    """Warm up, then measure."""
    await run_all(WARM_UP)
    before_s = _cpu_s()
    seconds = await run_all(workflows)
    timed = workflows * STEPS
    found = {"enqueued": timed, "timed": timed, "seconds": seconds, "cpu_s": _cpu_s() - before_s}
    sys.stdout.write(json.dumps(found) + "\n")


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    DBOS(config=DBOSConfig(name="bench", system_database_url=url(), log_level="ERROR"))
    DBOS.launch()
    asyncio.run(measure(int(sys.argv[2])))
    DBOS.destroy()

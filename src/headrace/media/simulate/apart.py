"""A made-up cluster computed in a process of its own: seconds of CPU that would hold up every other caller of the API.

The process is niced, gets its orders as JSON and ends itself at its time limit, so that it outlives neither its caller's patience
nor its caller. One runs at a time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import msgspec

from headrace.kernel.errors import Unavailable
from headrace.media.errors import InvalidSimulation
from headrace.media.simulate.cluster import Cluster, Simulation, require_possible, simulate

LIMIT_S: Final = 30
NICE: Final = 10
_running = asyncio.Lock()


class SimulationBusy(Unavailable):
    """A simulation for somebody else runs."""

    code = "media.simulation_busy"


class Orders(msgspec.Struct, frozen=True):
    """What the process computes."""

    cluster: Cluster
    lost: tuple[str, ...]


async def simulate_apart(cluster: Cluster, *, lost: Sequence[str] = ()) -> Simulation:
    """As `simulate`; cancelled, it ends at once. Raises: InvalidSimulation, SimulationBusy."""
    require_possible(cluster, lost)
    if _running.locked():
        raise SimulationBusy(
            "a simulation for another caller runs: try again, or `headrace media partitions simulate`",
            retry_after_s=5,
        )
    async with _running:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            told, _ = await process.communicate(msgspec.json.encode(Orders(cluster, tuple(lost))))
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
    if process.returncode == -signal.SIGALRM:
        raise InvalidSimulation(
            f"{cluster.centres} centres of {cluster.nodes} nodes take over {LIMIT_S} s: ask for fewer nodes, or use"
            " `headrace media partitions simulate`, which has no limit"
        )
    if process.returncode:
        raise SimulationBusy(
            f"the process that computes it ended with {process.returncode}: try again",
            retry_after_s=5,
        )
    return msgspec.json.decode(told, type=Simulation)


def main() -> None:
    """Compute what stands on the standard input."""
    signal.alarm(LIMIT_S)
    os.nice(NICE)
    orders = msgspec.json.decode(sys.stdin.buffer.read(), type=Orders)
    found = simulate(orders.cluster, lost=orders.lost)
    sys.stdout.buffer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main()

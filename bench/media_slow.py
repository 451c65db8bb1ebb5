"""Does a fast client feel ten thousand slow ones, and can one machine hold a hundred thousand?

Slow clients read 32 KiB/s (a track that plays) or, of the hundred thousand, 4 KiB/s; of every
sixteenth all bytes are compared. The fast one requests 256 KiB at 200 Poisson moments a second. It
shares its core with the slow ones and runs before them (SCHED_FIFO, where that is allowed), since
otherwise it waits for a slice of the scheduler, 2 to 3 ms, whichever server it requests from. The
hundred thousand are spread over as many processes as the limit of files requires, on both sides,
each client process on an address of its own.
"""

from __future__ import annotations

import asyncio
import json
import math
import resource
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tests.kit.processes import descendants

from bench.children import BenchFault, Child, wait_for
from bench.figures import Figure, Goal, figure, others
from bench.harness import Run
from bench.media_objects import make_tracks
from bench.media_ranges import LARGE, Serve, our_cache
from bench.media_stage import Serving, blobs_folder, generator, press, read_all
from bench.peers import media_servers as peers
from bench.systems import OURS

SLOW, SLOW_QUICK = 10_000, 1_000
SLOW_BYTES_PER_S, CROWD_BYTES_PER_S = 32 * 1024, 4 * 1024
FAST_PER_S = 200
CROWD, CROWD_QUICK = 100_000, 4_000
CONNECTIONS_A_PROCESS = 15_000
HELD = "slow connections held, 0 errors"
HELD_DEADLINE_S = 240.0
PAGE_KIB = resource.getpagesize() / 1024


async def measure_fast(run: Run) -> list[Figure]:
    """Ours and nginx in turns."""
    count = run.sized(SLOW, SLOW_QUICK)
    serves: dict[str, Serve] = {
        OURS.name: partial(our_cache, HEADRACE_MEDIA_CONNECTIONS_MAX=str(count + 500)),
        peers.NGINX: peers.nginx_static,
    }
    found = await run.alternate(
        {name: partial(_fast, run, serve, count) for name, serve in serves.items()}
    )
    size = f"among {count:,} of {SLOW_BYTES_PER_S // 1024} KiB/s, {FAST_PER_S} requested a second"
    goals = {"p50": None, "p75": Goal(at_most=1), "p99": Goal(at_most=2)}
    rows = [
        figure(
            f"time to the first byte of a fast client, {share}",
            "ms",
            size,
            ours=found.get(f"first {share}", {}).get(OURS.name),
            peers=others(found.get(f"first {share}", {})),
            goal=goal,
            why="the fast client and the generator of the slow ones share a core",
            is_less_better=True,
        )
        for share, goal in goals.items()
    ]
    for metric, name, unit in (
        ("total p99", "time to the last byte of a fast client, p99", "ms"),
        ("cpu %", "CPU of the server, slow and fast", "% of a core"),
        ("delivered %", "what the slow clients got of what they would take", "% delivered"),
    ):
        rows.append(
            figure(
                name,
                unit,
                size,
                ours=found.get(metric, {}).get(OURS.name),
                peers=others(found.get(metric, {})),
                is_less_better=unit == "ms",
            )
        )
    return rows


async def _fast(run: Run, serve: Serve, count: int) -> Mapping[str, float]:
    seconds = run.sized(15, 4)
    async with run.cell() as cell:
        tracks = make_tracks(blobs_folder(cell), 16)
        async with serve(cell, tracks) as serving:
            await read_all(serving)
            slow = generator(
                cell,
                serving,
                "slow",
                connections=count,
                bytes_per_s=SLOW_BYTES_PER_S,
                chunk_bytes=16_384,
                receive_buffer=32_768,
                seconds=seconds + 6,
                check_every=16,
            )
            try:
                await _wait_held(slow)
                pressed = await press(
                    cell,
                    serving,
                    "open",
                    seconds=seconds,
                    warm_s=1,
                    rate_per_s=FAST_PER_S,
                    connections=16,
                    range_bytes=LARGE,
                    is_preferred=True,
                )
                report = _last_line(await slow.finish(seconds + 60))
            finally:
                await slow.end()
    possible = count * SLOW_BYTES_PER_S * report["seconds"]
    values = {
        f"first {share}": pressed.report["first_us"][share] / 1000
        for share in ("p50", "p75", "p99")
    }
    return values | {
        "total p99": pressed.report["total_us"]["p99"] / 1000,
        "cpu %": pressed.cpu_s / seconds * 100,
        "delivered %": report["bytes"] / possible * 100,
    }


async def measure_crowd(run: Run) -> list[Figure]:
    """Ours alone: how many it holds, and in what memory."""
    count = run.sized(CROWD, CROWD_QUICK)
    size = f"{count:,} requested, {CROWD_BYTES_PER_S // 1024} KiB/s each"
    if (files := open_files_max()) < (least := min(count, CONNECTIONS_A_PROCESS) * 4 // 3):
        reason = f"a process may open {files:,} files, {least:,} are needed (`ulimit -n`)"
        print(f"  left out: {reason}", flush=True)
        return [figure(HELD, "connections", size, ours=None, not_measured=[reason])]
    found = await run.alternate({OURS.name: partial(_crowd, run, count)}, pairs=1)
    missing = [fault for fault in run.faults if fault.startswith(f"{OURS.name}: crowd")]

    def of(metric: str) -> Any:
        return found.get(metric, {}).get(OURS.name)

    limit = {"MiB tcp_mem allows": tcp_memory_max_kib() / 1024}
    return [
        figure(
            HELD,
            "connections",
            size,
            ours=of("held"),
            goal=Goal(at_least=count),
            why="the machine's memory for TCP or its ports were used up",
            not_measured=missing,
        ),
        figure(
            "memory of the processes",
            "KiB a connection",
            size,
            ours=of("process KiB"),
            goal=Goal(at_most=2),
            why="each worker process has memory of its own, which few connections share",
        ),
        figure("memory of TCP, both ends", "MiB", size, ours=of("tcp MiB"), limit=limit),
        figure("processes that serve", "processes", size, ours=of("processes")),
        figure("CPU of the server", "% of a core", size, ours=of("cpu %")),
        figure(
            "what the clients got of what they would take",
            "% delivered",
            size,
            ours=of("delivered %"),
        ),
    ]


async def _crowd(run: Run, count: int) -> Mapping[str, float]:
    processes, seconds = math.ceil(count / CONNECTIONS_A_PROCESS), run.sized(20, 4)
    more = {
        # The kernel spreads clients over the workers by chance, so each needs room for some more.
        "HEADRACE_MEDIA_WORKERS": str(processes),
        "HEADRACE_MEDIA_CONNECTIONS_MAX": str(round(count * 1.1) + 500),
    }
    async with run.cell() as cell:
        tracks = make_tracks(blobs_folder(cell), 16)
        async with our_cache(cell, tracks, core=None, **more) as serving:
            await read_all(serving)
            before_kib = process_kib(serving)
            clients = [
                generator(
                    cell,
                    serving,
                    "slow",
                    core=None,
                    connections=own,
                    bytes_per_s=CROWD_BYTES_PER_S,
                    chunk_bytes=8_192,
                    receive_buffer=8_192,
                    seconds=seconds,
                    check_every=16,
                    **{"from": f"127.0.0.{2 + place}"},
                )
                for place, own in enumerate(parts(count, processes))
            ]
            try:
                for client in clients:
                    await _wait_held(client)
                before_s, own_kib = serving.child.cpu_s(), process_kib(serving) - before_kib
                kernel_kib = tcp_memory_kib()
                reports = [_last_line(await client.finish(seconds + 120)) for client in clients]
                cpu_s = serving.child.cpu_s() - before_s
            except BenchFault as fault:
                had_mib, max_mib = tcp_memory_kib() / 1024, tcp_memory_max_kib() / 1024
                text = f"crowd: {fault}; TCP had {had_mib:.0f} of {max_mib:.0f} MiB (tcp_mem)"
                raise BenchFault(text) from fault
            finally:
                await asyncio.gather(*(client.end() for client in clients))
    held = sum(one["held"] for one in reports)
    return {
        "held": held,
        "process KiB": own_kib / held,
        "tcp MiB": kernel_kib / 1024,
        "processes": processes,
        "cpu %": cpu_s / seconds * 100,
        "delivered %": sum(one["bytes"] for one in reports)
        / (held * CROWD_BYTES_PER_S * seconds)
        * 100,
    }


def open_files_max() -> int:
    """How many files a process of this run may open. The limit is raised as far as allowed."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


async def _wait_held(client: Child) -> None:
    await wait_for(lambda: "held" in client.out, "all to be held", HELD_DEADLINE_S, client)


def parts(count: int, processes: int) -> list[int]:
    """`count` in as many even parts."""
    return [count // processes + (place < count % processes) for place in range(processes)]


def process_kib(serving: Serving) -> float:
    """Memory of all processes of the server; what they share is counted once."""
    return sum(_pss_kib(pid) for pid in (serving.child.pid, *descendants(serving.child.pid)))


def _pss_kib(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    rows = dict(line.split(":", 1) for line in text.splitlines()[1:])
    # Not the shared tables: they are the store's, however many clients there are.
    return float(rows["Pss_Anon"].split()[0])


def tcp_memory_kib() -> float:
    """What all TCP sockets of this machine hold now."""
    for line in Path("/proc/net/sockstat").read_text().splitlines():
        if line.startswith("TCP:"):
            fields = line.split()
            return float(fields[fields.index("mem") + 1]) * PAGE_KIB
    return 0.0


def tcp_memory_max_kib() -> float:
    """What all TCP sockets of this machine may hold."""
    return float(Path("/proc/sys/net/ipv4/tcp_mem").read_text().split()[2]) * PAGE_KIB


def _last_line(out: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return found

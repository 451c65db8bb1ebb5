"""Headrace as an adapter of the outside harness, by its contract in CONTRIBUTING_ADAPTERS.md.

One replica is one process of the harness. It enqueues at a fixed rate or to a fixed depth, and it
runs the two roles that a site runs: `headrace agent` and `headrace scheduler`. If the harness kills
the replica with SIGKILL, the kernel kills both roles too, as when a machine loses its power.

The roles import `app` from this file. Each slot sends the latency of every job that it ran over a
Unix socket to the replica, which counts them and prints the samples.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import struct
import sys
import tempfile
import time
from collections import Counter, deque
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from headrace import Headrace, __version__
from headrace.kernel.errors import NotFound, Unavailable

HERE = Path(__file__).parent
QUEUE = "long_horizon_bench"
SOCKET_VARIABLE = "BENCH_REPORT_SOCKET"
PADDING_LESS_BYTES = 96
WINDOW_S = 30
DEPTH_EVERY_S = 0.5
STOP_S = 5.0
LATENCY = struct.Struct("<d")
RATIO = math.log(1.001)
"""Buckets of latency are this far apart: three significant figures."""


def number(name: str, default: int) -> int:
    """A number of the environment that the harness gives."""
    return int(os.environ.get(name, default))


INSTANCE = number("BENCH_INSTANCE_ID", 0)
WORKER_COUNT = number("WORKER_COUNT", 32)
SLOTS = min(len(os.sched_getaffinity(0)), WORKER_COUNT)
WORK_S = number("JOB_WORK_MS", 1) / 1000
FOLDER = Path(tempfile.gettempdir()) / f"headrace-replica-{INSTANCE}"
"""The data folder of this replica; it stays when the replica is killed, as that of a host does."""

app = Headrace()
reports: list[asyncio.StreamWriter] = []


@app.on_slot_start
async def connect_to_replica() -> None:
    """Open the socket over which a slot reports."""
    reports.append((await asyncio.open_unix_connection(os.environ[SOCKET_VARIABLE]))[1])


@app.task(QUEUE, concurrency=math.ceil(WORKER_COUNT / SLOTS))
async def bench_job(sent_s: float, padding: str) -> None:
    """Wait for the time of the synthetic work; report the latency of the pickup."""
    latency_s = time.time() - sent_s
    await asyncio.sleep(WORK_S)
    reports[0].write(LATENCY.pack(latency_s))


class Latencies:
    """Latencies of the last 30 s in logarithmic buckets, so that memory is bounded."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, Counter[int]]] = deque(maxlen=WINDOW_S)

    def add(self, latency_s: float) -> None:
        """Count one job."""
        now_s = int(time.monotonic())
        if not self._seconds or self._seconds[-1][0] != now_s:
            self._seconds.append((now_s, Counter()))
        self._seconds[-1][1][round(math.log(max(latency_s * 1000, 0.01)) / RATIO)] += 1

    def percentiles_ms(self, *shares: float) -> list[float]:
        """The percentiles of the window; 0 without jobs."""
        since_s = time.monotonic() - WINDOW_S
        merged: Counter[int] = Counter()
        for second_s, counts in self._seconds:
            if second_s >= since_s:
                merged.update(counts)
        found, passed = [], 0
        left = deque(sorted(share * merged.total() for share in shares))
        for bucket in sorted(merged):
            passed += merged[bucket]
            while left and passed >= left[0]:
                found.append(math.exp(bucket * RATIO))
                left.popleft()
        return found + [0.0] * (len(shares) - len(found))


class Replica:
    """One replica: producer, roles, counts and samples."""

    def __init__(self) -> None:
        self._rate_file = os.environ.get("PRODUCER_RATE_CONTROL_FILE")
        self._rate = number("PRODUCER_RATE", 800)
        self._batch_max = max(1, number("PRODUCER_BATCH_MAX", 128))
        self._batch_s = number("PRODUCER_BATCH_MS", 25) / 1000
        self._sample_s = number("SAMPLE_EVERY_S", 5)
        self._target_depth = (
            number("TARGET_DEPTH", 1000)
            if os.environ.get("PRODUCER_MODE") == "depth-target"
            else None
        )
        self._padding = "x" * max(0, number("JOB_PAYLOAD_BYTES", 256) - PADDING_LESS_BYTES)
        self._latencies = Latencies()
        self._enqueued = self._completed = self._ready = self._running = 0
        self._can_work = asyncio.Event()

    async def run(self) -> None:
        """Work until SIGTERM. Raises: RuntimeError if a role ends by itself."""
        stop = asyncio.Event()
        for each in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(each, stop.set)
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            os.environ[SOCKET_VARIABLE] = f"{folder}/reports"
            await asyncio.start_unix_server(self._receive, os.environ[SOCKET_VARIABLE])
            await _prepare()
            roles = [await _start_role("agent", "--name", f"replica-{INSTANCE}"),
                     await _start_role("scheduler")]  # fmt: skip
            tasks = [asyncio.create_task(self._work()), asyncio.create_task(self._read_tokens())]
            ends = [asyncio.create_task(role.wait()) for role in roles]
            stopped = asyncio.create_task(stop.wait())
            done, _ = await asyncio.wait(
                [*tasks, *ends, stopped], return_when=asyncio.FIRST_COMPLETED
            )
            for task in tasks:
                task.cancel()
            await asyncio.gather(*map(_stop_role, roles))
            await app.close()
            if stopped not in done:
                raise RuntimeError(f"ended before SIGTERM: {[task.result() for task in done]}")

    async def _work(self) -> None:
        """Report readiness as soon as the first slot runs; then produce and sample."""
        await self._can_work.wait()
        emit(descriptor())
        await asyncio.gather(self._produce(), self._observe(), self._sample())

    async def _receive(self, reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        self._can_work.set()
        with suppress(asyncio.IncompleteReadError):
            while True:
                (latency_s,) = LATENCY.unpack(await reader.readexactly(LATENCY.size))
                self._completed += 1
                self._latencies.add(latency_s)

    async def _read_tokens(self) -> None:
        """Discard the pacing tokens of the harness, whose writer would block at a full pipe.

        This adapter keeps the pace itself: the tokens do not follow the rate of a high-load phase.
        """
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
        while await reader.read(65536):
            pass
        await asyncio.get_running_loop().create_future()

    async def _produce(self) -> None:
        credit, credited_at_s = 0.0, time.monotonic()
        while True:
            await asyncio.sleep(max(0.0, credited_at_s + self._batch_s - time.monotonic()))
            now_s = time.monotonic()
            credit += self._target_rate() * (now_s - credited_at_s)
            credited_at_s = now_s
            if self._target_depth is not None:
                credit = self._target_depth - self._ready
            if (jobs := min(int(credit), self._batch_max)) < 1:
                continue
            credit -= jobs
            payload = {"sent_s": time.time(), "padding": self._padding}
            try:
                await bench_job.enqueue_many([payload] * jobs)
            except Unavailable as error:
                print(f"[headrace] {jobs} jobs were not enqueued: {error}", file=sys.stderr)
                continue
            self._enqueued += jobs
            self._ready += jobs

    def _target_rate(self) -> float:
        if self._rate_file is None:
            return self._rate
        try:
            return float(Path(self._rate_file).read_text())
        except ValueError:
            return self._rate  # the harness is writing it

    async def _observe(self) -> None:
        """Read the backlog, which only the first replica reports."""
        while INSTANCE == 0 or self._target_depth is not None:
            with suppress(Unavailable, NotFound):  # unknown until the first job
                queue = await app.jobs.queues.get(QUEUE)
                self._ready, self._running = queue.ready, queue.leased
            await asyncio.sleep(DEPTH_EVERY_S)
        await asyncio.get_running_loop().create_future()

    async def _sample(self) -> None:
        await asyncio.sleep(self._sample_s - time.time() % self._sample_s)
        began_s, enqueued, completed = time.monotonic(), self._enqueued, self._completed
        while True:
            await asyncio.sleep(self._sample_s - time.time() % self._sample_s)
            took_s = time.monotonic() - began_s
            p50, p95, p99 = self._latencies.percentiles_ms(0.5, 0.95, 0.99)
            found: dict[str, tuple[float, float]] = {
                "claim_p50_ms": (p50, WINDOW_S),
                "claim_p95_ms": (p95, WINDOW_S),
                "claim_p99_ms": (p99, WINDOW_S),
                "enqueue_rate": ((self._enqueued - enqueued) / took_s, self._sample_s),
                "completion_rate": ((self._completed - completed) / took_s, self._sample_s),
            }
            if INSTANCE == 0:
                found |= {
                    "queue_depth": (self._ready, 0),
                    "running_depth": (self._running, 0),
                    "producer_target_rate": (self._target_rate(), 0),
                }
            began_s, enqueued, completed = time.monotonic(), self._enqueued, self._completed
            emit_samples(found)


def emit(record: dict[str, object]) -> None:
    """Print one line of the protocol."""
    print(json.dumps({**record, "system": "headrace", "instance_id": INSTANCE}), flush=True)


def emit_samples(found: dict[str, tuple[float, float]]) -> None:
    """Print a sample per metric: its value and the window in seconds."""
    at = now_text()
    for metric, (value, window_s) in found.items():
        sample = {"kind": "adapter", "subject_kind": "adapter", "subject": "", "metric": metric}
        emit({"t": at, **sample, "value": value, "window_s": window_s})


def now_text() -> str:
    """The time as the protocol writes it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def descriptor() -> dict[str, object]:
    """What this adapter is, from its manifest and the installed package."""
    manifest = json.loads((HERE / "adapter.json").read_text())
    kept = {key: manifest[key] for key in ("db_name", "event_tables", "event_indexes")}
    return {
        "kind": "descriptor",
        **kept,
        "extensions": manifest["extensions"],
        "version": f"headrace {__version__}",
        "schema_version": "current",
        "started_at": now_text(),
    }


async def _prepare() -> None:
    """Apply the migrations at the first start of the first replica. Roles of others wait for it."""
    if INSTANCE or FOLDER.exists():
        return
    migrating = await _headrace("migrate")
    if code := await migrating.wait():
        raise SystemExit(f"headrace migrate ended with code {code}")


async def _start_role(role: str, *flags: str) -> asyncio.subprocess.Process:
    return await _headrace(role, *flags, "main:app")


async def _headrace(*words: str) -> asyncio.subprocess.Process:
    """Start a command of Headrace that dies with this process and prints to standard error."""
    # If this process died before its child requested the signal, the child has another parent.
    guard = ("sh", "-c", f'[ "$PPID" = {os.getpid()} ] && exec "$@"', "sh")
    return await asyncio.create_subprocess_exec(
        *("setpriv", "--pdeathsig", "KILL", *guard, sys.executable, "-m", "headrace", *words),
        cwd=HERE,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=sys.stderr,
    )


async def _stop_role(role: asyncio.subprocess.Process) -> None:
    if role.returncode is None:
        role.terminate()
    try:
        await asyncio.wait_for(role.wait(), STOP_S)
    except TimeoutError:
        print(f"[headrace] a role did not end within {STOP_S} s", file=sys.stderr)
        role.kill()


def configure() -> None:
    """Set what Headrace reads from its environment, for this process and its roles."""
    os.environ |= {
        "HEADRACE_POSTGRES_URL": os.environ["DATABASE_URL"],
        "HEADRACE_VALKEY_URL": "unix:///unused",  # no room but `jobs` is in use
        "HEADRACE_DATA_FOLDER": str(FOLDER),
        "HEADRACE_JOBS_FLOATS": str(SLOTS),
        "HEADRACE_JOBS_SLOTS_PER_CORE": "1",
    }


if __name__ == "__main__":
    configure()
    asyncio.run(Replica().run())

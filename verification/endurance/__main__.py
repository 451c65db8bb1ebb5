"""Run the demo for hours, break it every minute, and measure what must stay flat.

    python -m verification.endurance --hours 8

The demo's own simulated users send the load and verify every answer; its ledger counts what was
lost or doubled. Each minute this module requests the next fault, as the page `/break` does. Every
SAMPLE_S it measures the demo's processes, PostgreSQL and Valkey. At the end it fits a line through
each series after a warm-up and compares its growth with a bound. The result is written to
`verification/endurance/results.json`; `docs/reference/endurance.md` with its plot is made from it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from bench.machine import read_machine_facts
from examples.bazaar.breaks import descendants
from examples.bazaar.records import BREAKS, Records
from tests.kit.processes import ROOT

from headrace import Headrace
from headrace.engines.sql import compile_query
from headrace.kernel.errors import HeadraceError
from verification.endurance.page import RESULTS, Series, write_page

SAMPLE_S: Final = 10.0
FAULT_S: Final = 60.0
START_S: Final = 300.0
END_S: Final = 120.0
ENGINES: Final = {"postgres", "valkey-server"}
STATE: Final = compile_query(
    "endurance_state",
    "-- Connections, dead rows, log and size of the database.\n"
    "SELECT (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend')"
    " AS connections,"
    " (SELECT coalesce(sum(n_dead_tup), 0)::bigint FROM pg_stat_user_tables) AS dead_rows,"
    " (SELECT coalesce(sum(size), 0)::bigint FROM pg_ls_waldir()) AS log_bytes,"
    " pg_database_size(current_database()) AS database_bytes",
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement; None: the engine did not answer, as it was broken on purpose."""

    at_s: float
    memory_bytes: int
    """Private and shared memory (PSS) of the demo's processes without the engines."""
    engines_bytes: int
    """The same of PostgreSQL and Valkey."""
    descriptors: int
    """Of the demo's processes without the engines."""
    processes: int
    connections: int | None
    dead_rows: int | None
    log_bytes: int | None
    database_bytes: int | None
    valkey_bytes: int | None
    stream_entries: int | None
    disk_bytes: int
    """Of the whole data folder."""


def machine_text() -> str:
    """The machine in words."""
    facts = read_machine_facts()
    return f"{facts['cores']} cores, {facts['cpu']}"


def pss_bytes(pid: int) -> int:
    """Proportional memory of a process; 0 if it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def count_descriptors(pid: int) -> int:
    """Open descriptors of a process; 0 if it has ended."""
    with contextlib.suppress(OSError):
        return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return 0


def is_engine(pid: int) -> bool:
    """Whether a process is one of PostgreSQL or Valkey."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/exe").resolve().name in ENGINES
    return False


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in a folder."""
    found = subprocess.run(["du", "-sb", folder], capture_output=True, text=True, check=False)
    return int(found.stdout.split()[0]) if found.stdout else 0


class Probe:
    """Measures the demo in `folder`."""

    def __init__(self, folder: Path, pid: int) -> None:
        self._folder, self._pid = folder, pid
        self._app = Headrace(folder / "headrace.toml")
        self._began_s = time.monotonic()

    async def sample(self) -> Sample:
        """Measure now."""
        pids = sorted(descendants(self._pid) | {self._pid})
        engines = {pid for pid in pids if is_engine(pid)}
        others = [pid for pid in pids if pid not in engines]
        state, valkey, entries = await self._state(), None, None
        with contextlib.suppress(HeadraceError):
            valkey = int((await self._app.engines.valkey.command("INFO", "memory"))["used_memory"])
            entries = await self._stream_entries()
        return Sample(
            at_s=round(time.monotonic() - self._began_s, 1),
            memory_bytes=sum(map(pss_bytes, others)),
            engines_bytes=sum(map(pss_bytes, engines)),
            descriptors=sum(map(count_descriptors, others)),
            processes=len(pids),
            **state,
            valkey_bytes=valkey,
            stream_entries=entries,
            disk_bytes=await asyncio.to_thread(folder_bytes, self._folder),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._app.close()

    async def _state(self) -> dict[str, int | None]:
        names = ("connections", "dead_rows", "log_bytes", "database_bytes")
        try:
            row = await self._app.engines.postgres.one(STATE)
        except HeadraceError:
            return dict.fromkeys(names)
        assert row is not None
        return {name: int(row[name]) for name in names}

    async def _stream_entries(self) -> int:
        """Entries of all streams: pending hits and changes."""
        found, cursor = 0, 0
        while True:
            cursor, keys = await self._app.engines.valkey.command(
                "SCAN", cursor, "COUNT", 5000, "TYPE", "stream"
            )
            for key in keys:
                found += await self._app.engines.valkey.command("XLEN", key)
            if not cursor:
                return found


@contextlib.contextmanager
def running_demo(folder: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """The demo, with its output in `folder`.out; SIGINT ends it."""
    log = folder.with_suffix(".out")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        process = subprocess.Popen(
            [
                *(sys.executable, "-u", "-m", "examples.bazaar.demo"),
                *("--folder", str(folder), "--port", str(port)),
            ],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            deadline_s = time.monotonic() + START_S
            while "break it  " not in log.read_text():
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise SystemExit(f"the demo did not start: see {log}")
                time.sleep(0.5)
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


async def endure(
    folder: Path, pid: int, *, hours: float
) -> tuple[list[Sample], list[dict[str, Any]]]:
    """Break the demo every FAULT_S and sample it. Return the samples and the faults."""
    probe, records = Probe(folder, pid), Records(folder / "bazaar.sqlite")
    kinds = cycle(BREAKS)
    began_s = time.monotonic()
    next_fault_s = FAULT_S
    samples: list[Sample] = []
    try:
        while (now_s := time.monotonic() - began_s) < hours * 3600:
            if now_s >= next_fault_s:
                records.ask_break(next(kinds))
                next_fault_s += FAULT_S
            samples.append(await probe.sample())
            await asyncio.sleep(max(0.0, SAMPLE_S * len(samples) - (time.monotonic() - began_s)))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted: what was measured is written", file=sys.stderr)
    finally:
        await probe.close()
    faults = [asdict(one) for one in reversed(records.breaks(100_000))]
    return samples, faults


def main() -> int:
    """Run it; return 1 if something grew, was lost or was answered wrongly."""
    parser = argparse.ArgumentParser(prog="python -m verification.endurance", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--hours", type=float, default=8.0, help="how long (default 8)")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "endurance" / "demo-data")
    parser.add_argument("--port", type=int, default=9400, help="first of three ports")
    given = parser.parse_args()
    # A background job of a shell ignores SIGINT; asyncio turns it into the end of the run.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    folder = given.folder.resolve()
    with running_demo(folder, given.port) as process:
        samples, faults = asyncio.run(endure(folder, process.pid, hours=given.hours))
    summary = folder.with_suffix(".out").read_text().rpartition("\nSummary\n")[2].splitlines()
    series = Series.of([asdict(sample) for sample in samples])
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine_text(),
        "command": f"python -m verification.endurance --hours {given.hours:g}",
        "hours": round(samples[-1].at_s / 3600, 3) if samples else 0.0,
        "samples": [asdict(sample) for sample in samples],
        "faults": faults,
        "summary": [line.strip() for line in summary if line.strip()],
        "exit_code": process.returncode,
    }
    RESULTS.write_text(json.dumps(result, separators=(",", ":")) + "\n")
    write_page(result)
    grown = [one.text for one in series if one.is_over]
    print(*(one.text for one in series), *summary, sep="\n")
    print("what grew beyond its bound:", *(grown or ["nothing"]), sep="\n  ")
    return 1 if grown or process.returncode else 0


if __name__ == "__main__":
    sys.exit(main())

"""The cells of the harness' sweep (phases B and C of `scripts/run_full_sweep.sh`), and their runs.

A record holds what the harness wrote: its exit code, lines of its log, and figures of its
summary.json. Nothing is measured here but the load of the machine.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.machine import now_text
from bench.outside.checkout import Checkout

SHORT_RATE: Final = 0.1
"""A short run has this share of the offered jobs per second."""
SAMPLE_S, SHORT_SAMPLE_S = 5, 1
START_AND_END_S = 240
"""On top of the phases; a run that takes longer is killed, as the sweep does after 15 minutes."""
FIGURES = (
    "median_throughput_per_s",
    "median_enqueue_rate_per_s",
    "median_claim_p99_ms",
    "median_queue_depth",
    "peak_dead_tup",
    "autovacuum_count_delta",
    "jobs_enqueued",
    "jobs_completed",
    "jobs_lost",
    "chaos_recovery_time_s",
    "baseline_completion_rate_median",
)
RUN_ID = re.compile(r"^\[harness\] run_id = (\S+)$", re.MULTILINE)
EXITED = re.compile(r"replica \d+ stop_all: exited in ([\d.]+)s")
ESCALATED = re.compile(r"replica \d+ did not exit within shared grace")
RAISED = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Errors\w*|Timeout\w*): .+$", re.MULTILINE)


@dataclass(frozen=True)
class Phase:
    """A phase in the harness' language, with its length in the sweep and in a short run."""

    label: str
    kind: str
    own_s: int
    short_s: int


@dataclass(frozen=True)
class Cell:
    """One cell: what it does, and the load that the sweep offers to each replica."""

    kind: str
    phases: tuple[Phase, ...]
    rate: int
    replicas: int = 1
    workers: int = 32


WARM_UP = Phase("warmup", "warmup", 30, 10)
BASELINE = Phase("baseline", "clean", 60, 10)
RECOVERY = Phase("recovery", "clean", 60, 15)


def _chaos(*stress: Phase, rate: int = 600, replicas: int = 1) -> Cell:
    return Cell("chaos", (WARM_UP, BASELINE, *stress, RECOVERY), rate, replicas)


def _bloat(stress: Phase, *, recovery_s: int, rate: int = 800, workers: int = 32) -> Cell:
    baseline = Phase("clean_1", "clean", 60, 10)
    recovery = Phase("recovery_1", "clean", recovery_s, 15)
    return Cell("bloat", (WARM_UP, baseline, stress, recovery), rate, workers=workers)


CELLS: Final = {
    "crash_recovery": _chaos(
        Phase("kill", "kill-worker(instance=0)", 60, 38),
        Phase("restart", "start-worker(instance=0)", 60, 12),
        rate=300,
        replicas=2,
    ),
    "repeated_kills": _chaos(
        Phase("repeated", "repeated-kill(instance=0,period=20s)", 120, 42), rate=300, replicas=2
    ),
    "postgres_restart": _chaos(Phase("restart", "postgres-restart", 60, 20)),
    "pg_backend_kill": _chaos(Phase("kills", "pg-backend-kill(rate=2)", 60, 20)),
    "pool_exhaustion": _chaos(Phase("exhaustion", "pool-exhaustion(idle_conns=300)", 60, 20)),
    "idle_in_tx": _bloat(Phase("idle_1", "idle-in-tx", 240, 20), recovery_s=180),
    "active_readers": _bloat(Phase("readers_1", "active-readers", 240, 20), recovery_s=120),
    "sustained_high_load": _bloat(Phase("pressure_1", "high-load", 240, 20), recovery_s=120),
    "event_burst": _bloat(
        Phase("pressure_1", "high-load", 300, 20), recovery_s=240, rate=1200, workers=64
    ),
}


def run_cell(checkout: Checkout, name: str, system: str, *, short: bool) -> dict[str, Any]:
    """Run one system through a cell by the harness. Return the record."""
    cell = CELLS[name]
    lengths_s = [phase.short_s if short else phase.own_s for phase in cell.phases]
    rate = round(cell.rate * SHORT_RATE) if short else cell.rate
    command = [
        *(str(checkout.python), str(Path(__file__).parent / "launch.py"), "run"),
        *("--systems", system, "--replicas", str(cell.replicas)),
        *("--producer-rate", str(rate), "--worker-count", str(cell.workers)),
        *("--sample-every", str(SHORT_SAMPLE_S if short else SAMPLE_S)),
    ]
    for phase, length_s in zip(cell.phases, lengths_s, strict=True):
        command += ["--phase", f"{phase.label}={phase.kind}:{length_s}s"]
    record: dict[str, Any] = {
        "cell": name,
        "system": system,
        "short": short,
        "date": now_text(),
        "options": command[3:],
        "load_before": round(os.getloadavg()[0], 1),
    }
    code, log = _run(checkout, command, sum(lengths_s) + START_AND_END_S)
    record |= {"exit_code": code, "load_after": round(os.getloadavg()[0], 1)}
    (checkout.folder / "logs").mkdir(exist_ok=True)
    (checkout.folder / "logs" / f"{name}-{system}.log").write_text(log)
    return record | _read(checkout, system, log)


def _run(checkout: Checkout, command: list[str], timeout_s: float) -> tuple[int, str]:
    """Run the harness; after `timeout_s` kill it and its adapters. Return exit code and log."""
    env = checkout.environment()
    for folder in Path(env["TMPDIR"]).glob("headrace-replica-*"):
        shutil.rmtree(folder)  # the hosts of an earlier cell, whose database is no more
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            command,
            cwd=checkout.harness,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                child.wait(timeout_s)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                shim = checkout.folder / "bin" / "docker"
                subprocess.run([shim, "compose", "down", "-v"], env=env, check=True)
        output.seek(0)
        return child.returncode, output.read()


def _read(checkout: Checkout, system: str, log: str) -> dict[str, Any]:
    """What the harness wrote about this run."""
    errors = RAISED.findall(log)
    found: dict[str, Any] = {
        "stopped_in_s": [float(took_s) for took_s in EXITED.findall(log)],
        "killed_at_stop": len(ESCALATED.findall(log)),
        "error": errors[-1] if errors else None,
        "phases": {},
    }
    run_id = RUN_ID.search(log)
    folder = checkout.harness / "results" / run_id[1] if run_id else None
    if folder is None or not (folder / "summary.json").exists():
        return found
    phases = json.loads((folder / "summary.json").read_text())["systems"][system]["phases"]
    found["phases"] = {
        label: {key: phase[key] for key in FIGURES if key in phase}
        for label, phase in phases.items()
    }
    manifest = json.loads((folder / "manifest.json").read_text())
    found["version"] = manifest["adapters"][system]["version"]
    found["pinned"] = manifest["adapters"][system]["revision"].get("pinned_version")
    return found

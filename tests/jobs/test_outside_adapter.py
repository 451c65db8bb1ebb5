"""Our adapter of the outside harness (`bench/outside/adapter`) on a real engine: its protocol.

The contract is the harness' CONTRIBUTING_ADAPTERS.md: one JSON object per line on standard output,
first the descriptor, then samples; tokens on standard input; SIGTERM ends it with code 0.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
from bench.outside import docker
from bench.outside.cells import CELLS
from tests.kit.processes import ROOT, descendants, is_alive, wait_until

import headrace

ADAPTER = ROOT / "bench" / "outside" / "adapter"
REQUIRED = {
    *("claim_p50_ms", "claim_p95_ms", "claim_p99_ms"),
    *("enqueue_rate", "completion_rate", "queue_depth"),
}
RATE = 20
BATCH = "ENQUEUE 1\n" * 20_000
"""More than a pipe holds: the harness blocks if nobody reads it."""


class Replica:
    """The adapter as the harness starts it."""

    def __init__(self, child: subprocess.Popen, out: Path) -> None:
        self.child = child
        self._out = out

    def wait_until(self, ask: Callable[[], bool], *, what: str) -> None:
        """Wait for a condition. Raises: AssertionError if the replica ends before."""

        def ask_while_it_runs() -> bool:
            assert self.child.poll() is None, f"the replica ended with {self.child.returncode}"
            return ask()

        wait_until(ask_while_it_runs, what=what)

    def records(self, kind: str) -> list[dict]:
        """The lines of a kind so far."""
        whole = self._out.read_text().rpartition("\n")[0].splitlines()
        return [record for record in map(json.loads, whole) if record["kind"] == kind]

    def values(self, metric: str) -> list[float]:
        """The samples of a metric so far."""
        return [each["value"] for each in self.records("adapter") if each["metric"] == metric]


@contextmanager
def replica_on(database_url: str, folder: Path, **env: str):
    """A replica that enqueues 20 jobs per second, with a sample per second."""
    (folder / "tmp").mkdir()
    given = {
        "DATABASE_URL": database_url,
        "TMPDIR": str(folder / "tmp"),
        "PYTHONPATH": str(Path(headrace.__file__).parents[1]),
        "SCENARIO": "long_horizon",
        "PRODUCER_RATE": str(RATE),
        "WORKER_COUNT": "4",
        "SAMPLE_EVERY_S": "1",
        **env,
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    out, err = folder / "out.jsonl", folder / "err.txt"
    with out.open("w") as out_file, err.open("w") as err_file:
        child = subprocess.Popen(
            [sys.executable, "main.py"],
            cwd=ADAPTER,
            env=kept | given,
            stdin=subprocess.PIPE,
            stdout=out_file,
            stderr=err_file,
            text=True,
        )
    try:
        yield Replica(child, out)
        assert child.returncode is not None, "a test ends its replica"
    except AssertionError as error:
        error.add_note(err.read_text()[-5000:])
        raise
    finally:
        family = [child.pid, *descendants(child.pid)]
        child.kill()
        child.wait(10)
        assert child.stdin is not None
        child.stdin.close()
        wait_until(lambda: not any(map(is_alive, family)), what="no process of it is left")


def test_adapter_runs_jobs_and_prints_the_samples_of_the_contract(database_url, tmp_path):
    with replica_on(database_url, tmp_path) as replica:
        replica.wait_until(
            lambda: sum(replica.values("completion_rate")) > 2 * RATE,
            what="jobs of two seconds are counted",
        )
        print(BATCH, file=replica.child.stdin, flush=True)
        replica.child.send_signal(signal.SIGTERM)
        assert replica.child.wait(60) == 0

    [descriptor] = replica.records("descriptor")
    manifest = json.loads((ADAPTER / "adapter.json").read_text())
    assert {key: descriptor[key] for key in manifest if key != "display_name"} == {
        key: value for key, value in manifest.items() if key != "display_name"
    }
    samples = replica.records("adapter")
    assert {sample["metric"] for sample in samples} >= REQUIRED
    for sample in samples:
        assert {"t", "system", "subject_kind", "subject", "value", "window_s"} <= sample.keys()
        assert (sample["system"], sample["instance_id"]) == ("headrace", 0)
    p50, p95, p99 = (replica.values(f"claim_p{share}_ms")[-1] for share in (50, 95, 99))
    assert 0 < p50 <= p95 <= p99


def test_roles_of_a_killed_replica_end_with_it(database_url, tmp_path):
    with replica_on(database_url, tmp_path) as replica:
        replica.wait_until(
            lambda: bool(replica.records("descriptor")), what="the descriptor is printed"
        )
        family = descendants(replica.child.pid)
        assert len(family) >= 3, "an agent, its slots and a scheduler"
        replica.child.kill()
        replica.child.wait(10)
        wait_until(lambda: not any(map(is_alive, family)), what="agent, slots and scheduler end")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--rm", "-i", "--network", "host", "-v", "/h/c:/control", "-e", "RATE=/control/rate"],
            "/h/c/rate",
        ),
        (["--rm", "-e", "RATE=/other/rate"], "/other/rate"),
    ],
)
def test_docker_run_becomes_the_adapter_with_variables_of_the_call(
    words, expected, tmp_path, monkeypatch
):
    settings = tmp_path / "settings.json"
    program = [sys.executable, "-c", "import os; print(os.environ['RATE'], os.environ['OWN'])"]
    image = {"folder": str(tmp_path), "command": program, "env": {"OWN": "own"}}
    settings.write_text(json.dumps({"images": {"some-bench": image}}))
    monkeypatch.setenv(docker.SETTINGS_VARIABLE, str(settings))
    done = subprocess.run(
        [sys.executable, docker.__file__, "run", *words, "some-bench"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == [expected, "own"]


def test_cells_begin_with_a_warm_up_and_end_with_a_steady_phase():
    for cell in CELLS.values():
        assert cell.phases[0].kind == "warmup", "the harness refuses others"
        assert cell.phases[1].kind == cell.phases[-1].kind == "clean"
        labels = [phase.label for phase in cell.phases]
        assert len(set(labels)) == len(labels)

"""The scoreboard of `make torture`: it counts, resumes, fails, and its page fits its records."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.kit.checkers import Finding
from tests.kit.processes import ROOT
from tests.kit.storm.storm import Tally
from verification.torture import __main__ as command
from verification.torture import results
from verification.torture.faults import FAULTS
from verification.torture.results import Cell, Record, load_all, page_of, row_of, seed_ranges
from verification.torture.site import ROOMS, Outcome

CLEAN = Outcome(Tally(10, 8, 1), 0.5)
BROKEN = Outcome(
    Tally(10, 8, 1),
    1.5,
    (
        Finding("lost", 1, ""),
        Finding("shared key", 2, ""),
        Finding("over concurrency", 3, ""),
        Finding("wrong bytes", 4, ""),
        Finding("not recovered", 5, ""),
    ),
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


def test_findings_count_in_their_columns():
    assert row_of(7, BROKEN) == [7, 10, 8, 1, 1, 1, 2, 1, 0, 1.5]
    assert row_of(8, CLEAN) == [8, 10, 8, 1, 0, 0, 0, 0, 0, 0.5]


def test_runs_accumulate_and_another_version_of_the_product_replaces_them(folder, monkeypatch):
    Record("kill-api").add(1, {"jobs": CLEAN, "feed": CLEAN})
    record = Record("kill-api")
    record.add(2, {"jobs": BROKEN})
    assert (record.runs(["jobs"]), record.runs(["jobs", "feed"])) == (2, 1)
    assert record.is_clean(["feed"])
    assert not Record("kill-api").is_clean(["jobs"])
    monkeypatch.setattr(results, "code", lambda: "another")
    assert Record("kill-api").runs(["jobs"]) == 0


def test_failures_stay_on_the_page_until_their_cause_is_known(folder, monkeypatch):
    record = Record("kill-api")
    record.add_trips({"jobs": 0.5, "feed": 0.5})
    record.add(1, {"jobs": BROKEN, "feed": CLEAN})
    Record("kill-api").add_failure(None, "the site was ended after 9 s")
    monkeypatch.setattr(results, "code", lambda: "another")
    later = Record("kill-api")
    later.add_trips({"jobs": 0.5, "feed": 0.5})
    later.add(2, {"jobs": CLEAN, "feed": CLEAN})
    page = page_of(load_all())
    assert "| kill-api | 1 | jobs: lost, not recovered, over concurrency, shared key," in page
    assert f"| kill-api | site of {results.today()} | the site was ended after 9 s" in page
    monkeypatch.setattr(results, "FINDINGS", "| kill-api | 1 | found | fixed |")
    assert "shared key" not in page_of(load_all())


def test_a_site_that_hangs_is_ended_and_reported(folder, monkeypatch):
    monkeypatch.setattr(command, "SITE_OVER_S", 0.1)
    monkeypatch.setattr(sys, "argv", ["torture", "--fault", "kill-api", "--room", "feed"])
    words = command.read_words()
    assert not command.run_site_process("kill-api", words, site_s=0.0)
    [(_, seed, text)] = Record("kill-api").failures
    assert (seed, text) == (None, "the site was ended after 0 s")


def test_a_cell_shows_sums_percentiles_and_ranges_of_seeds():
    rows = [row_of(seed, CLEAN) for seed in (5, 6, 9)] + [row_of(10, BROKEN)]
    shown = Cell.of("kill-api", "jobs", rows, [0.25]).row()
    assert shown == (
        "| kill-api | jobs | 4 | 40 | 32 | 4 | 1 | 1 | 2 | 1 | 0.25 | 0.50 | 1.50 | 5..6, 9..10 |"
    )
    assert seed_ranges([3]) == "3"


def test_each_fault_meets_a_room_or_gives_the_reason():
    for name, fault in FAULTS.items():
        assert set(fault.without) <= set(ROOMS), name
        assert all(fault.without.values()), name
        assert fault.rooms, name


def test_the_page_shows_the_records():
    assert results.PAGE.read_text() == page_of(load_all()), "run `make torture` or write_page()"


def torture(*words, **env):
    """Run the command; return its exit code and output."""
    ended = subprocess.run(
        [sys.executable, "-m", "verification.torture", "--no-record", *words],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.soak
@pytest.mark.timeout(1000)
def test_two_faults_break_no_promise():
    code, out = torture("--fault", "kill-postgres", "--fault", "network-reset", "--runs", "1")
    assert code == 0, out


@pytest.mark.soak
@pytest.mark.timeout(1000)
def test_a_planted_fault_is_reported():
    """The test application acknowledges jobs that it did not do."""
    words = ("--fault", "kill-worker", "--room", "jobs", "--runs", "1")
    code, out = torture(*words, PLANTED_FAULT="skip")
    assert code == 1, out
    assert "of noted: no handler finished it" in out

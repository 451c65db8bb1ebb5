"""The benchmarks' bookkeeping: what a result file holds, and that a goal which is missed is told.

The figures themselves are made by `make bench`, which is no test: machines differ.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from bench import harness
from bench.children import BenchFault
from bench.figures import Goal, Runs, figure, rounded
from bench.jobs_lanes import Shape, judge
from bench.report import bars, broken, remarks, table

ROOT = Path(__file__).parents[2]
ROOMS = {"jobs", "fetch", "views", "feed", "media"}
RESULTS = sorted((ROOT / "bench" / "results").glob("*.json"))
HEAD_KEYS = {"room", "machine", "commit", "date", "versions", "figures"}
FIGURE_KEYS = {
    "name",
    "unit",
    "size",
    "ours",
    "peers",
    "limit",
    "ratio",
    "goal",
    "holds",
    "runs",
    "spread",
    "not_measured",
}
OWN_KEYS = {"question", "commit", "date"}
"""Of a figure whose questions may be measured one at a time."""


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_a_result_file_says_where_it_comes_from_and_has_the_agreed_fields(path):
    document = json.loads(path.read_text())
    # The simulated day runs no server.
    needed = HEAD_KEYS if path.stem in ROOMS else HEAD_KEYS - {"versions"}
    assert document.keys() >= needed
    assert document["room"] == path.stem
    assert {"cores", "cpu", "memory_gib", "kernel", "python"} <= document["machine"].keys()
    rows = [(row["name"], row["size"]) for row in document["figures"]]
    assert len(rows) == len(set(rows)), "one entry a figure and size"
    for row in document["figures"]:
        assert row.keys() - OWN_KEYS == FIGURE_KEYS
        assert path.stem not in ROOMS or row["question"]
        assert (row["holds"] is None) == (row["goal"] is None), row["name"]
    assert path.with_suffix(".svg").exists(), "bars and figures are written together"


@pytest.mark.parametrize(
    ("goal", "ours", "holds"),
    [
        (Goal(at_least=100), 100, True),
        (Goal(at_least=100), 99, False),
        (Goal(at_most=3), 3.1, False),
        (Goal(at_least=1, times={"peer": 5}), 49, False),
        (Goal(at_least=1, times={"peer": 5}), 50, True),
    ],
)
def test_a_goal_is_judged_by_the_median_and_by_the_peers_of_the_same_run(goal, ours, holds):
    runs = Runs((ours - 90, ours, ours + 1_000))
    row = figure("drain", "jobs/s", "10", ours=runs, peers={"peer": Runs((10,))}, goal=goal)
    assert row.holds is holds
    assert (row in broken([row])) is not holds
    assert row.spread["headrace"] == [rounded(ours - 90), rounded(ours + 1_000)]


def test_a_goal_that_was_not_measured_does_not_hold_and_says_why():
    row = figure("slots", "MiB", "", ours=None, goal=Goal(at_most=8), not_measured=["no slots"])
    assert row.holds is False
    assert remarks([row]) == ["slots, : no slots"]


def test_a_peer_without_a_figure_decides_nothing_and_is_named():
    goal = Goal(at_least=1, times={"peer": 5})
    row = figure("drain", "jobs/s", "10", ours=Runs((2,)), goal=goal)
    assert row.holds is True
    assert "peer" in row.not_measured[0]


def test_the_bars_and_the_table_show_every_system():
    row = figure("drain <x>", "jobs/s", "10", ours=Runs((50,)), peers={"a&b": Runs((10,))})
    head = {"commit": "abc", "date": "now", "machine": {"cores": 2, "cpu": "x"}}
    texts = [e.text for e in ET.fromstring(bars("jobs", head, [row])).iter() if e.text]
    assert "a&b" in texts
    assert "headrace" in texts
    assert "a&b 10 (5 x)" in table([row])


def test_a_window_with_one_start_too_many_is_seen():
    shape = Shape(lanes=2, window_s=10, windows=1)
    fair = [(0, int(at * 1e9)) for at in [1.0] * 10 + [11.1] * 10]
    early = [(1, int(at * 1e9)) for at in [1.0] * 10 + [10.9]]
    assert judge(fair, shape, ended_s=13).over == 0
    judged = judge(sorted(fair + early, key=lambda row: row[1]), shape, ended_s=13)
    assert judged.over == 1
    assert judged.least_s == pytest.approx(9.9)


def test_a_lane_that_gets_nothing_lowers_the_share():
    shape = Shape(lanes=2, window_s=10, windows=1)
    starts = [(0, int(at * 1e9)) for at in [1.0] * 10 + [11.0]]
    starts += [(1, 1_000_000_000)] * 10
    assert judge(starts, shape, ended_s=21).by_spacing < 0.7


def test_peers_are_pinned():
    lines = (ROOT / "bench" / "requirements.txt").read_text().splitlines()
    assert all("==" in line for line in lines if line and not line.startswith("#"))


async def test_a_question_ends_in_time_though_a_library_swallows_its_cancellation(monkeypatch):
    monkeypatch.setattr(harness, "CANCEL_EVERY_S", 0.01)
    swallowed = []

    async def measure():
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if len(swallowed) == 3:
                    raise
                swallowed.append(1)

    with pytest.raises(BenchFault, match="not measured in"):
        await harness.bounded(measure(), 0.01)
    assert len(swallowed) == 3

"""The judges of the benchmarks: a missed goal, an exceeded limit or a wrong page is detected.

`make bench` measures the figures themselves; that is no test, because machines differ.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import pytest
from bench import __main__ as bench_command
from bench import harness, jobs_day, jobs_lanes, report
from bench.children import BenchFault, family_of
from bench.feed_push import pays_from, plot
from bench.feed_stage import (
    FIRST_AUTHOR,
    FOLLOWS,
    PER_PAGE,
    make_world,
    stage_follows,
    stage_posts,
)
from bench.fetch_broken import live, read_rule
from bench.fetch_limits import most_in_window
from bench.fetch_routing import Shares, judge_first_requests
from bench.figures import UNEXPLAINED, Goal, Runs, figure, rounded
from bench.media_objects import content, make_tracks, native_program
from bench.media_ranges import stages_of
from bench.media_store import make_full_disk
from bench.origins.log import Request, judge, read_log
from bench.origins.photos import jpeg
from bench.origins.plan import HostPlan, seed_mix
from bench.report import bars, broken, remarks, table

from headrace.feed import store
from headrace.feed.model import ChangeKind
from headrace.fetch.images import inspect_image
from headrace.media.cache.layout import (
    ENTRY,
    HEAD_BYTES,
    SET_BYTES,
    TAGS_BYTES,
    WAYS,
    entry_sum,
    read_head,
    read_superblock,
)

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
    "why",
    "runs",
    "spread",
    "not_measured",
}
OWN_KEYS = {"question", "commit", "date"}
"""Of a figure whose questions may be measured one at a time."""


def test_the_simulated_day_runs_on_the_hosts_of_a_plan(tmp_path, capsys):
    """A few minutes of it; its goals are for whole days."""
    words = ["--hours", "0.2", "--hosts", "17", "--slots", "3457", "--results", str(tmp_path)]
    jobs_day.main(words)
    made = json.loads((tmp_path / "jobs_day.json").read_text())["day"]
    assert made["sizes"] == {"hosts": 17, "slots": 3457}
    assert 0 < made["busy_slots"]["mean"] <= made["busy_slots"]["peak"] <= 3457
    assert "goal" in capsys.readouterr().out


def test_the_engines_are_no_cost_of_our_own_processes():
    with ExitStack() as ends:
        engine, ours = (ends.enter_context(subprocess.Popen(["sleep", "60"])) for _ in range(2))
        for child in (engine, ours):
            ends.callback(child.kill)
        family = family_of(os.getpid(), without=[engine.pid])
        assert ours.pid in family
        assert engine.pid not in family


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_a_result_file_names_its_origin_and_has_the_agreed_fields(path):
    document = json.loads(path.read_text())
    # The simulated day runs no server.
    assert document.keys() >= (HEAD_KEYS if path.stem in ROOMS else HEAD_KEYS - {"versions"})
    assert document["room"] == path.stem
    assert {"cores", "cpu", "memory_gib", "kernel", "python"} <= document["machine"].keys()
    rows = [(row["name"], row["size"]) for row in document["figures"]]
    assert len(rows) == len(set(rows)), "one entry per figure and size"
    for row in document["figures"]:
        assert row.keys() - OWN_KEYS == FIGURE_KEYS
        assert path.stem not in ROOMS or row["question"]
        assert (row["holds"] is None) == (row["goal"] is None), row["name"]
        assert bool(row["why"]) == (row["holds"] is False), f"{row['name']}: a miss has its cause"
    assert path.with_suffix(".svg").exists()


def test_a_goal_is_judged_by_the_median_and_the_peers_of_the_same_run():
    times = {"peer": 5}
    for goal, ours, holds in (
        (Goal(at_least=100), 100, True),
        (Goal(at_least=100), 99, False),
        (Goal(at_most=3), 3.1, False),
        (Goal(at_least=1, times=times), 49, False),
        (Goal(at_least=1, times=times), 50, True),
    ):
        runs, peers = Runs((ours - 90, ours, ours + 1_000)), {"peer": Runs((10,))}
        row = figure("drain", "jobs/s", "10", ours=runs, peers=peers, goal=goal, why="one core")
        assert (row.holds, row in broken([row])) == (holds, not holds)
        assert ("**no**: one core" in table([row])) == (not holds)
        assert row.spread["headrace"] == [rounded(ours - 90), rounded(ours + 1_000)]
    missing = figure("slots", "MiB", "", ours=None, goal=Goal(at_most=8), not_measured=["no slots"])
    assert (missing.holds, missing.why) == (False, "not measured")
    assert remarks([missing]) == ["slots, : no slots"]
    goal = Goal(at_least=1, times=times)
    row = figure("drain", "jobs/s", "10", ours=Runs((2,)), goal=goal)
    assert (row.holds, "peer" in row.not_measured[0]) == (True, True)
    row = figure("drain", "jobs/s", "10", ours=Runs((2,)), goal=Goal(at_least=3))
    assert row.why == UNEXPLAINED


def test_a_quick_run_leaves_the_record_as_it_is(monkeypatch, tmp_path):
    monkeypatch.setattr(report, "RESULTS", tmp_path / "record")
    head = {"command": "make bench", "commit": "abc", "date": "now", "notes": []}
    head |= {"machine": {"cores": 2, "cpu": "x", "memory_gib": 1}}

    def write(folder, **rows):
        figures = [figure(name, "s", "", ours=Runs((value,))) for name, value in rows.items()]
        for row in figures:
            row.question = row.name
        path = report.write_results("jobs", head, figures, ["drain", "wake"], folder=folder)
        return {row["name"]: row["ours"] for row in json.loads(path.read_text())["figures"]}

    assert write(report.RESULTS, drain=1, wake=2) == {"drain": 1, "wake": 2}
    assert write(tmp_path / "quick", wake=9) == {"wake": 9}
    assert write(report.RESULTS, drain=3) == {"drain": 3, "wake": 2}
    quick, full = (harness.Run(None, tmp_path, quick) for quick in (True, False))
    assert (quick.results, full.results) == (harness.QUICK_RESULTS, harness.RESULTS)
    assert full.results != quick.results


async def test_a_quick_run_that_is_out_of_time_names_what_it_leaves_out(tmp_path, capsys):
    began_s = time.monotonic() - harness.QUICK_S
    run = harness.Run(None, tmp_path, quick=True, began_s=began_s)
    [row] = await bench_command.rows_of(run, "media", "ranges")
    assert (row.ours, row.holds) == (None, None)
    assert "left out" in row.not_measured[0]
    assert "make bench ROOM=media ONLY=ranges QUICK=1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["medai"], "'media'"),
        (["media", "--only", "range"], "ranges, tls, fast, crowd"),
        (["--only", "ranges"], "needs a room: jobs"),
    ],
)
def test_an_unknown_room_or_row_is_answered_with_the_valid_names(words, text, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", *words])
    with pytest.raises(SystemExit) as ended:
        bench_command.main()
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def test_bars_plot_and_table_contain_every_system():
    row = figure("drain <x>", "jobs/s", "10", ours=Runs((50,)), peers={"a&b": Runs((10,))})
    head = {"commit": "abc", "date": "now", "machine": {"cores": 2, "cpu": "x"}}
    texts = [e.text for e in ET.fromstring(bars("jobs", head, [row])).iter() if e.text]
    assert {"a&b", "headrace"} <= set(texts)
    assert "a&b 10 (5 x)" in table([row])
    costs = {"write into an inbox": 3.0, "read of an inbox": 5.0}
    costs |= {f"pull, {follows:,} follows": 300.0 for follows in FOLLOWS}
    lines = [e for e in ET.fromstring(plot(costs)).iter() if e.tag.endswith("polyline")]
    assert [len(line.get("points").split()) for line in lines] == [len(FOLLOWS)] * 3
    assert pays_from(100, 1.0, write=3.0, read=5.0, pull=305.0) == pytest.approx(1.0)
    assert pays_from(100, 1.0, write=3.0, read=5.0, pull=1.0) > 1_000


def test_a_window_with_one_start_too_many_is_detected(tmp_path):
    shape = jobs_lanes.Shape(lanes=2, window_s=10, windows=1)
    fair = [(0, int(at * 1e9)) for at in [1.0] * 10 + [11.1] * 10]
    early = [(1, int(at * 1e9)) for at in [1.0] * 10 + [10.9]]
    assert jobs_lanes.judge(fair, shape, ended_s=13).over == 0
    found = jobs_lanes.judge(sorted(fair + early, key=lambda row: row[1]), shape, ended_s=13)
    assert (found.over, found.least_s) == (1, pytest.approx(9.9))
    idle = [*fair[:10], (0, 11_000_000_000), *[(1, 1_000_000_000)] * 10]
    assert jobs_lanes.judge(idle, shape, ended_s=21).by_spacing < 0.7
    span = {"starts_max": 3, "window_s": 1.0, "from_s": 0.0, "until_s": 2.0}
    kept = [0.1, 0.2, 0.3]
    assert judge({"a": [*kept, 1.1]}, **span).over == 0
    found = judge({"a": [*kept, 1.09]}, **span)
    assert (found.over, found.checked, found.least_s) == (1, 1, pytest.approx(0.99))
    assert [most_in_window([*kept, last], 1.0) for last in (1.1, 1.09)] == [3, 4]
    whole = [0.1, 0.2, 0.3, 1.1, 1.2, 1.3]
    shares = [judge(log, **span).share for log in ({"a": whole}, {"a": whole, "b": []}, {})]
    assert shares == [1, 0.5, 0]
    log = tmp_path / "access.log"
    assert read_log(log) == []
    log.write_text("20 b.test /2 200 5\n10 a.test /1 -1 7\n30 a.te")
    assert [request.path for request in read_log(log)] == ["/1", "/2"], "without the partial line"


def test_first_requests_and_simulated_hosts_follow_their_plan():
    plans = {"slow.test": HostPlan(low_s=0.4, high_s=0.5), "fast.test": HostPlan()}
    wait_s = plans["slow.test"].answer("slow.test", "/1", 0)[1]

    def request(status, held_s, host="slow.test", at=1):
        return Request(at, host, "/1", status, round(held_s * 1e6))

    given_up, answered = request(0, 0.1), request(200, wait_s, at=2)
    for requests, shares in (
        ([given_up, answered], Shares(1, 1)),
        ([answered, given_up], Shares(1, 0)),
        ([request(200, 0.0, "fast.test")], Shares(0, 0)),
    ):
        assert judge_first_requests(requests, plans) == shares
    mix = seed_mix(100, scale=0.1).values()
    for low_s, high_s in ((0, 0.1), (0.1, 0.5)):
        assert sum(low_s < plan.high_s <= high_s for plan in mix) == 40
    assert all(0.6 <= plan.failing <= 0.8 and plan.low_s <= plan.high_s < 3.0 for plan in mix)
    statuses = [HostPlan(failing=0.7).answer("a.test", f"/{n}", 0)[0] for n in range(1_000)]
    assert 0.65 < sum(status != 200 for status in statuses) / 1_000 < 0.75
    for size_bytes in (4_000, 150_000):
        bodies = [jpeg(f"photo {n}", n % 2, size_bytes) for n in range(4)]
        assert len(set(bodies)) == 4
        assert all(inspect_image(body).format == "jpg" for body in bodies)
        assert all(0.8 < len(body) / size_bytes < 1.25 for body in bodies)


async def test_a_simulated_week_saves_requests_and_detects_repairs(postgres):
    rule = await read_rule(postgres)
    for gap_s in (3_600.0, 86_400.0):
        week = live(rule, 200, gap_s, 1)
        assert week.cut > 40
        assert 0 < week.latest_s <= 86_400


@pytest.mark.slow
async def test_the_brute_force_page_and_the_staged_rows_are_those_of_the_product(
    database_url, postgres
):
    for shape in ("zipf", "uniform"):
        world = make_world(shape, posts=3_000, viewers=1)
        assert {len(world.follows[one[0]]) for one in world.viewers.values()} == set(FOLLOWS)
        names = [each.decode() for each in world.ids.tolist()]
        rows = list(zip(world.scores.tolist(), names, world.author.tolist(), strict=True))
        for [viewer] in world.viewers.values():
            followed = set(world.follows[viewer].tolist())
            mine = sorted(((s, i) for s, i, author in rows if author in followed), reverse=True)
            for first in (0, 5):
                assert world.page_of(viewer, first) == [i for _, i in mine[first:][:PER_PAGE]]
    cell = SimpleNamespace(url=database_url)
    await stage_follows(cell, world)
    await stage_posts(cell, world)
    for viewer in world.follows:
        found = await store.page(
            postgres, viewer, before=None, after=None, kinds=None, rows_max=PER_PAGE
        )
        assert [row[1] for row in found] == world.page_of(viewer)
    [post] = await store.find_posts(postgres, world.ids_of([0]))
    assert (post.author, post.score) == (world.author[0] + FIRST_AUTHOR, world.scores[0])
    authors = await store.entities_after(postgres, ChangeKind.POSTS, after=0, rows_max=50_000)
    assert authors == sorted(set((world.author + FIRST_AUTHOR).tolist()))


def test_bytes_of_a_track_follow_from_its_number_and_place(tmp_path):
    """The generator `native/media_load.c` computes the same words."""

    def word(number: int, index: int) -> int:
        x = ((number << 40) ^ index) * 0x9E3779B97F4A7C15 & 2**64 - 1
        x = (x ^ x >> 29) * 0xBF58476D1CE4E5B9 & 2**64 - 1
        return x ^ x >> 32

    data = content(7, 1003)
    assert len(data) == 1003
    assert all(data[at] == word(7, at // 8) >> 8 * (at % 8) & 255 for at in (0, 7, 8, 500, 1002))
    assert content(8, 100) != content(7, 100)
    [track, _] = make_tracks(tmp_path, 2, size_bytes=1003, first=7)
    assert (tmp_path / track.key).read_bytes() == data
    if shutil.which("cc"):
        assert all(native_program(name, tmp_path).exists() for name in ("media_load", "media_bare"))


def test_a_full_disk_has_a_valid_entry_in_every_frame(tmp_path):
    folder, frames = tmp_path / "disk", 4 * WAYS
    make_full_disk(folder, frames)
    superblock = read_superblock((folder / "blocks").read_bytes()[:4096])
    index = (folder / "index").read_bytes()
    assert superblock.frames == frames
    assert read_head(index, superblock) is False
    for frame in range(frames):
        start = HEAD_BYTES + frame // WAYS * SET_BYTES
        tag_at = start + 8 * (frame % WAYS)
        tag = int.from_bytes(index[tag_at : tag_at + 8], "little")
        *fields, checksum = ENTRY.unpack_from(
            index, start + TAGS_BYTES + ENTRY.size * (frame % WAYS)
        )
        assert tag
        assert checksum == entry_sum(tag, tuple(fields), frame=frame, superblock=superblock)


def test_stages_are_means_over_all_files(tmp_path):
    text = (
        'media_stage_seconds_sum{stage="parse"} 0.5\n'
        'media_stage_seconds_count{stage="parse"} 1000.0\n'
        'media_stage_seconds_sum{stage="send"} 0.0\nmedia_stage_seconds_count{stage="send"} 0.0\n'
    )
    for name, found in (
        ("media-1", text),
        ("media-2", text.replace("0.5", "1.5")),
        ("api-3", text),
    ):
        (tmp_path / f"{name}.prom").write_text(found)
    assert stages_of(tmp_path) == {"stage parse": pytest.approx(1000)}


def test_peers_are_pinned():
    lines = (ROOT / "bench" / "requirements.txt").read_text().splitlines()
    assert all("==" in line for line in lines if line and not line.startswith("#"))


async def test_a_question_ends_in_time_if_a_library_swallows_its_cancellation(monkeypatch):
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

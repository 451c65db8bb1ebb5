"""The index is right after a writer's death between the engines or a loss of Valkey's data."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from own_valkey import OwnValkey
from tests.kit.processes import HeadraceProcess
from tests.kit.waiting import wait_true
from written_feed import AUTHORS, VIEWERS, Writer, open_feed

from headrace.engines.sql import compile_query
from headrace.feed.worker import Sweeper

PROGRAM = Path(__file__).with_name("written_feed.py")


@pytest.mark.slow
async def test_writers_killed_between_truth_and_index_leave_them_equal(
    running_engines, database_url, tmp_path
):
    await _killed(running_engines, database_url, tmp_path, kills=12)


@pytest.mark.soak
async def test_writers_killed_many_times_leave_truth_and_index_equal(
    running_engines, database_url, tmp_path
):
    await _killed(running_engines, database_url, tmp_path, kills=100)


async def _killed(running_engines, database_url, tmp_path, *, kills):
    prefix, chance = f"test-{secrets.token_hex(4)}", random.Random(5)
    valkey_url = running_engines.endpoints.valkey_url
    feed, engines = open_feed(database_url, valkey_url, prefix, tmp_path)
    await feed.index.ready()
    env = {
        "HEADRACE_POSTGRES_URL": database_url,
        "HEADRACE_VALKEY_URL": valkey_url,
        "HEADRACE_VALKEY_PREFIX": prefix,
        "HEADRACE_FEED_SHARDS": "2",
        "HEADRACE_FEED_SWEEP_EVERY": "100ms",
    }
    files = [tmp_path / f"told-{number}" for number in range(kills)]
    flusher = HeadraceProcess(["flusher"], folder=tmp_path / "f", env=env)
    try:
        running = []
        for number, file in enumerate(files):
            words = [database_url, valkey_url, prefix, str(file), str(number)]
            crash = os.environ | {"HEADRACE_CRASH_AT": f"feed.committed:{chance.randint(5, 60)}"}
            running.append(
                subprocess.Popen([sys.executable, PROGRAM, *words], env=crash, cwd=tmp_path)
            )
            if len(running) == 2:
                assert await _ended(running.pop(0)) == -signal.SIGKILL
        assert await _ended(running.pop()) == -signal.SIGKILL
        await wait_true(lambda: _is_swept(engines.postgres), what="all is swept")
        verified = await feed.index.verify()
        assert verified.is_equal, verified.differences
        assert verified.posts == await _require_told(engines.postgres, files)
    finally:
        flusher.kill_all()
        await engines.close()


@pytest.mark.slow
async def test_a_valkey_emptied_under_load_is_filled_anew_while_pages_go_on(database_url, tmp_path):
    """Emptied, killed and cut: every page is told.

    After each the index is the truth again, and pages come from it.
    """
    server = OwnValkey(tmp_path / "v", tmp_path / "link")
    server.start()
    server.lead()
    feed, engines = open_feed(database_url, server.url, "test", tmp_path)
    sweeper, stop = Sweeper(feed), asyncio.Event()
    writers = [Writer(feed, seed, lambda _line: None) for seed in range(3)]
    for writer in writers:
        for _ in range(60):
            await writer.write()
    pages = [0]
    load = [asyncio.create_task(_write_until(writer, stop)) for writer in writers]
    load += [asyncio.create_task(_read_until(feed, stop, pages)) for _ in range(2)]
    sweeping = asyncio.create_task(sweeper.run(stop))
    try:
        for harm in (_empty, _kill, _cut, _empty):
            before = pages[0]
            await asyncio.to_thread(harm, server)
            feed.index.require_ready()
            await wait_true(lambda: _is_fast(feed), what="pages come from the index")
            await wait_true(lambda b=before: _is(pages[0] > b + 20), what="pages are told")
    finally:
        stop.set()
        await asyncio.gather(*load, sweeping)
    await sweeper.run_once(older_s=0)
    verified = await feed.index.verify()
    assert verified.is_equal, verified.differences
    await engines.close()
    server.end()


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["away", "tail"])
async def test_a_returning_valkey_shows_nothing_that_was_undone(database_url, tmp_path, harm):
    """Killed.

    What was undone meanwhile, or in the end of its file that is lost, is on no page of anybody,
    ever.

    No flusher runs: who reads brings it back.

    """
    server = OwnValkey(tmp_path / "v", tmp_path / "link")
    server.start()
    server.lead()
    feed, engines = open_feed(database_url, server.url, "test", tmp_path)
    others = [open_feed(database_url, server.url, "test", tmp_path) for _ in range(2)]
    await _fill(feed)
    assert [await _shown(feed, viewer) for viewer in (1, 2, 3, 4)] == [{"a1", "a2", "b1", "c1"}] * 4
    assert await _shown(others[0][0], 1) == {"a1", "a2", "b1", "c1"}
    kept = server.newest_file().stat().st_size
    if harm == "away":
        await asyncio.to_thread(server.kill)
    await _undo(feed)
    if harm == "tail":
        assert server.newest_file().stat().st_size > kept
        await asyncio.to_thread(server.kill)
        with server.newest_file().open("r+b") as opened:
            opened.truncate(kept)
    await asyncio.to_thread(server.start)
    readers = [feed, others[0][0]]
    deadline_s, slow = asyncio.get_running_loop().time() + 20, True
    while slow:
        assert asyncio.get_running_loop().time() < deadline_s, "pages do not come from the index"
        slow = False
        for reader in [*readers, others[1][0]]:
            for viewer, expected in UNDONE.items():
                page = await reader.page(viewer)
                assert {post.id for post in page.posts} == expected
                slow = slow or page.is_slow
    verified = await feed.index.verify()
    assert verified.is_equal, verified.differences
    for opened in (engines, *(other[1] for other in others)):
        await opened.close()
    server.end()


UNDONE = {1: {"a2", "b1", "c1"}, 2: {"b1", "c1"}, 3: {"a2", "c1"}, 4: set()}
"""What each viewer is to see in the end: one deletion for all.

An unfollow, a block, the end of all follows.
"""


async def _fill(feed):
    for author, posts in ((11, ("a1", "a2")), (12, ("b1",)), (13, ("c1",))):
        for post in posts:
            await feed.post(author, post)
    for viewer in UNDONE:
        await feed.follow(viewer, [11, 12, 13])


async def _undo(feed):
    assert await feed.delete("a1") == 1
    assert await feed.unfollow(2, 11) == 1
    assert await feed.follows.block(12, 3) == 1
    assert await feed.follows.unfollow_all(4) == 3


async def _shown(feed, viewer):
    page = await feed.page(viewer)
    assert not page.is_slow
    return {post.id for post in page.posts}


def _empty(server):
    assert server.ask("FLUSHALL") == b"+OK\r\n"


def _kill(server):
    server.kill()
    server.start()


def _cut(server):
    """As a power cut: the end of the append-only file is gone."""
    server.kill()
    file = server.newest_file()
    with file.open("r+b") as opened:
        opened.truncate(max(0, file.stat().st_size - 3_000))
    server.start()


async def _write_until(writer, stop):
    while not stop.is_set():
        await writer.write()
        await asyncio.sleep(0)


async def _read_until(feed, stop, pages):
    chance = random.Random(1)
    while not stop.is_set():
        page = await feed.page(chance.choice(VIEWERS), 20)
        assert [post.score for post in page.posts] == sorted(
            [p.score for p in page.posts], reverse=True
        )
        assert {post.author for post in page.posts} <= set(AUTHORS)
        pages[0] += 1
        await asyncio.sleep(0)


async def _is_fast(feed):
    return not (await feed.page(1)).is_slow


async def _is(told):
    return told


async def _ended(process):
    return await asyncio.to_thread(process.wait, 60)


async def _is_swept(postgres):
    text = "-- Changes left.\nSELECT count(*) FROM headrace.feed_outbox WHERE NOT is_swept"
    return await postgres.value(compile_query("left", text)) == 0


async def _require_told(postgres, files):
    """What was answered is there, but for what was being deleted; how many posts there are."""
    query = compile_query("posts", "-- Posts.\nSELECT id FROM headrace.feed_post")
    stored = {row["id"] for row in await postgres.all(query)}
    lines = [line for file in files for line in file.read_text().splitlines()]
    posted = {line.partition(" ")[2] for line in lines if line.startswith("posted")}
    deleting = {line.partition(" ")[2] for line in lines if line.startswith("deleting")}
    assert posted - deleting <= stored
    assert len(posted) > len(files)
    return len(stored)

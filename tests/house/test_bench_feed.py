"""The judges of the feed's figures.

The brute-force page is one, and the plot says what was measured.
"""

from __future__ import annotations

from types import SimpleNamespace
from xml.etree import ElementTree as ET

import pytest
from bench.feed_push import pays_from, plot
from bench.feed_stage import (
    FIRST_AUTHOR,
    FOLLOWS,
    PER_PAGE,
    make_world,
    stage_follows,
    stage_posts,
)

from headrace.feed import store
from headrace.feed.model import Kind, moment_of


@pytest.mark.parametrize("shape", ["uniform", "zipf"])
def test_the_brute_force_page_is_sorted_by_score_then_id(shape):
    world = make_world(shape, posts=3_000, viewers=1)
    assert {len(world.follows[one[0]]) for one in world.viewers.values()} == set(FOLLOWS)
    for [viewer] in world.viewers.values():
        followed = set(world.follows[viewer].tolist())
        ids = [each.decode() for each in world.ids.tolist()]
        rows = zip(world.scores.tolist(), ids, world.author.tolist(), strict=True)
        mine = sorted(((s, i) for s, i, author in rows if author in followed), reverse=True)
        assert world.page_of(viewer) == [i for _, i in mine[:PER_PAGE]]
        assert world.page_of(viewer, 5) == [i for _, i in mine[5 : 5 + PER_PAGE]]


def test_posts_of_the_zipf_world_share_moments():
    world = make_world("zipf", posts=30_000, viewers=1)
    assert len(set(world.scores.tolist())) < len(world.ids)


def test_a_crowd_follows_and_is_not_looked_at():
    world = make_world("uniform", posts=3_000, viewers=2, crowd=2_000)
    assert sum(len(some) for some in world.viewers.values()) == 2 * len(FOLLOWS)
    assert len(world.follows) == 2 * len(FOLLOWS) + sum(2_000 // follows for follows in FOLLOWS)


@pytest.mark.slow
async def test_what_is_copied_is_the_world(running_engines, database_url, postgres):
    """Rows made of columns are those that the product's own statements read."""
    world = make_world("uniform", posts=3_000, viewers=1)
    cell = SimpleNamespace(url=database_url)
    await stage_follows(cell, world)
    await stage_posts(cell, world)
    for viewer in world.follows:
        rows = await store.page(postgres, viewer, before=None, after=None, rows_max=PER_PAGE)
        assert [post for _, post, _ in rows] == world.page_of(viewer)
    [post] = await store.find_posts(postgres, world.ids_of([0]))
    assert (post.author, post.score) == (world.author[0] + FIRST_AUTHOR, world.scores[0])
    assert (post.is_waiting, post.visible_at) == (False, moment_of(post.score))
    authors = await store.entities_after(postgres, Kind.POSTS, after=0, rows_max=50_000)
    assert authors == sorted(set((world.author + FIRST_AUTHOR).tolist()))


def test_push_pays_for_who_reads_often():
    costs = {"write": 3.0, "read": 5.0, "pull": 305.0}
    assert pays_from(100, 1.0, **costs) == pytest.approx(1.0)
    assert pays_from(1_000, 3.0, **costs) == pytest.approx(30.0)
    assert pays_from(100, 1.0, write=3.0, read=5.0, pull=1.0) > 1_000


def test_the_plot_has_a_line_for_each_rate():
    costs = {"write into an inbox": 3.0, "read of an inbox": 5.0}
    costs |= {f"pull, {follows:,} follows": 300.0 for follows in FOLLOWS}
    root = ET.fromstring(plot(costs))
    lines = [element for element in root.iter() if element.tag.endswith("polyline")]
    assert [len(line.get("points").split()) for line in lines] == [len(FOLLOWS)] * 3

"""Named counters: counted with or without a view, by class, once per event, moved and exported."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from views_surfaces import client_of

from headrace.engines.valkey import ValkeyDown
from headrace.kernel.config import InvalidConfig, load_config
from headrace.kernel.metrics import REGISTRY
from headrace.views import Hit, ViewsConfig
from headrace.views.errors import InvalidHit

ALL = ("total", "classes", "counters")


@pytest.fixture
def views(make_views):
    """The service with three counters."""
    return make_views(counters=("photo", "phone", "call"))


async def test_a_hit_counts_a_view_and_counters_once(views, flusher, engines):
    before = REGISTRY.get_sample_value("views_flushed_total")
    both = Hit(id="ad:1", counters=("photo", "phone"), event="e1")
    assert (await views.hits([both, both, "ad:1"]))[2].total == 2
    alone = await views.hit("ad:1", 0, counters=["phone"])
    assert alone.total == 2
    await views.hit("ad:1", 5, counters=["call"], traffic="bot")
    await views.hit("ad:2", 0, counters=["call"], viewer="ann")
    await flusher.run_once()
    one, two = await views.totals(["ad:1", "ad:2"], fields=ALL)
    assert (one.total, one.classes, one.counters) == (
        2,
        {"human": 2, "bot": 5},
        {"photo": 1, "phone": 2},
    )
    assert (two.total, two.classes, two.counters) == (0, {}, {"call": 1})
    [point] = await views.analytics.series("ad:1", "hour")
    assert (point.human, point.bot, point.counters) == (2, 5, {"photo": 1, "phone": 2})
    [point] = await views.analytics.series("ad:1", "day")
    assert (point.human, point.counters) == (2, {"photo": 1, "phone": 2})
    found = await views.analytics.verify()
    assert (found.views, found.differences) == (7, [])
    assert REGISTRY.get_sample_value("views_flushed_total") == before + 7, "views, not counters"
    assert [(entry.id, entry.views) for entry in await views.analytics.top()] == [("ad:1", 2)]
    rows = (await views.exports.series("hour")).rows
    assert [(row.id, row.traffic, row.views) for row in rows] == [
        ("ad:1", "human", 2),
        ("ad:1", "bot", 5),
        *sorted([("ad:1", "phone", 2), ("ad:1", "photo", 1), ("ad:1", "call/bot", 1)], key=_order),
        ("ad:2", "call", 1),
    ]


def _order(row):
    """By the number of a counter: names of one flush get numbers in alphabetical order."""
    return {"call/bot": 0, "phone": 1, "photo": 2}[row[1]]


async def test_counters_move_and_are_deleted_with_their_views(views, flusher, make_flusher):
    recording = make_flusher(changes_kept_s=3600.0)
    await recording.run_once()
    position = (await views.exports.changes("now")).position
    await views.hit("ad:1", counters=["phone"], traffic="bot")
    await views.hit("ad:1", counters=["phone"])
    await recording.run_once()
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    span = {"from_at": hour - timedelta(hours=1), "to_at": hour + timedelta(hours=1)}
    move = SimpleNamespace(id="ad:1", **span, source="bot", target="human")
    await views.corrections.move(move)
    [one] = await views.totals(["ad:1"], fields=ALL)
    assert (one.total, one.counters) == (2, {"phone": 2})
    assert (await views.analytics.verify()).differences == []
    changes = (await views.exports.changes(position)).changes
    assert sorted((row.traffic, row.views) for row in changes) == [
        ("bot", -1),
        ("bot", 1),
        ("human", 1),
        ("human", 1),
        ("phone", 1),
        ("phone", 1),
        ("phone/bot", -1),
        ("phone/bot", 1),
    ]
    await views.delete("ad:1")
    [one] = await views.totals(["ad:1"], fields=ALL)
    assert (one.total, one.counters) == (0, {})


async def test_invalid_counters_count_nothing(views, engines, flusher, sql):
    for wrong in (["mail"], ["phone", "phone"], "phone", [5], [[]], ["phone+x"], None, {"phone"}):
        with pytest.raises(InvalidHit):
            await views.hits([Hit(id="ad:1", counters=wrong), "ad:1"])
    with pytest.raises(InvalidHit):
        await views.hit("ad:1", 0)
    stream = f"{engines.valkey.prefix}:{{v:1}}:q"
    await views.hit("ad:1")
    for line in ("ad:1*0", "ad:1+", "ad:1+A", "ad:1++a", "ad:1+a/b", "ad:1/b+a+", "ad:1+1"):
        with pytest.raises(ValkeyDown):
            await engines.valkey.call("headrace_views_hit_v1", [stream], [line])
        await engines.valkey.command("XADD", stream, "*", "v", line)
    await flusher.run_once()
    [one] = await views.totals(["ad:1"], fields=ALL)
    assert (one.total, one.counters) == (1, {})
    assert await sql("SELECT * FROM headrace.views_counter") == []
    for text in (
        "human",
        "views",
        "total",
        "a,b,a",
        "deleted",
        "Phone",
        "a b",
        "9a",
        ",".join(f"c{n}" for n in range(33)),
    ):
        with pytest.raises(InvalidConfig):
            load_config({"views": ViewsConfig}, env={"HEADRACE_VIEWS_COUNTERS": text})


async def test_http_counts_counters_on_both_paths(engines, views, flusher):
    async with client_of(engines, views) as client:
        for name in ("ad:1", "ad%3A1"):
            path = f"/v1/views/items/{name}?class=human&counters=photo"
            assert (await client.post(path)).status_code == 200
            assert (await client.post(f"{path},phone&n=0")).status_code == 200
            for wrong in (f"{path},mail", f"{path}&n=-1", f"{path},", f"{path},photo"):
                answer = await client.post(wrong)
                assert (answer.status_code, answer.json()["code"]) == (422, "views.invalid_hit")
        body = [{"id": "ad:1", "class": "human", "n": 0, "counters": ["phone"]}]
        await client.post("/v1/views", json=body)
        await flusher.run_once()
        [one] = (await client.get("/v1/views?ids=ad:1&fields=total,counters")).json()
        assert one == {"id": "ad:1", "total": 2, "counters": {"photo": 4, "phone": 3}}
        [point] = (await client.get("/v1/views/items/ad:1/series")).json()
        assert point["counters"] == {"photo": 4, "phone": 3}

"""The verbs of views on each surface, one life of some items as a table, and an HTTP client."""

# ruff: noqa: A006 - the product's name of a counted entity is `id`

from __future__ import annotations

from contextlib import asynccontextmanager
from datetime import date, datetime

from tests.views.room_harness import ANY, Refusal, Surface, Verb, quoted, served, words_of

from headrace.kernel.config import parse_duration_s
from headrace.views import Hit, cli, http

SCOPES = ("views:hit", "views:read", "views:write")
GROUP = cli.COMMANDS[0]
INVALID, SPAN = Refusal("422 views.invalid_hit"), Refusal("422 views.invalid_span")


def traffic_named(more):
    """Arguments with Python's name of the class."""
    return {"traffic" if name == "class" else name: value for name, value in more.items()}


def moments(span):
    """Arguments `from` and `to` as Python's moments."""
    return {f"{name}_at": datetime.fromisoformat(text) for name, text in span.items()}


def item(entity, rest=""):
    """The path of an entity."""
    return f"/v1/views/items/{quoted(entity)}{rest}"


VERBS = {
    "hit": Verb(
        lambda views, id, n=1, **more: views.hit(id, n, **traffic_named(more)),
        lambda id, **more: ("POST", item(id), {"params": {"class": "human", **more}}),
        lambda id, n=1, **more: ("hit", id, "-n", n, *words_of(more)),
    ),
    "hits": Verb(
        lambda views, hits: views.hits([one if type(one) is str else Hit(**one) for one in hits]),
        lambda hits: ("POST", "/v1/views", {"json": [{"id": i, "class": "human"} for i in hits]}),
        lambda hits: ("hit", *hits),
    ),
    "totals": Verb(
        lambda views, ids, fields=("total",): views.totals(ids, fields=fields),
        lambda ids, fields=("total",): (
            "GET",
            "/v1/views",
            {"params": {"ids": ",".join(ids), "fields": ",".join(fields)}},
        ),
        lambda ids, fields=("total",): ("get", *ids, "--fields", ",".join(fields)),
    ),
    "series": Verb(
        lambda views, id, by="day", **span: views.analytics.series(id, by, **moments(span)),
        lambda id, **params: ("GET", item(id, "/series"), {"params": params}),
        lambda id, **options: ("series", id, *words_of(options)),
    ),
    "viewers": Verb(
        lambda views, id, **span: views.analytics.viewers(
            id, **{f"{name}_day": date.fromisoformat(text) for name, text in span.items()}
        ),
        lambda id, **params: ("GET", "/v1/views/viewers", {"params": {"ids": id, **params}}),
        lambda id, **options: ("viewers", id, *words_of(options)),
    ),
    "unique": Verb(
        lambda views, ids, by, **span: views.analytics.viewers(
            ids, by, **{f"{name}_day": date.fromisoformat(text) for name, text in span.items()}
        ),
        lambda ids, **params: (
            "GET",
            "/v1/views/viewers",
            {"params": {"ids": ",".join(ids), **params}},
        ),
        lambda ids, **options: ("viewers", *ids, *words_of(options)),
    ),
    "top": Verb(
        lambda views, window, limit, **more: views.analytics.top(
            parse_duration_s(window), limit, **traffic_named(more)
        ),
        lambda **params: ("GET", "/v1/views/top", {"params": params}),
        lambda limit, **options: ("top", "--max", limit, *words_of(options)),
    ),
    "export": Verb(
        lambda views, by, limit, after="": views.exports.series(by, ids_max=limit, after=after),
        lambda **params: ("GET", "/v1/views/export", {"params": params}),
        lambda limit, **options: ("export", "--max", limit, *words_of(options)),
    ),
    "changes": Verb(
        lambda views, **more: views.exports.changes(**more),
        lambda **params: ("GET", "/v1/views/changes", {"params": params}),
        lambda **options: ("changes", *words_of(options)),
    ),
    "mark": Verb(
        lambda views, id, name, **span: views.corrections.mark(id, name, **moments(span)),
        lambda id, name, **span: (
            "POST",
            item(id, "/marks"),
            {"json": {"name": name, **{f"{key}_at": text for key, text in span.items()}}},
        ),
        lambda id, name, **span: ("mark", id, name, *words_of(span)),
    ),
    "marks": Verb(
        lambda views, id, **span: views.analytics.marks(id, **moments(span)),
        lambda id, **params: ("GET", item(id, "/marks"), {"params": params}),
        lambda id, **options: ("marks", id, *words_of(options)),
    ),
    "unmark": Verb(
        lambda views, id, name, **span: views.corrections.unmark(id, name, **moments(span)),
        lambda id, name, **params: ("DELETE", item(id, f"/marks/{name}"), {"params": params}),
        lambda id, name, **options: ("unmark", id, name, *words_of(options)),
        wrap="deleted",
    ),
    "verify": Verb(
        lambda views: views.analytics.verify(),
        lambda: ("GET", "/v1/views/verify"),
        lambda: ("verify",),
    ),
    "pending": Verb(
        lambda views: views.analytics.lag(),
        lambda: ("GET", "/v1/views/lag"),
        lambda: ("lag",),
        pick="pending",
    ),
    "delete": Verb(
        lambda views, id: views.delete(id),
        lambda id: ("DELETE", item(id)),
        lambda id: ("rm", id),
    ),
    "reclassify": Verb(
        lambda views, id, from_at, to_at, **classes: views.corrections.reclassify(
            id, **moments({"from": from_at, "to": to_at}), **classes
        ),
        lambda **body: ("POST", "/v1/views/reclassify", {"json": body}),
        lambda id, from_at, to_at, **classes: (
            "reclassify",
            id,
            *words_of({"from": from_at, "to": to_at, **classes}),
        ),
        wrap="job",
    ),
}


def total(entity, total, **more):
    """An answer."""
    return {"id": entity, "total": total, **more}


MOVE = {"source": "bot", "target": "human"}
HALF_HOUR = {"from_at": "2026-01-01T00:30:00Z", "to_at": "2026-01-01T02:00:00Z"}
YEAR_2020 = {"from": "2020-01-01T00:00:00Z", "to": "2020-02-01T00:00:00Z"}
BACKWARDS = {"from": "2026-02-01T00:00:00Z", "to": "2026-01-01T00:00:00Z"}
JANUARY = {"from": "2026-01-01T00:00:00Z", "to": "2026-02-01T00:00:00Z"}
MARKED = {"name": "paid", "from_at": "2026-01-01T00:00:00Z", "to_at": "2026-02-01T00:00:00Z"}
HUMANS = {"human": 10, "bot": 1, "owner": 2}
STEPS = [
    ("totals", {"ids": ["ad:1", "ad:2"]}, [total("ad:1", 0), total("ad:2", 0)]),
    ("hit", {"id": "ad:1"}, total("ad:1", 1)),
    ("hit", {"id": "ad:1", "viewer": "ann"}, total("ad:1", 2)),
    ("hit", {"id": "ad:1", "viewer": "ann"}, total("ad:1", 3)),
    ("hit", {"id": "ad:1", "n": 5}, total("ad:1", 8)),
    ("hit", {"id": "ad:1", "event": "request-7"}, total("ad:1", 9)),
    ("hit", {"id": "ad:1", "event": "request-7"}, total("ad:1", 9)),
    ("hit", {"id": "ad:1", "class": "bot"}, total("ad:1", 9)),
    ("hit", {"id": "ad:1", "class": "owner", "n": 2}, total("ad:1", 9)),
    ("hits", {"hits": ["ad:2", "ad:1"]}, [total("ad:2", 1), total("ad:1", 10)]),
    (
        "hits",
        {"hits": ["ad:2", "ad:3", "ad:2"]},
        [total("ad:2", 2), total("ad:3", 1), total("ad:2", 3)],
    ),
    ("totals", {"ids": ["ad:2", "ad:9"]}, [total("ad:2", 3), total("ad:9", 0)]),
    ("series", {"id": "ad:1", "by": "hour"}, []),
    ("flush", {}, None),
    ("series", {"id": "ad:1", "by": "hour"}, [{"start_at": ANY, **HUMANS, "staff": 0}]),
    ("series", {"id": "ad:2"}, [{"start_at": ANY, "human": 3, "bot": 0, "owner": 0, "staff": 0}]),
    (
        "series",
        {"id": "ad:2", "by": "month"},
        [{"start_at": ANY, "human": 3, "bot": 0, "owner": 0, "staff": 0}],
    ),
    ("series", {"id": "ad:1", "by": "day", **YEAR_2020}, []),
    (
        "totals",
        {"ids": ["ad:1"], "fields": ["total", "today", "unique", "classes"]},
        [total("ad:1", 10, today=10, unique=1, classes=HUMANS)],
    ),
    ("viewers", {"id": "ad:1"}, [{"day": ANY, "viewers": 1}]),
    ("viewers", {"id": "ad:1", "from": "2020-01-01", "to": "2020-02-01"}, []),
    ("viewers", {"id": "ad:1", "from": "2020-02-01", "to": "2020-01-01"}, SPAN),
    ("unique", {"ids": ["ad:1", "ad:2"], "by": "week"}, [{"day": ANY, "viewers": 1}]),
    ("unique", {"ids": ["ad:1"], "by": "all", "from": "2010-01-01", "to": "2021-01-01"}, SPAN),
    (
        "top",
        {"window": "24h", "limit": 2},
        [{"id": "ad:1", "views": 10}, {"id": "ad:2", "views": 3}],
    ),
    ("top", {"window": "2h", "limit": 1, "class": "bot"}, [{"id": "ad:1", "views": 1}]),
    (
        "export",
        {"by": "hour", "limit": 1, "after": "ad:1"},
        {
            "rows": [{"id": "ad:2", "start_at": ANY, "class": "human", "views": 3}],
            "after": "ad:2",
        },
    ),
    ("export", {"by": "day", "limit": 5, "after": "ad:3"}, {"rows": [], "after": None}),
    ("export", {"by": "day", "limit": 5, "after": "a b"}, INVALID),
    ("changes", {}, Refusal("409 views.changes_off")),
    ("changes", {"after": "1-1"}, Refusal("422 views.invalid_position")),
    ("mark", {"id": "ad:1", "name": "paid", **JANUARY}, MARKED),
    ("mark", {"id": "ad:1", "name": "paid", **JANUARY}, MARKED),
    (
        "mark",
        {"id": "ad:1", "name": "promoted"},
        {"name": "promoted", "from_at": ANY, "to_at": None},
    ),
    ("mark", {"id": "ad:1", "name": "paid", **BACKWARDS}, SPAN),
    ("mark", {"id": "ad:1", "name": "Not a name"}, INVALID),
    ("marks", {"id": "ad:1", **YEAR_2020}, []),
    ("marks", {"id": "ad:1", **JANUARY}, [MARKED]),
    ("marks", {"id": "ad:1"}, [{"name": "promoted", "from_at": ANY, "to_at": None}]),
    ("unmark", {"id": "ad:1", "name": "paid", "from": "2026-01-02T00:00:00Z"}, {"deleted": 0}),
    ("unmark", {"id": "ad:1", "name": "paid"}, {"deleted": 1}),
    ("marks", {"id": "ad:1", **JANUARY}, []),
    ("verify", {}, {"entities": 3, "views": 17, "differences": []}),
    ("pending", {}, [0, 0, 0, 0]),
    ("reclassify", {"id": "ad:1", "from_at": "$from", "to_at": "$to", **MOVE}, {"job": ANY}),
    ("work", {}, None),
    (
        "totals",
        {"ids": ["ad:1"], "fields": ["total", "classes"]},
        [total("ad:1", 11, classes={"human": 11, "bot": 0, "owner": 2})],
    ),
    ("delete", {"id": "ad:2"}, total("ad:2", 3, until_at=ANY)),
    ("hit", {"id": "ad:2", "n": 3}, total("ad:2", 0)),
    ("flush", {}, None),
    ("totals", {"ids": ["ad:2"], "fields": ["total", "today"]}, [total("ad:2", 0, today=0)]),
    ("verify", {}, {"entities": 2, "views": 14, "differences": []}),
    ("hit", {"id": "ad 1"}, INVALID),
    ("hit", {"id": "ad:1", "n": 1_000_001}, INVALID),
    ("hit", {"id": "ad:1", "viewer": "ann,bob"}, INVALID),
    ("hits", {"hits": ["ad:1", "ad/1"]}, INVALID),
    ("totals", {"ids": ["ad:1"], "fields": ["likes"]}, Refusal("422 views.invalid_hit")),
    ("series", {"id": "ad:1", **BACKWARDS}, SPAN),
    ("top", {"window": "400d", "limit": 10}, SPAN),
    ("reclassify", {"id": "ad:1", **HALF_HOUR, **MOVE}, SPAN),
    ("hit", {"id": "ad:1"}, total("ad:1", 12)),
]


@asynccontextmanager
async def client_of(engines, views, *, scopes=SCOPES):
    """A client of the room's routes."""
    async with served(engines, {"views": views}, http.ROUTES, scopes=scopes) as client:
        yield client


@asynccontextmanager
async def surface_on(name, engines, views):
    """The surface `name` of a service."""
    if name != "http":
        yield Surface(name, views, GROUP, VERBS)
        return
    async with client_of(engines, views) as client:
        yield Surface(name, views, GROUP, VERBS, client)

"""The search of the command palette: screens, and things of all rooms by name or id.

Each room returns a few things whose name begins with the text, within SOURCE_S. A room that
the caller may not read has no matches; one that does not answer is named.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Final
from urllib.parse import urlencode

import msgspec

from headrace.console.format import path_segment
from headrace.console.model import PREFIX
from headrace.console.views import ViewContext, row_id
from headrace.jobs.model import JobState
from headrace.kernel.errors import HeadraceError, Unavailable
from headrace.kernel.terminal import visible

EACH_MAX: Final = 6
"""Matches of one kind."""
MATCHES_MAX: Final = 50
SOURCE_S: Final = 1.5
TEXT_CHARACTERS_MAX: Final = 256


STATE_WORDS: Final = {
    JobState.READY: "waiting",
    JobState.LEASED: "in progress",
    JobState.GONE: "ended and not kept, or unknown",
}
"""States of jobs whose names are not those of the console."""
LISTS: Final[Sequence[tuple[str, str, str, str]]] = (
    ("jobs:read", "Failed jobs", "/jobs/jobs?state=failed", "Jobs"),
    ("jobs:read", "Waiting jobs", "/jobs/jobs?state=ready", "Jobs"),
    ("jobs:read", "Scheduled jobs", "/jobs/jobs?state=scheduled", "Jobs"),
    ("jobs:read", "Jobs in progress", "/jobs/jobs?state=leased", "Jobs"),
    ("jobs:read", "Cancelled jobs", "/jobs/jobs?state=cancelled", "Jobs"),
    ("jobs:read", "Quarantined jobs", "/jobs/jobs?state=quarantined", "Jobs"),
    ("jobs:read", "Paused queues", "/jobs?state=paused", "Jobs"),
    ("fetch:read", "Held runs", "/fetch?show=held", "Fetch"),
    ("jobs:read", "Open alerts", "/jobs/alerts?open=1", "Jobs"),
    ("fetch:read", "Missing and failed photos", "/fetch/photos?show=broken", "Fetch"),
    ("fetch:read", "Photo hosts by errors", "/fetch/hosts?sort=errors", "Fetch"),
)
"""Filtered lists with the scope that they need, their path, and their room."""


class Match(msgspec.Struct, frozen=True, kw_only=True):
    """A place in the console: its kind, its name, and what distinguishes it from others."""

    kind: str
    label: str
    href: str
    hint: str = ""


async def view_search(context: ViewContext) -> dict[str, Any]:
    """The search as a page, for browsers without scripts."""
    text = context.query.text("q", most=TEXT_CHARACTERS_MAX).strip()
    return {"q": text, "matches": await find_matches(context, text)}


async def find_matches(context: ViewContext, text: str) -> list[Match]:
    """What the text leads to: equal names first, then screens and things of each room."""
    found = [*_lists(context, text), *_screens(context, text)]
    if text and text.isprintable():
        allowed = [(scope, find) for scope, find in SOURCES if context.may(scope)]
        calls = (_within(context, scope, find, text) for scope, find in allowed)
        for matches in await asyncio.gather(*calls):
            found += matches
        found = list(dict.fromkeys(found))
    found.sort(key=lambda one: one.label.lower() != text.lower())
    return found[:MATCHES_MAX]


Find = Callable[[ViewContext, str], AsyncIterator[Match]]


async def _within(context: ViewContext, scope: str, find: Find, text: str) -> list[Match]:
    """The matches that a source yields in time, and a line if it could not be read."""
    found: list[Match] = []
    try:
        async with asyncio.timeout(SOURCE_S):
            async for match in find(context, text):
                found.append(match)  # noqa: PERF401 - keeps the matches before a failure
    except (Unavailable, TimeoutError):
        room = scope.partition(":")[0].capitalize()
        found.append(
            Match(kind="no answer", label=room, href=PREFIX, hint="not searched, see Health")
        )
    except HeadraceError:
        # No such job or run, or the room is not installed.
        pass
    return found


def _screens(context: ViewContext, text: str) -> Iterator[Match]:
    words = text.lower().split()
    for room in context.rooms:
        for screen in room.screens:
            scope = screen.scope or room.scope
            if "{" in screen.path or (scope is not None and not context.may(scope)):
                continue
            name = f"{room.title} {screen.tab} {screen.title}".lower()
            if (words or screen.tab) and all(word in name for word in words):
                href = PREFIX + screen.path.rstrip("/")
                label = screen.tab or screen.title
                hint = "" if room.title == label else room.title
                yield Match(kind="screen", label=label, href=href, hint=hint)


def _lists(context: ViewContext, text: str) -> Iterator[Match]:
    """Lists that a word of the text selects, such as failed jobs."""
    words = text.lower().split()
    for scope, label, path, room in LISTS:
        if words and context.may(scope) and all(word in label.lower() for word in words):
            yield Match(kind="list", label=label, href=PREFIX + path, hint=room)


def _match(kind: str, label: object, path: str, hint: str = "", **query: object) -> Match:
    href = f"{PREFIX}{path}?{urlencode(query)}" if query else PREFIX + path
    return Match(kind=kind, label=visible(str(label)), href=href, hint=visible(hint))


async def _job(context: ViewContext, text: str) -> AsyncIterator[Match]:
    if job_id := row_id(text):
        job = await context.jobs.job(job_id)
        queue = "" if job.state is JobState.GONE else f" in {job.queue}"
        state = STATE_WORDS.get(job.state, job.state.value)
        yield _match("job", job_id, f"/jobs/jobs/{job_id}", f"{state}{queue}")


async def _failures(context: ViewContext, text: str) -> AsyncIterator[Match]:
    found = await context.jobs.find(state="failed", q=text, jobs_max=1)
    if found.jobs:
        label = f"Failed jobs with {text!r} in their error"
        yield _match("list", label, "/jobs/jobs", found.jobs[0].queue or "", state="failed", q=text)


async def _names(context: ViewContext, text: str) -> AsyncIterator[Match]:
    paths = {"queue": "/jobs/queues/", "limiter": "/jobs/lanes/"}
    for kind, name in await context.jobs.queues.find_names(text, rows_max=2 * EACH_MAX):
        path = paths[kind] + path_segment(name) if kind in paths else "/jobs/crons"
        yield _match(kind, name, path)


async def _customers(context: ViewContext, text: str) -> AsyncIterator[Match]:
    for name in await context.fetch.lookup.customers(text, rows_max=EACH_MAX):
        yield _match("customer", name, f"/fetch/customers/{path_segment(name)}")


async def _run(context: ViewContext, text: str) -> AsyncIterator[Match]:
    if run_id := row_id(text):
        run = await context.fetch.runs.get(run_id)
        yield _match("run", run_id, f"/fetch/runs/{run_id}", f"{run.state.value}, {run.customer}")


async def _items(context: ViewContext, text: str) -> AsyncIterator[Match]:
    for customer, item in await context.fetch.lookup.items(text, rows_max=EACH_MAX):
        path = f"/fetch/customers/{path_segment(customer)}/item"
        yield _match("item", item, path, customer, id=item)


async def _photo(_: ViewContext, text: str) -> AsyncIterator[Match]:
    if text.startswith(("http://", "https://")):
        yield _match("photo", text, "/fetch/why", "why it is stored or not", url=text)


async def _entities(context: ViewContext, text: str) -> AsyncIterator[Match]:
    for entity in await context.views.analytics.find(text, rows_max=EACH_MAX):
        yield _match("viewed item", entity, "/views/entity", "views", id=entity)


async def _people(context: ViewContext, text: str) -> AsyncIterator[Match]:
    for one in await context.feed.lookup.find(text, rows_max=EACH_MAX):
        if one.is_author:
            yield _match("author", one.id, "/feed/authors", "feed", author=one.id)
        else:
            yield _match("viewer", one.id, "/feed", "feed", viewer=one.id)


async def _objects(context: ViewContext, text: str) -> AsyncIterator[Match]:
    above, _, part = text.strip("/").rpartition("/")
    found = await context.media.objects.folder(above, after=_before(part), entries_max=EACH_MAX + 1)
    start = f"{above}/{part}".lstrip("/")
    for prefix in [one for one in found.folders if one.startswith(start)][:EACH_MAX]:
        yield _match("folder", f"{prefix}/", "/media/objects", prefix=prefix)
    for one in [one for one in found.objects if one.key.startswith(start)][:EACH_MAX]:
        yield _match("object", one.key, "/media/object", one.content_type, key=one.key)


async def _nodes(context: ViewContext, text: str) -> AsyncIterator[Match]:
    if context.media.config.node is not None:
        membership = await context.media.nodes.membership()
        for member in membership.members:
            if text.lower() in member.name.lower():
                yield _match("node", member.name, "/media/cluster", str(member.state))


def _before(part: str) -> str:
    """A text that sorts right before all names that begin with `part`."""
    # `~` is the greatest character of a key, and a part of a key has up to 128.
    return part and part[:-1] + chr(ord(part[-1]) - 1) + "~" * 128


SOURCES: Final[Sequence[tuple[str, Find]]] = (
    ("jobs:read", _job),
    ("jobs:read", _names),
    ("jobs:read", _failures),
    ("fetch:read", _customers),
    ("fetch:read", _run),
    ("fetch:read", _items),
    ("fetch:read", _photo),
    ("views:read", _entities),
    ("feed:read", _people),
    ("media:read", _objects),
    ("media:read", _nodes),
)
"""Each source with the scope that it needs."""

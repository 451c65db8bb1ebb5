"""Every action of the console: the posted form, its effect, its audit entry and its command.

A row is one submission as a browser without scripts makes it: action, values of the form, part of
the message, API path of the effect, and what its response shows, perhaps after some time.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from urllib.parse import quote

import pytest
from console_stack import TRACK, tone
from crawler import Page
from hostile import CORPUS, TEXT

from headrace.console.screens import ROOMS
from headrace.kernel.terminal import visible

pytestmark = pytest.mark.slow
UPLOAD = "id,name,price\nu-1,Uploaded,5\n"
BACK = "/console/audit"
"""Return URL of forms: a page that needs no room."""
LISTS = "/console/jobs"
"""Actions on a moderated job, and removals, lead to pages below."""
"""The page to which actions of moderators lead."""


class Refused(str):
    """Part of the message of a refused submission."""

    __slots__ = ()


def has(**fields):
    """Whether a document has these values."""
    return lambda found: fields.items() <= found.items()


def lacks(text):
    """Whether a document does not have this text."""
    return lambda found: text not in json.dumps(found)


def submit(stack, action, values, *, is_refused=False):
    """Open and submit a form; return the message of the next page."""
    place, values = f"/console/do/{action}", {name: str(value) for name, value in values.items()}
    file = values.pop("upload", "").encode()
    page = Page(place, stack.browse.get(place, params={**values, "back": BACK}).text)
    [command] = [text for text in page.codes if text.startswith("headrace ")]
    assert is_refused or file or " /v1/" in page.codes[-1], action
    form = page.form(f"{place}/file" if file else place)
    assert form.fields["form_id"], action
    sent = {"files": {"file": ("up.csv", file)}} if file else {}
    command = command.replace("FILE", "up.csv") if file else command
    answer = stack.browse.post(form.action, data=form.fields, headers={"origin": stack.api}, **sent)
    if not is_refused:
        following = answer.headers.get("location", answer.text)
        assert answer.status_code == 303, answer.text
        if following != BACK:
            assert file or following.startswith(LISTS), action
            answer = stack.browse.get(following) if not file else stack.browse.get(BACK)
        else:
            answer = stack.browse.get(BACK)
        log = Page(BACK, stack.browse.get(BACK).text).text
        assert visible(command) in " ".join(log.split()), action
    assert answer.status_code == (422 if is_refused else 200), action
    found = Page(place, answer.text)
    assert page.faults + found.faults == [], action
    [entry] = stack.call("GET", "/v1/audit")[:1]
    expected = ("bad", "refused") if is_refused else ("good", "done")
    assert (found.flash[0], entry["outcome"]) == expected, found.flash
    assert (entry["action"], entry["command"]) == (action, command)
    assert entry["address"] == "127.0.0.1"
    return found.flash[1]


def job_rows(stack):
    queue, of = stack.queue("acted"), {"queue": "acted"}
    at, listed = f"/v1/queues/{queue}", f"/v1/jobs?queue={queue}"
    approve = {"queue": "approve"}, "/v1/queues/approve"
    yield "pause_queue", approve[0], "is paused", approve[1], has(paused=True)
    assert "queue approve is paused" in Page("", stack.browse.get("/console").text).text
    yield "resume_queue", approve[0], "is resumed", approve[1], has(paused=False)
    bounds = {"importance": 3, "slots_max": 9}
    yield "set_queue", {**of, **bounds}, "importance 3", at, has(overridden=bounds)
    yield "set_queue", {**of, "slots_min": 99, "slots_max": 1}, Refused("expected")
    stack.call("PUT", "/v1/queues/mial?create=true", json={})
    yield "remove_queue", {"queue": "mial"}, "is removed", "/v1/queues", lacks('"mial"')
    yield "remove_queue", approve[0], Refused("cannot be removed")
    payload = {"to": "button@example.org"}
    given = {**of, "payload": json.dumps(payload), "priority": 1}
    yield "add_job", given, "is in queue acted", listed, lambda found: len(found["jobs"]) == 1
    job = {"job": stack.call("GET", listed)["jobs"][0]["id"]}
    one = f"/v1/jobs/{job['job']}"
    assert stack.call("GET", one)["payload"] == payload
    yield "cancel_job", job, "is cancelled", one, has(state="cancelled")
    yield "retry_job", job, "queued again", one, has(state="ready")
    yield "delete_job", job, "is deleted", one, has(state="gone")
    yield "cancel_job", job, Refused("gone")
    trip = {"job": stack.call("POST", "/v1/workflows/trip/start", json={})["id"]}
    one = f"/v1/workflows/{trip['job']}"
    stack.wait(one, lambda found: len(found["steps"]) == 2)
    page = Page("", stack.browse.get(f"/console/jobs/jobs/{trip['job']}").text).text
    assert "1. book (step, done)" in page
    assert f"2. paid {trip['job']} (event, waiting) waits for event paid" in page
    yield "cancel_workflow", trip, "is cancelled with its jobs", one, has(state="cancelled")
    bulky = {"queue": stack.queue("bulky")}
    one = f"/v1/jobs/{stack.enqueue('bulky', *({'bulk': n} for n in range(25)))[0]}"
    preview = stack.browse.get("/console/do/jobs.bulk_cancel", params=bulky).text
    assert "25 jobs match now" in preview
    yield "bulk_cancel", bulky, "25 jobs are cancelled", one, has(state="cancelled")
    yield "bulk_retry", bulky, "25 jobs are queued again", one, has(state="ready")
    yield "bulk_delete", {**bulky, "state": "ready"}, "25 jobs are", one, has(state="gone")
    yield "bulk_delete", {}, Refused("every job")
    yield from lane_rows(stack)
    yield from people_rows(stack)
    named, at = {"name": "by-hand"}, "/v1/crons/by-hand"
    cron = {**named, "spec": "0 4 * * *", "queue": queue}
    yield "add_cron", cron, "runs first at", at, has(source="api")
    yield "run_cron", named, "enqueued job", listed, lambda found: len(found["jobs"]) == 1
    yield "pause_cron", named, "is paused", at, has(paused=True)
    yield "resume_cron", named, "runs next", at, has(paused=False)
    yield "remove_cron", named, "is deleted", "/v1/crons", lacks("by-hand")
    yield "remove_cron", {"name": "nightly"}, Refused("nightly")
    fleet = "/v1/fleet"
    [host] = stack.wait(fleet, lambda found: len(found["hosts"]) == 1)["hosts"]
    host = {"host": host["name"]}
    yield "drain_host", host, "draining", fleet, lambda found: found["hosts"][0]["is_draining"]
    yield "undrain_host", host, "accepts jobs", fleet, lacks('"is_draining": true')


def people_rows(stack):
    people, ids = {"queue": "moderation"}, stack.enqueue("moderation", {"n": 1}, {"n": 2})
    paths = [f"/v1/jobs/{job}" for job in ids]

    def held(number):
        lease = stack.call("GET", paths[number])["lease_id"]
        return {**people, "job": ids[number], "lease": lease}

    yield "take_job", people, f"job {ids[0]} is taken", paths[0], has(state="leased")
    text, result = f"job {ids[0]}: reject; job {ids[1]} is taken", {"decision": "reject"}
    ended = lambda found: result.items() <= found["result"].items()  # noqa: E731
    yield "decide", {**held(0), "decision": "reject"}, text, paths[0], ended
    text = f"job {ids[1]}: skipped; no job of queue moderation is due"
    yield "skip_job", held(1), text, paths[1], has(state="scheduled")


def lane_rows(stack):
    limits = {"starts_max": 5, "window_s": 60, "concurrency": 2, "weight": 3}
    stack.enqueue("approve", {"n": 1}, lane=CORPUS[1], unique=CORPUS[0])
    for limiter, lane in (("partners", "buttons"), ("approve", CORPUS[1])):
        one, all_of = {"limiter": limiter, "lane": lane}, f"/v1/limiters/{limiter}/lanes"
        at = f"{all_of}/{quote(lane, safe='')}"
        yield "set_lane", {**one, **limits}, "has new limits", at, has(**limits)
        yield "pause_lane", one, "is paused", at, has(paused=True, starts_max=5)
        yield "resume_lane", one, "is resumed", at, has(paused=False)
        # The next sweep deletes lanes without own limits and jobs.
        yield "reset_lane", one, "follows", all_of, lacks('"starts_max": 5')
    made, at = {"limiter": "made"}, "/v1/limiters/made"
    yield "set_limiter", {**made, "concurrency": 7}, "has new limits", at, has(concurrency=7)
    yield "reset_limiter", made, "declared limits"
    yield "remove_limiter", made, "is removed", "/v1/limiters", lacks('"made"')
    yield "remove_limiter", {"limiter": "approve"}, Refused("queues")


def run_rows(stack):
    """A catalogue that removes too much: held, applied, undone; the next one is discarded."""
    stack.customer("fragile")
    stack.wait_run(stack.catalogue("fragile", [f"f-{n},Item {n},5,,," for n in range(30)]))
    held = stack.catalogue("fragile", ["f-0,Item 0,5,,,"])
    assert stack.wait_run(held)["state"] == "held"
    at, page, run = f"/v1/fetch/runs/{held}", f"/console/fetch/runs/{held}", {"run": held}
    assert "removes 29" in stack.browse.get("/console/do/fetch-confirm", params=run).text
    yield "confirm", run, f"run {held} is", at, has(state="done", gone=29)
    assert "Undo run" in stack.browse.get(page).text
    yield "undo", run, "29 published again", at, lambda found: found["undone_by"]
    undone_by = stack.call("GET", at)["undone_by"]
    text = Page(page, stack.browse.get(page).text).text
    assert f"Undone by run {undone_by}" in text
    assert "Undo run" not in text
    stack.wait_run(undone_by)
    newest, given = "/v1/fetch/runs?customer=fragile", {"customer": "fragile", "upload": UPLOAD}
    is_held = newest, lambda found: found["runs"][0]["state"] == "held"
    yield "upload", given, "would change: 1 new, 0 changed, 30 removed", *is_held
    yield "upload", {**given, "upload": "%PDF-1.7"}, Refused("PDF document")
    yield "seller-link", {"customer": "fragile", "days": 2}, f"{stack.api}/v1/fetch/sellers/"
    assert "/sellers/" not in json.dumps(stack.call("GET", "/v1/audit"))
    held = stack.catalogue("fragile", [])
    assert stack.wait_run(held)["state"] == "held"
    at = f"/v1/fetch/runs/{held}"
    yield "discard", {"run": held}, "is discarded", at, has(state="superseded")


def fetch_rows(stack):
    yield from run_rows(stack)
    stack.seller.files["/made.csv"] = b"id,name,price\nm-1,Made here,5\n"
    made, at, hook = {"customer": "made"}, "/v1/fetch/customers/made", stack.seller.url("/hook")
    limits = {**made, "rate": "20/5s", "connections": 3}
    rate = has(starts_max=20, window_s=5.0, connections=3)
    rotate = "headrace fetch webhook rotate made"
    yield "customer", {**limits, "webhook": hook}, rotate, at, rate
    assert "whsec" not in stack.browse.get("/console/fetch/customers/made").text
    assert "whsec" not in stack.browse.get(BACK).text
    more, stored = {"hold_share": "0.1", "hold_items": 5, "refresh_s": "7d"}, (0.1, 5, 604_800)
    text, kept = "20 requests per 5 s, 3 concurrent", dict(zip(more, stored, strict=True))
    yield "customer", {**limits, **more}, text, at, has(**kept)
    yield "customer", {**limits, "hold_share": "30%"}, Refused("a fraction from 0 to 1")
    yield "webhook-test", made, "accepted"
    source = {"url": stack.seller.url("/made.csv"), "cron": "0 4 * * *", "tz": "Europe/Berlin"}
    yield "source", {**made, **source}, "next import", f"{at}/source", has(tz="Europe/Berlin")
    ended = ("applied", "done")
    brought = f"{at}/source", lambda found: found["outcome"] in ended
    yield "bring", made, "imports the catalogue", *brought
    yield "webhook-replay", made, "queued"
    assert hook in stack.browse.get("/console/fetch/deliveries").text
    yield "webhook-remove", made, "is deleted", "/v1/fetch/webhooks", lacks('"made"')
    yield "source-remove", made, "is removed", "/v1/fetch/sources", lacks('"made"')
    item = {"customer": "copy-house", "id": "look-1"}
    yield "release", item, "is published", "/v1/fetch/held", lacks("look-1")
    yield "release", item, Refused("is not held")
    at = "/v1/fetch/duplicates?customer=copy-house"
    pair = stack.call("GET", at)["duplicates"][0]["id"]
    yield "duplicate-review", {"pair": pair}, "is reviewed", at, lacks(f'"id": {pair},')
    assert f'"id": {pair},' in json.dumps(stack.call("GET", f"{at}&reviewed=true"))
    all_of = "/v1/fetch/consumers"
    found = stack.wait(all_of, lambda found: len(found["consumers"]) > 1)["consumers"]
    [one] = [one for one in found if one["name"] != "before_publish"]
    name = {"name": one["name"]}
    yield "consumer-replay", {**name, "customer": "bike-shop"}, "14 items are queued"
    yield "consumer-remove", name, "is deleted", all_of, lacks(name["name"])
    yield "consumer-remove", name, Refused("is not known")


def view_rows(stack):
    stack.call("POST", "/v1/views/items/ad:moved?n=9&class=human")
    stack.wait("/v1/views/top?limit=1000", lambda top: "ad:moved" in str(top))
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    span = {"from": hour - timedelta(hours=2), "to": hour + timedelta(hours=2)}
    moved = {name: at.isoformat() for name, at in span.items()}
    moved |= {"id": "ad:moved", "source": "human", "target": "bot"}
    at = "/v1/views?ids=ad:moved&fields=total,classes"
    yield "verify", {}, "all match their hourly counts"
    is_moved = at, lambda found: found[0]["classes"].get("bot") == 9
    yield "reclassify", moved, "moves the views", *is_moved
    marks = "/v1/views/items/ad:moved/marks", lambda found: found[0]["name"] == "promoted"
    yield "mark", {"id": "ad:moved", "name": "promoted"}, "is marked as promoted", *marks
    yield "delete", {"id": "ad:moved"}, "", at, lambda found: found[0]["total"] == 0


def feed_rows(stack):
    given, at = {"viewer": "tester", "author": "bike-shop"}, "/v1/feed/viewers/tester"
    for verb, part, follows in (
        ("follow", "follows", True),
        ("mute", "mutes", True),
        ("unmute", "mutes", False),
        ("block", "blocks", True),
        ("unblock", "blocks", False),
        ("unfollow", "follows", False),
    ):
        is_so = (lambda found: not lacks("bike-shop")(found)) if follows else lacks("bike-shop")
        yield verb, given, "viewer tester ", f"{at}/{part}", is_so
    yield "unfollow", given, "viewer tester did not follow bike-shop; no change"
    stack.call("POST", "/v1/feed/posts", json={"author": "quiet", "id": "quiet-1", "ref": TEXT})
    one, at = {"post": "quiet-1"}, "/v1/feed/authors/quiet/posts"
    yield "delete", one, "post quiet-1 is deleted", at, has(posts=[])
    yield "verify", {}, "the index matches PostgreSQL"
    yield "rebuild", {}, "job ", "/v1/jobs?state=ready", lacks("rebuild")


def media_rows(stack):
    """Actions on nodes and disks are refused, as this node has no cluster and no disks."""
    key, tag, traces = {"key": "tracks/away.wav"}, {"tag": "user=42"}, "/v1/media/traces"
    yield "purge", key, "all nodes purge tracks/away.wav"
    yield "remove", key, "is deleted", "/v1/media/objects?prefix=tracks", lacks("away.wav")
    yield "warm", {"key": TRACK}, "1 block"
    yield "trace", {**tag, "minutes": 5}, "traced until", traces, lambda found: "42" in str(found)
    assert "user=42" in stack.browse.get("/console/media/traces").text
    yield "trace-end", tag, "1 trace is ended"
    for action in ("drain", "undrain", "weight"):
        yield action, {"node": "n1", "weight": "2"}, Refused("node")
    for action in ("disk-drain", "disk-undrain", "disk-retire"):
        yield action, {"disk": "d1"}, Refused("node")
    yield "verify", {"share": "0.5"}, Refused("node")


ROWS = {
    "jobs": ("jobs.", job_rows),
    "fetch": ("fetch-", fetch_rows),
    "views": ("views-", view_rows),
    "feed": ("feed-", feed_rows),
    "media": ("media-", media_rows),
}


@pytest.mark.parametrize("room", [room for room in ROOMS if room.actions], ids=lambda r: r.name)
async def test_each_action_has_its_effect_audit_entry_and_command(stack, room):
    await stack.put("tracks/away.wav", tone(0.1))
    (prefix, rows), submitted = ROWS[room.name], set()
    for action, values, message, *effect in rows(stack):
        submitted.add(prefix + action)
        is_refused = isinstance(message, Refused)
        assert message in submit(stack, prefix + action, values, is_refused=is_refused), action
        if effect:
            stack.wait(*effect)
    assert submitted == {action.name for action in room.actions}


@pytest.mark.parametrize(
    ("action", "values", "name", "fault"),
    [
        ("fetch-customer", {"rate": "9/s", "connections": "many"}, "connections", "whole number"),
        ("jobs.set_queue", {"queue": "mail", "importance": "very"}, "importance", "whole number"),
        ("jobs.add_job", {"queue": "mail", "payload": "{bad"}, "payload", "expected JSON"),
        ("views-reclassify", {"id": "a", "source": "none"}, "source", "expected one of"),
    ],
)
def test_an_invalid_value_is_reported_at_its_field_and_not_audited(
    stack, action, values, name, fault
):
    place, before = f"/console/do/{action}", stack.call("GET", "/v1/audit")
    form = Page(place, stack.browse.get(place, params=values).text).form(place)
    sent = {**form.fields, **values}
    answer = stack.browse.post(place, data=sent, headers={"origin": stack.api})
    page = Page(place, answer.text)
    assert (answer.status_code, page.faults) == (422, [])
    assert fault in page.text
    if name not in page.form(place).options:
        assert page.form(place).fields[name] == values[name]
    assert stack.call("GET", "/v1/audit") == before

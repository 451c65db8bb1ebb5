"""People decide jobs in the console: by key, without scripts, never two of them the same job."""

from __future__ import annotations

import re

import pytest
from crawler import Page
from hostile import TEXT

pytestmark = pytest.mark.slow
DECISIONS = {"approve": "thumbs", "reject": None, "ask": None}
LOADED = "() => [...document.querySelectorAll('.moderation img')].every((img) => img.naturalWidth)"


def queue_for_people(stack, name, *payloads):
    """A queue with decisions; its page and the ids of its jobs."""
    stack.call("PUT", f"/v1/queues/{name}?create=true", json={"decisions": DECISIONS})
    page = f"/console/jobs/queues/{name}/moderate"
    return page, stack.enqueue(name, *payloads)


def state_of(stack, job):
    """State and queue of a job."""
    found = stack.call("GET", f"/v1/jobs/{job}")
    return found["state"], found.get("queue")


async def press(screen, key):
    """Press a key that leads to the next page; return the job on it, or 0."""
    async with screen.page.expect_navigation(wait_until="load"):
        await screen.page.keyboard.press(key)
    return await shown(screen)


async def shown(screen):
    """The job that the page shows, or 0."""
    found = re.search(r"\bJob (\d+)\n", await screen.text())
    return int(found[1]) if found else 0


async def test_a_person_decides_by_key_and_the_next_job_follows(screen, stack):
    listing = "/v1/media/objects?prefix=photos"
    objects = stack.wait(listing, lambda found: len(found["objects"]) > 1)["objects"]
    keys = [one["key"] for one in objects[:2]]
    payloads = {"photos": keys, "text": TEXT, "seller": "ann"}, {"photo": keys[0]}, {}, {}
    _, ids = queue_for_people(stack, "by-key", *payloads)
    await screen.open("/console/jobs/queues/by-key")
    await screen.press("text=Moderate")
    assert await press(screen, "t") == ids[0]
    assert await screen.page.locator(".moderation img").count() == 2
    await screen.page.wait_for_function(LOADED)
    assert "seller" in await screen.text()
    assert await screen.findings() == []
    await screen.narrow()
    assert await press(screen, "a") == ids[1]
    assert f"job {ids[0]}: approve; job {ids[1]} is taken" in await screen.text(".flash")
    assert await press(screen, "r") == ids[2], "the key of the page, not the reload of the console"
    assert await press(screen, "s") == ids[3]
    assert await press(screen, "1") == 0, "`ask` shares its letters with the others and the console"
    assert "no job of queue by-key is due" in await screen.text(".flash")
    assert state_of(stack, ids[0])[1] == "thumbs" or state_of(stack, ids[0])[0] == "gone"
    assert [state_of(stack, job)[0] for job in ids[1:]] == ["gone", "scheduled", "gone"]
    commands = [line["command"] for line in stack.call("GET", "/v1/audit")[:5]]
    assert [one.split()[4:] for one in commands][-2:-1] == [["--decide", str(ids[0]), "approve"]]


async def test_two_people_get_different_jobs_and_one_key_press_decides_one(tab, stack):
    path, ids = queue_for_people(stack, "for-two", *({"n": n} for n in range(4)))
    async with tab() as ann, tab() as bob:
        for person in (ann, bob):
            await person.open(path)
        assert [await press(ann, "t"), await press(bob, "t")] == ids[:2]
        # The next key arrives before the next page: it must not decide a job that nobody saw.
        async with ann.page.expect_navigation(wait_until="load"):
            await ann.page.evaluate(
                "() => { for (const repeat of [false, false, true]) document.body.dispatchEvent("
                "new KeyboardEvent('keydown', {key: 'r', bubbles: true, repeat})); }"
            )
        assert await shown(ann) == ids[2]
        assert state_of(stack, ids[3])[0] == "ready"
        # Another person's page of this job: decided there, refused here.
        await bob.open(ann.page.url.removeprefix(stack.api))
        assert await shown(bob) == ids[2]
        assert await press(bob, "r") == ids[3]
        assert await press(ann, "r") == 0
        assert "is over" in await ann.text(".flash.bad")
        assert state_of(stack, ids[3])[0] == "leased", "a refused decision takes no job"


async def test_without_scripts_a_decision_after_the_lease_is_refused(tab, stack):
    path, [job] = queue_for_people(stack, "late", {"text": "slow"})
    async with tab(scripts=False) as screen:
        await screen.open(path)
        await screen.press("text=Take the next job")
        assert await shown(screen) == job
        lease = stack.call("GET", f"/v1/jobs/{job}")["lease_id"]
        stack.call("POST", f"/v1/leases/{lease}/extend?lease=1s")
        stack.wait(f"/v1/jobs/{job}", lambda found: found["state"] == "ready")
        await screen.press("button[value=reject]")
        assert f"lease {lease} is over" in await screen.text(".flash.bad")
        [entry] = stack.call("GET", "/v1/audit")[:1]
        assert (entry["action"], entry["outcome"]) == ("jobs.decide", "refused")
        await screen.press("text=Take the next job")
        await screen.press("button[value=reject]")
        assert f"job {job}: reject; no job" in await screen.text(".flash.good")
    assert state_of(stack, job)[0] == "gone"


def test_wrong_decisions_and_jobs_are_refused_and_foreign_photos_not_loaded(stack):
    photos = ["https://evil.example/x.png", "//evil.example/x", "../../etc/passwd", 7]
    payload = {"photos": photos, "photo": f"{stack.media}/m/photos/a.jpg", "text": TEXT}
    path, [job] = queue_for_people(stack, "wrong", payload)
    taken = stack.call("POST", "/v1/queues/wrong/take")
    place = f"{path}?lease={taken['lease_id']}&job={job}"
    page = Page(place, stack.browse.get(place).text)
    assert (page.faults, page.media) == ([], [payload["photo"]])
    assert "evil.example" in page.text
    given = page.form("/console/do/jobs.decide").fields
    for wrong, text in (
        ({"decision": "delete"}, "expected one of approve, reject, ask"),
        ({"job": "999999999", "decision": "reject"}, "expected a job of this lease"),
        ({"lease": "1", "decision": "reject"}, "lease 1 is over"),
        ({"lease": "x" * 40, "decision": "reject"}, "lease 0 is over"),
    ):
        form = page_form(stack, place)
        sent = {**given, **form, **wrong}
        answer = stack.browse.post(
            "/console/do/jobs.decide", data=sent, headers={"origin": stack.api}
        )
        assert (answer.status_code, answer.headers["location"]) == (303, place), answer.text
        after = Page(place, stack.browse.get(place).text)
        assert after.flash[0] == "bad"
        assert text in after.flash[1]
        assert state_of(stack, job)[0] == "leased", "a wrong form leaves the job to its holder"
    for query in (f"?lease=1&job={job}", "?lease=1&job=999999999", "?lease=1&job=x", "?job=1"):
        answer = stack.browse.get(path + query)
        assert TEXT[:20] not in Page(path, answer.text).text
        assert answer.status_code == (422 if query.endswith("x") else 200)
    assert stack.browse.get("/console/jobs/queues/nobody/moderate").status_code == 404
    assert "declares no decisions" in stack.browse.get("/console/jobs/queues/mail/moderate").text


def page_form(stack, place):
    """A new id of the form on a page."""
    fields = Page(place, stack.browse.get(place).text).form("/console/do/jobs.decide").fields
    return {"form_id": fields["form_id"]}


async def test_a_token_needs_the_scope_to_moderate(guarded):
    app = guarded.app
    await app.jobs.queues.set("judged", create=True, decisions={"yes": None})
    await guarded.log_in(await guarded.token("jobs:read"))
    assert "Moderate" not in (await guarded.get("/console/jobs/queues/judged")).text
    assert (await guarded.get("/console/jobs/queues/judged/moderate")).status_code == 403

"""Overview and jobs screens in a browser: live updates, accessibility, actions."""

from __future__ import annotations

import json
from urllib.parse import quote, urlencode

import pytest
from browser import WIDTHS
from console_stack import send
from hostile import CORPUS
from tests.kit.waiting import wait_true

from headrace.kernel.terminal import visible

pytestmark = pytest.mark.slow


async def do(screen, name, /, **values):
    """Open and submit the form of an action; return the resulting message."""
    query = urlencode({**values, "back": "/console/jobs/alerts"})
    await screen.open(f"/console/do/{name}?{query}")
    return await send(screen)


async def test_hostile_texts_of_jobs_are_escaped(screen, stack):
    found = stack.wait(
        "/v1/jobs?queue=broken&state=failed", lambda page: len(page["jobs"]) >= len(CORPUS)
    )
    await screen.open("/console/jobs/jobs?queue=broken&state=failed")
    text = await screen.text("main")
    assert CORPUS[0] in text
    assert "1337" not in text
    for job in found["jobs"][:4]:
        await screen.open(f"/console/jobs/jobs/{job['id']}")
        shown = await screen.text("main")
        document = stack.call("GET", f"/v1/jobs/{job['id']}")
        assert visible(document["payload"]["text"][:12]) in shown
        assert "ValueError" in shown
    assert not await screen.findings()


async def test_lanes_and_keys_may_have_hostile_names(screen, stack):
    lane, key = CORPUS[1], CORPUS[0]
    [job_id] = stack.enqueue("approve", {"n": 1}, lane=lane, unique=key)
    await screen.open(f"/console/jobs/jobs/{job_id}")
    text = await screen.text("main")
    assert lane in text
    assert key in text
    assert "is paused" in await do(screen, "jobs.pause_lane", limiter="approve", lane=lane)
    path = f"/v1/limiters/approve/lanes/{quote(lane, safe='')}"
    assert stack.call("GET", path)["paused"]
    await screen.open("/console/jobs/lanes/approve")
    assert lane in await screen.text("main")
    await screen.wait_live()
    state = screen.page.locator("tbody tr", has_text=lane).locator(".chip")
    assert await state.inner_text() == "paused"
    stack.call("DELETE", path)
    waiting = screen.page.locator("tbody tr", has_text=lane).locator(".chip", has_text="waiting")
    await waiting.wait_for()
    await screen.open("/console/audit")
    assert lane in await screen.text("main")
    assert not await screen.findings()


async def test_hostile_queries_run_no_script(screen):
    for text in CORPUS[:5]:
        answer = await screen.open(f"/console/jobs/jobs?q={quote(text)}&state=failed")
        assert answer.status == 200
        screen.allow("404")
        await screen.open(f"/console/jobs/queues/{quote(text, safe='')}")
        assert "no such" in (await screen.text("main")).lower() or text[:8] in await screen.text(
            "main"
        )


async def test_a_job_page_explains_why_it_waits(screen, stack):
    [job_id] = stack.enqueue("approve", {"photo": "waits"})
    await screen.open(f"/console/jobs/jobs/{job_id}")
    text = await screen.text("main")
    assert "no running code serves queue 'approve'" in text
    assert '"photo": "waits"' in text
    assert not await screen.findings()


async def test_a_queue_is_paused_overridden_and_resumed(screen, stack):
    assert "is paused" in await do(screen, "jobs.pause_queue", queue="approve")
    assert stack.call("GET", "/v1/queues/approve")["paused"]
    await screen.open("/console")
    assert "queue approve is paused" in await screen.text("#health")
    told = await do(screen, "jobs.set_queue", queue="approve", importance=3, slots_max=9)
    assert "importance 3" in told
    found = stack.call("GET", "/v1/queues/approve")
    assert found["overridden"] == {"importance": 3, "slots_max": 9}
    assert "is resumed" in await do(screen, "jobs.resume_queue", queue="approve")
    assert not stack.call("GET", "/v1/queues/approve")["paused"]
    assert "expected" in await do(
        screen, "jobs.set_queue", queue="approve", slots_min=99, slots_max=1
    )


async def test_failed_jobs_are_a_health_issue(screen, stack):
    stack.enqueue("broken", {"text": "no such product"})

    async def is_red():
        await screen.open("/console")
        return "no such product" in await screen.text("#health")

    await wait_true(is_red, what="the failed job is on the overview")
    text = await screen.text("#health")
    assert "queue broken: " in text
    assert "failed in the last hour" in text
    assert "problem" in await screen.text("#health .health.bad")
    assert not await screen.findings()


async def test_a_job_is_added_cancelled_retried_and_deleted(screen, stack):
    payload = json.dumps({"to": "button@example.org"})
    told = await do(screen, "jobs.add_job", queue="approve", payload=payload, priority=1)
    job_id = int(told.split()[1])
    assert stack.call("GET", f"/v1/jobs/{job_id}")["payload"] == {"to": "button@example.org"}
    assert "is cancelled" in await do(screen, "jobs.cancel_job", job=job_id)
    assert stack.call("GET", f"/v1/jobs/{job_id}")["state"] == "cancelled"
    assert "queued again" in await do(screen, "jobs.retry_job", job=job_id)
    assert stack.call("GET", f"/v1/jobs/{job_id}")["state"] == "ready"
    assert "is deleted" in await do(screen, "jobs.delete_job", job=job_id)
    assert stack.call("GET", f"/v1/jobs/{job_id}")["state"] == "gone"
    assert "gone" in await do(screen, "jobs.cancel_job", job=job_id), "the refusal is shown"
    lines = stack.call("GET", "/v1/audit")
    assert [line["outcome"] for line in lines[:5]] == ["refused", "done", "done", "done", "done"]
    assert lines[1]["command"] == f"headrace jobs rm {job_id}"


async def test_bulk_actions_apply_to_all_matching_jobs(screen, stack):
    ids = stack.enqueue("approve", *({"bulk": n} for n in range(25)), priority=9)
    stack.call("PUT", "/v1/queues/bulky?create=true", json={})
    ids = stack.enqueue("bulky", *({"bulk": n} for n in range(25)))
    await screen.open("/console/do/jobs.bulk_cancel?queue=bulky")
    assert "25 jobs match now" in await screen.text("#form")
    assert "25 jobs are cancelled" in await do(screen, "jobs.bulk_cancel", queue="bulky")
    assert stack.call("GET", f"/v1/jobs/{ids[0]}")["state"] == "cancelled"
    assert "25 jobs are queued again" in await do(screen, "jobs.bulk_retry", queue="bulky")
    assert stack.call("GET", f"/v1/jobs/{ids[0]}")["state"] == "ready"
    assert "25 jobs are deleted" in await do(
        screen, "jobs.bulk_delete", queue="bulky", state="ready"
    )
    assert stack.call("GET", f"/v1/jobs/{ids[0]}")["state"] == "gone"
    assert "every job" in await do(screen, "jobs.bulk_delete"), "without a filter it is refused"


async def test_lanes_and_limiters(screen, stack):
    lane = {"limiter": "partners", "lane": "buttons"}
    path = "/v1/limiters/partners/lanes/buttons"
    await do(screen, "jobs.set_lane", **lane, starts_max=5, window_s=60, concurrency=2, weight=3)
    found = stack.call("GET", path)
    assert (found["starts_max"], found["window_s"], found["concurrency"]) == (5, 60, 2)
    assert found["weight"] == 3
    assert "is paused" in await do(screen, "jobs.pause_lane", **lane)
    assert stack.call("GET", path)["paused"]
    assert stack.call("GET", path)["starts_max"] == 5
    assert "is resumed" in await do(screen, "jobs.resume_lane", **lane)
    assert not stack.call("GET", path)["paused"]
    assert "follows" in await do(screen, "jobs.reset_lane", **lane)
    # The next sweep deletes lanes without own limits and jobs.
    lanes = stack.call("GET", "/v1/limiters/partners/lanes")
    assert all(one["follows_limiter"] for one in lanes if one["lane"] == "buttons")
    await do(screen, "jobs.set_limiter", limiter="bulk-made", concurrency=7, slack_s=0.5)
    assert stack.call("GET", "/v1/limiters/bulk-made")["concurrency"] == 7
    assert "declared limits" in await do(screen, "jobs.reset_limiter", limiter="bulk-made")


async def test_a_cron_is_added_run_paused_and_deleted(screen, stack):
    told = await do(screen, "jobs.add_cron", name="by-hand", spec="0 4 * * *", queue="approve")
    assert "runs first at" in told
    assert stack.call("GET", "/v1/crons/by-hand")["source"] == "api"
    told = await do(screen, "jobs.run_cron", name="by-hand")
    job_id = int(told.partition("job ")[2].split(",")[0])
    assert stack.call("GET", f"/v1/jobs/{job_id}")["queue"] == "approve"
    assert "is paused" in await do(screen, "jobs.pause_cron", name="by-hand")
    assert stack.call("GET", "/v1/crons/by-hand")["paused"]
    assert "runs next" in await do(screen, "jobs.resume_cron", name="by-hand")
    assert "is deleted" in await do(screen, "jobs.remove_cron", name="by-hand")
    assert "by-hand" not in [cron["name"] for cron in stack.call("GET", "/v1/crons")]
    assert "nightly" in await do(screen, "jobs.remove_cron", name="nightly"), "code declares it"


async def test_a_host_is_drained_and_used_again(screen, stack):
    [host] = stack.wait("/v1/fleet", lambda fleet: len(fleet["hosts"]) == 1)["hosts"]
    assert "is draining" in await do(screen, "jobs.drain_host", host=host["name"])
    assert stack.call("GET", "/v1/fleet")["hosts"][0]["is_draining"]
    assert "accepts jobs again" in await do(screen, "jobs.undrain_host", host=host["name"])
    assert not stack.call("GET", "/v1/fleet")["hosts"][0]["is_draining"]


async def test_values_update_without_a_reload(screen, stack):
    stack.call("PUT", "/v1/queues/watched?create=true", json={})
    await screen.open("/console/jobs/queues/watched")
    await screen.wait_live()
    cell = screen.page.locator('[data-live="ready"] .v')
    assert await cell.inner_text() == "0"
    await screen.page.evaluate("window.keptByNoReload = true")
    stack.enqueue("watched", *({"n": n} for n in range(7)))

    async def shows_seven():
        return await cell.inner_text() == "7"

    await wait_true(shows_seven)
    assert await screen.page.evaluate("window.keptByNoReload")


async def test_a_form_opens_as_a_dialog_and_previews_typed_values(screen, stack):
    await screen.open("/console/jobs/queues/mail")
    await screen.page.get_by_role("link", name="Override settings").click()
    dialog = screen.page.locator("#dialog")
    await dialog.locator("#a-importance").wait_for()
    assert not await screen.findings()
    await dialog.locator("#a-importance").fill("4")
    await dialog.get_by_text("headrace queues set mail --importance 4").wait_for()
    assert '"importance": 4' in await dialog.inner_text()
    await dialog.locator("#a-importance").fill("very")
    await dialog.locator(".primary").click()
    await dialog.get_by_text("expected a whole number").wait_for()
    assert not await screen.findings()
    screen.allow("422")
    await dialog.locator("#a-importance").fill("2")
    async with screen.page.expect_navigation():
        await dialog.locator(".primary").click()
    assert "importance 2" in await screen.text(".flash")
    assert screen.page.url.endswith("/console/jobs/queues/mail")
    assert stack.call("GET", "/v1/queues/mail")["overridden"] == {"importance": 2}


async def test_long_names_fit_a_phone_and_the_current_tab_is_visible(tab, stack):
    name = "q" * 128
    stack.call("PUT", f"/v1/queues/{name}?create=true", json={})
    async with tab(width=WIDTHS["phone"]) as screen:
        for path in (f"/console/jobs/queues/{name}", f"/console/do/jobs.set_queue?queue={name}"):
            await screen.open(path)
            assert await screen.overflow() == 0
        await screen.open("/console/jobs/alerts")
        for place in (".rooms [aria-current]", ".tabs [aria-current]"):
            box = await screen.page.locator(place).bounding_box()
            assert 0 <= box["x"] < WIDTHS["phone"] - 20, place


async def test_keyboard_shortcuts(screen):
    await screen.open("/console/jobs")
    page = screen.page
    await page.keyboard.press("?")
    await page.locator("#help[open]").wait_for()
    assert not await screen.findings()
    await page.keyboard.press("Escape")
    await page.locator("#help[open]").wait_for(state="detached")
    await page.keyboard.press("/")
    await page.locator("[name=q]:focus").wait_for()
    await page.keyboard.type("mail")
    await page.keyboard.press("Enter")
    await page.wait_for_url("**q=mail**")
    await page.locator("caption", has_text="1 of").wait_for()
    await page.keyboard.press("Escape")
    await page.keyboard.press("j")
    await page.locator("tr.at").wait_for()
    await page.keyboard.press("Enter")
    await page.wait_for_url("**/console/jobs/queues/mail")
    await page.wait_for_load_state()
    await page.keyboard.press("g")
    await page.keyboard.press("o")
    await page.wait_for_url("**/console")


async def test_escape_restores_a_filter(screen):
    await screen.open("/console/jobs?q=mail")
    page = screen.page
    await page.keyboard.press("/")
    await page.keyboard.type("er")
    async with page.expect_request("**/console/jobs?**") as asked:
        await page.keyboard.press("Escape")
        assert await page.evaluate("document.activeElement === document.body")
        assert await page.locator("[name=q]").input_value() == "mail"

        async def is_asked():
            # A page that is reloading ignores the key.
            await page.keyboard.press("r")
            return asked.is_done()

        await wait_true(is_asked, what="the page is requested")
    assert "q=mail" in (await asked.value).url
    assert "q=mail" in page.url


async def test_the_skip_link_is_first(screen):
    await screen.open("/console/jobs")
    await screen.page.keyboard.press("Tab")
    assert await screen.page.evaluate("document.activeElement.className") == "skip"
    await screen.page.keyboard.press("Enter")
    assert await screen.page.evaluate("document.activeElement.id") == "main"


async def test_forms_and_links_work_without_scripts(tab, stack):
    stack.call("PUT", "/v1/queues/plain?create=true", json={})
    async with tab(scripts=False) as screen:
        await screen.open("/console/jobs?q=plain")
        await screen.press("tbody a")
        await screen.page.get_by_role("link", name="Pause queue").click()
        await screen.page.wait_for_url("**/do/jobs.pause_queue**")
        await screen.press("#form .primary")
        assert "is paused" in await screen.text(".flash")
        assert screen.page.url.endswith("/console/jobs/queues/plain")
    assert stack.call("GET", "/v1/queues/plain")["paused"]


async def test_the_theme_is_stored(screen):
    await screen.open("/console/jobs")
    async with screen.page.expect_navigation():
        await screen.page.locator("#theme").select_option("dark")
    assert await screen.page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert not await screen.findings()
    assert screen.page.url.endswith("/console/jobs")

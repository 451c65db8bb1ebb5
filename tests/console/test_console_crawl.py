"""Every page, filter and form that the console links to, with hostile texts stored in every room.

The site is crawled over HTTP, so each page is checked as it works without scripts; then one page
per screen is checked in a browser: accessibility, a phone's width, both themes, security policy.
"""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime, timedelta
from urllib.parse import quote, urlencode

import httpx
import pytest
from browser import WIDTHS
from console_stack import TRACK
from crawler import Crawl, Page, place_of
from hostile import CORPUS, LAMP, TEXT
from tests.kit.waiting import wait_true

from headrace.console.model import PREFIX
from headrace.console.screens import ROOMS
from headrace.kernel.terminal import visible

pytestmark = pytest.mark.slow
PAGE_HEIGHT_MAX = 4_000
"""Pixels of a page on a phone, if its list can be long."""
PHONE_WIDTHS = (WIDTHS["phone"], 320)
PHONE_RULES = ("color-contrast", "scrollable-region-focusable")
SEEDS = (
    "/console/jobs/jobs?queue=broken",
    "/console/jobs/lanes/partners",
    "/console/jobs/queues/mail",
    "/console/jobs/queues/moderation/moderate",
    "/console/fetch/customers/bike-shop",
    "/console/fetch/customers/bike-shop/item?id=bike-1",
    "/console/fetch/photos?customer=bike-shop",
    "/console/views/entity?id=ad%3A39",
    "/console/feed?viewer=anna",
    "/console/feed/authors?author=bike-shop",
    "/console/feed/why?viewer=anna&post=loud-1",
    "/console/media/objects?prefix=tracks",
    f"/console/media/object?{urlencode({'key': TRACK})}",
)
"""Pages that come first, so that the texts below are those of known data."""
TEXTS = {
    "/": "Live state",
    "/audit": "Every action that was sent",
    "/search": "Screens, lists, and things of all rooms",
    "/jobs": "thumbs",
    "/jobs/hosts": "Slots by host",
    "/jobs/decisions": "Slot decisions",
    "/jobs/jobs": "failed",
    "/jobs/jobs/{job:str}": "Payload",
    "/jobs/lanes": "partners",
    "/jobs/lanes/{limiter:str}": "acme",
    "/jobs/crons": "nightly",
    "/jobs/alerts": "Alerts",
    "/jobs/queues/{queue:str}": "By minute",
    "/jobs/queues/{queue:str}/moderate": "Take the next job",
    "/fetch": "bike-shop",
    "/fetch/customers": "lamp-house",
    "/fetch/customers/{customer:str}": "Recent results",
    "/fetch/customers/{customer:str}/item": "City bike 1",
    "/fetch/photos": "why?",
    "/fetch/review": "look-0",
    "/fetch/why": "Photo",
    "/fetch/hosts": "127.0.0.2",
    "/fetch/study": "Reserved time per photo",
    "/fetch/runs/{run:str}": "1 invalid",
    "/fetch/sources": "Sources",
    "/fetch/deliveries": "Consumers",
    "/views": "ad:39",
    "/views/entity": "Views by people",
    "/views/lag": "Flushed up to",
    "/feed": "lamp-house-0",
    "/feed/authors": "bike-shop-3",
    "/feed/why": "has muted",
    "/feed/index": "Newest post",
    "/media": "local mode",
    "/media/objects": TRACK.rpartition("/")[2],
    "/media/object": "audio/",
    "/media/cluster": "No cluster",
    "/media/traces": "No active traces",
}
"""A text that each screen shows with the data of `ConsoleStack.seed`."""
VISIBILITY = {
    "bike-shop-1": ("followed", "anna follows bike-shop"),
    "loud-1": ("muted", "anna has muted loud"),
    "enemy-1": ("blocked", "anna has blocked enemy"),
    "outsider-1": ("not_followed", "anna does not follow outsider"),
    "bike-soon": ("waits", "the post waits until"),
    "never-was": ("unknown", "does not exist: it was never posted"),
}
EVENTS_MAX = 3
"""The first event arrives immediately, later ones with the next sample."""
LOADS_MAX = 5


@pytest.fixture(scope="module")
def crawl(stack):
    """The crawl of the whole console."""
    run = stack.call("GET", "/v1/fetch/runs?customer=bike-shop")["runs"][-1]["run"]
    crawl = Crawl(stack.browse)
    paths = [PREFIX + screen.path.rstrip("/") for room in ROOMS for screen in room.screens]
    plain = [path for path in paths if "{" not in path]
    crawl.run([*SEEDS, f"{PREFIX}/fetch/runs/{run}?list=problems", *plain])
    return crawl


def test_every_page_is_sound_and_links_lead_to_every_screen(crawl, stack):
    assert "\n".join(crawl.faults) == ""
    places = crawl.places
    assert {screen.path for room in ROOMS for screen in room.screens} <= places.keys()
    for place, text in TEXTS.items():
        assert text in crawl.pages[places[place]].text, places[place]
    forms = {place.rpartition("/")[2] for place in places if "/do/" in place}
    for room in ROOMS:
        assert not room.actions or forms & {action.name for action in room.actions}, room.name
    media = {url for page in crawl.pages.values() for url in page.media if "/m/" in url}
    assert media
    for url in sorted(media)[:20]:
        assert httpx.head(url).status_code == 200, url


def test_hostile_filters_are_shown_as_text(crawl):
    for path, name in sorted(crawl.filters()):
        for text in (TEXT[:120], CORPUS[11]):
            page = crawl.open(f"{path}?{urlencode({name: text})}", statuses=(200, 404, 422))
            is_kept = text in [form.fields.get(name) for form in page.forms]
            assert is_kept or visible(text)[:12] in page.text, page.url
    for text in CORPUS[:5]:
        crawl.open(f"/console/jobs/queues/{quote(text, safe='')}", statuses=(404,))
    assert "\n".join(crawl.faults) == ""


def shown_rows(stack):
    """(URL of a page, texts that it shows), the texts as the API returns them."""
    [bikes] = stack.call("GET", "/v1/fetch/runs?customer=bike-shop")["runs"][-1:]
    [lamps] = stack.call("GET", "/v1/fetch/runs?customer=lamp-house")["runs"]
    path, run = f"/v1/fetch/runs/{bikes['run']}/errors", f"/console/fetch/runs/{bikes['run']}"
    faults = stack.call("GET", path)
    in_russian = stack.call("GET", f"{path}?lang=ru")["photos"][0]["text"]
    yield f"{run}?list=problems", ("failed:http_404", "refused:not_an_image")
    yield f"{run}?list=problems", (faults["problems"][0]["text"],)
    yield f"{run}?list=photos&lang=ru", (in_russian,)
    yield f"{run}?list=changes", ("bike-11",)
    yield f"/console/fetch/runs/{lamps['run']}?list=changes", (LAMP,)
    yield "/console/fetch/photos?customer=bike-shop&show=broken", ("failed:http_404", "404")
    gone = stack.seller.url("/gone/1.jpg")
    why = stack.call("GET", "/v1/fetch/why", params={"url": gone})
    texts = (why["customers"][0]["ahead"], why["links"][0]["text"])
    yield f"/console/fetch/why?{urlencode({'url': gone})}", texts
    yield f"/console/fetch/why?{urlencode({'url': 'http://10.0.0.1/x.jpg'})}", ("refused",)
    item = f"fetch/customers/lamp-house/item?{urlencode({'id': LAMP})}"
    fields = stack.call("GET", f"/v1/{item}")["fields"].values()
    yield f"/console/{item}", tuple(visible(str(value)) for value in fields)
    for job in stack.call("GET", "/v1/jobs?queue=broken&state=failed")["jobs"][:4]:
        found = stack.call("GET", f"/v1/jobs/{job['id']}")
        yield f"/console/jobs/jobs/{job['id']}", (visible(found["payload"]["text"][:12]), "Value")
    [waits] = stack.enqueue("approve", {"photo": "waits"})
    texts = ("no running code serves queue 'approve'", '"photo": "waits"')
    yield f"/console/jobs/jobs/{waits}", texts
    top = stack.call("GET", "/v1/views/top?window=24h&limit=20")[0]
    yield "/console/views?limit=20", (top["id"], f"{top['views']:,}")
    yield "/console/views/entity?id=ad%3A39&span=2d", ("118", "Views by bot", "human")
    for post, shown in VISIBILITY.items():
        yield f"/console/feed/why?viewer=anna&post={post}", shown
    yield "/console", ("queue broken: ", " failed jobs, first ")


def test_pages_show_what_the_api_returns(crawl, stack):
    stack.wait("/v1/jobs?queue=broken&state=failed", lambda page: len(page["jobs"]) >= len(CORPUS))
    for url, texts in shown_rows(stack):
        page = crawl.open(url)
        for text in texts:
            assert " ".join(text.split()) in " ".join(page.text.split()), url
    assert "\n".join(crawl.faults) == ""


def test_a_failed_job_is_two_presses_from_the_overview(crawl, stack):
    stack.wait("/v1/jobs?queue=broken&state=failed", lambda page: len(page["jobs"]) >= len(CORPUS))
    overview = crawl.open("/console")
    causes = [url for url in overview.links if "/jobs/jobs?queue=broken&state=failed" in url]
    assert causes
    assert any("/do/jobs.bulk_retry?queue=broken" in url for url in overview.links)
    matching = crawl.open(causes[0])
    job = next(url for url in matching.links if re.fullmatch(r"/console/jobs/jobs/\d+", url))
    assert any(f"/do/jobs.retry_job?job={job.rpartition('/')[2]}" in url for url in matching.links)
    page = crawl.open(job)
    assert "ValueError" in page.text
    assert any("/do/jobs.retry_job" in url for url in page.links)
    assert "Publish held item" in crawl.open("/console/do/fetch-release").text
    # Other tests may have published one of the two held items.
    for text in ("queue broken: ", "held items?: ", "photos of bike-shop: 2 photos of "):
        assert re.search(text, " ".join(overview.text.split()))


def test_a_feed_is_paged_to_its_end(crawl, stack):
    posts = stack.call("GET", "/v1/feed/viewers/anna?limit=200")["posts"]
    url, seen = "/console/feed?viewer=anna", []
    while url:
        answer = stack.browse.get(url)
        seen += re.findall(r'class="id"[^>]*>\s*([\w-]+)', answer.text)
        following = re.search(
            r'href="([^"]+)"[^>]*rel="next"|rel="next"[^>]*href="([^"]+)"',
            answer.text.replace("&amp;", "&"),
        )
        url = following and (following[1] or following[2])
    assert seen == [post["id"] for post in posts]
    assert not any(one.startswith(("loud", "enemy")) for one in seen)


async def first_events(client, url):
    """The first events of the live stream of a newly loaded page."""
    main = Page(url, (await client.get(url)).text).main
    params = {"page": main["data-page"], "url": main["data-live-url"]}
    params["layout"] = main["data-layout"]
    text, events = "", []
    async with client.stream("GET", "/console/live", params=params) as answer:
        async for chunk in answer.aiter_text():
            text += chunk
            events = re.findall(r"event: (\w+)", text)
            if len(events) >= EVENTS_MAX or "stale" in events:
                break
    return events


async def test_an_unchanged_page_is_not_reloaded(crawl, stack):
    live = [url for url in crawl.places.values() if "data-page" in crawl.pages[url].main]
    assert len(live) > 15
    async with httpx.AsyncClient(
        base_url=stack.api, headers=stack.browse.headers, cookies=stack.browse.cookies, timeout=60
    ) as client:

        async def at_rest(url):
            for _ in range(LOADS_MAX):
                events = await first_events(client, url)
                if "stale" not in events:
                    break
            return events

        events_of = dict(zip(live, await asyncio.gather(*map(at_rest, live)), strict=True))
    for url, events in events_of.items():
        assert not {"stale", "unavailable"} & set(events), url
    assert events_of["/console/fetch/sources"].count("heartbeat") > 1


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
async def test_screens_are_accessible_at_two_widths_and_in_both_themes(screen, crawl, room):
    """`Screen` asserts that no script failed and that the security policy was kept."""
    paths = {screen.path for screen in room.screens}
    urls = [url for place, url in crawl.places.items() if place in paths]
    forms = {action.name: {field.kind for field in action.fields} for action in room.actions}
    places = [place for place in crawl.places if place.rpartition("/")[2] in forms]
    places.sort(key=lambda place: len(forms[place.rpartition("/")[2]]))
    for url in [*urls, *(crawl.places[place] for place in places[-1:])]:
        await screen.page.set_viewport_size({"width": WIDTHS["laptop"], "height": 900})
        await screen.page.emulate_media(color_scheme="light")
        await screen.open(url)
        assert not await screen.findings(), url
        await screen.narrow()
        await screen.page.emulate_media(color_scheme="dark")
        assert not await screen.findings(rules=PHONE_RULES), url
        assert await screen.phone_faults() == [], url


async def test_long_names_fit_a_phone_and_the_current_tab_is_visible(tab, stack):
    name = stack.queue("q" * 128)
    async with tab(width=WIDTHS["phone"]) as screen:
        for path in (f"/console/jobs/queues/{name}", f"/console/do/jobs.set_queue?queue={name}"):
            await screen.open(path)
            assert await screen.overflow() == 0
        await screen.open("/console/do/jobs.bulk_retry?queue=broken-by-hand&state=failed")
        lines = await screen.page.locator(".calls .whole").evaluate_all(
            "all => all.map((one) => one.getClientRects().length)"
        )
        assert set(lines) == {1}, "commands break between words"
        await screen.open("/console/jobs/alerts")
        for place in (".rooms [aria-current]", ".tabs [aria-current]"):
            box = await screen.page.locator(place).bounding_box()
            assert 0 <= box["x"] < WIDTHS["phone"] - 20, place


async def test_the_queues_fit_a_laptop_and_are_labelled_cards_on_a_phone_without_scripts(
    tab, screen
):
    await screen.open("/console/jobs")
    box = "box => box.scrollWidth - box.clientWidth"
    assert await screen.page.locator(".scroll").evaluate(box) <= 0
    async with tab(width=WIDTHS["phone"], scripts=False) as phone:
        await phone.open("/console/jobs")
        cell = phone.page.locator("tbody td[data-label=Waiting]").first
        label = await cell.evaluate("cell => getComputedStyle(cell, '::before').content")
        assert label == '"Waiting"'
        assert await phone.page.locator("tbody a:has-text('Pause')").first.is_visible()
        assert await phone.page.locator("thead").is_hidden()
        assert await phone.phone_faults() == []


async def pages_of(phone, path, row):
    """The number of rows of each page of a list, none too long for a phone."""
    found, names = [], []
    await phone.open(path)
    while True:
        texts = await phone.page.locator(row).all_inner_texts()
        found.append(len(texts))
        names += texts
        height = await phone.page.evaluate("document.documentElement.scrollHeight")
        assert height <= PAGE_HEIGHT_MAX, path
        assert await phone.overflow() == 0
        if not await phone.page.locator(".pager [rel=next]").count():
            return found, names
        await phone.press(".pager [rel=next]")


async def test_long_lists_have_pages_for_a_phone_without_scripts(tab, stack):
    later = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    ids = stack.enqueue(stack.queue("long-list"), *({"n": n} for n in range(120)), at=later)
    links = [stack.seller.url(f"/photo/album{n}.jpg") for n in range(30)]
    stack.customer("album")
    rows = [f"album-{n},Album {n},5,Books,,{'|'.join(links)}" for n in range(4)]
    stack.wait_run(stack.catalogue("album", rows))
    for n in range(60):
        stack.customer(f"seller-{n:02}")
    async with tab(width=WIDTHS["phone"], scripts=False) as phone:
        counts, names = await pages_of(phone, "/console/jobs/jobs?queue=long-list", "tbody th")
        assert (counts, sorted(map(int, names))) == ([50, 50, 20], sorted(ids))
        counts, _ = await pages_of(phone, "/console/fetch/photos?customer=album", ".shot")
        assert counts == [90, 30]
        counts, names = await pages_of(phone, "/console/fetch/customers?match=seller", "tbody th")
        assert (counts, names) == ([50, 10], [f"seller-{n:02}" for n in range(60)])


async def test_long_pages_are_folded_on_a_phone_without_scripts(tab, stack, screen):
    later = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    stack.enqueue(stack.queue("folded"), *({"n": n} for n in range(21)), at=later)
    path, rows = "/console/jobs/jobs?queue=folded", ".scroll > table > tbody > tr"
    await screen.open(path)
    assert await screen.page.locator("summary", has_text="All 21 rows").is_hidden()
    assert await screen.page.locator(rows).last.is_visible()
    async with tab(width=WIDTHS["phone"], scripts=False) as phone:
        await phone.open(path)
        shown = phone.page.locator(rows).filter(visible=True)
        assert await shown.count() == 20
        await phone.page.locator("summary", has_text="All 21 rows").click()
        assert await shown.count() == 21
        assert await phone.phone_faults() == []
        await phone.open("/console/jobs/jobs?queue=broken")
        assert await phone.page.locator("summary", has_text="rows").count() == 0


async def test_the_lists_of_a_run_are_in_one_line(tab, stack):
    run = stack.call("GET", "/v1/fetch/runs?customer=bike-shop")["runs"][-1]["run"]
    async with tab(width=WIDTHS["phone"]) as phone:
        await phone.open(f"/console/fetch/runs/{run}?list=photos")
        links = phone.page.locator("main .tabs a")
        boxes = [await one.bounding_box() for one in await links.all()]
        assert len({box["y"] for box in boxes}) == 1
        assert boxes[-1]["x"] + boxes[-1]["width"] <= WIDTHS["phone"]


async def test_no_inner_list_is_wider_than_its_page_on_small_phones(tab, stack):
    run = stack.call("GET", "/v1/fetch/runs?customer=bike-shop")["runs"][-1]["run"]
    lists = (f"/console/fetch/runs/{run}?list={name}" for name in ("problems", "photos", "changes"))
    wide = """() => [...document.querySelectorAll("main :is(.scroll, .panel, nav, ul)")]
        .filter((one) => one.scrollWidth > one.clientWidth + 1)
        .map((one) => `${one.className} ${one.scrollWidth} px in ${one.clientWidth} px`)"""
    async with tab(width=WIDTHS["phone"]) as phone:
        for path in (*lists, "/console/fetch/study", "/console/jobs", "/console/fetch"):
            await phone.open(path)
            for width in PHONE_WIDTHS:
                await phone.page.set_viewport_size({"width": width, "height": 740})
                assert await phone.overflow() == 0, path
                assert await phone.page.evaluate(wide) == [], f"{path} at {width} px"


async def test_filters_and_bulk_buttons_are_folded_on_a_phone_without_scripts(tab, screen):
    path = "/console/jobs/jobs?state=failed"
    await screen.open(path)
    assert await screen.page.locator(".fold").first.is_hidden()
    assert await screen.page.locator("#f-queue").is_visible()
    async with tab(width=WIDTHS["phone"], scripts=False) as phone:
        await phone.open(path)
        for label, place in (("Filters (1 set)", "#f-queue"), ("Change all", "a:has-text('all')")):
            shown = phone.page.locator("main").locator(place).first
            assert await shown.is_hidden()
            await phone.page.locator("summary", has_text=label).click()
            await shown.wait_for()
        assert await phone.phone_faults() == []


async def test_the_row_that_a_key_selects_is_above_the_foot_of_the_page(screen):
    await screen.open("/console/jobs")
    page = screen.page
    await page.set_viewport_size({"width": WIDTHS["laptop"], "height": 500})
    count = await page.locator("tbody tr").count()
    # In one call, because the page replaces its rows while it is open.
    edges = """() => ["tr.at", ".bottom"].map(
        part => document.querySelector(part).getBoundingClientRect()
    ).map((box, place) => place ? box.top : box.bottom)"""
    for _ in range(count):
        await page.keyboard.press("j")
        row_end, foot = await page.evaluate(edges)
        assert row_end <= foot + 1


async def test_photos_tracks_and_charts_are_drawn(screen):
    await screen.open("/console/fetch/photos?customer=bike-shop")
    photo = screen.page.locator(".shot img").first
    await photo.scroll_into_view_if_needed()
    loaded = "image => image.decode().then(() => image.naturalWidth)"
    assert await photo.evaluate(loaded) == 320
    await screen.open("/console/views/entity?id=ad%3A39&span=2d")
    await screen.page.locator("[data-chart=series].drawn canvas").wait_for()
    await screen.open("/console/fetch/study")
    await screen.page.locator("[data-chart=times].drawn canvas").wait_for()
    await screen.open(f"/console/media/object?{urlencode({'key': TRACK})}")
    player = screen.page.locator("audio")

    async def duration_s():
        return await player.evaluate("player => player.readyState >= 1 && player.duration")

    loaded_s = await wait_true(duration_s, what="the player has loaded the track")
    assert loaded_s == pytest.approx(1, abs=0.05)


async def test_forms_and_filters_work_in_a_browser_without_scripts(tab, stack):
    stack.queue("plain")
    async with tab(scripts=False) as screen:
        await screen.open("/console/jobs")
        await screen.page.locator("#f-q").fill("plain")
        await screen.press(".filters button")
        assert "q=plain" in screen.page.url
        await screen.press("tbody a")
        await screen.press("a:has-text('Pause queue')")
        await screen.press("#form .primary")
        assert "is paused" in await screen.text(".flash")
        assert screen.page.url.endswith("/console/jobs/queues/plain")
    assert stack.call("GET", "/v1/queues/plain")["paused"]


def test_places_of_links():
    assert place_of("/console/jobs/queues/a%2Fb?span=1h") == "/jobs/queues/{queue:str}"
    with pytest.raises(AssertionError, match="leads to no screen"):
        place_of("/console/nothing")


PLANTED = {
    "<script>alert(1)</script>": "foreign script",
    "<p onclick='x'>": "onclick",
    "<img src=x alt=''>": "src='x'",
    "<a href='javascript:alert(1)'>a</a>": "javascript",
    "<div hx-get='/logout'></div>": "hx-get",
    "<iframe></iframe>": "iframe",
    "<a href='/console'> </a>": "empty <a>",
    "<form method=post action=/console/do/x></form>": "CSRF token",
    "<form><input name=a id=a></form>": "without label",
    "<p>\u202eabc</p>": "the text has",
    "<p>Traceback (most recent call last)</p>": "Traceback",
    "<h1>second</h1>": "main headings",
}


@pytest.mark.parametrize(("markup", "fault"), PLANTED.items(), ids=str)
def test_the_crawler_detects_a_planted_fault(markup, fault):
    whole = "<title>a · Headrace</title><h1>a</h1>{}"
    assert Page("/", whole.format("<p>fine</p>")).faults == []
    assert fault in "\n".join(Page("/", whole.format(markup)).faults)

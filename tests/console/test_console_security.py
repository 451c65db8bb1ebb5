"""Forms and pages: CSRF, repeated submissions, forged cookies, hostile URLs, policy, assets."""

from __future__ import annotations

import hashlib
import html
import re
from pathlib import Path

import pytest
from browser import browsing
from crawler import Page
from served import app_of, serving, visiting
from tests.kit.chaos import RESET, ChaosProxy

from headrace.console import app as console_app
from headrace.console.rendering import Assets, make_environment
from headrace.engines.endpoints import Endpoints
from headrace.jobs import NewJob
from headrace.kernel.metrics import REGISTRY

pytestmark = pytest.mark.slow
ASSETS = Path(console_app.__file__).parent / "assets"
TEMPLATES = sorted((Path(console_app.__file__).parent / "templates").rglob("*.html"))


async def test_forms_are_accepted_from_own_pages_only(at, served):
    fields = {"name": "n", "spec": "0 4 * * *", "queue": "nothing"}
    path, csrf_token = "/console/do/jobs.add_cron", (await at.form("jobs.add_cron"))["csrf_token"]
    own = {"csrf_token": csrf_token, **fields}
    async with visiting(*served) as other:
        for answer in (
            await at.post(path, **fields),
            await at.post(path, **{**own, "csrf_token": "0" * 32}),
            await at.post(path, origin="https://evil.example", **own),
            await at.post(path, origin="null", **own),
            await at.client.post(path, data=own),
            await other.post(path, **own),
        ):
            assert answer.status_code == 403
    entries = await at.entries()
    assert [entry.outcome for entry in entries] == ["refused"] * 4, "foreign origins get no further"
    assert (await at.post(path, **own)).status_code == 422, "accepted, and then refused"


async def test_a_result_is_shown_once_and_on_full_pages_only(at):
    await at.app.jobs.queues.set("shown-once", create=True)
    answer = await at.send("jobs.set_queue", queue="shown-once", importance=2)
    assert answer.status_code == 303, answer.text
    piece = await at.get("/console/jobs/crons", headers={"hx-request": "true"})
    assert 'class="flash' not in piece.text
    assert "headrace_flash" not in piece.headers.get("set-cookie", "")
    page = await at.get("/console/jobs/crons")
    [text] = re.findall(r'class="flash good"[^>]*>([^<]+)', page.text)
    assert "shown-once" in text
    assert "headrace_flash" in page.headers["set-cookie"]
    assert 'class="flash' not in (await at.get("/console/jobs/crons")).text


async def test_a_resubmitted_form_has_no_effect(at):
    fields = await at.form("jobs.add_job", queue="again")
    await at.app.jobs.queues.set("again", create=True)
    for outcome in ("done", "refused"):
        await at.post("/console/do/jobs.add_job", **fields, queue="again", payload="1")
        assert (await at.entries())[0].outcome == outcome
    assert (await at.app.jobs.queues.get("again")).ready == 1


async def test_an_invalid_form_shows_no_calls(at):
    place = "/console/do/jobs.add_job/calls"
    for payload in ("{bad", "NaN", r'"\u0000"'):
        text = (await at.get(place, params={"queue": "q", "payload": payload})).text
        assert text.count("Available once all required fields") == 2
        assert "/v1/queues" not in text
        assert "headrace jobs add" not in text
    text = (await at.get(place, params={"queue": "q", "payload": '"5"'})).text
    assert "headrace jobs add q '\"5\"'" in html.unescape(re.sub("<[^>]*>", "", text))
    assert "Available once" not in text
    sent = await at.send("jobs.add_job", queue="q", payload=r'"\u0000"')
    assert (sent.status_code, "without NUL characters" in sent.text) == (422, True)


@pytest.mark.parametrize("cookie", ["0" * 32 + b"good.gotcha".hex(), "~" * 40])
async def test_forged_flash_cookies_are_ignored(at, cookie):
    at.client.cookies.set("headrace_flash", cookie)
    page = await at.get("/console/jobs")
    assert (page.status_code, "gotcha" in page.text) == (200, False)


async def test_with_scripts_a_form_redirects_by_header_within_the_console(at):
    await at.app.jobs.queues.set("sent", create=True)
    fields = {**await at.form("jobs.pause_queue", queue="sent"), "queue": "sent"}
    answer = await at.client.post(
        "/console/do/jobs.pause_queue",
        data={**fields, "back": "https://evil.example/"},
        headers={"origin": at.address, "hx-request": "true"},
    )
    assert (answer.status_code, answer.headers["hx-redirect"]) == (200, "/console")


WRONG_ADDRESSES = (
    ("/console/nothing", 404),
    ("/console/jobs/jobs/abc", 404),
    ("/console/jobs/jobs/99999999999999999999", 404),
    ("/console/jobs/queues/%00", 404),
    *((f"/console/fetch/runs/{text}", 404) for text in ("-1", "1e3", "%D9%A3", "9" * 19, "<b>")),
    ("/console/fetch/hosts?after_host=%00", 422),
    ("/console/fetch/customers/%00", 404),
    ("/console/do/jobs.bulk_retry?queue=%00", 200),
    ("/console/jobs/queues/<script>alert(1)</script>", 404),
    ("/console/jobs?sort=<script>alert(1)</script>", 422),
    ("/console/jobs/decisions?before=-1", 422),
    ("/console/fetch/review?before=-1", 422),
    ("/console/do/nothing.at_all", 404),
    ("/console/assets/../model.py", 404),
    ("/console/assets/%2e%2e/model.py", 404),
    ("/console/assets/vendor", 404),
    ("/console/live?url=/console/nothing", 404),
    ("/console/live?url=https://evil.example/console/nothing", 200),
)


@pytest.mark.parametrize(("path", "status"), WRONG_ADDRESSES)
async def test_an_unknown_url_is_an_escaped_error_page(at, path, status, recwarn):
    async with at.client.stream("GET", path) as answer:
        assert answer.status_code == status
        if status != 200:
            text = (await answer.aread()).decode()
            assert Page(path, text).faults == []
            assert "script-src 'self'" in answer.headers["content-security-policy"]
            assert answer.headers["x-request-id"] in text
    assert [one for one in recwarn if "never awaited" in str(one.message)] == []


async def test_every_page_has_a_strict_policy_and_other_hosts_are_refused(at):
    answer = await at.get("/")
    assert (answer.status_code, answer.headers["location"]) == (303, "/console")
    headers = (await at.get("/console/jobs")).headers
    policy = headers["content-security-policy"]
    for rule in (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "frame-ancestors 'none'",
        "img-src 'self' data: http://127.0.0.1:8081",
    ):
        assert rule in policy
    assert "unsafe" not in policy
    assert headers["referrer-policy"] == "same-origin", "else browsers hide the origin of forms"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    head = await at.client.head("/console/jobs")
    assert (head.status_code, head.content) == (200, b"")
    assert (await at.get("/console", headers={"host": "evil.example"})).status_code == 421
    before = REGISTRY.get_sample_value("console_csp_reports_total")
    kind = {"content-type": "application/csp-report"}
    report = await at.client.post("/console/csp", content=b'{"csp-report": {}}', headers=kind)
    assert report.status_code == 204
    assert REGISTRY.get_sample_value("console_csp_reports_total") == before + 1


async def test_assets_are_cached_by_content_hash(at):
    page = await at.get("/console/jobs")
    places = re.findall(r'(?:src|href)="(/console/assets/[^"]+)"', page.text)
    assert len(places) >= 6
    for place in places:
        answer = await at.get(place)
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
        tag = answer.headers["etag"]
        assert (await at.get(place, headers={"if-none-match": tag})).status_code == 304
    script = await at.get("/console/assets/console.js")
    assert script.headers["content-encoding"] == "gzip"
    assert script.headers["cache-control"] == "no-cache"
    assert script.headers["content-type"].startswith("text/javascript")
    plain = await at.get("/console/assets/console.js", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers


async def test_the_theme_is_kept_in_a_cookie(at):
    assert 'data-theme="auto"' in (await at.get("/console/jobs")).text
    answer = await at.post("/console/theme", theme="dark", back="/console/jobs")
    assert answer.headers["location"] == "/console/jobs"
    assert 'data-theme="dark"' in (await at.get("/console/jobs")).text
    await at.post("/console/theme", theme='"><script>')
    assert 'data-theme="auto"' in (await at.get("/console/jobs")).text


async def test_a_stopped_engine_affects_only_its_panels(tmp_path, database_url, chromium):
    """Existing sessions still see the error while PostgreSQL is down."""
    with ChaosProxy(database_url) as postgres:
        app = app_of(
            tmp_path, Endpoints(postgres.url, f"unix://{tmp_path}/none", "file:///nowhere")
        )
        async with serving(app) as address, visiting(app, address) as at:
            assert (await at.get("/console")).status_code == 200
            postgres.set(RESET)
            page = await at.get("/console")
            assert page.status_code == 200
            assert "PostgreSQL is down" in page.text
            assert "Valkey is down" in page.text
            assert page.text.count("headrace doctor") == 1, "the remedy is stated once"
            cookies = [
                {"name": name, "value": value, "url": f"{address}/console"}
                for name, value in at.client.cookies.items()
            ]
            async with browsing(chromium, address, cookies=cookies) as screen:
                await screen.open("/console")
                state = screen.page.locator("#live-state")
                await state.get_by_text(re.compile("^not live: PostgreSQL")).wait_for()
            for path, name in (
                ("", "State of the queues"),
                ("/hosts", "State of the hosts"),
                ("/decisions", "Slot decisions"),
                ("/jobs", "List of jobs"),
                ("/lanes", "Limiters"),
                ("/crons", "Crons"),
                ("/alerts", "Alerts"),
            ):
                page = await at.get(f"/console/jobs{path}")
                assert page.status_code == 200, path
                assert f"<strong>{name} unavailable.</strong>" in page.text
                assert "check it with <code>headrace doctor</code>" in page.text
            refused = await at.get("/console/jobs/queues/mail")
            assert refused.status_code == 503
            assert "<h1>" in refused.text
            assert "check it with <code>headrace doctor</code>" in refused.text


async def test_invisible_characters_are_escaped_in_text_and_kept_in_fields(at):
    await at.app.jobs.queues.set("turned", create=True)
    job = await at.app.jobs.enqueue(NewJob(queue="turned", payload={"file": "a\u202egpj.exe"}))
    turned = (
        "/console/feed?viewer=%E2%80%AEabc",
        "/console/media/object?key=a%E2%80%AEgpj.exe",
        "/console/views/entity?id=%E2%80%AEabc",
    )
    for path in (*turned, f"/console/jobs/jobs/{job}"):
        text = (await at.get(path)).text
        assert Page(path, text).faults == []
        assert "\\u202e" in Page(path, text).text, path
        if path in turned:
            assert "\\u202e" in Page(path, text).title, path
            assert "\u202e" in re.search(r"<input id=\"f-[^>]*>", text)[0], "sent back as it was"


async def test_limit_forms_show_the_exact_window(at):
    for limiter, window_s, text in (("part", 1.5, "1.5"), ("whole", 60, "60")):
        await at.app.jobs.lanes.set_limiter(limiter, starts_max=7, window_s=window_s)
        await at.app.jobs.lanes.set(limiter, "a", starts_max=7, window_s=window_s, concurrency=None)
        for path in ("/console/jobs/lanes", f"/console/jobs/lanes/{limiter}"):
            page = (await at.get(path)).text
            link = rf"do/jobs.set_\w+\?limiter={limiter}&[^\"]*window_s=([^&\"]*)"
            assert set(re.findall(link, page)) == {text}, path


def test_templates_have_no_inline_code_and_escape_everything():
    for path in TEMPLATES:
        text = path.read_text()
        inline = r"\bstyle=|\son\w+=\"|<style|javascript:|\|\s*safe\b|autoescape"
        assert not re.search(inline, text), path
        assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", text)), path
        assert not re.search(r"""(?:src|href|action)=["']?https?:""", text), path


def test_every_value_in_a_template_is_escaped():
    """Whichever template: the environment escapes, and no template turns that off."""
    template = make_environment(Assets()).from_string("<b title='{{ text }}'>{{ text }}</b>")
    shown = template.render(text="<script>alert(1)</script>' onclick='alert(2)&")
    assert shown.count("<") == 2
    assert shown.count("'") == 2
    assert html.unescape(shown).count("<script>") == 2


def test_vendored_files_match_their_hashes():
    listed = (ASSETS / "vendor" / "VENDORED.md").read_text()
    files = [f for f in (ASSETS / "vendor").iterdir() if f.suffix in (".js", ".css")]
    assert len(files) == 3
    for file in files:
        assert f"`{file.name}`" in listed
        assert hashlib.sha256(file.read_bytes()).hexdigest() in listed

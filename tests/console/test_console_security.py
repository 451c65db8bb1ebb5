"""Login, CSRF and page security, on a real socket with real engines."""

from __future__ import annotations

import hashlib
import html
import re
from pathlib import Path
from urllib.parse import parse_qs, parse_qsl, urlsplit

import httpx
import pytest
import structlog
from served import CSRF_TOKEN, PAGE, app_of, make_link, post, send, serving
from tests.kit.chaos import RESET, ChaosProxy

from headrace.console import app as console_app
from headrace.engines.endpoints import Endpoints
from headrace.jobs import NewJob
from headrace.kernel.metrics import REGISTRY

pytestmark = pytest.mark.slow
ASSETS = Path(console_app.__file__).parent / "assets"
TEMPLATES = sorted((Path(console_app.__file__).parent / "templates").rglob("*.html"))


@pytest.fixture
def endpoints(database_url, running_engines, tmp_path):
    """Endpoints of this test's database and the test run's Valkey."""
    blobs = (tmp_path / "blobs").as_uri()
    return Endpoints(database_url, running_engines.endpoints.valkey_url, blobs)


@pytest.fixture
async def at(tmp_path, endpoints):
    """A console with a logged-in client."""
    async with serving(app_of(tmp_path, endpoints)) as found:
        yield found


@pytest.fixture
async def guarded(tmp_path, endpoints):
    """A console with a client without a session."""
    async with serving(app_of(tmp_path, endpoints), logged_in=False) as found:
        yield found


async def log_in(at, token):
    return await post(at, "/console/login", token=token, back="/console/jobs")


async def test_the_root_redirects_browsers_to_the_console(at):
    answer = await at.client.get("/")
    assert (answer.status_code, answer.headers["location"]) == (303, "/console")
    answer = await at.client.get("/", headers={"accept": "application/json"})
    assert answer.status_code == 401, "a session of the console is no token of the API"
    token = (await at.app.tokens.create("reader", ("jobs:read",))).text
    headers = {"accept": "application/json", "authorization": f"Bearer {token}"}
    assert (await at.client.get("/", headers=headers)).json()["name"] == "headrace"


PASSED_ON = (
    {},
    {"x-forwarded-for": "127.0.0.1"},
    {"forwarded": "for=127.0.0.1"},
    {"x-forwarded-user": "root", "x-remote-user": "root"},
    {"host": "localhost"},
    {"x-forwarded-for": "10.0.0.1"},
    {"forwarded": "for=10.0.0.1"},
    {"via": "1.1 proxy"},
    {"x-real-ip": "10.0.0.1"},
    {"host": "192.0.2.7"},
)


async def test_loopback_and_proxies_need_a_session(guarded):
    for headers in PASSED_ON:
        answer = await guarded.client.get("/console/jobs?state=failed", headers=headers)
        assert answer.status_code == 303
        place = "/console/login?back=%2Fconsole%2Fjobs%3Fstate%3Dfailed"
        assert answer.headers["location"] == place
        form = await guarded.client.get("/console/do/jobs.pause_queue", headers=headers)
        assert form.status_code == 303
        for path in ("/console/jobs", "/console/live?url=/console/jobs"):
            plain = await guarded.client.get(path, headers={**headers, "accept": "*/*"})
            assert (plain.status_code, plain.json()["code"]) == (401, "console.login_needed")


async def test_an_unknown_host_header_is_refused(at):
    answer = await at.client.get("/console", headers={"host": "evil.example"})
    assert answer.status_code == 421


async def test_login_by_token(guarded):
    assert (await guarded.client.get("/console")).status_code == 303
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            wrong = await log_in(guarded, "hrt_wrong")
            assert wrong.status_code == 401
    [line] = [one for one in logs if one["event"] == "logins_refused"]
    assert (line["alike_before"], line["address"]) == (0, "127.0.0.1"), (
        "the others are summarized later"
    )
    assert "token is not valid here" in wrong.text
    assert "Authorization" not in wrong.text
    token = (await guarded.app.tokens.create("ann", ("*",))).text
    answer = await log_in(guarded, f" {token}\n")
    assert (answer.status_code, answer.headers["location"]) == (303, "/console/jobs")
    assert token not in str(answer.headers)
    page = await guarded.client.get("/console/jobs")
    assert page.status_code == 200
    assert "ann" in page.text


async def test_a_publishable_key_cannot_log_in(guarded):
    key = (await guarded.app.tokens.create("site", ("views:hit",), publishable=True)).text
    assert (await log_in(guarded, key)).status_code == 401


async def test_revoking_a_token_ends_its_sessions_and_streams(guarded, monkeypatch):
    monkeypatch.setattr("headrace.console.live.CHECK_S", 0.2)
    token = (await guarded.app.tokens.create("ann", ("*",))).text
    await log_in(guarded, token)
    assert (await guarded.client.get("/console/jobs")).status_code == 200
    params = {"url": "/console/jobs"}
    async with guarded.client.stream("GET", "/console/live", params=params) as pages_open:
        await guarded.app.tokens.revoke("ann")
        text = "".join([chunk async for chunk in pages_open.aiter_text()])
    assert text.rstrip().endswith("event: logged_out\r\ndata: {}"), "and nothing after it"
    assert (await guarded.client.get("/console/jobs")).status_code == 303


async def test_a_new_login_returns_to_the_filled_form(guarded):
    form, given = (
        "/console/do/jobs.add_job",
        {"queue": "é & x", "back": "/console/jobs?state=failed"},
    )
    sent = await post(guarded, form, csrf_token="0" * 32, form_id="a", payload="x" * 5_000, **given)
    asked = await guarded.client.get(f"{form}/calls", params=given)
    for answer in (sent, asked):
        assert answer.status_code == 303
        login = urlsplit(answer.headers["location"])
        assert login.path == "/console/login"
        [back] = parse_qs(login.query)["back"]
        assert (urlsplit(back).path, dict(parse_qsl(urlsplit(back).query))) == (form, given)
    token = (await guarded.app.tokens.create("ann", ("*",))).text
    answer = await post(guarded, "/console/login", token=token, back=back)
    assert answer.headers["location"] == back
    page = await guarded.client.get(back)
    assert "into queue é &amp; x." in page.text


async def test_an_invalid_form_shows_no_calls(at):
    place = "/console/do/jobs.add_job/calls"
    for payload in ("{bad", "NaN", r'"\u0000"'):
        text = (await at.client.get(place, params={"queue": "q", "payload": payload})).text
        assert text.count("Available once all required fields") == 2
        assert "/v1/queues" not in text
        assert "headrace jobs add" not in text
    text = (await at.client.get(place, params={"queue": "q", "payload": '"5"'})).text
    assert "headrace jobs add q '\"5\"'" in html.unescape(re.sub("<[^>]*>", "", text))
    assert "Available once" not in text
    sent = await send(at, "jobs.add_job", queue="q", payload=r'"\u0000"')
    assert (sent.status_code, "without NUL characters" in sent.text) == (422, True)


async def test_logout_ends_the_session(guarded):
    token = (await guarded.app.tokens.create("ann", ("*",))).text
    await log_in(guarded, token)
    page = await guarded.client.get("/console/jobs")
    stolen, csrf_token = dict(guarded.client.cookies), CSRF_TOKEN.search(page.text)[1]
    assert (await post(guarded, "/console/logout")).status_code == 403
    answer = await post(guarded, "/console/logout", csrf_token=csrf_token)
    assert answer.headers["location"] == "/console/login"
    guarded.client.cookies.update(stolen)
    assert (await guarded.client.get("/console/jobs")).status_code == 303


async def test_scopes_limit_pages_and_actions(guarded):
    token = (await guarded.app.tokens.create("reader", ("jobs:read",))).text
    await log_in(guarded, token)
    page = await guarded.client.get("/console/jobs/crons")
    assert page.status_code == 200
    assert "requires scope jobs:write" in page.text
    overview = await guarded.client.get("/console")
    assert "your token lacks the scope views:read" in overview.text
    for path in ("/console/views", "/console/audit", "/console/do/jobs.add_cron"):
        refused = await guarded.client.get(path)
        assert (refused.status_code, "web.insufficient_scope" in refused.text) == (403, True)
    csrf_token = CSRF_TOKEN.search(page.text)[1]
    answer = await post(guarded, "/console/do/jobs.run_cron", csrf_token=csrf_token, name="nightly")
    assert answer.status_code == 403
    [line] = await guarded.app.audit.lines()
    assert (line.actor, line.outcome) == ("reader", "refused"), "a refused try has its line too"
    assert line.command == "headrace crons run nightly"
    live = await guarded.client.get(
        "/console/live?url=/console/views", headers={"accept": "text/event-stream"}
    )
    assert live.status_code == 403


async def test_forms_are_accepted_from_own_pages_only(at):
    page = await at.client.get("/console/do/jobs.add_cron")
    csrf_token = CSRF_TOKEN.search(page.text)[1]
    fields = {"name": "n", "spec": "0 4 * * *", "queue": "nothing"}
    path = "/console/do/jobs.add_cron"
    assert (await post(at, path, **fields)).status_code == 403
    assert (await post(at, path, csrf_token="0" * 32, **fields)).status_code == 403
    assert (
        await post(at, path, origin="https://evil.example", csrf_token=csrf_token, **fields)
    ).status_code == 403
    assert (await post(at, path, origin="null", csrf_token=csrf_token, **fields)).status_code == 403
    without = await at.client.post(path, data={"csrf_token": csrf_token, **fields})
    assert without.status_code == 403
    token = (await at.app.tokens.create("other", ("*",))).text
    other = httpx.AsyncClient(base_url=at.address, headers=PAGE, verify=False)
    async with other:
        await other.get(await make_link(at, token))
        elsewhere = await other.post(
            path, data={"csrf_token": csrf_token, **fields}, headers={"origin": at.address}
        )
    assert elsewhere.status_code == 403, "the csrf_token of another session"
    assert [line.outcome for line in await at.app.audit.lines()] == ["refused"] * 4, (
        "foreign origins get no further"
    )
    assert (await post(at, path, csrf_token=csrf_token, **fields)).status_code == 422, (
        "taken, and then refused"
    )


async def test_a_result_is_shown_once_and_audited(at):
    await at.app.jobs.queues.set("told", create=True)
    answer = await send(at, "jobs.set_queue", queue="told", importance=2)
    told = await at.client.get("/console/jobs/crons")
    assert answer.status_code == 303, answer.text
    assert "told" in re.search(r'class="flash good"[^>]*>([^<]+)', told.text)[1]
    assert 'class="flash' not in (await at.client.get("/console/jobs/crons")).text


async def test_a_refusal_keeps_the_form_values(at):
    answer = await send(at, "jobs.add_cron", name="n", spec="0 4 * * *", queue="nothing")
    assert answer.status_code == 422
    assert "nothing" in re.search(r'class="flash bad"[^>]*>([^<]+)', answer.text)[1]
    assert 'value="0 4 * * *"' in answer.text
    [line] = await at.app.audit.lines()
    assert (line.actor, line.address, line.action) == ("root", "127.0.0.1", "jobs.add_cron")
    assert (line.outcome, line.command) == (
        "refused",
        "headrace crons add n '0 4 * * *' nothing null",
    )
    assert "nothing" in line.detail
    assert "headrace crons add" in (await at.client.get("/console/audit")).text


async def test_a_resubmitted_form_has_no_effect(at):
    page = await at.client.get("/console/do/jobs.add_job?queue=q")
    fields = dict(re.findall(r'name="(csrf_token|form_id)" value="([^"]+)"', page.text))
    await at.app.jobs.queues.set("q", create=True)
    for outcome in ("done", "refused"):
        await post(at, "/console/do/jobs.add_job", **fields, queue="q", payload="1")
        assert (await at.app.audit.lines())[0].outcome == outcome
    assert (await at.app.jobs.queues.get("q")).ready == 1


async def test_forged_flash_cookies_are_ignored(at):
    at.client.cookies.set("headrace_flash", "0" * 32 + b"good.gotcha".hex())
    assert "gotcha" not in (await at.client.get("/console/jobs")).text
    at.client.cookies.set("headrace_flash", "~" * 40)
    assert (await at.client.get("/console/jobs")).status_code == 200


async def test_the_flash_message_appears_on_full_pages_only(at):
    await at.app.jobs.queues.set("q", create=True)
    await send(at, "jobs.pause_queue", queue="q", back="/console/jobs")
    piece = await at.client.get("/console/jobs", headers={"hx-request": "true"})
    assert 'class="flash' not in piece.text
    assert "headrace_flash" not in piece.headers.get("set-cookie", "")
    page = await at.client.get("/console/jobs")
    assert len(re.findall(r'class="flash good"', page.text)) == 1
    assert "headrace_flash" in page.headers["set-cookie"]
    assert 'class="flash' not in (await at.client.get("/console/jobs")).text


async def test_field_errors_appear_beside_their_fields(at):
    page = await at.client.get("/console/do/jobs.set_queue?queue=mail")
    csrf_token = CSRF_TOKEN.search(page.text)[1]
    answer = await post(
        at, "/console/do/jobs.set_queue", csrf_token=csrf_token, queue="mail", importance="very"
    )
    assert answer.status_code == 422
    assert "expected a whole number" in answer.text
    assert 'value="very"' in answer.text
    assert not await at.app.audit.lines()


async def test_with_scripts_a_form_redirects_by_header(at):
    await at.app.jobs.queues.set("sent", create=True)
    page = await at.client.get("/console/do/jobs.pause_queue?queue=sent")
    csrf_token = CSRF_TOKEN.search(page.text)[1]
    answer = await at.client.post(
        "/console/do/jobs.pause_queue",
        data={"csrf_token": csrf_token, "queue": "sent", "back": "https://evil.example/"},
        headers={"origin": at.address, "hx-request": "true"},
    )
    assert (answer.status_code, answer.headers["hx-redirect"]) == (200, "/console")


WRONG_ADDRESSES = (
    ("/console/nothing", 404),
    ("/console/jobs/jobs/abc", 404),
    ("/console/jobs/jobs/99999999999999999999", 404),
    ("/console/jobs/queues/%00", 404),
    ("/console/fetch/hosts?after_host=%00", 422),
    ("/console/fetch/customers/%00", 404),
    ("/console/do/jobs.bulk_retry?queue=%00", 200),
    ("/console/jobs/queues/<script>alert(1)</script>", 404),
    ("/console/jobs?sort=<script>alert(1)</script>", 422),
    ("/console/jobs/decisions?before=-1", 422),
    ("/console/do/nothing.at_all", 404),
    ("/console/assets/../model.py", 404),
    ("/console/assets/%2e%2e/model.py", 404),
    ("/console/assets/vendor", 404),
    ("/console/live?url=/console/nothing", 404),
    ("/console/live?url=https://evil.example/console/nothing", 200),
)


async def test_an_unknown_url_is_an_escaped_error_page(at):
    for path, status in WRONG_ADDRESSES:
        async with at.client.stream("GET", path) as answer:
            assert answer.status_code == status, path
            if status != 200:
                text = (await answer.aread()).decode()
                assert "<script>alert" not in text
                assert "script-src 'self'" in answer.headers["content-security-policy"]
                assert answer.headers["x-request-id"] in text
    assert "job abc does not exist" in (await send(at, "jobs.retry_job", job="abc")).text


async def test_pages_have_a_security_policy(at):
    headers = (await at.client.get("/console/jobs")).headers
    policy = headers["content-security-policy"]
    for rule in (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "frame-ancestors 'none'",
    ):
        assert rule in policy
    assert "unsafe" not in policy
    assert "img-src 'self' data: http://127.0.0.1:8081" in policy
    assert headers["referrer-policy"] == "same-origin", "else browsers hide the origin of forms"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"


async def test_policy_reports_are_counted(at):
    def count():
        return REGISTRY.get_sample_value("console_csp_reports_total")

    before = count()
    answer = await at.client.post(
        "/console/csp",
        content=b'{"csp-report": {}}',
        headers={"content-type": "application/csp-report"},
    )
    assert (answer.status_code, count() - before) == (204, 1)


async def test_assets_are_cached_by_content_hash(at):
    page = await at.client.get("/console/jobs")
    places = re.findall(r'(?:src|href)="(/console/assets/[^"]+)"', page.text)
    assert len(places) >= 6
    for place in places:
        answer = await at.client.get(place)
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
        tag = answer.headers["etag"]
        assert (await at.client.get(place, headers={"if-none-match": tag})).status_code == 304
    script = await at.client.get("/console/assets/console.js")
    assert script.headers["content-encoding"] == "gzip"
    assert script.headers["cache-control"] == "no-cache"
    assert script.headers["content-type"].startswith("text/javascript")
    assert (
        "content-encoding"
        not in (
            await at.client.get(
                "/console/assets/console.js", headers={"accept-encoding": "identity"}
            )
        ).headers
    )


async def test_the_theme_is_kept_in_a_cookie(at):
    assert 'data-theme="auto"' in (await at.client.get("/console/jobs")).text
    answer = await post(at, "/console/theme", theme="dark", back="/console/jobs")
    assert answer.headers["location"] == "/console/jobs"
    assert 'data-theme="dark"' in (await at.client.get("/console/jobs")).text
    await post(at, "/console/theme", theme='"><script>')
    assert 'data-theme="auto"' in (await at.client.get("/console/jobs")).text


async def test_head_requests_have_no_body(at):
    answer = await at.client.head("/console/jobs")
    assert (answer.status_code, answer.content) == (200, b"")


async def test_a_stopped_engine_affects_only_its_panels(tmp_path, database_url):
    """Existing sessions still see the error while PostgreSQL is down."""
    with ChaosProxy(database_url) as postgres:
        endpoints = Endpoints(postgres.url, f"unix://{tmp_path}/none", "file:///nowhere")
        async with serving(app_of(tmp_path, endpoints)) as at:
            assert (await at.client.get("/console")).status_code == 200
            postgres.set(RESET)
            page = await at.client.get("/console")
            assert page.status_code == 200
            assert "postgres is down" in page.text
            assert "valkey is down" in page.text
            refused = await at.client.get("/console/jobs")
            assert refused.status_code == 503
            assert "<h1>" in refused.text


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_templates_have_no_inline_code_and_escape_everything(path):
    text = path.read_text()
    assert not re.search(r"\bstyle=|\son\w+=\"|<style|javascript:|\|\s*safe\b|autoescape", text)
    for tag in re.findall(r"<script[^>]*>", text):
        assert "src=" in tag
    assert not re.search(r"""(?:src|href|action)=["']?https?:""", text), (
        "nothing is loaded from elsewhere"
    )


TURNED = (
    "/console/feed?viewer=%E2%80%AEabc",
    "/console/media/object?key=a%E2%80%AEgpj.exe",
    "/console/views/entity?id=%E2%80%AEabc",
)


async def test_invisible_characters_are_escaped_in_text(at):
    await at.app.jobs.queues.set("turned", create=True)
    job = await at.app.jobs.enqueue(NewJob(queue="turned", payload={"file": "a\u202egpj.exe"}))
    for path in (*TURNED, f"/console/jobs/jobs/{job}"):
        text = (await at.client.get(path)).text
        assert "\u202e" not in re.sub(r"<[^>]*>", "", text), path
        assert "\\u202e" in text, path
    for path in TURNED:
        text = (await at.client.get(path)).text
        assert "\\u202e" in re.search("<title>(.*)</title>", text)[1], path
        assert "\u202e" in re.search(r"<input id=[^>]*>", text)[0], "what is sent back is as it was"


def test_vendored_files_match_their_hashes():
    listed = (ASSETS / "vendor" / "VENDORED.md").read_text()
    files = [f for f in (ASSETS / "vendor").iterdir() if f.suffix in (".js", ".css")]
    assert len(files) == 3
    for file in files:
        assert f"`{file.name}`" in listed
        assert hashlib.sha256(file.read_bytes()).hexdigest() in listed


async def test_limit_forms_show_the_exact_window(at):
    for limiter, window_s, text in (("part", 1.5, "1.5"), ("whole", 60, "60")):
        await at.app.jobs.lanes.set_limiter(limiter, starts_max=7, window_s=window_s)
        await at.app.jobs.lanes.set(limiter, "a", starts_max=7, window_s=window_s, concurrency=None)
        for path in ("/console/jobs/lanes", f"/console/jobs/lanes/{limiter}"):
            page = (await at.client.get(path)).text
            found = re.findall(
                rf"do/jobs.set_\w+\?limiter={limiter}&[^\"]*window_s=([^&\"]*)", page
            )
            assert set(found) == {text}, path

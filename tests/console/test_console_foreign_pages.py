"""Pages of other origins can neither read nor write console and API."""

from __future__ import annotations

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from headrace.web.routes import handlers_of
from headrace.web.server import create_app
from headrace.web.tokens import KEY_PREFIX, make_token

pytestmark = pytest.mark.slow
FOREIGN = {"origin": "http://evil.example"}
FOR_PAGES = {
    ("POST", "/v1/views"),
    ("POST", "/v1/views/items/{id}"),
    ("GET", "/v1/views/items/{id}/pixel"),
}
PROBES = {"/healthz", "/readyz"}
CONSOLE = (
    "/console",
    "/console/jobs",
    "/console/audit",
    "/console/do/jobs.add_job",
    "/console/live",
)


def cors_of(answer: Any) -> list[str]:
    """CORS headers that let a foreign page read a response."""
    return [name for name in answer.headers if name.startswith("access-control")]


async def test_only_public_routes_accept_foreign_pages(guarded):
    """Each route with an unknown key, with a valid key if not public, and each preflight."""
    key = await guarded.token("views:hit", publishable=True)
    routes = {(method, path) for method, path, _ in handlers_of(create_app(guarded.app))}
    routes |= {(method, path) for path in CONSOLE for method in ("GET", "POST")}
    assert routes >= FOR_PAGES
    client = guarded.client
    client.headers["accept"] = "*/*"
    for method, template in sorted(routes):
        path = template.replace("{id}", "ad:1").replace("{", "").replace("}", "")
        for given in (make_token(KEY_PREFIX), key):
            is_for_page = given == key and (method, template) in FOR_PAGES
            place = f"{path}?k={given}"
            asked = {**FOREIGN, "access-control-request-method": method}
            preflight = await client.options(place, headers=asked)
            assert bool(cors_of(preflight)) == is_for_page, place
            answer = await client.request(method, place, headers=FOREIGN)
            assert bool(cors_of(answer)) == is_for_page, place
            assert answer.status_code in (303, 401, 403, 404) or is_for_page or path in PROBES, (
                f"{method} {place}: {answer.status_code}"
            )
    assert await guarded.entries() == []


async def test_without_credentials_only_probes_respond(guarded):
    unauthorized = ("/", "/metrics", "/openapi.json", "/problems", "/problems/web.not_found")
    for path, status in (
        *((path, 200) for path in sorted(PROBES)),
        *((path, 401) for path in (*unauthorized, "/v1/queues")),
    ):
        answer = await guarded.get(path, headers={"accept": "application/json"})
        assert answer.status_code == status, path
    for scope, path, status in (
        ("jobs:read", "/openapi.json", 200),
        ("jobs:read", "/metrics", 403),
        ("metrics:read", "/metrics", 200),
        ("metrics:read", "/v1/queues", 403),
    ):
        bearer = {"authorization": f"Bearer {await guarded.token(scope)}"}
        assert (await guarded.get(path, headers=bearer)).status_code == status, path


@contextlib.contextmanager
def foreign_page():
    """Serve an empty page from another origin; yield its URL."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>evil</title>")

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


TRY = """async ([url, options]) => {
  try {
    const answer = await fetch(url, {credentials: 'include', ...options});
    return answer.type + ' ' + answer.status + ' ' + (await answer.text()).slice(0, 40);
  } catch (error) { return 'refused'; }
}"""


async def test_a_foreign_page_in_a_browser_can_neither_read_nor_write(chromium, stack):
    """The user is logged in to the console. Browsers treat other ports as the same site."""
    before = len(stack.call("GET", "/v1/audit"))
    key = stack.process_run("tokens", "create", "evil-site", "--publishable")
    context = await chromium.new_context()
    await context.add_cookies(stack.cookies)
    try:
        with foreign_page() as origin:
            page = await context.new_page()
            await page.goto(origin)
            for path in ("/console/jobs", "/console/live", "/v1/queues", "/healthz"):
                for query in ("", f"?k={key}"):
                    for options in ({}, {"method": "POST", "body": "queue=mail&payload=1"}):
                        found = await page.evaluate(TRY, [stack.api + path + query, options])
                        assert found == "refused", f"{path}{query} {options}: {found}"
                    # Without CORS, pages can still send simple requests.
                    sent = {"method": "POST", "mode": "no-cors", "body": "queue=mail&payload=1"}
                    found = await page.evaluate(TRY, [stack.api + path + query, sent])
                    assert found == "opaque 0 "
            hit = {
                "method": "POST",
                "headers": {"content-type": "application/json"},
                "body": json.dumps(["ad:cors"]),
            }
            found = await page.evaluate(
                TRY, [f"{stack.api}/v1/views?k={key}", {**hit, "credentials": "omit"}]
            )
            assert found.startswith("cors 200 "), found
    finally:
        await context.close()
    assert len(stack.call("GET", "/v1/audit")) == before

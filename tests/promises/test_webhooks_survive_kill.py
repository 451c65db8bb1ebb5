"""A webhook receives events at least once and in order, even if the sender or others die."""

from __future__ import annotations

import http.server
import json
import threading

import pytest
from tests.kit.processes import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def receiver():
    """Somebody who takes every message, and the numbers of what was told, in order."""
    told: list[int] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            told.extend(result["seq"] for result in json.loads(body)["results"])
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/hook", told
    server.shutdown()
    server.server_close()


def test_a_sender_killed_after_its_message_was_taken_sends_it_again(site, receiver):
    url, told = receiver
    process = site.up(HEADRACE_CRASH_AT="fetch.webhook_taken")
    site.run("fetch", "customer", "set", "shop", "--webhook", url)
    rows = "".join(f"i{n},Item,5,\n" for n in range(8))
    (site.folder / "shop.csv").write_text(f"id,name,price,photos\n{rows}")
    site.run("fetch", "catalogue", "run", "shop.csv", "--customer", "shop", "--no-wait")
    wait_until(lambda: process.events("slot_died"), what="the sender died at its crash point")
    process.kill_all()
    first = list(told)
    assert first, "the message was taken before the sender died"

    site.up()
    site.age_hosts()

    def is_at_the_end() -> bool:
        return site.call("GET", "/v1/fetch/customers/shop/webhook").json()["taken_seq"] == 8

    wait_until(is_at_the_end, what="all eight results are taken")
    assert set(told) == set(range(1, 9))
    assert told.count(first[0]) >= 2
    again = told[len(first) :]
    assert again[-8:] == sorted(again[-8:])

"""Webhooks over HTTP and on the command line, and through a whole run to the receiver."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from receiver import Receiver
from tests.kit.waiting import wait_true

from headrace.cli.doctor import check_webhooks
from headrace.engines.sql import compile_query

LIMITS = {"starts_max": 100_000, "window_s": 60.0, "connections": 50}


@pytest.fixture
async def receiver():
    """Somebody who listens."""
    receiver = Receiver()
    await receiver.start()
    yield receiver
    await receiver.close()


@pytest.fixture
def config(config, receiver):
    """The receiver's port is open too."""
    return replace(config, allow_ports=(*config.allow_ports, receiver.port))


async def test_a_webhook_over_http(client, receiver):
    path = "/v1/fetch/customers/shop"
    assert (await client.get(f"{path}/webhook")).status_code == 404
    made = await client.put(path, json={**LIMITS, "webhook": {"url": receiver.url}})
    assert made.json()["webhook"] == receiver.url
    assert made.json()["webhook_secret"].startswith("whsec_")
    again = (await client.put(path, json=LIMITS)).json()
    assert (again["webhook"], again["webhook_secret"]) == (receiver.url, None)
    shown = (await client.get(f"{path}/webhook")).json()
    assert (await client.get("/v1/fetch/webhooks")).json() == {"webhooks": [shown]}
    assert not any("secret" in name for name in shown)
    assert (await client.get("/v1/fetch/webhooks?after=shop")).json() == {"webhooks": []}
    trial = (await client.post(f"{path}/webhook/test")).json()
    assert (trial["is_taken"], trial["status"]) == (True, 204)
    assert receiver.posts[0].is_signed_with(made.json()["webhook_secret"])
    rotated = (await client.post(f"{path}/webhook/rotate")).json()
    assert rotated["secret"] != made.json()["webhook_secret"]
    assert (await client.post(f"{path}/webhook/replay?after=7")).json()["after"] == 7
    removed = await client.put(path, json={**LIMITS, "webhook": None})
    assert removed.json()["webhook"] is None
    for method, action in (("GET", ""), ("DELETE", ""), ("POST", "/rotate"), ("POST", "/test")):
        answer = await client.request(method, f"{path}/webhook{action}")
        assert answer.json()["code"] == "fetch.webhook_unknown"
    for url in ("http://10.0.0.1/", "nonsense", "http://[::1]/", "http://127.0.0.1:22/"):
        answer = await client.put(path, json={**LIMITS, "webhook": {"url": url}})
        assert answer.json()["code"] == "fetch.url_refused", answer.text
    wrong = await client.put(path, json={**LIMITS, "webhook": {"url": 5}})
    assert wrong.status_code == 422


async def test_a_webhook_by_commands(command, shop, receiver):
    assert (await command("webhook", "ls"))[1] == "no webhooks"
    code, text = await command("customer", "set", "shop", "--webhook", receiver.url)
    assert code == 0
    assert "secret: whsec_" in text
    assert (await shop.fetch.customers.get("shop")).connections == 50, "limits stay as they are"
    assert receiver.url in (await command("webhook", "show", "shop"))[1]
    assert "accepted, in" in (await command("webhook", "test", "shop"))[1]
    receiver.planned.append((500, {}))
    assert (await command("webhook", "test", "shop"))[0] == 1
    assert "whsec_" in (await command("webhook", "rotate", "shop"))[1]
    assert "0 results of shop" in (await command("webhook", "replay", "shop"))[1]
    assert (await command("webhook", "rm", "shop"))[0] == 0
    assert (await command("webhook", "show", "shop"))[0] == "fetch.webhook_unknown"


NOT_TAKEN = compile_query(
    "not_taken",
    "-- It has failed for long, or does not exist.\n"
    "UPDATE headrace.fetch_webhook SET failures = :failures,"
    " disabled_at = CASE WHEN :is_gone::boolean THEN now() END",
)


@pytest.mark.parametrize(
    ("failures", "is_gone", "state", "told"),
    [
        (0, False, "ok", "1 accept their results"),
        (9, False, "warn", "deliveries fail: shop (1)"),
        (1, True, "warn", "returned 410: shop (1)"),
    ],
)
async def test_the_doctor_tells_of_receivers_that_take_nothing(
    shop, postgres, receiver, *, failures, is_gone, state, told
):
    house = SimpleNamespace(installed_fetch=lambda: shop.fetch)
    assert await check_webhooks(house) == []
    await shop.fetch.customers.set("shop", **LIMITS, webhook=receiver.url)
    await postgres.run(NOT_TAKEN, failures=failures, is_gone=is_gone)
    (found,) = await check_webhooks(house)
    assert (found.state, told in found.text) == (state, True)


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
async def test_what_runs_publish_reaches_the_receiver(shop, command, receiver):
    receiver.planned.append((410, {}))
    await shop.fetch.customers.set("shop", **LIMITS, webhook=receiver.url)
    await shop.run_to_end("id,name,price,photos\na,A,5,\nb,B,5,\n")
    assert "disabled" in (await command("webhook", "ls"))[1]
    await shop.fetch.customers.set("shop", **LIMITS, webhook=receiver.url)
    await shop.run_to_end("id,name,price,photos\na,A2,5,\n")
    await wait_true(lambda: len(receiver.told()) == 4, what="all four results are taken")
    polled = await shop.fetch.items.results()
    assert receiver.told() == [(r.seq, r.action, r.id, r.version) for r in polled]

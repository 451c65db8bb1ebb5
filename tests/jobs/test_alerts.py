"""Alerts: the bound of each rule, how long it must hold, missing hosts, and the webhook."""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from headrace.jobs import store
from headrace.jobs.fleet.alerts import (
    HOST_RAISE_AFTER,
    HOST_RULE,
    QUEUE_RULES,
    AlertEvaluator,
    FleetObservation,
    QueueObservation,
)
from headrace.jobs.fleet.scheduler import USE, AlertSender, Scheduler, WebhookFailed, send_alert
from headrace.jobs.model import JobsConfig
from headrace.jobs.sql import SQL
from headrace.kernel.resilience import Backoff
from headrace.kernel.signing import derive_key

CONFIG = JobsConfig()
SECRET = "a root secret of at least thirty-two characters"
WELL = {"active": 10, "leased": 1, "oldest_age_s": 0.0, "done": 100, "failed": 0}


def seen(**changes):
    return QueueObservation(**{**WELL, **changes})


@pytest.mark.parametrize(
    ("rule", "before", "now", "is_broken"),
    [
        ("active_grows", seen(active=500), seen(active=1000), True),
        ("active_grows", seen(active=500), seen(active=999), False),
        ("active_grows", seen(active=1000), seen(active=1499), False),
        ("active_grows", seen(active=1000), seen(active=1500), True),
        ("active_grows", None, seen(active=10**6), False),
        ("leased_grows", seen(leased=100), seen(leased=200), True),
        ("leased_grows", seen(leased=10), seen(leased=199), False),
        ("leased_grows", seen(leased=150), seen(leased=250), False),
        ("oldest_waits", None, seen(oldest_age_s=900.0), False),
        ("oldest_waits", None, seen(oldest_age_s=900.1), True),
        ("many_fail", None, seen(done=10, failed=10), True),
        ("many_fail", None, seen(done=11, failed=10), False),
        ("many_fail", None, seen(done=0, failed=19), False),
        ("at_max", None, seen(is_at_max=True), True),
        ("at_max", None, seen(), False),
        ("fleet_short", None, seen(is_short=True, oldest_age_s=31.0), True),
        ("fleet_short", None, seen(is_short=True, oldest_age_s=30.0), False),
        ("fleet_short", None, seen(oldest_age_s=31.0), False),
        ("fleet_short", None, seen(), False),
    ],
)
def test_the_edge_of_each_rule(rule, before, now, is_broken):
    text = QUEUE_RULES[rule].broken(now, before, CONFIG)
    assert (text is not None) is is_broken


def test_the_text_of_an_alert_names_the_cause():
    broken = QUEUE_RULES["below_min"].broken
    assert broken(seen(slots=2, slots_min=2), None, CONFIG) is None
    text = broken(seen(slots=1, slots_min=2), None, CONFIG)
    assert "1 of its minimum of 2 slots" in text
    assert "they lack memory or cores" in text
    assert "short of CPU" in broken(seen(slots_min=2, is_loaded=True), None, CONFIG)
    broken = QUEUE_RULES["fleet_short"].broken
    for is_loaded in (True, False):
        text = broken(seen(is_short=True, oldest_age_s=60.0, is_loaded=is_loaded), None, CONFIG)
        assert ("Hosts short of CPU add no slots" in text) is is_loaded
    text = broken(seen(is_short=True, oldest_age_s=75.0), None, CONFIG)
    assert text.startswith("its oldest due job had waited 75 s when this alert was raised")
    assert "add hosts" in text
    text = broken(seen(is_short=True, oldest_age_s=75.0, idle_elsewhere=5), None, CONFIG)
    assert "5 slots of other queues were idle" in text
    assert "add hosts" not in text


def changes_of(watch, sights):
    """Changes with the number of their evaluation, one every 5 s."""
    found = []
    for index, queue in enumerate(sights):
        sight = FleetObservation(at_s=index * 5.0, queues={"mail": queue}, hosts={})
        found += [(index, change.rule, change.is_raised) for change in watch.observe(sight)]
    return found


def test_an_alert_is_raised_and_cleared_after_several_evaluations():
    bad, good = seen(oldest_age_s=1000.0), seen()
    rule = QUEUE_RULES["oldest_waits"]
    raised = [bad] * rule.raise_after
    assert changes_of(AlertEvaluator(CONFIG), [*raised[1:], good, *raised[1:]]) == [], (
        "never often enough in a row"
    )
    edges = [good, bad] * 20
    assert changes_of(AlertEvaluator(CONFIG), edges) == []
    cleared = [good] * rule.clear_after
    assert changes_of(AlertEvaluator(CONFIG), [*raised, *edges, *cleared]) == [
        (rule.raise_after - 1, "oldest_waits", True),
        (rule.raise_after - 1 + len(edges) + rule.clear_after, "oldest_waits", False),
    ]


def test_growth_is_seen_over_ten_minutes():
    """From 400 to 1,600 in the tenth minute: raised half a minute later."""
    sights = [seen(active=400)] * 120 + [seen(active=1600)] * 200
    rule = QUEUE_RULES["active_grows"]
    [(raised_index, _, _), (cleared_index, _, is_raised)] = changes_of(
        AlertEvaluator(CONFIG), sights
    )
    assert raised_index == 120 + rule.raise_after - 1
    assert not is_raised
    assert cleared_index == 240 + rule.clear_after - 1, "ten minutes later it grows no more"


def changes_of_hosts(watch, rounds):
    found = []
    for index, hosts in enumerate(rounds):
        changes = watch.observe(FleetObservation(at_s=index * 5.0, queues={}, hosts=hosts))
        found += [(index, change.subject, change.is_raised) for change in changes]
    return found


def test_a_missing_agent_is_an_alert_until_it_is_back():
    alive, silent = {"a": False}, {"a": True}
    rounds = [alive, *[silent] * 900, alive, alive, alive]
    found = changes_of_hosts(AlertEvaluator(CONFIG), rounds)
    assert found == [(HOST_RAISE_AFTER, "a", True), (902, "a", False)]


def test_a_new_leader_continues_with_open_alerts():
    watch = AlertEvaluator(CONFIG, [(HOST_RULE, "a")])
    assert watch.open_counts[HOST_RULE] == 1
    assert changes_of_hosts(watch, [{"a": True}] * 5) == [], "still missing, and known"
    assert changes_of_hosts(watch, [{"a": False}] * 2) == [(1, "a", False)]
    assert changes_of_hosts(AlertEvaluator(CONFIG), [{"a": False}, {}, {}, {}, {}]) == [], "it left"
    missing = AlertEvaluator(CONFIG, [(HOST_RULE, "a")])
    found = changes_of_hosts(missing, [{}] * 5)
    assert [change[1:] for change in found] == [("a", False)], "forgotten"


async def test_alerts_are_kept_until_they_are_old(postgres, sql):
    assert await store.fleet.raise_alert(postgres, "at_max", "mail", "it needs more")
    assert await store.fleet.raise_alert(postgres, "at_max", "mail", "again") is None
    assert [a.text for a in await store.fleet.find_alerts(postgres, is_open=True, alerts_max=9)]
    assert await postgres.value(SQL.count_open_alerts) == 1
    cleared = await store.fleet.clear_alert(postgres, "at_max", "mail")
    assert cleared.cleared_at is not None
    assert await store.fleet.clear_alert(postgres, "at_max", "mail") is None
    assert await store.fleet.find_alerts(postgres, is_open=True, alerts_max=9) == []
    assert await postgres.value(SQL.count_open_alerts) == 0
    await sql("UPDATE headrace.alert SET cleared_at = now() - interval '8 d'")
    assert (
        await postgres.value(
            SQL.drop_old, table="alert", column="cleared_at", kept_s=7 * 86400, rows_max=100
        )
        == 1
    )


async def test_the_webhook_receives_each_change_once(postgres):
    async def unsent():
        rows = await store.fleet.unsent_alerts(postgres, age_s=60, alerts_max=9)
        return [(alert, is_raise) for alert, is_raise in rows]

    await store.fleet.raise_alert(postgres, "at_max", "mail", "it needs more")
    [(alert, is_raise)] = await unsent()
    assert is_raise
    await store.fleet.clear_alert(postgres, "at_max", "mail")
    assert [is_raise for _, is_raise in await unsent()] == [True], "first that it was raised"
    await postgres.run(SQL.mark_sent, alert=alert.id, is_raise=True)
    [(alert, is_raise)] = await unsent()
    assert not is_raise
    await postgres.run(SQL.mark_sent, alert=alert.id, is_raise=False)
    assert await unsent() == []


class Receiver(BaseHTTPRequestHandler):
    """Keeps requests; answers with the status of its server."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.taken.append((self.path, dict(self.headers), body))
        is_refused = json.loads(body or "{}").get("subject") in self.server.refused
        self.send_response(self.server.refused_with if is_refused else self.server.status)
        self.send_header("Location", f"http://127.0.0.1:{self.server.server_port}/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST  # noqa: N815 - the library's name

    def log_message(self, *_):
        """Nothing on the terminal."""


@pytest.fixture
def receiver():
    """A server on loopback that receives alerts."""
    server = HTTPServer(("127.0.0.1", 0), Receiver)
    server.taken, server.status = [], 204
    server.refused, server.refused_with = (), 500
    server.url = f"http://127.0.0.1:{server.server_port}/alerts"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
async def alert(postgres):
    """An alert as it was just raised."""
    return await store.fleet.raise_alert(postgres, "at_max", "mail", "it needs more")


async def test_a_post_is_signed(receiver, alert):
    key = derive_key(SECRET, USE)
    await send_alert(receiver.url, key, alert, is_raise=True)
    [(path, headers, body)] = receiver.taken
    document = json.loads(body)
    assert path == "/alerts"
    assert (document["event"], document["state"]) == (f"{alert.id}-raised", "raised")
    assert (document["rule"], document["subject"]) == ("at_max", "mail")
    parts = dict(part.split("=") for part in headers["Headrace-Signature"].split(","))
    expected = hmac.digest(key.secret, parts["t"].encode() + b"." + body, "sha256").hex()
    assert (parts["v1"], parts["key"]) == (expected, key.id)


async def test_other_statuses_than_2xx_fail_and_no_redirect_is_followed(receiver, alert):
    for receiver.status in (302, 307, 404, 500):
        with pytest.raises(WebhookFailed, match=str(receiver.status)):
            await send_alert(receiver.url, derive_key(SECRET, USE), alert, is_raise=True)
    assert [path for path, _, _ in receiver.taken] == ["/alerts"] * 4
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    url = f"http://127.0.0.1:{port}/"
    with pytest.raises(WebhookFailed, match="does not answer"):
        await send_alert(url, derive_key(SECRET, USE), alert, is_raise=True)


async def test_only_the_leader_sends_alerts_and_each_once(postgres, jobs, receiver, alert):
    jobs.config = dataclasses.replace(jobs.config, alerts_webhook_url=receiver.url)
    scheduler = Scheduler(postgres, jobs, name="here", secret=SECRET)
    await scheduler.send_alerts()
    assert receiver.taken == [], "another leads"
    await scheduler.planner.run_once()
    await scheduler.send_alerts()
    await store.fleet.clear_alert(postgres, alert.rule, alert.subject)
    for _ in range(3):
        await scheduler.send_alerts()
    states = [json.loads(body)["state"] for _, _, body in receiver.taken]
    assert states == ["raised", "cleared"]


def events(receiver):
    """Subjects and states that the receiver got since the last call."""
    sent, receiver.taken = receiver.taken, []
    documents = [json.loads(body) for _, _, body in sent]
    return [(document["subject"], document["state"]) for document in documents]


async def test_a_refused_event_delays_no_other(postgres, receiver):
    receiver.refused, receiver.refused_with = ("bad",), 500
    for subject in ("bad", "good", "fine"):
        await store.fleet.raise_alert(postgres, "at_max", subject, "it needs more")
    at_once = AlertSender(postgres, receiver.url, derive_key(SECRET, USE), retry=Backoff(0.0, 0.0))
    await at_once.send_due()
    assert events(receiver) == [("bad", "raised"), ("good", "raised"), ("fine", "raised")]
    await store.fleet.clear_alert(postgres, "at_max", "good")
    await at_once.send_due()
    assert events(receiver) == [("good", "cleared"), ("bad", "raised")], "the fresh one first"
    receiver.refused = ()
    await at_once.send_due()
    await at_once.send_due()
    assert events(receiver) == [("bad", "raised")]


async def test_each_event_waits_for_its_own_time(postgres, receiver):
    receiver.refused = ("bad",)
    later = AlertSender(
        postgres, receiver.url, derive_key(SECRET, USE), retry=Backoff(600.0, 600.0)
    )
    for subject in ("bad", "good"):
        await store.fleet.raise_alert(postgres, "at_max", subject, "it needs more")
        await later.send_due()
        assert events(receiver) == [(subject, "raised")]

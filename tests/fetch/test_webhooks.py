"""Webhooks: signed by the letter, in order, nothing lost while the receiver is away."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime

import msgspec
import pytest
from forbidden import FORBIDDEN_ADDRESSES
from name_server import NameServer
from receiver import Receiver
from tests.kit.waiting import wait_true

from headrace.engines.sql import compile_query
from headrace.fetch import FetchConfig, store
from headrace.fetch.errors import UrlRefused, WebhookUnknown
from headrace.fetch.model import WEBHOOK_QUEUE, Customer, Result
from headrace.fetch.service.customers import Webhooks
from headrace.fetch.sql import SQL
from headrace.fetch.store.results import NewResult
from headrace.fetch.webhook_delivery import (
    MESSAGE_BYTES_MAX,
    PostFailed,
    WebhookClient,
    WebhookJob,
    WebhookSender,
    headers_of,
    message_of,
    new_secret,
    signature,
)
from headrace.jobs import Jobs, JobsConfig, NewJob, Registry, Task
from headrace.jobs.model import JobFilter
from headrace.jobs.worker import Worker

JOBS = JobsConfig(poll_s=0.05, retry_first_s=0.1)
DUE_NOW = compile_query(
    "due_now",
    "-- What waits for its time is due.\n"
    "UPDATE headrace.job_ready SET run_at = now() WHERE run_at > now()",
)


def test_the_signature_is_that_of_the_standard():
    """The vector that the makers of Standard Webhooks publish."""
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    signed = signature(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_both_secrets_sign_during_a_rotation():
    old, new = new_secret(), new_secret()
    headers = dict(line.split(": ", 1) for line in headers_of("results_1_2", b"{}", [new, old], 5))
    assert headers["webhook-signature"].split(" ") == [
        signature(new, "results_1_2", 5, b"{}"),
        signature(old, "results_1_2", 5, b"{}"),
    ]


def result(seq: int, *, size: int = 0) -> Result:
    return Result(
        seq=seq,
        at=datetime(2026, 1, 1, tzinfo=UTC),
        customer="shop",
        id=f"i{seq}",
        version=1,
        action="publish",
        fields={"name": "x" * size},
        photos=[],
    )


def test_a_message_is_bounded_in_results_and_bytes():
    message = message_of("shop", [result(n) for n in range(1, 151)])
    assert (message.id, message.last_seq) == ("results_1_100", 100)
    large = message_of("shop", [result(n, size=300_000) for n in range(1, 9)])
    assert large.last_seq == 3
    assert len(large.body) <= MESSAGE_BYTES_MAX + 200
    alone = message_of("shop", [result(7, size=2 * MESSAGE_BYTES_MAX)])
    assert alone.last_seq == 7


class Hooks:
    """The webhooks of customer `shop`, and a publisher of results; works while `working`."""

    def __init__(self, postgres, config) -> None:
        self.registry = Registry()
        self.jobs = Jobs(postgres, JOBS, self.registry)
        self.registry.bind(lambda: self.jobs)
        self.postgres = postgres
        self.client = WebhookClient(config)
        self.sender = WebhookSender(postgres, self.jobs, self.client)
        self.webhooks = Webhooks(postgres, self.jobs, self.client, self.sender)
        self.registry.add(
            Task(queue=WEBHOOK_QUEUE, handler=self.sender.deliver, timeout="5m", concurrency=5)
        )

    async def set(self, url: str) -> str | None:
        async with self.postgres.transaction() as tx:
            return await self.webhooks.set("shop", url, tx=tx)

    async def publish(self, *ids: str, version: int = 1) -> list[int]:
        """Publish a version of each; their numbers."""
        async with self.postgres.transaction() as tx:
            return await self.publish_in(tx, *ids, version=version)

    async def publish_in(self, tx, *ids: str, version: int = 1) -> list[int]:
        await tx.run(SQL.lock_result_order)
        new = [NewResult("shop", i, version, "publish", "{}", []) for i in ids]
        seqs = [seq for seq, _ in await store.results.insert_results(tx, new)]
        await self.sender.notify(tx, {"shop"})
        return seqs


@pytest.fixture
async def receiver():
    """Somebody who listens."""
    receiver = Receiver()
    await receiver.start()
    yield receiver
    await receiver.close()


@pytest.fixture
def config(receiver):
    """The receiver's port is open, and messages are short-lived."""
    return FetchConfig(
        allow_networks=("127.0.0.0/8",), allow_ports=(receiver.port,), webhook_timeout_s=2.0
    )


@pytest.fixture
async def hooks(postgres, config):
    """The webhooks, no worker."""
    hooks = Hooks(postgres, config)
    limits = {"starts_max": 10, "window_s": 1, "connections": 1}
    await store.runs.set_customer(postgres, Customer(customer="shop", **limits))
    yield hooks
    await hooks.client.close()


@pytest.fixture
async def working(hooks):
    """A worker on the webhook queue."""
    stop = asyncio.Event()
    worker = Worker(hooks.postgres, hooks.jobs, JOBS, host_name="test")
    running = asyncio.create_task(worker.run(stop))
    yield running
    stop.set()
    await asyncio.wait_for(running, 60)


async def wait_taken(hooks, receiver, results: int) -> None:
    await wait_true(lambda: len(receiver.told()) >= results, what=f"{results} results are taken")

    async def is_idle() -> bool:
        queue = await hooks.jobs.queues.get("fetch.webhook")
        return queue.ready + queue.leased + queue.scheduled == 0

    await wait_true(is_idle, what="the webhook rests")


async def wait_waiting(hooks) -> None:
    """Until what failed waits for its next time."""

    async def ask() -> bool:
        queue = await hooks.jobs.queues.get("fetch.webhook")
        return (queue.ready, queue.leased, queue.scheduled) == (0, 0, 1)

    await wait_true(ask, what="the message waits for its next try")


@pytest.mark.usefixtures("working")
async def test_results_come_signed_and_in_order(hooks, receiver):
    secret = await hooks.set(receiver.url)
    assert secret.startswith("whsec_")
    assert await hooks.set(receiver.url) is None
    seqs = await hooks.publish("a", "b")
    seqs += await hooks.publish("a", version=2)
    await wait_taken(hooks, receiver, 3)
    assert receiver.told() == [
        (seqs[0], "publish", "a", 1),
        (seqs[1], "publish", "b", 1),
        (seqs[2], "publish", "a", 2),
    ]
    assert all(post.is_signed_with(secret) for post in receiver.posts)
    assert not receiver.posts[0].is_signed_with(new_secret())
    document = receiver.posts[0].document
    assert (document["type"], document["customer"]) == ("fetch.results", "shop")
    found = await hooks.webhooks.get("shop")
    assert (found.taken_seq, found.waiting, found.failures) == (seqs[2], 0, 0)
    assert found.last_status == 204


@pytest.mark.slow
@pytest.mark.usefixtures("working")
async def test_a_receiver_that_is_away_loses_nothing(hooks, receiver):
    receiver.planned += [(500, {}), (302, {"Location": "http://127.0.0.1:1/"})]
    await hooks.set(receiver.url)
    seqs = await hooks.publish(*(f"i{n}" for n in range(130)))
    await wait_waiting(hooks)
    found = await hooks.webhooks.get("shop")
    assert (found.failures, found.last_status, found.waiting) == (1, 500, 130)
    assert found.next_at is not None
    await hooks.postgres.run(DUE_NOW)
    await wait_true(lambda: not receiver.planned, what="it is sent again")
    await wait_waiting(hooks)
    await hooks.postgres.run(DUE_NOW)
    await wait_taken(hooks, receiver, 130)
    assert [p.status for p in receiver.posts] == [500, 302, 204, 204]
    assert [one[0] for one in receiver.told()] == seqs
    found = await hooks.webhooks.get("shop")
    assert (found.failures, found.failing_since, found.waiting) == (0, None, 0)


async def test_no_more_is_read_than_a_message_carries(hooks):
    async with hooks.postgres.transaction() as tx:
        await tx.run(SQL.lock_result_order)
        large = msgspec.json.encode({"text": "x" * 300_000}).decode()
        new = [NewResult("shop", f"i{n}", 1, "publish", large, []) for n in range(6)]
        seqs = [seq for seq, _ in await store.results.insert_results(tx, new)]
    for rows_max, bytes_max, count in ((100, 2**20, 3), (2, 2**20, 2), (100, 1, 1)):
        found = await store.results.unsent_results(
            hooks.postgres, "shop", after=seqs[0], rows_max=rows_max, bytes_max=bytes_max
        )
        assert [one.seq for one in found] == seqs[1 : 1 + count]


@pytest.mark.usefixtures("working")
async def test_a_receiver_says_when_to_come_again(hooks, receiver):
    receiver.planned.append((503, {"Retry-After": "1800"}))
    await hooks.set(receiver.url)
    await hooks.publish("a")
    await wait_waiting(hooks)
    found = await hooks.webhooks.get("shop")
    assert 1795 <= (found.next_at - found.last_at).total_seconds() <= 1805


@pytest.mark.slow
@pytest.mark.usefixtures("working")
async def test_gone_disables_until_a_person_sets_it_again(hooks, receiver, capsys):
    await hooks.set(receiver.url)
    receiver.planned.append((410, {}))
    await hooks.publish("a")

    async def is_disabled() -> bool:
        return (await hooks.webhooks.get("shop")).disabled_at is not None

    await wait_true(is_disabled, what="the webhook is disabled")
    assert "webhook_gone" in capsys.readouterr().out
    await hooks.publish("a", version=2)
    await wait_taken(hooks, receiver, 0)
    assert len(receiver.posts) == 1
    assert (await hooks.webhooks.get("shop")).waiting == 2
    await hooks.set(receiver.url)
    await wait_taken(hooks, receiver, 2)
    assert [one[3] for one in receiver.told()] == [1, 2]


@pytest.mark.slow
@pytest.mark.usefixtures("working")
async def test_rotation_replay_trial_and_removal(hooks, receiver):
    first = await hooks.set(receiver.url)
    second = await hooks.webhooks.rotate("shop")
    trial = await hooks.webhooks.test("shop")
    assert (trial.is_accepted, trial.status) == (True, 204)
    assert receiver.posts[0].is_signed_with(first)
    assert receiver.posts[0].is_signed_with(second.secret)
    assert receiver.posts[0].document["type"] == "fetch.test"
    receiver.posts.clear()
    seqs = await hooks.publish("a", "b")
    await wait_taken(hooks, receiver, 2)
    assert (await hooks.webhooks.replay("shop")).after == 0
    await wait_taken(hooks, receiver, 4)
    await hooks.webhooks.replay("shop", after=seqs[0])
    await wait_taken(hooks, receiver, 5)
    assert [one[0] for one in receiver.told()] == [*seqs, *seqs, seqs[1]]
    await hooks.webhooks.remove("shop")
    await hooks.publish("a", version=3)
    await wait_taken(hooks, receiver, 5)
    assert len(receiver.told()) == 5
    with pytest.raises(WebhookUnknown, match="--webhook URL"):
        await hooks.webhooks.get("shop")


async def test_results_published_while_it_goes_to_rest_are_told(hooks, receiver):
    """A publisher that has not committed holds the webhook: the turn ends only after it is seen."""
    await hooks.set(receiver.url)
    turn = (await store.results.find_webhooks(hooks.postgres, customer="shop"))[0].turn

    async def rest() -> bool:
        async with hooks.postgres.transaction() as tx:
            return await store.results.end_turn(tx, "shop", turn)

    async with hooks.postgres.transaction() as tx:
        await hooks.publish_in(tx, "a")
        resting = asyncio.create_task(rest())
        done, _ = await asyncio.wait({resting}, timeout=0.2)
        assert not done
    assert await resting is False


async def test_a_result_after_the_rest_makes_a_job_of_the_next_turn(hooks, receiver):
    await hooks.set(receiver.url)
    turn = (await store.results.find_webhooks(hooks.postgres, customer="shop"))[0].turn
    async with hooks.postgres.transaction() as tx:
        assert await store.results.end_turn(tx, "shop", turn)
    await hooks.publish("a")
    await hooks.publish("b")
    queue = await hooks.jobs.queues.get(WEBHOOK_QUEUE)
    assert queue.ready == 2, "one of the first turn, one of the next for both results"


async def test_a_webhook_whose_job_was_lost_gets_another(hooks, receiver):
    await hooks.set(receiver.url)
    await hooks.publish("a")
    await hooks.sender.notify_all()
    assert (await hooks.jobs.queues.get(WEBHOOK_QUEUE)).ready == 1, "one is there already"
    await hooks.jobs.bulk("delete", JobFilter(queue=WEBHOOK_QUEUE, state="ready"))
    assert (await hooks.jobs.queues.get(WEBHOOK_QUEUE)).ready == 0
    await hooks.sender.notify_all()
    assert (await hooks.jobs.queues.get(WEBHOOK_QUEUE)).ready == 1


@pytest.mark.usefixtures("working")
async def test_a_job_of_an_older_turn_does_nothing(hooks, receiver):
    await hooks.set(receiver.url)
    await hooks.publish("a")
    await wait_taken(hooks, receiver, 1)
    stale = NewJob(queue=WEBHOOK_QUEUE, payload=WebhookJob(customer="shop", turn=-1))
    await hooks.jobs.enqueue(stale)
    await wait_taken(hooks, receiver, 1)
    assert len(receiver.posts) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("working")
async def test_whatever_happens_beside_it_each_result_is_told_in_order(hooks, receiver):
    """Publishers at once and refusals: every number arrives, none before its turn, none twice."""
    await hooks.set(receiver.url)
    receiver.planned += [(204, {}), (500, {}), (204, {}), (429, {"Retry-After": "0"})] * 3
    seqs: list[int] = []

    async def publish(name: str) -> None:
        for version in range(1, 26):
            seqs.extend(await hooks.publish(name, version=version))

    async def hurry() -> None:
        while not receiver.told() or len({one[0] for one in receiver.told()}) < 100:
            await hooks.postgres.run(DUE_NOW)
            await asyncio.sleep(0)

    await asyncio.gather(*(publish(name) for name in "abcd"))
    await asyncio.wait_for(hurry(), 60)
    told = [one[0] for one in receiver.told()]
    assert told == sorted(told)
    assert told == sorted(set(seqs))


async def test_where_nothing_may_be_sent(hooks, config, receiver):
    for url in ("http://10.0.0.1/hook", "ftp://example.com/", "http://u:p@example.com/"):
        with pytest.raises(UrlRefused):
            await hooks.set(url)
    assert await hooks.webhooks.list() == []
    for name in ("nobody", "\x00", ""):
        with pytest.raises(WebhookUnknown):
            await hooks.webhooks.get(name)
    strict = WebhookClient(replace(config, allow_networks=()))
    with pytest.raises(PostFailed, match="this machine"):
        await strict.post(receiver.url.replace("127.0.0.1", "localhost"), [], b"{}")
    await strict.close()
    assert receiver.posts == []


async def test_a_receiver_that_hangs_or_is_not_there_is_given_up(hooks, config, receiver):
    receiver.is_hanging = True
    poster = WebhookClient(replace(config, webhook_timeout_s=0.2))
    with pytest.raises(PostFailed):
        await poster.post(receiver.url, [], b"{}")
    url = receiver.url
    await receiver.close()
    with pytest.raises(PostFailed):
        await poster.post(url, [], b"{}")
    await poster.close()


async def test_a_name_that_leads_inside_is_never_connected_to(config, receiver):
    """Every form of a forbidden address, beside a public one of the same name."""
    transport, names = await asyncio.get_running_loop().create_datagram_endpoint(
        NameServer, local_addr=("127.0.0.1", 0)
    )
    name_servers = f"127.0.0.1:{names.port}"
    poster = WebhookClient(replace(config, allow_networks=(), name_servers=name_servers))
    for address in FORBIDDEN_ADDRESSES:
        host = f"h{len(names.records)}.example"
        names.records[host] = ["93.184.215.14", address]
        with pytest.raises(PostFailed, match="not public"):
            await poster.post(f"http://{host}:{receiver.port}/", [], b"{}")
    await poster.close()
    transport.close()
    assert receiver.posts == []

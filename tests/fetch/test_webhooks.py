"""Webhooks: signed, in order, no result lost while the receiver is away."""

from __future__ import annotations

import asyncio
import random
import re
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from forbidden import FORBIDDEN_ADDRESSES
from room import DUE_NOW, JOBS, LIMITS, working
from tests.kit.waiting import wait_true

from headrace.cli.doctor import check_webhooks
from headrace.fetch import FetchConfig, store
from headrace.fetch.download import Downloader, PostFailed
from headrace.fetch.errors import UrlRefused, WebhookUnknown
from headrace.fetch.model import WEBHOOK_QUEUE, Customer, Result
from headrace.fetch.service.customers import Webhooks
from headrace.fetch.sql import SQL
from headrace.fetch.store.results import NewResult
from headrace.fetch.webhook_delivery import (
    MESSAGE_BYTES_MAX,
    WebhookJob,
    WebhookSender,
    headers_of,
    message_of,
    new_secret,
    signature,
)
from headrace.jobs import Jobs, NewJob, Registry, Task
from headrace.jobs.model import JobFilter

GUIDE = Path(__file__).parents[2] / "docs" / "fetch.md"
BODY = b'{"type":"fetch.results","results":[]}'


# Messages


def test_the_signature_is_that_of_the_standard():
    """The vector that Standard Webhooks publish."""
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    signed = signature(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def signed_headers(*secrets: str, at_s: float | None = None) -> dict[str, str]:
    lines = headers_of("results_1_2", BODY, secrets, int(time.time() if at_s is None else at_s))
    return dict(line.split(": ", 1) for line in lines)


def test_the_receiver_of_the_guide_accepts_our_messages_and_no_others():
    """The code of docs/fetch.md, as it is printed there."""
    found = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (snippet,) = [one for one in found if "def is_ours" in one]
    names: dict = {}
    exec(compile(snippet, "docs/fetch.md", "exec"), names)
    is_ours = names["is_ours"]
    old, new = new_secret(), new_secret()
    assert is_ours(new, signed_headers(new), BODY)
    for secret in (old, new):
        assert is_ours(secret, signed_headers(new, old), BODY), "both sign during a rotation"
    assert not is_ours(old, signed_headers(new), BODY)
    assert not is_ours(new, signed_headers(new), BODY + b" ")
    assert not is_ours(new, signed_headers(new) | {"webhook-id": "results_1_3"}, BODY)
    assert not is_ours(new, signed_headers(new, at_s=time.time() - 3600), BODY)


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


# Delivery


class Hooks:
    """The webhooks of customer `shop`, and a publisher of results; works while `working`."""

    def __init__(self, postgres, config) -> None:
        self.registry = Registry()
        self.jobs = Jobs(postgres, JOBS, self.registry)
        self.registry.bind(lambda: self.jobs)
        self.postgres = postgres
        self.client = Downloader(config)
        self.sender = WebhookSender(postgres, self.jobs, self.client, timeout_s=15)
        self.webhooks = Webhooks(postgres, self.jobs, self.sender, self.client.policy)
        self.registry.add(
            Task(queue=WEBHOOK_QUEUE, handler=self.sender.deliver, timeout="5m", concurrency=5)
        )

    async def set(self, url: str) -> str | None:
        async with self.postgres.transaction() as tx:
            return await self.webhooks.set("shop", url, tx=tx)

    async def publish(self, *ids: str, version: int = 1) -> list[int]:
        """Publish a version of each; return their numbers."""
        async with self.postgres.transaction() as tx:
            return await self.publish_in(tx, *ids, version=version)

    async def publish_in(self, tx, *ids: str, version: int = 1) -> list[int]:
        await tx.run(SQL.lock_result_order)
        new = [NewResult("shop", i, version, "publish", "{}", []) for i in ids]
        seqs = [seq for seq, _ in await store.results.insert_results(tx, new)]
        await self.sender.notify(tx, {"shop"})
        return seqs


@pytest.fixture
def config(receiver):
    """The receiver's port is allowed, and requests are short."""
    return FetchConfig(
        allow_networks=("127.0.0.0/8",), allow_ports=(receiver.port,), webhook_timeout_s=2.0
    )


@pytest.fixture
async def hooks(postgres, config):
    """The webhooks, no worker."""
    hooks = Hooks(postgres, config)
    await store.runs.set_customer(postgres, Customer(customer="shop", **LIMITS))
    yield hooks
    await hooks.client.close()


@pytest.fixture
async def worker(hooks):
    """A worker on the webhook queue."""
    async with working(hooks.postgres, hooks.jobs) as task:
        yield task


async def jobs_of(hooks) -> tuple[int, int]:
    """Webhook jobs (ready or running, waiting for their time)."""
    queue = await hooks.jobs.queues.get(WEBHOOK_QUEUE)
    return queue.ready + queue.leased, queue.scheduled


async def wait_jobs(hooks, *, scheduled: int = 0) -> None:
    async def is_quiet() -> bool:
        return await jobs_of(hooks) == (0, scheduled)

    await wait_true(is_quiet, what=f"{scheduled} messages wait")


class Protocol:
    """Drives a webhook at random; the oracle is a cursor over the published results."""

    def __init__(self, hooks, receiver, rng: random.Random) -> None:
        self.hooks, self.receiver, self.rng = hooks, receiver, rng
        self.seqs: list[int] = []
        self.cursor = 0
        self.version = 0
        self.secrets: list[str] = []

    async def take(self, step: str) -> None:
        self.receiver.posts.clear()
        await getattr(self, step)()
        expected = [seq for seq in self.seqs if seq > self.cursor]
        await self.drain(len(expected))
        assert [one[0] for one in self.receiver.delivered()] == expected, step
        self.cursor = max(self.cursor, *expected, 0)
        for post in self.receiver.posts:
            assert all(post.is_signed_with(secret) for secret in self.secrets)
            assert not post.is_signed_with(new_secret())
        found = await self.hooks.webhooks.get("shop")
        assert (found.waiting, found.failures, found.failing_since) == (0, 0, None)

    async def drain(self, results: int) -> None:
        async def is_drained() -> bool:
            await self.hooks.postgres.value(DUE_NOW)
            return len(self.receiver.delivered()) >= results and await jobs_of(self.hooks) == (0, 0)

        await wait_true(is_drained, what=f"{results} results are delivered")

    async def publish(self) -> None:
        self.version += 1
        count = self.rng.choice([1, 2, 30, 130])
        names = [f"i{n}" for n in range(count)]
        self.seqs += await self.hooks.publish(*names, version=self.version)

    async def publish_at_once(self) -> None:
        async def publish(name: str) -> None:
            for version in range(1, 9):
                self.seqs.extend(await self.hooks.publish(name, version=version))

        self.receiver.planned += [(204, {}), (500, {}), (429, {"Retry-After": "0"})] * 2
        await asyncio.gather(*(publish(name) for name in "abcd"))
        self.seqs.sort()
        await wait_true(self._is_planned_over, what="all planned responses are used")

    async def _is_planned_over(self) -> bool:
        await self.hooks.postgres.value(DUE_NOW)
        if await jobs_of(self.hooks) == (0, 0):
            self.receiver.planned.clear()
        return not self.receiver.planned

    async def refuse(self) -> None:
        elsewhere = {"Location": "http://127.0.0.1:1/"}
        answers = [(500, {}), (302, elsewhere), (503, {"Retry-After": "1800"}), (404, {})]
        self.receiver.planned += self.rng.sample(answers, 2)
        await self.publish()

    async def gone(self) -> None:
        self.receiver.planned.append((410, {}))
        await self.publish()

        async def is_disabled() -> bool:
            return (await self.hooks.webhooks.get("shop")).disabled_at is not None

        await wait_true(is_disabled, what="the webhook is disabled")
        await self.publish()
        await self.drain(0)
        assert len(self.receiver.posts) == 1
        waiting = (await self.hooks.webhooks.get("shop")).waiting
        assert waiting == len([seq for seq in self.seqs if seq > self.cursor])
        await self.hooks.set(self.receiver.url)

    async def rotate(self) -> None:
        rotated = await self.hooks.webhooks.rotate("shop")
        self.secrets = [*self.secrets[-1:], rotated.secret]
        trial = await self.hooks.webhooks.test("shop")
        assert (trial.is_accepted, trial.status) == (True, 204)
        [post] = self.receiver.posts
        assert post.document["type"] == "fetch.test"
        self.receiver.posts.clear()
        await self.publish()

    async def replay(self) -> None:
        self.cursor = self.rng.choice([0, *self.seqs])
        assert (await self.hooks.webhooks.replay("shop", after=self.cursor)).after == self.cursor

    async def set_again(self) -> None:
        assert await self.hooks.set(self.receiver.url) is None, "its secret stays"


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("seed", [1, 2])
async def test_every_result_is_delivered_once_in_order_whatever_happens(hooks, receiver, seed):
    rng = random.Random(seed)
    protocol = Protocol(hooks, receiver, rng)
    protocol.secrets = [await hooks.set(receiver.url)]
    assert protocol.secrets[0].startswith("whsec_")
    steps = ["publish", "publish_at_once", "refuse", "gone", "rotate", "replay", "set_again"] * 2
    for step in ["publish", *rng.sample(steps, len(steps))]:
        await protocol.take(step)
    receiver.posts.clear()
    await hooks.webhooks.remove("shop")
    await hooks.publish("a", version=1000)
    await wait_jobs(hooks)
    assert receiver.posts == []
    with pytest.raises(WebhookUnknown, match="--webhook URL"):
        await hooks.webhooks.get("shop")


@pytest.mark.usefixtures("worker")
async def test_a_failed_message_waits_for_its_backoff_or_the_receivers_time(hooks, receiver):
    receiver.planned += [(500, {}), (503, {"Retry-After": "1800"}), (410, {})]
    await hooks.set(receiver.url)
    await hooks.publish(*(f"i{n}" for n in range(130)))
    for failures, status in ((1, 500), (2, 503)):
        await wait_true(lambda count=failures: len(receiver.posts) == count, what="it is sent")
        await wait_jobs(hooks, scheduled=1)
        found = await hooks.webhooks.get("shop")
        assert (found.failures, found.last_status, found.waiting) == (failures, status, 130)
        assert found.next_at is not None
        await hooks.postgres.value(DUE_NOW)
    assert 1795 <= (found.next_at - found.last_at).total_seconds() <= 1805


async def test_a_webhook_job_ends_only_after_it_saw_every_result(hooks, receiver):
    """A turn is the life of one job; each result has a job of its turn or a later one."""
    await hooks.set(receiver.url)
    turn = (await store.results.find_webhooks(hooks.postgres, customer="shop"))[0].turn

    async def end_turn() -> bool:
        async with hooks.postgres.transaction() as tx:
            return await store.results.end_turn(tx, "shop", turn)

    async with hooks.postgres.transaction() as tx:
        await hooks.publish_in(tx, "a")
        ending = asyncio.create_task(end_turn())
        done, _ = await asyncio.wait({ending}, timeout=0.2)
        assert not done, "a publisher that has not committed holds the webhook"
    assert await ending is False


async def test_a_lost_job_is_replaced_and_a_result_after_a_turn_makes_a_job(hooks, receiver):
    await hooks.set(receiver.url)
    turn = (await store.results.find_webhooks(hooks.postgres, customer="shop"))[0].turn
    async with hooks.postgres.transaction() as tx:
        assert await store.results.end_turn(tx, "shop", turn)
    await hooks.publish("a")
    await hooks.publish("b")
    assert await jobs_of(hooks) == (2, 0), "one of the first turn, one of the next for both"
    await hooks.sender.notify_all()
    assert await jobs_of(hooks) == (2, 0)
    await hooks.jobs.bulk("delete", JobFilter(queue=WEBHOOK_QUEUE, state="ready"))
    await hooks.sender.notify_all()
    assert await jobs_of(hooks) == (1, 0)


@pytest.mark.usefixtures("worker")
async def test_a_job_of_an_older_turn_has_no_effect(hooks, receiver):
    await hooks.set(receiver.url)
    await hooks.publish("a")
    await wait_true(lambda: receiver.posts, what="it is delivered")
    await wait_jobs(hooks)
    stale = NewJob(queue=WEBHOOK_QUEUE, payload=WebhookJob(customer="shop", turn=-1))
    await hooks.jobs.enqueue(stale)
    await wait_jobs(hooks)
    assert len(receiver.posts) == 1


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


# Addresses


async def test_no_forbidden_url_is_set_and_no_such_address_connected(
    hooks, config, receiver, names
):
    for url in ("http://10.0.0.1/hook", "ftp://example.com/", "http://u:p@example.com/"):
        with pytest.raises(UrlRefused):
            await hooks.set(url)
    assert await hooks.webhooks.list() == []
    for name in ("nobody", "\x00", ""):
        with pytest.raises(WebhookUnknown):
            await hooks.webhooks.get(name)
    name_servers = f"127.0.0.1:{names.port}"
    strict = Downloader(replace(config, allow_networks=(), name_servers=name_servers))
    with pytest.raises(PostFailed, match="this machine"):
        await strict.post(receiver.url.replace("127.0.0.1", "localhost"), [], b"{}", time_s=15)
    for number, address in enumerate(FORBIDDEN_ADDRESSES):
        host = f"h{number}.example"
        names.records[host] = ["93.184.215.14", address]
        with pytest.raises(PostFailed, match="not public"):
            await strict.post(f"http://{host}:{receiver.port}/", [], b"{}", time_s=15)
    await strict.close()
    assert receiver.posts == []


async def test_the_status_of_a_long_response_counts(config, receiver):
    client = Downloader(config)
    receiver.answer = b"x" * 500_000
    for status in (200, 302, 503):
        receiver.planned = [(status, {"Retry-After": "7"})]
        found = await client.post(receiver.url, [], b"{}", time_s=15)
        assert (found.status, found.retry_after_s) == (status, 7)
    await client.close()


async def test_a_receiver_that_hangs_or_does_not_listen_is_given_up(config, receiver):
    receiver.is_hanging = True
    url = receiver.url
    client = Downloader(config)
    with pytest.raises(PostFailed):
        await client.post(url, [], b"{}", time_s=0.2)
    await receiver.close()
    with pytest.raises(PostFailed):
        await client.post(url, [], b"{}", time_s=0.2)
    await client.close()


@pytest.mark.parametrize(
    ("failures", "is_gone", "state", "text"),
    [
        (0, False, "ok", "1 webhook accepts results"),
        (9, False, "warn", "deliveries fail: shop (1)"),
        (1, True, "warn", "returned 410: shop (1)"),
    ],
)
async def test_the_doctor_reports_failing_receivers(
    hooks, receiver, *, failures, is_gone, state, text
):
    app = SimpleNamespace(installed_fetch=lambda: SimpleNamespace(webhooks=hooks.webhooks))
    assert await check_webhooks(app) == []
    await hooks.set(receiver.url)
    async with hooks.postgres.session() as session:
        disabled = "now()" if is_gone else "NULL"
        await session.connection.execute(
            f"UPDATE headrace.fetch_webhook SET failures = {failures}, disabled_at = {disabled}"
        )
    (found,) = await check_webhooks(app)
    assert (found.state, text in found.text) == (state, True)

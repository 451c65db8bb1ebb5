"""A request with an `Idempotency-Key` has one effect, even after a failure before its answer.

The API is a process as users run it. The test kills it before and after the commit, drops the
database's answer or the API's own in the network, and at the end kills it repeatedly under load. A
client that repeats the request has one job.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import socket

import httpx
import pytest
from tests.kit.chaos import ChaosProxy
from tests.kit.processes import is_alive
from tests.kit.waiting import wait_true

from headrace.engines.sql import compile_query
from headrace.web.tokens import Tokens

pytestmark = pytest.mark.slow
JOBS = compile_query(
    "jobs",
    "-- What waits.\nSELECT id, convert_from(payload, 'UTF8')::jsonb->>'key' AS key"
    " FROM headrace.job_ready",
)
KEYS = compile_query("keys", "-- Keys kept.\nSELECT key FROM headrace.idempotency_key")
PATH = "/v1/queues/noted/jobs"


class Api:
    """`headrace api` on one address, started again whenever it died.

    And its caller, who repeats.
    """

    def __init__(self, fleet, token: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self._fleet = fleet
        self._headers = {"authorization": f"Bearer {token}"}
        self.process = None

    async def start(self, **options: str) -> None:
        """Start it and wait until it answers."""
        self.process = self._fleet.start("api", HEADRACE_WEB_LISTEN=self.address, **options)
        await wait_true(self._answers, what="the API answers")

    def kill(self) -> None:
        self.process.kill_all()

    async def enqueue(self, key: str, *, at: str | None = None) -> httpx.Response:
        """One try."""
        async with httpx.AsyncClient(
            base_url=f"http://{at or self.address}", timeout=60, verify=False
        ) as client:
            headers = {**self._headers, "idempotency-key": key}
            return await client.post(PATH, headers=headers, json={"payload": {"key": key}})

    async def enqueue_until_answered(self, key: str) -> httpx.Response:
        """As a caller does who wants to know."""
        answers = []

        async def ask():
            try:
                answers.append(await self.enqueue(key))
            except httpx.TransportError:
                return False
            return answers[-1].status_code not in {409, 503}

        await wait_true(ask, what=f"{key} is answered")
        return answers[-1]

    async def _answers(self) -> bool:
        assert is_alive(self.process.pid), self.process.err
        try:
            async with httpx.AsyncClient(verify=False) as client:
                return (await client.get(f"http://{self.address}/healthz")).status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture
async def api(fleet, postgres):
    """The API, not yet running."""
    made = await Tokens(postgres).create("caller", ("jobs:read", "jobs:write"))
    return Api(fleet, made.text)


@pytest.mark.parametrize(("point", "stored"), [("web.before_commit", 0), ("web.after_effect", 1)])
async def test_an_api_that_died_at_the_commit_does_it_once(api, postgres, point, stored):
    await api.start(HEADRACE_CRASH_AT=point)
    with pytest.raises(httpx.TransportError):
        await api.enqueue("order-1")
    assert api.process.wait_exit() == -9
    # The database ends the transaction of a dead client by itself, in a moment.
    await wait_true(lambda: _counts(postgres, stored))
    await api.start()
    second = await api.enqueue_until_answered("order-1")
    assert second.status_code == 202
    assert ("idempotency-replayed" in second.headers) is bool(stored)
    third = await api.enqueue("order-1")
    assert (third.content, third.headers["idempotency-replayed"]) == (second.content, "true")
    [job] = await postgres.all(JOBS)
    assert second.json() == {"ids": [job["id"]]}


@pytest.mark.parametrize("lost", ["COMMIT", "job_ready", "idempotency_key"])
async def test_an_answer_of_the_database_that_was_lost_does_it_once(
    api, postgres, database_url, lost
):
    with ChaosProxy(database_url) as proxy:
        await api.start(HEADRACE_POSTGRES_URL=proxy.url)
        loss = proxy.lose_reply(lost.encode())
        first = await api.enqueue("order-1")
        assert (first.status_code, loss.fired) == (503, 1), first.text
        second = await api.enqueue_until_answered("order-1")
        assert second.status_code == 202
        assert ("idempotency-replayed" in second.headers) is (lost == "COMMIT")
        [job] = await postgres.all(JOBS)
        assert second.json() == {"ids": [job["id"]]}
        api.kill()


async def test_an_answer_of_the_api_that_was_lost_does_it_once(api, postgres):
    await api.start()
    with ChaosProxy(f"http://{api.address}") as proxy:
        loss = proxy.lose_reply(b"order-1")
        with pytest.raises(httpx.TransportError):
            await api.enqueue("order-1", at=proxy.url.removeprefix("http://"))
        assert loss.fired == 1
    await wait_true(lambda: _counts(postgres, 1))
    second = await api.enqueue("order-1")
    assert (second.status_code, second.headers["idempotency-replayed"]) == (202, "true")
    assert await _counts(postgres, 1)


async def test_an_api_killed_at_any_moment_under_load_does_each_once(api, postgres):
    await api.start()
    ended = asyncio.Event()
    numbers = itertools.count()

    async def caller():
        told = {}
        while not ended.is_set():
            key = f"order-{next(numbers)}"
            told[key] = await api.enqueue_until_answered(key)
        return told

    callers = [asyncio.create_task(caller()) for _ in range(6)]
    chance = random.Random(7)
    for _ in range(2):
        seen, more = len(await postgres.all(KEYS)), chance.randrange(10, 60)
        await wait_true(lambda: _has_kept(postgres, seen + more), what="calls are answered")  # noqa: B023
        api.kill()
        await api.start()
    ended.set()
    told = {}
    for answers in await asyncio.gather(*callers):
        told |= answers
    assert {answer.status_code for answer in told.values()} == {202}
    rows = await postgres.all(JOBS)
    assert {row["key"]: [row["id"]] for row in rows} == {
        key: answer.json()["ids"] for key, answer in told.items()
    }
    assert len(rows) == len(told) > 10, "one job each"


async def _counts(postgres, jobs: int) -> bool:
    return len(await postgres.all(JOBS)) == len(await postgres.all(KEYS)) == jobs


async def _has_kept(postgres, keys: int) -> bool:
    return len(await postgres.all(KEYS)) >= keys

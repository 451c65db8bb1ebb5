"""A request with an `Idempotency-Key` has one effect, even after a failure before its reply.

The API is a process as users run it. It dies before and after the commit, the reply of the database
or its own is lost. `test_storms` kills it under load.
"""

from __future__ import annotations

import httpx
import pytest
from tests.kit.chaos import ChaosProxy
from tests.kit.processes import free_ports, is_alive
from tests.kit.waiting import wait_true

from headrace.engines.sql import compile_query
from headrace.web.tokens import Tokens

pytestmark = pytest.mark.slow
JOBS = compile_query(
    "jobs",
    "-- Waiting jobs.\nSELECT id, convert_from(payload, 'UTF8')::jsonb->>'key' AS key"
    " FROM headrace.job_ready ORDER BY id",
)
KEYS = compile_query("keys", "-- Stored keys.\nSELECT key FROM headrace.idempotency_key")
REPLAYED = "idempotency-replayed"


class Api:
    """`headrace api` on one address, and its caller."""

    def __init__(self, fleet, token: str) -> None:
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        self._fleet = fleet
        self._headers = {"authorization": f"Bearer {token}"}
        self.process = None

    async def start(self, **settings: str) -> None:
        self.process = self._fleet.start("api", WEB_LISTEN=self.address, **settings)
        await wait_true(self._answers, what="the API answers")

    async def enqueue(self, key: str, *, at: str | None = None) -> httpx.Response:
        async with httpx.AsyncClient(timeout=60, verify=False) as client:
            url = f"http://{at or self.address}/v1/queues/noted/jobs"
            headers = {**self._headers, "idempotency-key": key}
            return await client.post(url, headers=headers, json={"payload": {"key": key}})

    async def enqueue_until_answered(self, key: str) -> httpx.Response:
        """Repeat the request while the first one may still run."""
        answers = []

        async def ask():
            answers.append(await self.enqueue(key))
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
    made = await Tokens(postgres).create("caller", ("jobs:read", "jobs:write"))
    return Api(fleet, made.text)


async def test_an_api_that_dies_at_the_commit_does_it_once(api, fleet, postgres):
    async def has_stored(count):
        return len(await postgres.all(JOBS)) == len(await postgres.all(KEYS)) == count

    for point, stored in (("web.before_commit", 0), ("web.after_effect", 1)):
        await api.start(CRASH_AT=point)
        with pytest.raises(httpx.TransportError):
            await api.enqueue("order-1")
        assert api.process.wait_exit() == -9
        fleet.kill(api.process)
        # The database ends the transaction of a dead client by itself, in a moment.
        await wait_true(lambda stored=stored: has_stored(stored))
    await api.start()
    second, third = [await api.enqueue_until_answered("order-1") for _ in range(2)]
    assert (second.status_code, second.headers[REPLAYED]) == (202, "true")
    assert (third.content, third.headers[REPLAYED]) == (second.content, "true")
    [job] = await postgres.all(JOBS)
    assert second.json() == {"ids": [job["id"]]}


async def test_a_request_whose_reply_was_lost_is_done_once(api, fleet, postgres, database_url):
    with ChaosProxy(database_url) as proxy:
        await api.start(POSTGRES_URL=proxy.url)
        for number, lost in enumerate((b"COMMIT", b"job_ready", b"idempotency_key"), 1):
            loss = proxy.lose_reply(lost)
            key = f"order-{number}"
            first = await api.enqueue(key)
            assert (first.status_code, loss.fired) == (503, 1), first.text
            second = await api.enqueue_until_answered(key)
            assert second.status_code == 202
            assert (REPLAYED in second.headers) is (lost == b"COMMIT")
            *others, job = await postgres.all(JOBS)
            assert (len(others), second.json()) == (number - 1, {"ids": [job["id"]]})

        with ChaosProxy(f"http://{api.address}") as own:
            loss = own.lose_reply(b"order-4")
            with pytest.raises(httpx.TransportError):
                await api.enqueue("order-4", at=own.url.removeprefix("http://"))
            assert loss.fired == 1
        again = await api.enqueue_until_answered("order-4")
        assert (again.status_code, again.headers[REPLAYED]) == (202, "true")
        assert len(await postgres.all(JOBS)) == 4
        fleet.kill(api.process)

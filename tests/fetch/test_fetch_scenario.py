"""One life of a customer's catalogues through Python, HTTP and the command line: equal results."""

from __future__ import annotations

import asyncio
import re
import tomllib
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from fetch_ways import WAYS, CommandWay, HttpWay, PythonWay, Refused
from receiver import Receiver
from tests.kit.waiting import wait_true

from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.fetch import Fetch, FetchConfig, Item, http
from headrace.fetch.model import RunState
from headrace.jobs import Jobs, JobsConfig, Registry
from headrace.jobs.worker import Worker
from headrace.kernel.config import load_config
from headrace.web.model import WebConfig
from headrace.web.server import create_api
from headrace.web.tokens import Tokens

STEPS = tomllib.loads(Path(__file__).with_name("scenario_fetch.toml").read_text())["step"]
JOBS = JobsConfig(poll_s=0.05, retry_first_s=0.1)
BY_CHANCE = {"at", "secret", "webhook_secret", "needs", "starts_live", "file_name", "sample"}


@asynccontextmanager
async def fresh_room(running_engines, blobs, config: FetchConfig):
    """A room with a worker, on a database of its own."""
    async with running_engines.database() as url:
        postgres = Postgres(url, PostgresConfig())
        registry = Registry()
        jobs = Jobs(postgres, JOBS, registry)
        registry.bind(lambda: jobs)
        fetch = Fetch(postgres, blobs, jobs, config)
        fetch.register(registry)

        async def on_item(_item: Item) -> None:
            pass

        fetch.on_item(on_item)
        await fetch.declare_consumers()
        stop = asyncio.Event()
        working = asyncio.create_task(Worker(postgres, jobs, JOBS, host_name="test").run(stop))
        yield SimpleNamespace(fetch=fetch, jobs=jobs, postgres=postgres)
        stop.set()
        await asyncio.wait_for(working, 60)
        await fetch.close()
        await jobs.close()
        await postgres.close()


@asynccontextmanager
async def way_into(name: str, room, folder: Path):
    """The way `name` into a room."""
    if name == "python":
        yield PythonWay(room.fetch, folder)
    elif name == "commands":
        yield CommandWay(room.fetch, folder)
    else:
        house = SimpleNamespace(
            config=load_config({"web": WebConfig}, env={}),
            engines=SimpleNamespace(postgres=room.postgres),
            metrics_folder=None,
            version="0",
            services=lambda: {"fetch": room.fetch},
            routes=lambda: http.ROUTES,
        )
        token = await Tokens(room.postgres).create("test", ("fetch:read", "fetch:write"))
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(create_api(house)),
            base_url="http://127.0.0.1",
            headers={"Authorization": f"Bearer {token.text}"},
        ) as client:
            yield HttpWay(client)


class Telling:
    """One run of the scenario on one way."""

    def __init__(self, way, room, **known: str) -> None:
        self._way = way
        self._room = room
        self._kept: dict = known

    async def step(self, step):
        """Do a step, compare with what it gives; return the whole answer, or how it was refused."""
        given = self._filled(step.get("with", {}))
        if step["do"] == "wait":
            return await self._wait(**given)
        if "refused" in step:
            with pytest.raises(Refused) as raised:
                await self._way.do(step["do"], given)
            assert raised.value.told == step["refused"]
            return step["refused"]
        answer = await self._way.do(step["do"], given)
        require_part(answer, self._filled(step.get("gives", answer)))
        for name, path in step.get("keep", {}).items():
            value = answer
            for part in path.split("."):
                value = value[int(part) if part.isdigit() else part]
            self._kept[name] = value
        return answer

    async def _wait(self, *, run) -> None:
        async def is_over() -> bool:
            if (await self._room.fetch.runs.get(run)).state is not RunState.DONE:
                return False
            queues = await self._room.jobs.queues.all()
            return not any(q.ready + q.leased + q.scheduled for q in queues)

        await wait_true(is_over, what=f"run {run} is over and delivered")
        await self._room.fetch._host_stats.flush()

    def _filled(self, value):
        """`value` with what was kept in the place of its names."""
        if isinstance(value, dict):
            return {k: self._filled(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self._filled(one) for one in value]
        if isinstance(value, str) and value.startswith("$"):
            return self._kept[value[1:]]
        return value.replace("{host}", self._kept["host"]) if isinstance(value, str) else value


def require_part(answer, expected, path="answer"):
    """Whether `expected` is a part of the answer, in each list as many as there are."""
    if isinstance(expected, dict):
        assert isinstance(answer, dict), f"{path}: {answer!r}"
        for name, value in expected.items():
            require_part(answer.get(name), value, f"{path}.{name}")
    elif isinstance(expected, list):
        assert isinstance(answer, list), f"{path}: {answer!r}"
        assert len(answer) == len(expected), f"{path}: {answer!r}"
        for index, value in enumerate(expected):
            require_part(answer[index], value, f"{path}.{index}")
    elif expected in ("<some>", "<none>"):
        assert (answer is None) is (expected == "<none>"), f"{path}: {answer!r}"
    else:
        assert answer == expected, path


def without_chance(value, name=""):
    """An answer without what differs from run to run: moments, measured times, secrets, numbers in
    sentences.
    """
    if name in BY_CHANCE or name.endswith(("_at", "_s", "_until")):
        return None if value is None else f"<{name}>"
    if isinstance(value, dict):
        return {k: without_chance(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [without_chance(one, name) for one in value]
    return re.sub(r"\d+", "N", value) if isinstance(value, str) else value


@pytest.mark.slow
async def test_every_way_in_tells_the_same_life(running_engines, blobs, config, origin, tmp_path):
    receiver = Receiver()
    await receiver.start()
    config = replace(config, allow_ports=(*config.allow_ports, receiver.port))
    told = {}
    for name in WAYS:
        async with (
            fresh_room(running_engines, blobs, config) as room,
            way_into(name, room, tmp_path) as way,
        ):
            telling = Telling(way, room, hook=receiver.url, host=origin.url(""))
            told[name] = []
            for step in STEPS:
                try:
                    told[name].append((step["name"], without_chance(await telling.step(step))))
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"{name}, step {step['name']!r}")
                    raise
    await receiver.close()
    for name in WAYS[1:]:
        for ours, theirs in zip(told["python"], told[name], strict=True):
            assert ours == theirs, f"python and {name}"


def test_steps_have_names_of_their_own_and_what_they_need():
    names = [step["name"] for step in STEPS]
    assert len(set(names)) == len(names)
    allowed = {"name", "do", "with", "gives", "refused", "keep"}
    assert {key for step in STEPS for key in step} <= allowed
    assert not [step["name"] for step in STEPS if "refused" in step and "gives" in step]

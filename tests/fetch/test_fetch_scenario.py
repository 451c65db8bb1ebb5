"""One life of a customer's catalogues through Python, HTTP and the command line: equal results."""

from __future__ import annotations

import re
import tomllib
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fetch_ways import VERBS, WAYS, CommandWay, HttpWay, PythonWay, Refused
from room import api_client, new_room, working
from tests.kit.waiting import wait_true

from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.fetch import FetchConfig, Item
from headrace.fetch.model import RunState

BY_CHANCE = {"at", "secret", "webhook_secret", "needs", "starts_live", "file_name", "sample"}
STEPS = tomllib.loads(Path(__file__).with_name("scenario_fetch.toml").read_text())["step"]


@asynccontextmanager
async def fresh_room(running_engines, blobs, config: FetchConfig):
    """A room with a worker, on its own database."""
    async with running_engines.database() as url:
        postgres = Postgres(url, PostgresConfig())

        async def on_item(_item: Item) -> None:
            pass

        fetch, jobs = new_room(postgres, blobs, config, on_item)
        await fetch.declare_consumers()
        async with working(postgres, jobs):
            yield SimpleNamespace(fetch=fetch, jobs=jobs, postgres=postgres)
        await fetch.close()
        await jobs.close()
        await postgres.close()


@asynccontextmanager
async def way_into(name: str, room, folder: Path):
    """The surface `name` of a room."""
    if name == "http":
        async with await api_client(room.fetch, room.postgres) as client:
            yield HttpWay(client)
    else:
        yield {"python": PythonWay, "commands": CommandWay}[name](room.fetch, folder)


class Recording:
    """One run of the scenario on one surface."""

    def __init__(self, way, room, **known: str) -> None:
        self._way = way
        self._room = room
        self._kept: dict = known

    async def take(self, step: dict[str, Any]):
        """Run a step, compare it, and return the whole response or the refusal."""
        verb, given = step["do"], self._filled(step.get("with", {}))
        if verb == "wait":
            return await self._wait(**given)
        if "refused" in step:
            with pytest.raises(Refused) as raised:
                await self._way.do(verb, given)
            assert raised.value.told == step["refused"]
            return step["refused"]
        answer = await self._way.do(verb, given)
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
        """`value` with kept values in the place of their names."""
        if isinstance(value, dict):
            return {k: self._filled(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self._filled(one) for one in value]
        if isinstance(value, str) and value[1:] in self._kept:
            return self._kept[value[1:]]
        return value.replace("$host", self._kept["host"]) if isinstance(value, str) else value


def require_part(answer, expected, path="answer"):
    """Require that `expected` is a part of the answer; lists have the same length."""
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
    """A response without what differs from run to run: times, secrets, numbers in sentences."""
    if name in BY_CHANCE or name.endswith(("_at", "_s", "_until")):
        return None if value is None else f"<{name}>"
    if isinstance(value, dict):
        return {k: without_chance(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [without_chance(one, name) for one in value]
    return re.sub(r"\d+", "N", value) if isinstance(value, str) else value


@pytest.mark.slow
async def test_every_surface_gives_the_same_results(
    running_engines, blobs, *, config, origin, receiver, tmp_path
):
    results = {}
    for name in WAYS:
        async with (
            fresh_room(running_engines, blobs, config) as room,
            way_into(name, room, tmp_path) as way,
        ):
            recording = Recording(way, room, hook=receiver.url, host=origin.url(""))
            results[name] = []
            for number, step in enumerate(STEPS):
                try:
                    results[name].append(without_chance(await recording.take(step)))
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"{name}, step {number}: {step}")
                    raise
    for name in WAYS[1:]:
        for step, ours, theirs in zip(STEPS, results["python"], results[name], strict=True):
            assert ours == theirs, f"python and {name}: {step}"


def test_the_scenario_takes_every_verb():
    assert {step["do"] for step in STEPS} >= VERBS.keys()

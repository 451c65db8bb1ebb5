"""One life of jobs, told alike by Python, HTTP and the command line.

`scenario.toml`, step by step.
"""

from __future__ import annotations

import re
import tomllib
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import quote

import pytest
from click.testing import CliRunner
from surfaces import SURFACES, Refused, surface_on
from tests.kit.queue_counts import add_counts

from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.sql import compile_query
from headrace.jobs import Jobs, QueueUnknown, Registry, cli, store

STEPS = tomllib.loads(Path(__file__).with_name("scenario.toml").read_text())["step"]
END_LEASES = compile_query(
    "end", "-- Time passes.\nUPDATE headrace.host SET expires_at = now() WHERE kind = 'taker'"
)
AGE_MINUTES = compile_query(
    "age", "-- A day passes.\nUPDATE headrace.queue_minute SET minute = minute - interval '1 d'"
)


class Meanwhile:
    """What happens beside the verbs."""

    def __init__(self, postgres, jobs) -> None:
        self._postgres = postgres
        self._jobs = jobs
        self._hosts = {}

    async def a_host_comes(self, *, host, queues, capacity, slots):
        known = await store.queues.find_queues(self._postgres, queues)
        host_id = await store.leases.add_host(self._postgres, host, [q.id for q in known], 3600)
        self._hosts[host] = host_id
        await store.fleet.report_host(
            self._postgres, host_id, capacity=capacity, load_per_core=0.5, slots=slots
        )

    async def leases_end(self):
        await self._postgres.run(END_LEASES)
        await self._jobs.sweep()

    async def counts_come(self, *, queue, **counted):
        [known] = await store.queues.find_queues(self._postgres, [queue])
        await self._jobs.sweep()
        await self._postgres.run(AGE_MINUTES)
        await add_counts(self._postgres, known.id, **counted)


class Telling:
    """One run of the scenario on one surface."""

    def __init__(self, surface, meanwhile) -> None:
        self._surface = surface
        self._meanwhile = meanwhile
        in_two_hours = datetime.now(UTC) + timedelta(hours=2)
        self._kept = {"in_two_hours": in_two_hours.isoformat(timespec="seconds")}

    async def step(self, step):
        """Do a step, compare with what it gives; return the whole answer, or how it was refused."""
        given = self._filled(step.get("with", {}))
        meanwhile = getattr(self._meanwhile, step["do"].replace(" ", "_"), None)
        if meanwhile is not None:
            return await meanwhile(**given)
        if "refused" in step:
            with pytest.raises(Refused) as raised:
                await self._surface.do(step["do"], given)
            assert raised.value.told == step["refused"]
            return step["refused"]
        answer = await self._surface.do(step["do"], given)
        if "gives" in step:
            require_part(answer, self._filled(step["gives"]))
        for name, path in step.get("keep", {}).items():
            value = answer
            for part in path.split("."):
                value = value[int(part) if part.isdigit() else part]
            self._kept[name] = value
        return answer

    def _filled(self, value):
        """`value` with what was kept in the place of its names."""
        if isinstance(value, dict):
            return {str(self._filled(k)): self._filled(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self._filled(one) for one in value]
        if isinstance(value, str) and value.startswith("$"):
            return self._kept[value[1:]]
        return value


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
    elif expected in {"<some>", "<none>"}:
        assert (answer is None) is (expected == "<none>"), f"{path}: {answer!r}"
    else:
        assert answer == expected, path


def without_chance(value, name=""):
    """An answer without what differs from run to run.

    Moments, ages, cursors, numbers in sentences.
    """
    if isinstance(value, dict):
        return {k: without_chance(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [without_chance(one, name) for one in value]
    if value is None:
        return None
    if name.endswith(("_at", "_age_s")) or name in {"next", "minute", "at", "traceparent"}:
        return f"<{name}>"
    return re.sub(r"\d+", "N", value) if name == "text" else value


@asynccontextmanager
async def fresh_service(running_engines, config):
    """A service on a database of its own."""
    async with running_engines.database() as url:
        postgres = Postgres(url, PostgresConfig())
        jobs = Jobs(postgres, config, Registry())
        yield postgres, jobs
        await jobs.close()
        await postgres.close()


async def told_at(name, telling, step):
    """What a surface tells at a step, without what differs from run to run."""
    try:
        return without_chance(await telling.step(step))
    except (Exception, pytest.fail.Exception) as error:
        error.add_note(f"{name}, step {step['name']!r}")
        raise


@pytest.mark.slow
async def test_every_way_in_tells_the_same_life(running_engines, config):
    told = {}
    for name in SURFACES:
        async with (
            fresh_service(running_engines, config) as (postgres, jobs),
            surface_on(name, postgres, jobs) as surface,
        ):
            telling = Telling(surface, Meanwhile(postgres, jobs))
            told[name] = [(step["name"], await told_at(name, telling, step)) for step in STEPS]
    for name in SURFACES[1:]:
        for ours, theirs in zip(told["python"], told[name], strict=True):
            assert ours == theirs, f"python and {name}"


@pytest.mark.parametrize("lane", ["a/b", "https://shop.example/x?y=1", "a%2Fb", "/", "ж/\N{SEAL}"])
async def test_a_lane_whose_name_holds_slashes_is_reached(postgres, jobs, lane):
    place = {"limiter": "hosts/of us", "lane": lane}
    await jobs.lanes.set(**place, starts_max=1, window_s=60, concurrency=None)
    async with surface_on("http", postgres, jobs) as surface:
        found = await surface.do("set_lane", {**place, "starts_max": 5, "window_s": 60.0})
        assert (found["lane"], found["starts_max"]) == (lane, 5)
        assert await surface.do("lane", place) == found
        assert await surface.do("lanes", {"limiter": place["limiter"]}) == [found]
        path = f"/v1/limiters/{quote(place['limiter'], safe='')}/lanes/{quote(lane, safe='')}/spend"
        spent = [await surface.ask("POST", path, json={"starts": 3}) for _ in range(2)]
        assert spent == [{"wait_s": 0.0}, {"wait_s": None}]
        await surface.do("reset_lane", place)
        with pytest.raises(Refused, match=r"jobs\.lane_unknown"):
            await surface.do("lane", {**place, "lane": f"{lane}/"})
        with pytest.raises(Refused, match=r"web\.not_found"):
            await surface.ask("GET", "/v1%2Flimiters")
    assert (await jobs.lanes.get(**place)).follows_limiter


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("{to:x}",), "PAYLOAD: expected JSON with its quotes, got '{to:x}': JSON is malformed"),
        (("[" * 9000 + "]" * 9000,), "PAYLOAD: the JSON is nested too deep"),
        (("{}", "--after", "2y"), "--after: expected a duration such as 30s, 10m or 2h, got '2y'"),
        (("{}", "--spread", "x"), "--spread: expected a duration such as 30s, 10m or 2h, got 'x'"),
    ],
)
def test_each_wrong_word_of_add_is_told_by_its_name(words, told):
    add = next(command for command in cli.COMMANDS if command.name == "jobs")
    ran = CliRunner().invoke(add, ["add", "mail", *words])
    assert ran.exception.text.startswith(told)


async def test_setting_a_queue_that_is_not_there_tells_how_to_make_it(jobs):
    with pytest.raises(QueueUnknown, match=r"queues set NAME --create.*\?create=true"):
        await jobs.queues.set("nope", retries=1)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"id": 1}, {"id": 2}),
        ({}, {"id": 1}),
        ({"id": 1}, {"id": "<none>"}),
        ({"id": None}, {"id": "<some>"}),
        ({"jobs": [{"id": 1}, {"id": 2}]}, {"jobs": [{"id": 1}]}),
        ({"jobs": []}, {"jobs": [{"id": 1}]}),
        (None, {"id": 1}),
    ],
)
def test_what_is_no_part_of_an_answer_is_found(answer, expected):
    with pytest.raises(AssertionError):
        require_part(answer, expected)


def test_steps_have_names_of_their_own_and_what_they_need():
    names = [step["name"] for step in STEPS]
    assert len(set(names)) == len(names)
    allowed = {"name", "do", "with", "gives", "refused", "keep"}
    assert {key for step in STEPS for key in step} <= allowed
    assert not [step["name"] for step in STEPS if "refused" in step and "gives" in step]

"""Valkey's pools: function libraries, cancellation, and URLs as users may see them."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from functools import partial

import pytest

from headrace.engines.endpoints import (
    masked_text,
    masked_url,
    parse_valkey_url,
    seeds_of,
    server_of,
)
from headrace.engines.functions import load_libraries
from headrace.engines.valkey import Valkey, ValkeyConfig, ValkeyDown

LIBRARY = """#!lua name=headrace_room_v1
server.register_function{function_name='headrace_room_v1_add', callback=function(keys, args)
  return redis.call('INCRBY', keys[1], args[1])
end}
"""


async def test_a_single_server_reports_the_id_of_its_process(valkey):
    [node] = await valkey.primaries()
    info = await node.command("INFO", "server")
    assert len(info["run_id"]) == 40


async def test_an_absent_server_raises_with_the_remedy():
    valkey = Valkey("valkey://127.0.0.1:1", ValkeyConfig(timeout_s=0.5))
    with pytest.raises(ValkeyDown, match="headrace doctor"):
        await valkey.open()
    await valkey.close()


async def test_a_library_is_loaded_once_and_again_when_it_differs(valkey, tmp_path, monkeypatch):
    folder = tmp_path / "luaroomfortests" / "lua"
    folder.mkdir(parents=True)
    (tmp_path / "luaroomfortests" / "__init__.py").write_text('"""A room."""\n')
    monkeypatch.syspath_prepend(tmp_path)
    packages = ("luaroomfortests", "headrace.kernel")
    for code, total in ((LIBRARY, 5), (LIBRARY.replace("args[1]", "2 * args[1]"), 15)):
        (folder / "room_v1.lua").write_text(code)
        assert await load_libraries(valkey, packages) == ["headrace_room_v1"]
        assert await load_libraries(valkey, packages) == []
        assert await valkey.call("headrace_room_v1_add", [f"{valkey.prefix}:{{n}}"], [5]) == total
    await valkey.command("FUNCTION", "DELETE", "headrace_room_v1")
    sys.modules.pop("luaroomfortests", None)


class CancelAt:
    """Cancel a task at its `number`th await, when the wait begins or with its result."""

    def __init__(self, work, number, *, with_answer):
        self._work, self._number, self._with_answer = work, number, with_answer
        self.is_reached = False

    def __await__(self):
        task, steps = asyncio.current_task(), self._work.__await__()
        advance = partial(steps.send, None)
        for count in itertools.count(1):
            try:
                waited = advance()
            except StopIteration as end:
                return end.value
            if count == self._number:
                self.is_reached = True
                if self._with_answer and waited is not None:
                    waited.add_done_callback(lambda _: task.cancel())
                else:
                    asyncio.get_running_loop().call_soon(task.cancel)
            try:
                yield waited
                advance = partial(steps.send, None)
            except BaseException as error:  # noqa: BLE001 - also what a timeout of the client raises
                advance = partial(steps.throw, error)


async def _command(valkey):
    key = f"{valkey.prefix}:{{a}}"
    await valkey.command("PING")
    await valkey.command("GET", key, near=key)


async def _session(valkey):
    async with valkey.session(f"{valkey.prefix}:{{a}}") as session:
        await session.command("PING")
        await session.command("PING")


async def _opening(valkey):
    await valkey.open()


@pytest.mark.parametrize("with_answer", [False, True])
@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("work", [_command, _session, _opening])
async def test_a_cancellation_is_kept_at_every_await(running_engines, work, is_warm, with_answer):
    """`wait_for` on Python 3.11 loses a cancellation that arrives together with a result."""
    for number in itertools.count(1):
        valkey = Valkey(running_engines.endpoints.valkey_url, ValkeyConfig())
        if is_warm:
            await work(valkey)
        step = CancelAt(work(valkey), number, with_answer=with_answer)

        async def run(step=step):
            await step
            return "ended without the cancellation"

        task = asyncio.create_task(run())
        [ended] = await asyncio.gather(task, return_exceptions=True)
        if not step.is_reached:
            assert isinstance(ended, str)
            break
        assert isinstance(ended, asyncio.CancelledError), f"await {number}: {ended!r}"
        assert await valkey.command("PING"), "an interrupted connection is not used again"
        await valkey.close()
    await valkey.close()
    assert number > 1


UNKNOWN = "the configured address"
SERVERS = {
    "postgresql://me:hunter2@db/site": "db:5432",
    "postgresql://me:hunter2@db:6000/site": "db:6000",
    "postgresql://me:hunter2@[::1]:6000/site": "[::1]:6000",
    "postgresql://me:hunter2@one:1,two:2/site": "one:1,two:2",
    "postgresql://me@/site?host=/run/pg&password=hunter2": "/run/pg/.s.PGSQL.5432",
    "postgresql://me@/site?host=db&port=6000": "db:6000",
    "postgresql:///site": UNKNOWN,
    "valkey://:hunter2@cache/0": "cache:5432",
    "unix:///run/my%20valkey/valkey.sock?db=0": "/run/my valkey/valkey.sock",
    "postgresql://me:hun/ter2@db/site": UNKNOWN,
    "postgresql://me:hun#ter2@db/site": UNKNOWN,
    "postgresql://me:hun?ter2@db/site": UNKNOWN,
    "postgresql://me:hun@ter2@db/site": UNKNOWN,
    "postgresql://[me:hunter2@db/site": UNKNOWN,
}
MASKED = {
    "postgresql://me:hunter2@db/site": "postgresql://me:(masked)@db/site",
    "postgresql://me@db:6000/site?sslmode=require": None,
    "postgresql://me@db/site?password=hunter2": "postgresql://me@db/site?password=(masked)",
    "redis://:hunter2@cache:6379/1": "redis://:(masked)@cache:6379/1",
    "valkey://me:hunter2@a:1,b:2": "valkey://me:(masked)@a:1,b:2",
    "postgresql://me@db/site?pass%77ord=hunter2": "postgresql://me@db/site?pass%77ord=(masked)",
    "postgresql://me@db/s?PGAUTH=hunter2&a=1": "postgresql://me@db/s?PGAUTH=(masked)&a=1",
    "s3://AKIA:hunter2@bucket/prefix": "s3://(masked)@bucket/prefix",
    "s3://AKIA@bucket/prefix": "s3://(masked)@bucket/prefix",
    "https://hooks.example/services/T0/hunter2": "https://hooks.example/(masked)",
    "https://hooks.example/?x=hunter2": "https://hooks.example/(masked)",
    "https://hunter2@hooks.example/": "https://(masked)@hooks.example/",
    "https://hooks.example": "https://hooks.example/",
    "file:///srv/a@b#c": None,
    "s3://bucket/prefix": None,
    "s3://bucket?secret_access_key=hunter2": "s3://bucket?secret_access_key=(masked)",
    "postgresql://me:hun/ter2@db/site": "(masked)",
    "postgresql://me:hun#ter2@db/site": "(masked)",
    "postgresql://me:hun#ter2": "(masked)",
    "postgresql://me:hun@ter2@db/site": "(masked)",
    "hunter2": "(masked)",
}
MASKED_TEXTS = {
    "HeadraceFetch/0.1 (+https://example.org/about)": None,
    "https://me:hunter2@cdn.example/m": "https://(masked)@cdn.example/m",
    "a https://x/?token=hunter2, redis://:hunter2@c/0": (
        "a https://x/?token=(masked), redis://:(masked)@c/0"
    ),
    "127.0.0.1:8080": None,
}


def test_a_shown_url_contains_no_password(tmp_path):
    for url, server in SERVERS.items():
        assert server_of(url, port=5432, socket=".s.PGSQL.5432") == server
    for text, shown in MASKED.items():
        assert masked_url(text) == (shown or text)
    for text, shown in MASKED_TEXTS.items():
        assert masked_text(text) == (shown or text)
    descriptor = os.open(tmp_path, os.O_PATH)
    url = f"postgresql://headrace@/headrace?host=/proc/self/fd/{descriptor}"
    assert server_of(url, port=5432, socket="s") == f"{tmp_path}/s"
    os.close(descriptor)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("valkey://a/0?sentinal=main", "'sentinal'; known are db, password, username, sentinel"),
        ("valkey://a?sentinel=main&sentinel_user=me", "'sentinel_user'"),
        ("valkey://a?socket_timeout=3", "'socket_timeout'"),
        ("valkey://a,b?ssl_ca_certs=/ca.pem", "'ssl_ca_certs'"),
        ("valkey://a?db=abc", "database is a number"),
        ("valkey://a/main", "database is a number"),
        ("valkeys://a?ssl_cert_reqs=off", "none, optional or required"),
    ],
)
def test_a_parameter_that_no_client_would_follow_is_refused(url, expected):
    with pytest.raises(ValueError, match="a URL") as refused:
        parse_valkey_url(url)
    assert expected in str(refused.value)


def test_a_valkey_url_may_name_several_nodes():
    url = parse_valkey_url("valkeys://me:pw@a:1,[::1]:2,c/3?ssl_cert_reqs=none")
    assert seeds_of(url) == [
        "valkeys://me:pw@a:1/3?ssl_cert_reqs=none",
        "valkeys://me:pw@[::1]:2/3?ssl_cert_reqs=none",
        "valkeys://me:pw@c/3?ssl_cert_reqs=none",
    ]
    assert seeds_of("unix:///run/a,b") == ["unix:///run/a,b"]
    for nodes in ("a:1,", ",a:1", "a:1,,b", "a:x,b", "a b,c"):
        with pytest.raises(ValueError, match="nodes"):
            parse_valkey_url(f"valkey://{nodes}")

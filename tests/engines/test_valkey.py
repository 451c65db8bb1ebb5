"""Valkey: commands, errors in our words, function libraries."""

from __future__ import annotations

import asyncio
import itertools
import sys
from functools import partial

import pytest

from headrace.engines.functions import load_libraries
from headrace.engines.valkey import Valkey, ValkeyConfig, ValkeyDown

LIBRARY = """#!lua name=headrace_room_v1
server.register_function{function_name='headrace_room_v1_add', callback=function(keys, args)
  return redis.call('INCRBY', keys[1], args[1])
end}
"""


async def test_a_command_answers(valkey):
    key = f"{valkey.prefix}:{{a}}"
    await valkey.command("SET", key, b"\x00\xff")
    assert await valkey.command("GET", key) == b"\x00\xff"


async def test_an_absent_server_raises_with_the_remedy():
    valkey = Valkey("valkey://127.0.0.1:1", ValkeyConfig(timeout_s=0.5))
    with pytest.raises(ValkeyDown, match="headrace doctor"):
        await valkey.open()
    await valkey.close()


async def test_a_library_is_sent_once_and_again_when_it_differs(valkey, tmp_path, monkeypatch):
    folder = tmp_path / "luaroomfortests" / "lua"
    folder.mkdir(parents=True)
    (tmp_path / "luaroomfortests" / "__init__.py").write_text('"""A room."""\n')
    (folder / "room_v1.lua").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    packages = ("luaroomfortests", "headrace.kernel")
    assert await load_libraries(valkey, packages) == ["headrace_room_v1"]
    assert await load_libraries(valkey, packages) == []
    assert await valkey.call("headrace_room_v1_add", [f"{valkey.prefix}:{{n}}"], [5]) == 5
    (folder / "room_v1.lua").write_text(LIBRARY.replace("args[1]", "2 * args[1]"))
    assert await load_libraries(valkey, packages) == ["headrace_room_v1"]
    assert await valkey.call("headrace_room_v1_add", [f"{valkey.prefix}:{{n}}"], [5]) == 15
    await valkey.command("FUNCTION", "DELETE", "headrace_room_v1")
    sys.modules.pop("luaroomfortests", None)


class CancelAt:
    """Cancels a task at its `number`th await, at the start of the wait or with its result."""

    def __init__(self, work, number, *, with_answer):
        self._work, self._number, self._with_answer = work, number, with_answer
        self.is_reached = False

    def __await__(self):
        task, steps = asyncio.current_task(), self._work.__await__()
        go_on = partial(steps.send, None)
        for count in itertools.count(1):
            try:
                waited = go_on()
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
                go_on = partial(steps.send, None)
            except BaseException as error:  # noqa: BLE001 - also what a timeout of the client's throws
                go_on = partial(steps.throw, error)


async def _command(valkey):
    await valkey.command("PING")


async def _command_of_a_key(valkey):
    await valkey.command("GET", f"{valkey.prefix}:{{a}}", near=f"{valkey.prefix}:{{a}}")


async def _session(valkey):
    async with valkey.session(f"{valkey.prefix}:{{a}}") as session:
        await session.command("PING")
        await session.command("PING")


async def _opening(valkey):
    await valkey.open()


@pytest.mark.parametrize("with_answer", [False, True])
@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("work", [_command, _command_of_a_key, _session, _opening])
async def test_a_cancellation_is_kept_at_every_await(running_engines, work, is_warm, with_answer):
    """`wait_for` on Python 3.11 loses a cancellation that arrives together with a result."""
    for number in itertools.count(1):
        valkey = Valkey(running_engines.endpoints.valkey_url, ValkeyConfig())
        if is_warm:
            await work(valkey)
        step = CancelAt(work(valkey), number, with_answer=with_answer)

        async def run(step=step):
            await step
            return "ended as if nobody had cancelled it"

        task = asyncio.create_task(run())
        [ended] = await asyncio.gather(task, return_exceptions=True)
        if not step.is_reached:
            assert isinstance(ended, str)
            break
        assert isinstance(ended, asyncio.CancelledError), f"await {number}: {ended!r}"
        assert await valkey.command("PING"), "a connection that was cut off is not used again"
        await valkey.close()
    await valkey.close()
    assert number > 1

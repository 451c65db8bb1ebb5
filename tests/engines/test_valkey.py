"""Valkey: commands, errors in our words, function libraries."""

from __future__ import annotations

import sys

import pytest

from penstock.engines.functions import load_libraries
from penstock.engines.valkey import Valkey, ValkeyConfig, ValkeyDown

LIBRARY = """#!lua name=penstock_room_v1
server.register_function{function_name='penstock_room_v1_add', callback=function(keys, args)
  return redis.call('INCRBY', keys[1], args[1])
end}
"""


async def test_a_command_answers(valkey):
    key = f"{valkey.prefix}:{{a}}"
    await valkey.command("SET", key, b"\x00\xff")
    assert await valkey.command("GET", key) == b"\x00\xff"


async def test_a_server_that_is_not_there_is_told_with_the_way_to_mend_it():
    valkey = Valkey("valkey://127.0.0.1:1", ValkeyConfig(timeout_s=0.5))
    with pytest.raises(ValkeyDown, match="penstock doctor"):
        await valkey.open()
    await valkey.close()


async def test_a_library_is_sent_once_and_again_when_it_differs(valkey, tmp_path, monkeypatch):
    folder = tmp_path / "luaroomfortests" / "lua"
    folder.mkdir(parents=True)
    (tmp_path / "luaroomfortests" / "__init__.py").write_text('"""A room."""\n')
    (folder / "room_v1.lua").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    packages = ("luaroomfortests", "penstock.kernel")
    assert await load_libraries(valkey, packages) == ["penstock_room_v1"]
    assert await load_libraries(valkey, packages) == []
    assert await valkey.call("penstock_room_v1_add", [f"{valkey.prefix}:{{n}}"], [5]) == 5
    (folder / "room_v1.lua").write_text(LIBRARY.replace("args[1]", "2 * args[1]"))
    assert await load_libraries(valkey, packages) == ["penstock_room_v1"]
    assert await valkey.call("penstock_room_v1_add", [f"{valkey.prefix}:{{n}}"], [5]) == 15
    await valkey.command("FUNCTION", "DELETE", "penstock_room_v1")
    sys.modules.pop("luaroomfortests", None)

"""Every named query and every Lua function is used; every migration is numbered without a gap."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.engines.functions import find_libraries
from headrace.engines.migrate import find_migrations
from headrace.engines.sql import parse_queries

SRC = Path(__file__).parents[2] / "src" / "headrace"
FOLDERS = sorted({path.parent for path in SRC.glob("*/sql/*.sql")})
MIGRATED = tuple(
    sorted({f"headrace.{path.parts[-4]}" for path in SRC.glob("*/sql/migrations/*.sql")})
)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parent.name)
def test_every_query_is_used_by_its_own_room(folder):
    code = "\n".join(path.read_text() for path in folder.parent.rglob("*.py"))
    for file in folder.glob("*.sql"):
        for query in parse_queries(file.read_text()):
            assert re.search(rf"SQL\.{query.name}\b", code), (
                f"{query.name} is used nowhere: delete it"
            )


def test_migrations_are_numbered_without_a_gap():
    for package in MIGRATED:
        numbers = [m.number for m in find_migrations((package,))]
        assert numbers == list(range(1, len(numbers) + 1)), f"{package}: {numbers}"


def test_every_lua_function_is_called():
    for library in find_libraries(MIGRATED):
        code = "\n".join(path.read_text() for path in SRC.rglob("*.py"))
        for name in re.findall(r"register_function\W+(?:function_name\W+)?(\w+)", library.code):
            assert name in code, f"{library.name}: {name} is called nowhere"

"""`headrace tokens` as a person uses it, over a real PostgreSQL."""

from __future__ import annotations

import asyncio
import json

import pytest
from click.testing import CliRunner

from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.web.cli import tokens as command
from headrace.web.model import TokenNameTaken
from headrace.web.tokens import Tokens, is_token


class PlainTerminal:
    """Runs each verb in a loop of its own, as the command line does."""

    def __init__(self, url, *, is_json=False) -> None:
        self.url = url
        self.is_json = is_json

    def run(self, kind, verb):
        assert kind is Tokens

        async def in_loop():
            postgres = Postgres(self.url, PostgresConfig())
            try:
                return await verb(Tokens(postgres))
            finally:
                await postgres.close()

        return asyncio.run(in_loop())

    def show(self, value, text) -> None:
        print(json.dumps(value, default=str) if self.is_json else text)


@pytest.fixture
def invoke(database_url):
    """Run `tokens` with words; returns what it printed."""

    async def run(*words, is_json=False):
        terminal = PlainTerminal(database_url, is_json=is_json)
        result = await asyncio.to_thread(CliRunner().invoke, command, words, obj=terminal)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


async def test_a_token_is_made_listed_and_revoked(invoke):
    made = await invoke("create", "ci", "--scope", "jobs:write", "--expires", "90d")
    assert is_token(made.output.strip())
    with pytest.raises(TokenNameTaken):
        await invoke("create", "ci", "--scope", "jobs:write")
    listed = (await invoke("ls")).output
    assert "ci" in listed
    assert "until" in listed
    assert made.output.strip() not in listed
    assert "revoked" in (await invoke("revoke", "ci")).output
    rows = json.loads((await invoke("ls", is_json=True)).output)
    assert rows[0]["name"] == "ci"
    assert rows[0]["scopes"] == ["jobs:write"]
    assert rows[0]["revoked_at"]


async def test_wrong_arguments_are_reported(invoke):
    assert (await invoke("create", "ci")).exit_code == 2
    result = await invoke("create", "ci", "--scope", "jobs:write", "--expires", "soon")
    assert result.exit_code == 2
    assert "30s, 10m or 2h" in result.output

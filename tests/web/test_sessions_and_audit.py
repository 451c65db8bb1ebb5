"""The audit log, console sessions, and `headrace tokens` over a real PostgreSQL."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import msgspec
import pytest
from click.testing import CliRunner

from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.kernel.clock import VirtualClock
from headrace.kernel.errors import InvalidInput, Unavailable
from headrace.web.cli import audit
from headrace.web.cli import tokens as command
from headrace.web.model import TokenNameTaken, TokenRefused
from headrace.web.sessions import Audit, Sessions
from headrace.web.tokens import Tokens, is_token

KEPT_S = 3600.0


async def test_entries_have_a_start_and_an_outcome(postgres):
    kept = Audit(postgres, kept_s=KEPT_S)
    given = {"actor": "ann", "address": "10.0.0.1", "action": "jobs.pause_queue"}
    ids = [await kept.begin(**given, command=f"do {n}\0" + "x" * 9_000) for n in range(3)]
    await kept.end(ids[0], "done", "it is paused")
    await kept.end(ids[1], "refused", "no such queue")
    lines = await kept.lines()
    assert [line.outcome for line in lines] == ["begun", "refused", "done"]
    assert lines[2].detail == "it is paused"
    assert len(lines[2].command) == 4_000
    assert [line.id for line in await kept.lines(before=ids[1])] == [ids[0]]
    assert await kept.lines(before=-5) == []
    assert len(await kept.lines(before=10**30, lines_max=1)) == 1


async def test_entries_are_deleted_after_their_time_a_few_at_once(postgres):
    kept = Audit(postgres, kept_s=KEPT_S)
    given = {"actor": "ann", "address": "-", "action": "a.b", "command": "do"}
    ids = [await kept.begin(**given) for _ in range(30)]
    async with postgres.session() as session:
        await session.connection.execute(
            "UPDATE headrace.audit SET at = now() - interval '61 minutes' WHERE id <> $1", ids[-1]
        )
    newest = await kept.begin(**given)
    assert len(await kept.lines()) == 30 - 20 + 1
    last = await kept.begin(**given)
    assert [line.id for line in await kept.lines()] == [last, newest, ids[-1]]


async def test_the_command_shows_invisible_characters(postgres):
    kept = Audit(postgres, kept_s=KEPT_S)
    await kept.begin(actor="ann", address="-", action="a.b", command="do a\u202eb")
    lines, shown = await kept.lines(), []
    terminal = SimpleNamespace(
        run=lambda kind, verb: lines, show=lambda value, text: shown.append(text)
    )
    CliRunner().invoke(audit, obj=terminal, args=[], catch_exceptions=False)
    assert "do a\\u202eb" in shown[0]
    assert "\u202e" not in shown[0]
    CliRunner().invoke(audit, obj=terminal, args=["--max", "1"], catch_exceptions=False)
    assert str(shown[1]).endswith(f"more: --before {lines[-1].id}")


async def test_the_audit_is_readable_by_full_tokens_only(api, shared_postgres, token, root):
    await Audit(shared_postgres, kept_s=KEPT_S).begin(
        actor="ann", address="-", action="a.b", command="do"
    )
    refused = await api.get("/v1/audit", headers=token)
    assert (refused.status_code, refused.json()["code"]) == (403, "web.insufficient_scope")
    [line] = (await api.get("/v1/audit", headers=root)).json()
    assert (line["actor"], line["outcome"]) == ("ann", "begun")
    assert (await api.get(f"/v1/audit?before={line['id']}", headers=root)).json() == []


async def test_backups_by_another_tool_are_refused_with_their_reason(api, root):
    refused = await api.get("/v1/backups", headers=root)
    assert (refused.status_code, refused.json()["code"]) == (422, "backup.not_embedded")
    assert "pgBackRest" in refused.json()["detail"]


async def test_a_session_counts_as_use_of_its_token_once_a_minute(postgres):
    tokens = Tokens(postgres)

    async def used_at():
        [token] = await tokens.list()
        return token.last_used_at

    made = await tokens.create("ann", ("jobs:read",))
    assert await used_at() is None
    cookie = await Sessions(postgres).begin(made.text, lasts_s=60)
    login_at = await used_at()
    assert login_at is not None
    await tokens.find_caller(made.text)
    await Sessions(postgres).find(cookie)
    assert await used_at() == login_at
    async with postgres.session() as session:
        await session.connection.execute(
            "UPDATE headrace.token SET last_used_at = now() - interval '61 seconds'"
        )
    await Sessions(postgres).find(cookie)
    assert await used_at() > login_at


async def test_a_session_ends_with_its_token_its_time_or_a_logout(postgres):
    tokens, sessions = Tokens(postgres), Sessions(postgres)
    made = await tokens.create("ann", ("jobs:read",), expires_s=3600)
    gone, ended, cookie = [
        await sessions.begin(made.text, lasts_s=lasts_s) for lasts_s in (0, 60, 60)
    ]
    assert cookie not in made.text
    found = await Sessions(postgres).find(cookie)
    assert (found.name, found.scopes) == ("ann", {"jobs:read"})
    await sessions.end(ended)
    for invalid in ("x" * 43, gone, ended):
        assert await Sessions(postgres).find(invalid) is None
    await tokens.revoke("ann")
    assert await Sessions(postgres).find(cookie) is None
    with pytest.raises(TokenRefused):
        await sessions.begin(made.text, lasts_s=60)


async def test_open_sessions_stay_valid_while_postgres_is_down(database_url):
    postgres, clock = Postgres(database_url, PostgresConfig()), VirtualClock()
    made = await Tokens(postgres).create("ann", ("*",))
    sessions = Sessions(postgres, clock)
    cookie = await sessions.begin(made.text, lasts_s=7200)
    assert (await sessions.find(cookie)).name == "ann"
    await postgres.close()
    away = Postgres("postgresql://nobody@/none?host=/nowhere", PostgresConfig())
    sessions._postgres = away
    clock.advance(600)
    assert (await sessions.find(cookie)).name == "ann"
    with pytest.raises(Unavailable):
        await sessions.find("x" * 43)
    clock.advance(3600)
    with pytest.raises(Unavailable):
        await sessions.find(cookie)
    await away.close()


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
        print(msgspec.json.encode(value, enc_hook=str).decode() if self.is_json else text)


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
    rows = json.loads((await invoke("ls", is_json=True)).output)["items"]
    assert rows[0]["name"] == "ci"
    assert rows[0]["scopes"] == ["jobs:write"]
    assert rows[0]["revoked_at"]


async def test_wrong_arguments_are_reported(invoke):
    assert (await invoke("create", "ci")).exit_code == 2
    with pytest.raises(InvalidInput, match="--expires: expected a duration such as 30s, 10m or 2h"):
        await invoke("create", "ci", "--scope", "jobs:write", "--expires", "soon")

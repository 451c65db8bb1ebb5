"""The audit log and console sessions: lines before and after an action, ends of sessions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.kernel.clock import VirtualClock
from headrace.kernel.errors import Unavailable
from headrace.web.cli import audit
from headrace.web.model import TokenRefused
from headrace.web.sessions import Audit, Sessions
from headrace.web.tokens import Tokens

KEPT_S = 3600.0


async def test_lines_tell_what_was_begun_and_what_became_of_it(postgres):
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


async def test_lines_are_kept_so_long_and_go_a_few_at_a_time(postgres):
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


async def test_the_audit_is_for_those_who_may_everything(api, postgres, token):
    await Audit(postgres, kept_s=KEPT_S).begin(actor="ann", address="-", action="a.b", command="do")
    refused = await api.get("/v1/audit", headers=token)
    assert (refused.status_code, refused.json()["code"]) == (403, "web.insufficient_scope")
    root = await Tokens(postgres).create("root", ("*",))
    headers = {"authorization": f"Bearer {root.text}"}
    [line] = (await api.get("/v1/audit", headers=headers)).json()
    assert (line["actor"], line["outcome"]) == ("ann", "begun")
    assert (await api.get(f"/v1/audit?before={line['id']}", headers=headers)).json() == []


async def test_a_session_is_a_use_of_its_token_and_is_noted_once_a_minute(postgres):
    tokens = Tokens(postgres)

    async def used_at():
        [token] = await tokens.list()
        return token.last_used_at

    made = await tokens.create("ann", ("jobs:read",))
    cookie = await Sessions(postgres).begin(made.text, lasts_s=60)
    login_at = await used_at()
    assert login_at is not None
    await Sessions(postgres).find(cookie)
    assert await used_at() == login_at
    async with postgres.session() as session:
        await session.connection.execute(
            "UPDATE headrace.token SET last_used_at = now() - interval '61 seconds'"
        )
    await Sessions(postgres).find(cookie)
    assert await used_at() > login_at


async def test_a_session_is_of_a_valid_token_and_ends_with_it(postgres):
    tokens, sessions = Tokens(postgres), Sessions(postgres)
    made = await tokens.create("ann", ("jobs:read",))
    cookie = await sessions.begin(made.text, lasts_s=60)
    assert cookie not in made.text
    found = await Sessions(postgres).find(cookie)
    assert (found.name, found.scopes) == ("ann", {"jobs:read"})
    assert await sessions.find("x" * 43) is None
    await tokens.revoke("ann")
    assert await Sessions(postgres).find(cookie) is None
    with pytest.raises(TokenRefused):
        await sessions.begin(made.text, lasts_s=60)


async def test_a_session_lasts_no_longer_than_it_was_given_or_its_token(postgres):
    made = await Tokens(postgres).create("ann", ("*",), expires_s=3600)
    sessions = Sessions(postgres)
    gone = await sessions.begin(made.text, lasts_s=0)
    assert await sessions.find(gone) is None
    ended = await sessions.begin(made.text, lasts_s=60)
    await sessions.end(ended)
    assert await Sessions(postgres).find(ended) is None


async def test_who_was_in_stays_in_while_postgres_is_away(database_url):
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

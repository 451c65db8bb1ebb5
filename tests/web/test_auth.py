"""Tokens and scopes: one response to any invalid token; a revoked one stops within 5 s."""

from __future__ import annotations

import time

import pytest
from tests.kit.chaos import BLACK_HOLE, PASS, RESET, ChaosProxy
from tests.kit.waiting import wait_true

from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.postgres_errors import PostgresDown
from headrace.kernel.clock import VirtualClock
from headrace.web.auth import ANSWER_S, CACHED_S, KEPT_WHILE_AWAY_S, Callers
from headrace.web.model import ScopeUnknown, TokenNameTaken, TokenRefused, TokenUnknown
from headrace.web.tokens import (
    Tokens,
    dead_token,
    ensure_root_token,
    is_token,
    make_token,
    remedy_for,
    root_name,
)


async def all_rows(postgres, text):
    async with postgres.session() as session:
        return await session.connection.fetch(text)


def test_tokens_have_a_checksum():
    token = make_token()
    assert len(token) == 53
    assert is_token(token)
    assert token != make_token()
    assert not is_token(token[:-1])
    assert not is_token(token[:20] + ("a" if token[20] != "a" else "b") + token[21:])


async def test_only_the_hash_of_a_token_is_stored(postgres):
    made = await Tokens(postgres).create("ci", ("jobs:write",), expires_s=3600)
    rows = await all_rows(postgres, "SELECT token::text FROM headrace.token")
    assert made.text not in rows[0][0]
    assert made.token.expires_at > made.token.created_at
    assert made.text not in repr(made)


async def test_names_are_unique_until_revoked(postgres):
    tokens = Tokens(postgres)
    await tokens.create("ci", ("jobs:write",))
    with pytest.raises(TokenNameTaken, match="revoke ci"):
        await tokens.create("ci", ("jobs:write",))
    await tokens.revoke("ci")
    await tokens.create("ci", ("jobs:read",))
    assert [token.revoked_at is None for token in await tokens.list()] == [True, False]
    with pytest.raises(TokenUnknown):
        await tokens.revoke("nobody")
    with pytest.raises(ScopeUnknown, match="jobs:write"):
        await tokens.create("other", ("jobs:all",))
    with pytest.raises(ScopeUnknown):
        await tokens.create("other", ())


async def test_a_missing_scope_is_named(api, new_token):
    headers = {"authorization": f"bearer {await new_token('jobs:read')}"}
    assert (await api.get("/v1/things/7", headers=headers)).json() == {"id": 7, "limit": 10}
    answer = await api.post("/v1/things", headers=headers, json={"things": []})
    assert answer.status_code == 403
    assert answer.json()["code"] == "web.insufficient_scope"
    assert "jobs:write" in answer.json()["detail"]


async def test_every_invalid_token_gets_the_same_response(api, shared_postgres):
    tokens = Tokens(shared_postgres)
    revoked = (await tokens.create("revoked", ("jobs:read",))).text
    expired = (await tokens.create("expired", ("jobs:read",), expires_s=60)).text
    await tokens.revoke("revoked")
    await all_rows(
        shared_postgres, "UPDATE headrace.token SET expires_at = now() WHERE name = 'expired'"
    )
    wrong = [f"Bearer {t}" for t in (revoked, expired, make_token(), "hrt_short", "a b", "\xe9")]
    bodies = set()
    for header in (None, "Basic YTpi", "Bearer", *wrong):
        headers = {} if header is None else {"authorization": header.encode("latin-1")}
        answer = await api.get("/v1/things/7", headers=headers)
        assert answer.status_code == 401, header
        assert answer.headers["www-authenticate"] == "Bearer"
        body = answer.json()
        body.pop("request_id")
        bodies.add(str(body))
    assert len(bodies) == 1


async def test_a_revoked_token_stops_within_five_seconds(postgres):
    tokens, clock = Tokens(postgres), VirtualClock()
    callers = Callers(tokens, clock)
    header = f"Bearer {(await tokens.create('ci', ('jobs:read',))).text}"
    assert callers.known_caller(header) is None
    assert (await callers.require_caller(header)).name == "ci"
    await tokens.revoke("ci")
    clock.advance(CACHED_S - 0.1)
    assert callers.known_caller(header) == await callers.require_caller(header)
    assert [callers.known_caller(one) for one in (None, "", header[:-1], f"{header} ")] == [
        None
    ] * 4
    clock.advance(0.1)
    assert callers.known_caller(header) is None
    with pytest.raises(TokenRefused):
        await callers.require_caller(header)
    assert callers.known_caller(header) is None


async def test_a_database_that_is_down_is_no_wrong_token(make_app, serve, token):
    down = Postgres("postgresql://headrace@127.0.0.1:9/headrace", PostgresConfig())
    async with serve(make_app(), postgres=down) as client:
        answer = await client.get("/v1/things/7", headers=token)
    assert answer.status_code == 503
    assert answer.json()["code"] == "postgres.unavailable"
    assert "127.0.0.1" not in answer.text  # where the database is, is no caller's business
    assert answer.json()["retryable"] is True
    assert int(answer.headers["retry-after"]) >= 1


async def test_the_root_token_is_created_once_and_repaired(postgres, tmp_path):
    tokens = Tokens(postgres)
    root = await ensure_root_token(tmp_path, tokens)
    first = root.file.read_text()
    assert root.state == "valid"
    assert root.file.stat().st_mode & 0o777 == 0o600
    assert (await ensure_root_token(tmp_path, tokens)).file.read_text() == first
    assert (await tokens.find_caller(first.strip())).may("media:write")
    assert [entry.name for entry in tmp_path.iterdir()] == ["token"]
    # the database was emptied: the token of the file works again
    await all_rows(postgres, "DELETE FROM headrace.token")
    assert await tokens.state_of(first.strip()) == "unknown"
    await ensure_root_token(tmp_path, tokens)
    assert await tokens.find_caller(first.strip())
    # revoked on purpose: stays revoked, and the state shows it
    await tokens.revoke(root_name(first.strip()))
    root = await ensure_root_token(tmp_path, tokens)
    assert root.state == "revoked"
    assert await tokens.find_caller(first.strip()) is None
    assert dead_token(root) == f"{root.file} holds a token that is revoked"
    # the file was deleted: a new token is made
    root.file.unlink()
    root = await ensure_root_token(tmp_path, tokens)
    assert root.state == "valid"
    second = root.file.read_text().strip()
    assert await tokens.find_caller(second)
    await all_rows(postgres, "UPDATE headrace.token SET expires_at = now() - interval '1 s'")
    assert await tokens.state_of(second) == "expired"
    # the file has no token: it is reported and not stored
    root.file.write_text("changeme")
    root = await ensure_root_token(tmp_path, tokens)
    assert root.state == "no token"
    assert "holds no token" in dead_token(root)
    assert "tokens create" in remedy_for(root)
    assert len(await tokens.list()) == 2


async def test_two_data_folders_on_one_database_keep_a_root_token_each(postgres, tmp_path):
    tokens = Tokens(postgres)
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    # The third start is the first folder's again: nothing of the second's start may have hurt it.
    for folder in (*folders, folders[0], folders[1]):
        root = await ensure_root_token(folder, tokens)
        assert root.state == "valid"
        assert await tokens.find_caller(root.file.read_text().strip())
    names = [token.name for token in await tokens.list()]
    assert sorted(names) == sorted({root_name((f / "token").read_text().strip()) for f in folders})
    assert all(name.startswith("root-") for name in names)


async def test_while_postgres_is_down_cached_callers_stay_valid(postgres, database_url):
    known, other = [
        f"Bearer {(await Tokens(postgres).create(name, ('jobs:read',))).text}" for name in "ab"
    ]
    with ChaosProxy(database_url) as proxy:
        through = Postgres(proxy.url, PostgresConfig(connect_timeout_s=0.5))
        callers = Callers(Tokens(through), clock := VirtualClock())
        assert (await callers.require_caller(known)).name == "a"
        proxy.set(RESET)
        for hours in (0.01, 1, 20):
            clock.advance(hours * 3600)
            assert (await callers.require_caller(known)).name == "a"
        with pytest.raises(PostgresDown):
            await callers.require_caller(other)
        clock.advance(KEPT_WHILE_AWAY_S)
        with pytest.raises(PostgresDown):
            await callers.require_caller(known)
        proxy.set(PASS)
        assert (await callers.require_caller(known)).name == "a"
        proxy.set(RESET)
        clock.advance(CACHED_S)
        assert (await callers.require_caller(known)).name == "a"
        await Tokens(postgres).revoke("a")
        proxy.set(PASS)

        async def is_refused():
            clock.advance(CACHED_S)
            try:
                await callers.require_caller(known)
            except TokenRefused:
                return True
            return False

        await wait_true(is_refused, what="the revoked one is refused again")
        await through.close()


async def test_a_silent_postgres_delays_cached_callers_once(postgres, database_url):
    header = f"Bearer {(await Tokens(postgres).create('a', ('jobs:read',))).text}"
    with ChaosProxy(database_url) as proxy:
        through = Postgres(proxy.url, PostgresConfig(connect_timeout_s=0.5))
        callers = Callers(Tokens(through), clock := VirtualClock())
        await callers.require_caller(header)
        proxy.set(BLACK_HOLE)
        clock.advance(CACHED_S)
        began_s = time.monotonic()
        for _ in range(50):
            assert (await callers.require_caller(header)).name == "a"
        assert time.monotonic() - began_s < 25 * ANSWER_S
        proxy.set(RESET)
        await through.close()

"""A server that does not respond, became read-only, or waits for its standby.

`tests/hosts` has whole failovers; these are the parts that need one server.
"""

from __future__ import annotations

import asyncio
import re
import socket

import pytest
from tests.kit.own_postgres import OwnPostgres, run_statements
from tests.kit.waiting import wait_true

from headrace.engines.commit_wait import commit_wait_of, find_commit_wait
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.postgres_errors import PostgresDown
from headrace.engines.sql import compile_query

MAKE = "CREATE TABLE mark (word text)"
ADD = compile_query("test", "-- One row.\nINSERT INTO mark VALUES (:word)")
PORT = compile_query("test", "-- Who answers.\nSELECT current_setting('port')::integer")
WORDS = compile_query(
    "test", "-- What others read.\nSELECT coalesce(array_agg(word), '{}') FROM mark"
)
CONFIG = PostgresConfig(connect_timeout_s=5.0, statement_timeout_s=1.0)


@pytest.fixture
async def server(servers_folder):
    server = OwnPostgres(servers_folder / "p", "18")
    await server.make()
    await server.start()
    yield server
    server.end()


@pytest.mark.slow
async def test_servers_of_a_url_that_do_not_respond_are_passed_over(server):
    """The kernel accepts for them, as a host does whose processes hang."""
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("", 0)) as closed:
        ports = [silent.getsockname()[1], closed.getsockname()[1], server.port]
        closed.close()
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        postgres = Postgres(f"postgresql://headrace@{hosts}/postgres", CONFIG)
        assert await postgres.value(PORT) == server.port
        # The one that answered is first now: no other connection waits for the silent one.
        silent.setblocking(False)
        silent.accept()
        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(postgres.value(PORT))
        with pytest.raises(BlockingIOError):
            silent.accept()
        await postgres.close()


@pytest.mark.slow
async def test_only_the_writable_server_of_several_is_used(servers_folder, server):
    await run_statements(server.url, MAKE)
    standby = OwnPostgres(servers_folder / "s", "18")
    await standby.copy(server, name="standby")
    await standby.start()
    hosts = f"127.0.0.1:{standby.port},127.0.0.1:{server.port}"
    postgres = Postgres(f"postgresql://headrace@{hosts}/postgres", CONFIG)
    assert await postgres.value(PORT) == server.port
    reads = Postgres(
        f"postgresql://headrace@127.0.0.1:{server.port},{hosts}/postgres", CONFIG, role="standby"
    )
    assert await reads.value(PORT) == standby.port
    await reads.close()
    server.kill()
    text = (
        "1 of 2 servers answers, as a standby; 1 does not respond in time. This host may be cut off"
    )
    with pytest.raises(PostgresDown) as caught:
        await Postgres(f"postgresql://headrace@{hosts}/postgres", CONFIG).open()
    assert text in caught.value.text
    assert "headrace doctor" not in caught.value.text
    with pytest.raises(PostgresDown):
        await postgres.run(ADD, word="no primary")
    standby.run("pg_ctl", "promote", "-D", standby.data)

    async def is_written() -> bool:
        try:
            return await postgres.run(ADD, word="new") == 1
        except PostgresDown:
            return False

    await wait_true(is_written, what="the promoted server is written")
    await postgres.close()
    standby.end()


@pytest.mark.slow
async def test_checks_with_a_short_limit_find_the_primary_behind_a_silent_server(server):
    """The lost primary is first: each check would wait for it alone, and end before the others."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hosts = f"127.0.0.1:{silent.getsockname()[1]},127.0.0.1:{server.port}"
        postgres = Postgres(f"postgresql://headrace@{hosts}/postgres", CONFIG)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(postgres.connect_unpooled(), 1.5)
        connection = await asyncio.wait_for(postgres.connect_unpooled(), 1.5)
        assert await connection.fetchval("SELECT 1") == 1
        await connection.close()


@pytest.mark.slow
async def test_standbys_beside_a_silent_server_are_named_by_checks_with_a_short_limit(
    servers_folder, server
):
    standbys = [OwnPostgres(servers_folder / name, "18") for name in ("s", "t")]
    for standby in standbys:
        await standby.copy(server, name=standby.folder.name)
        await standby.start()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ports = [silent.getsockname()[1], *(standby.port for standby in standbys)]
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        postgres = Postgres(f"postgresql://headrace@{hosts}/postgres", CONFIG)
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(postgres.connect_unpooled(), 1.5)
        text = "2 of 3 servers answer, as standbys; 1 does not respond in time (failover)"
        assert str(postgres.direct_servers.no_primary) == text
    for standby in standbys:
        standby.end()


@pytest.mark.slow
async def test_a_host_that_reaches_only_its_own_standby_reports_no_failover(servers_folder, server):
    """Its network is cut, so the two others are silent; the failover is not known here."""
    standby = OwnPostgres(servers_folder / "s", "18")
    await standby.copy(server, name="standby")
    await standby.start()
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        ports = [standby.port, one.getsockname()[1], other.getsockname()[1]]
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        postgres = Postgres(f"postgresql://headrace@{hosts}/postgres", CONFIG)
        # The first check reaches one of the silent servers, so the state of the other is unknown.
        states = []
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(postgres.connect_unpooled(), 1.0)
            states.append(postgres.direct_servers.no_primary)
        assert [str(one) for one in states] == [
            "None",
            "1 of 3 servers answers, as a standby; 2 do not respond in time",
        ]
        with pytest.raises(PostgresDown, match=r"1 of 3 .* This host may be cut off") as caught:
            await postgres.open()
        assert "failover" not in caught.value.text
        await postgres.close()
    standby.end()


@pytest.mark.slow
async def test_one_address_that_answers_as_a_standby_is_no_failover(servers_folder, server):
    """A balancer may have any number of servers behind its address."""
    standby = OwnPostgres(servers_folder / "s", "18")
    await standby.copy(server, name="standby")
    await standby.start()
    url = f"postgresql://headrace@127.0.0.1:{standby.port}/postgres"
    postgres = Postgres(f"{url}?target_session_attrs=read-write", CONFIG)
    with pytest.raises(PostgresDown, match="this address answers as a standby") as caught:
        await postgres.open()
    assert "failover" not in caught.value.text
    await postgres.close()
    standby.end()


@pytest.mark.slow
async def test_a_server_that_is_full_is_named_and_not_one_that_is_away(server):
    await run_statements(server.url, "CREATE ROLE few LOGIN CONNECTION LIMIT 0")
    with socket.create_server(("", 0)) as away:
        port = away.getsockname()[1]
    hosts = f"127.0.0.1:{server.port},127.0.0.1:{port}"
    with pytest.raises(PostgresDown, match="refuses more connections") as caught:
        await Postgres(f"postgresql://few@{hosts}/postgres", CONFIG).open()
    assert "raise max_connections" in caught.value.text


@pytest.mark.slow
async def test_a_connection_to_a_server_that_became_read_only_is_replaced(server):
    await run_statements(server.url, MAKE)
    postgres = Postgres(server.url, CONFIG)
    word = "ALTER DATABASE postgres SET default_transaction_read_only = "
    await run_statements(server.url, f"{word} on")
    with pytest.raises(PostgresDown, match="read-only"):
        await postgres.run(ADD, word="refused")
    with pytest.raises(PostgresDown, match="read-only"):
        async with postgres.transaction() as tx:
            await tx.run(ADD, word="refused")
    await run_statements(server.url, "SET default_transaction_read_only = off", f"{word} off")
    await postgres.run(ADD, word="written")
    assert await postgres.value(WORDS) == ["written"]
    await postgres.close()


@pytest.mark.slow
async def test_a_commit_that_waits_for_its_standby_is_not_made_visible_by_a_timeout(server):
    """Others would read it, and a failover would lose it: PostgreSQL commits what is cancelled."""
    await run_statements(server.url, MAKE)
    postgres, other = Postgres(server.url, CONFIG), Postgres(server.url, CONFIG)
    await other.value(WORDS)
    await run_statements(
        server.url,
        "ALTER SYSTEM SET synchronous_standby_names = 'absent'",
        "SELECT pg_reload_conf()",
        "SELECT pg_sleep(0.2)",
    )
    with pytest.raises(PostgresDown):
        await postgres.run(ADD, word="timed out")
    left = asyncio.create_task(postgres.run(ADD, word="left by its caller"))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(left, 0.5)
    await postgres.close()
    assert await other.value(WORDS) == []
    await run_statements(
        server.url,
        "ALTER SYSTEM RESET synchronous_standby_names",
        "SELECT pg_reload_conf()",
    )

    async def are_both_visible() -> bool:
        return sorted(await other.value(WORDS)) == ["left by its caller", "timed out"]

    await wait_true(are_both_visible, what="both commits ended")
    await other.close()


RELOAD = "SELECT pg_reload_conf()"


@pytest.mark.slow
async def test_commits_that_wait_for_an_absent_standby_are_found(server):
    await run_statements(server.url, "CREATE ROLE plain LOGIN")
    plain_url = server.url.replace("headrace@", "plain@")
    urls = {"headrace": server.url, "plain": plain_url}
    pools = {name: Postgres(url, CONFIG) for name, url in urls.items()}

    async def are_waiting(pattern: str) -> bool:
        found = [await find_commit_wait(pool) for pool in pools.values()]
        if not pattern:
            return found == [None, None]
        return all(one is not None and re.search(pattern, one.text) for one in found)

    for names, pattern in (("absent", "'absent', and none is connected"), ("", "")):
        change = f"ALTER SYSTEM SET synchronous_standby_names = '{names}'"
        await run_statements(server.url, change, RELOAD)
        await wait_true(lambda seen=pattern: are_waiting(seen), what=f"the wait for {names!r}")
    for pool in pools.values():
        await pool.close()


STANDBYS = {
    "names": "ANY 2 (b, c)",
    "synchronous_commit": "on",
    "sees_states": True,
    "senders": 2,
    "synchronous": 2,
    "waited_s": 0.0,
    "role": "site",
}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, ""),
        ({"synchronous": 1}, "and 1 of 2 are connected"),
        ({"synchronous": 0, "synchronous_commit": "local"}, ""),
        ({"synchronous": 0, "names": "*"}, "'*', and none is connected"),
        ({"synchronous": 0, "sees_states": False, "waited_s": 1.0}, ""),
        ({"sees_states": False, "waited_s": 7.0}, "and a commit of site has waited 7 s"),
        ({"sees_states": False, "senders": 0}, "none is connected"),
    ],
)
def test_a_wait_for_standbys_is_named_with_what_the_role_may_read(changes, text):
    found = commit_wait_of({**STANDBYS, **changes})
    assert (found is None) == (not text)
    assert found is None or text in found.text


SLOW = compile_query("test", "-- Longer than its caller waits.\nSELECT pg_sleep(60)")
RUNNING = compile_query(
    "test",
    "-- Abandoned statements.\n"
    "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%pg_sleep(60)%' AND state = 'active'"
    " AND pid <> pg_backend_pid()",
)


@pytest.mark.slow
async def test_a_statement_that_its_caller_left_ends_on_the_server(server):
    postgres = Postgres(server.url, PostgresConfig(statement_timeout_s=120))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(postgres.value(SLOW), 0.3)

    async def is_ended() -> bool:
        return await postgres.value(RUNNING) == 0

    await wait_true(is_ended, what="the server ended the statement", deadline_s=30)
    await postgres.close()

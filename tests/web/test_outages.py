"""Outages of engines: what hosts record, and the marks that they become."""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import permutations

import pytest
from recording_host import Host, known

from headrace.engines.postgres_errors import PostgresDown, PostgresFull, PostgresRefused
from headrace.engines.postgres_servers import NoPrimary
from headrace.engines.sql import Query
from headrace.web import outages
from headrace.web.history import History
from headrace.web.joined_outages import EngineOutage, join_outages

CUT = "host c did not reach PostgreSQL and Valkey for about"
NOON = datetime(2026, 11, 29, 12, tzinfo=UTC)
COUNT = Query("count", "", "SELECT count(*) FROM headrace.engine_outage", ())


@pytest.fixture
def reader(postgres):
    return History(postgres)


async def outages_of(reader):
    """The outages among the marks: text, host, and begin and length in seconds since the first."""
    found = [mark for mark in await reader.marks() if mark.kind == "outage"]
    first_at = min((mark.at for mark in found), default=None)
    return [
        (
            mark.text,
            mark.host,
            round((mark.at - first_at).total_seconds()),
            round((mark.until_at - mark.at).total_seconds()),
        )
        for mark in found
    ]


async def pass_all(hosts, seconds):
    """Let the same time pass on all hosts."""
    for host in hosts:
        await host.pass_s(seconds)


@pytest.fixture
async def three(tmp_path, postgres):
    """Three hosts that run for two minutes."""
    hosts = [Host(tmp_path, postgres, name, ago_s=1200.0) for name in ("a", "b", "c")]
    for host in hosts:
        await host.recorder.step()
        await host.pass_s(120)
    return hosts


async def test_minutes_wait_while_postgres_is_down_and_its_outage_is_marked_afterwards(
    tmp_path, postgres, reader
):
    host = Host(tmp_path, postgres)
    host.write("api-1", "feed_posts_total 0")
    await host.recorder.step()
    host.write("api-1", "feed_posts_total 5")
    host.is_cut = True
    began_at = host.clock.now()
    await host.pass_s(60)
    assert await reader.marks() == []
    host.is_cut = False
    await host.pass_s(60)
    posts = await reader.read(["feed_posts"])
    assert known(posts.series[0].lines[0].values) == [5, 0]
    assert await outages_of(reader) == [
        ("PostgreSQL did not answer one for about 60 s: no answer in time", "one", 0, 60)
    ]
    [outage] = await reader.marks(kind="outage")
    assert (outage.engines, outage.hosts) == (["postgres"], ["one"])
    assert (outage.cause, outage.is_open) == ("no answer in time", False)
    assert await reader.marks(kind="start") == []
    assert abs((outage.at - began_at).total_seconds() - 2) < 0.1, "its first failed check"
    down = await reader.read(["engines_down"])
    assert sum(known(down.series[0].lines[0].values)) == pytest.approx(60, abs=1)


async def test_two_outages_apart_are_two_marks_and_that_of_one_host_is_its_own(three, reader):
    c = three[2]
    c.cut()
    await pass_all(three, 90)
    # Host c is back, and the machine with Valkey dies.
    c.restore()
    await pass_all(three, 4)
    for host in three:
        host.valkey.is_down = True
    await pass_all(three, 40)
    for host in three:
        host.valkey.is_down = False
    await pass_all(three, 120)
    assert await outages_of(reader) == [
        (f"{CUT} 90 s: no answer in time", "c", 0, 90),
        ("Valkey did not answer a, b, c for about 40 s: connection refused", "", 94, 40),
    ]


async def test_an_engine_that_fails_while_a_host_is_cut_off_has_its_own_mark(three, reader):
    c = three[2]
    c.cut()
    await pass_all(three, 40)
    for host in three:
        host.valkey.is_down = True
    await pass_all(three, 20)
    c.restore()
    await pass_all(three, 30)
    for host in three:
        host.valkey.is_down = False
    await pass_all(three, 120)
    assert await outages_of(reader) == [
        (f"{CUT} 60 s: no answer in time", "c", 0, 60),
        ("Valkey did not answer a, b, c for about 50 s: connection refused", "", 40, 50),
    ]


async def test_a_lost_primary_is_the_outage_of_all_and_its_host_reads_as_cut_off(three, reader):
    a, b, c = three
    c.cut()
    for host in (a, b):
        host.is_cut = True
    await pass_all(three, 10)
    standbys = NoPrimary(2, 3)
    for host in (a, b):
        host.servers.no_primary = standbys
    await pass_all(three, 16)
    for host in (a, b):
        host.is_cut, host.servers.no_primary, host.synchronous = False, None, "other"
    await pass_all(three, 4)
    for host in (a, b):
        host.synchronous = ""
    await pass_all(three, 60)
    c.restore()
    await pass_all(three, 120)
    causes = (
        "no answer in time, then 2 of 3 servers answer, as standbys;"
        " 1 does not respond in time (failover),"
        " then commits waited for a synchronous standby"
    )
    assert await outages_of(reader) == [
        (f"{CUT} 90 s: no answer in time", "c", 0, 90),
        (f"PostgreSQL did not answer a, b for about 30 s: {causes}", "", 0, 30),
    ]


async def test_a_host_that_was_lost_with_its_engine_is_no_witness(tmp_path, postgres, reader):
    a, b = (Host(tmp_path, postgres, name, ago_s=1200.0) for name in ("a", "b"))
    for host in (a, b):
        await host.recorder.step()
        await host.pass_s(140)
    # Host a had PostgreSQL, and dies with it: its recorder writes nothing.
    b.is_cut = True
    a.clock.advance(60)
    await b.pass_s(60)
    b.is_cut = False
    a.recorder = a.new_recorder("a")
    await a.recorder.step()
    await pass_all((a, b), 120)
    [(text, *_)] = await outages_of(reader)
    assert text.startswith("PostgreSQL did not answer b for about 60 s")


async def test_an_outage_names_that_writes_were_refused(three, reader):
    for host in three:
        host.is_read_only = True
    await pass_all(three, 20)
    for host in three:
        host.is_read_only = False
    await pass_all(three, 60)
    assert [text for text, *_ in await outages_of(reader)] == [
        "PostgreSQL took no writes of a, b, c for about 20 s: read-only"
    ]


async def test_a_full_disk_is_an_outage_until_a_write_succeeds(tmp_path, postgres, reader):
    host = Host(tmp_path, postgres)
    await host.recorder.step()

    @asynccontextmanager
    async def full():
        raise PostgresFull("PostgreSQL lacks disk space or memory")
        yield

    host.transaction = full
    with suppress(PostgresFull):
        await host.pass_s(60)
    for _ in range(3):
        with suppress(PostgresFull):
            await host.pass_s(20)
    del host.transaction
    await host.pass_s(60)
    [(text, _, _, lasted_s)] = await outages_of(reader)
    assert text.startswith("PostgreSQL took no writes of one for about ")
    assert text.endswith(": disk space or memory is short")
    assert 20 <= lasted_s <= 80


async def test_an_outage_of_one_check_is_marked_if_the_connection_was_refused(three, reader):
    for host in three:
        host.valkey.is_down = True
    await pass_all(three, 2)
    for host in three:
        host.valkey.is_down = False
    await pass_all(three, 80)
    assert await outages_of(reader) == [
        ("Valkey did not answer a, b, c for about 2 s: connection refused", "", 0, 2)
    ]
    down = await reader.read(["engines_down"])
    assert sum(known(down.series[0].lines[0].values)) == pytest.approx(6, abs=0.5)


async def test_a_server_that_was_started_again_between_two_checks_is_an_outage(
    tmp_path, postgres, reader
):
    host = Host(tmp_path, postgres)
    await host.pass_s(20)
    host.valkey.run += 1
    await host.pass_s(40)
    host.started_s += 500.0
    await host.pass_s(80)
    again = "its server was started again or replaced"
    assert await outages_of(reader) == [
        (f"Valkey did not answer one for about 2 s: {again}", "one", 0, 2),
        (f"PostgreSQL did not answer one for about 2 s: {again}", "one", 40, 2),
    ]


async def test_a_failed_check_before_the_first_answer_is_no_outage(tmp_path, postgres, reader):
    """The roles of a host start together with its engines."""
    host = Host(tmp_path, postgres)
    host.valkey.is_down = True
    await host.recorder.check_engines()
    host.valkey.is_down = False
    await host.pass_s(80)
    assert await outages_of(reader) == []


async def test_checks_at_once_are_one_and_do_not_confirm_each_other(tmp_path, postgres):
    """At a start the loop of checks and the loop of readings begin together."""
    host = Host(tmp_path, postgres)
    host.is_cut = True
    watch = host.recorder.watch
    await asyncio.gather(host.recorder.check_engines(), host.recorder.step())
    assert (watch.takes_writes, watch.cause_of("postgres")) == (False, "")
    await host.recorder.check_engines()
    assert watch.cause_of("postgres") == "no answer in time"


async def test_the_first_check_of_an_engine_waits_longer_than_the_next(
    tmp_path, postgres, monkeypatch
):
    monkeypatch.setattr(outages, "CHECK_S", 0.05)
    host = Host(tmp_path, postgres)
    watch = host.recorder.watch

    async def answer_late():
        late = asyncio.Event()
        asyncio.get_running_loop().call_later(0.2, late.set)
        await late.wait()

    monkeypatch.setattr(host, "one", partial(_late, answer_late, host.one))
    monkeypatch.setattr(host.valkey, "open", answer_late)
    await watch.check()
    assert watch.takes_writes
    assert watch.offset_s is not None
    await watch.check()
    assert not watch.takes_writes


async def _late(wait, read, sql, **given):
    await wait()
    return await read(sql, **given)


async def test_an_outage_that_continues_is_marked_and_one_late_check_is_none(three, reader):
    a, *_ = three
    a.valkey.is_cut = True
    await a.pass_s(2)
    a.valkey.is_cut = False
    await pass_all(three, 20)
    assert await outages_of(reader) == []
    for host in three:
        host.valkey.is_down = True
    await pass_all(three, 40)
    [(text, *_)] = await outages_of(reader)
    assert re.fullmatch("Valkey did not answer a, b, c for at least 3[0-9] s: .*", text)


async def test_an_outage_that_ends_while_it_is_stored_is_marked_with_its_end(three, reader):
    a, *_ = three
    for host in three:
        host.valkey.is_down = True
    await pass_all(three, 18)

    @asynccontextmanager
    async def slow():
        """A check runs and Valkey answers between the statements and their commit."""
        async with a.postgres.transaction() as tx:
            yield tx
            a.clock.advance(2)
            a.valkey.is_down = False
            await a.recorder.check_engines()

    a.transaction = slow
    await a.recorder.step()
    del a.transaction
    for host in three:
        host.valkey.is_down = False
    await pass_all(three, 20)
    assert [text for text, *_ in await outages_of(reader)] == [
        "Valkey did not answer a, b, c for about 18 s: connection refused"
    ]


async def test_a_host_keeps_a_bounded_number_of_outages(three, reader, monkeypatch):
    monkeypatch.setattr(outages, "OUTAGES_KEPT", 3)
    a, *_ = three
    for _ in range(5):
        a.valkey.is_down = True
        await a.pass_s(4)
        a.valkey.is_down = False
        await a.pass_s(6)
    await a.pass_s(10)
    assert await a.postgres.value(COUNT) == 3


def test_the_text_of_an_ended_outage_does_not_depend_on_other_outages():
    """Neither on the order of rows, nor on an outage that follows."""

    def row(host, engine, began_s, until_s, cause):
        began_at, until_at = (NOON + timedelta(seconds=at_s) for at_s in (began_s, until_s))
        return EngineOutage(
            host=host, engine=engine, causes=[cause], began_at=began_at, until_at=until_at
        )

    cut = [
        row("a", "postgres", 0, 30, "host unreachable"),
        row("a", "valkey", 2, 30, "connection lost"),
        row("a", "blobs", 8, 30, "no answer in time"),
        *(row(host, "postgres", 2, 12, "commits waited") for host in "bc"),
    ]
    later = [row(host, "blobs", 90, 120, "no answer in time") for host in "abc"]
    texts = {
        one.text
        for rows in permutations(cut)
        for found in (rows, (*later, *rows))
        for one in join_outages(found, lambda _: True)
        if one.hosts == ["a"]
    }
    assert len(texts) == 1, texts


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (TimeoutError(), "no answer in time"),
        (ConnectionRefusedError(111, "Connect call failed"), "connection refused"),
        (OSError(113, "No route to host"), "host unreachable"),
        (NoPrimary(1, 3), "1 of 3 servers answers, as a standby; 2 do not respond in time"),
        (NoPrimary(1, 2), "1 of 2 servers answers, as a standby; 1 does not respond in time"),
        (
            NoPrimary(2, 3),
            "2 of 3 servers answer, as standbys; 1 does not respond in time (failover)",
        ),
        (NoPrimary(3, 3), "3 of 3 servers answer, as standbys (failover)"),
        (NoPrimary(1, 1), "the server at this address answers as a standby"),
        (FileNotFoundError(2, "No such file or directory"), "no socket: its server does not run"),
        (PostgresFull("PostgreSQL lacks disk space"), "disk space or memory is short"),
        (PostgresDown("PostgreSQL at x is read-only (ReadOnlySQLTransactionError)"), "read-only"),
        (PostgresRefused("PostgreSQL refuses the connection"), "login refused"),
        (ValueError("something: check it with `headrace doctor`, then try again"), "something"),
    ],
)
def test_causes_are_named_in_a_few_words(error, cause):
    assert outages.cause_of(error) == cause
    outer = PostgresDown("PostgreSQL does not respond")
    outer.__cause__ = error
    if not isinstance(error, ValueError):
        assert outages.cause_of(outer) == cause


def test_a_long_cause_ends_with_a_whole_word():
    text = f"something {'odd ' * 20}happened (FileNotFoundError: [Errno 2] in the folder of blobs)"
    shown = outages.cause_of(ValueError(text))
    assert len(shown) <= outages.CAUSE_CHARACTERS
    assert shown.endswith(" ...")
    assert text.startswith(f"{shown.removesuffix(' ...')} "), shown

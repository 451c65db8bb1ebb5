"""Callers with transactions of their own, one a driver or framework, all with the same few verbs.

Each is a context manager over a database's URL. `tx` is what a user passes; `run` is a statement of
the caller's own in the same transaction; `savepoint` is a block that is rolled back to its start if
it raises.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, contextmanager
from urllib.parse import parse_qs, urlsplit

import asyncpg
import django
import django.db
import psycopg
import psycopg2
import psycopg2.extras
import sqlalchemy
from django.conf import settings
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

SAVE = "SAVEPOINT caller"
BACK = "ROLLBACK TO SAVEPOINT caller"


class Caller:
    """An open transaction: how to use and end it."""

    def __init__(self, tx, run, commit, rollback):
        self.tx = tx
        self.run = run
        self.commit = commit
        self.rollback = rollback


@asynccontextmanager
async def asyncpg_caller(url):
    connection = await asyncpg.connect(url)
    tx = connection.transaction()
    await tx.start()
    yield Caller(connection, connection.execute, tx.commit, tx.rollback)
    await connection.close()


@asynccontextmanager
async def pooled_asyncpg_caller(url):
    async with asyncpg.create_pool(url, min_size=1, max_size=1) as pool, pool.acquire() as c:
        tx = c.transaction()
        await tx.start()
        yield Caller(c, c.execute, tx.commit, tx.rollback)
        if c.is_in_transaction():
            await tx.rollback()


@asynccontextmanager
async def psycopg_caller(url):
    connection = await psycopg.AsyncConnection.connect(url)
    yield Caller(connection, connection.execute, connection.commit, connection.rollback)
    await connection.close()


@asynccontextmanager
async def raw_psycopg_caller(url):
    """One that numbers its placeholders, returns dicts, and began by hand in autocommit."""
    connection = await psycopg.AsyncConnection.connect(
        url,
        autocommit=True,
        cursor_factory=psycopg.AsyncRawCursor,
        row_factory=psycopg.rows.dict_row,
    )
    await connection.execute("BEGIN")
    yield Caller(connection, connection.execute, connection.commit, connection.rollback)
    await connection.close()


def _sqlalchemy_connection_caller(driver, connect):
    @asynccontextmanager
    async def caller(url):
        engine = create_async_engine(
            f"postgresql+{driver}://", async_creator=lambda: connect(url), poolclass=NullPool
        )
        async with engine.connect() as c:

            async def run(text):
                await c.execute(sqlalchemy.text(text))

            yield Caller(c, run, c.commit, c.rollback)
        await engine.dispose()

    return caller


def _sqlalchemy_session_caller(driver, connect, *, is_scoped):
    @asynccontextmanager
    async def caller(url):
        engine = create_async_engine(
            f"postgresql+{driver}://", async_creator=lambda: connect(url), poolclass=NullPool
        )
        session = AsyncSession(engine)
        if is_scoped:
            session = async_scoped_session(lambda: AsyncSession(engine), asyncio.current_task)

        async def run(text):
            await session.execute(sqlalchemy.text(text))

        yield Caller(session, run, session.commit, session.rollback)
        await session.close()
        await engine.dispose()

    return caller


ASYNC_CALLERS = {
    "asyncpg": asyncpg_caller,
    "asyncpg pooled": pooled_asyncpg_caller,
    "psycopg": psycopg_caller,
    "psycopg raw": raw_psycopg_caller,
    "sqlalchemy asyncpg": _sqlalchemy_connection_caller("asyncpg", asyncpg.connect),
    "sqlalchemy psycopg": _sqlalchemy_connection_caller("psycopg", psycopg.AsyncConnection.connect),
    "sqlalchemy session": _sqlalchemy_session_caller("asyncpg", asyncpg.connect, is_scoped=False),
    "sqlalchemy scoped session": _sqlalchemy_session_caller(
        "psycopg", psycopg.AsyncConnection.connect, is_scoped=True
    ),
}


@contextmanager
def blocking_psycopg_caller(url):
    with psycopg.connect(url) as c:
        yield Caller(c, c.execute, c.commit, c.rollback)
        c.rollback()


@contextmanager
def psycopg2_caller(url):
    """With the cursor that gives dicts."""
    connection = psycopg2.connect(url, cursor_factory=psycopg2.extras.RealDictCursor)

    def run(text):
        with connection.cursor() as cursor:
            cursor.execute(text)

    yield Caller(connection, run, connection.commit, connection.rollback)
    connection.close()


def _blocking_sqlalchemy_caller(driver, connect):
    @contextmanager
    def caller(url):
        engine = sqlalchemy.create_engine(
            f"postgresql+{driver}://", creator=lambda: connect(url), poolclass=NullPool
        )
        with engine.connect() as c:
            yield Caller(c, lambda text: c.execute(sqlalchemy.text(text)), c.commit, c.rollback)

    return caller


def _blocking_session_caller(driver, connect, *, is_scoped):
    @contextmanager
    def caller(url):
        engine = sqlalchemy.create_engine(
            f"postgresql+{driver}://", creator=lambda: connect(url), poolclass=NullPool
        )
        session = scoped_session(sessionmaker(engine)) if is_scoped else Session(engine)
        yield Caller(
            session,
            lambda text: session.execute(sqlalchemy.text(text)),
            session.commit,
            session.rollback,
        )
        session.close()

    return caller


def use_django(url):
    """Point Django at a database; configure it first if it is not."""
    parts = urlsplit(url)
    found = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.path.lstrip("/"),
        "USER": parts.username or "",
        "PASSWORD": parts.password or "",
        "HOST": parts.hostname or parse_qs(parts.query).get("host", [""])[0],
        "PORT": parts.port or "",
    }
    if not settings.configured:
        other = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
        settings.configure(DATABASES={"default": found, "other": other})
        django.setup()
    django.db.connections.settings["default"].update(found)


@contextmanager
def django_caller(url):
    """With Django's own connection, in autocommit switched off as `atomic` does it."""
    use_django(url)
    connection = django.db.connection

    def run(text):
        with connection.cursor() as cursor:
            cursor.execute(text)

    connection.set_autocommit(False)
    yield Caller(connection, run, connection.commit, connection.rollback)
    connection.close()


@contextmanager
def django_alias_caller(url):
    with django_caller(url) as caller:
        caller.tx = "default"
        yield caller


BLOCKING_CALLERS = {
    "psycopg": blocking_psycopg_caller,
    "psycopg2": psycopg2_caller,
    "sqlalchemy psycopg": _blocking_sqlalchemy_caller("psycopg", psycopg.connect),
    "sqlalchemy psycopg2": _blocking_sqlalchemy_caller("psycopg2", psycopg2.connect),
    "sqlalchemy session": _blocking_session_caller("psycopg", psycopg.connect, is_scoped=False),
    "sqlalchemy scoped session": _blocking_session_caller(
        "psycopg2", psycopg2.connect, is_scoped=True
    ),
    "django": django_caller,
    "django alias": django_alias_caller,
}

"""Callers with an open transaction, one for each driver or framework.

Each is a context manager over a database's URL. `tx` is the value that a user passes; `run`
executes a statement of the caller in the same transaction.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager, closing, contextmanager
from urllib.parse import parse_qs, urlsplit

import asyncpg
import django
import django.db
import psycopg
import psycopg2
import psycopg2.extras
import sqlalchemy
from django.conf import settings
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

connect_psycopg = psycopg.AsyncConnection.connect
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
    """It numbers its placeholders, returns dicts, and began by hand in autocommit."""
    connection = await psycopg.AsyncConnection.connect(
        url,
        autocommit=True,
        cursor_factory=psycopg.AsyncRawCursor,
        row_factory=psycopg.rows.dict_row,
    )
    await connection.execute("BEGIN")
    yield Caller(connection, connection.execute, connection.commit, connection.rollback)
    await connection.close()


def _sqlalchemy_caller(driver, connect, opened):
    """A caller with what `opened` makes of an engine, such as a connection or a session."""

    @asynccontextmanager
    async def caller(url):
        engine = create_async_engine(
            f"postgresql+{driver}://", async_creator=lambda: connect(url), poolclass=NullPool
        )
        async with opened(engine) as c:

            async def run(text):
                await c.execute(sqlalchemy.text(text))

            yield Caller(c, run, c.commit, c.rollback)
        await engine.dispose()

    return caller


def _scoped_async_session(engine):
    return aclosing(async_scoped_session(lambda: AsyncSession(engine), asyncio.current_task))


ASYNC_CALLERS = {
    "asyncpg": asyncpg_caller,
    "asyncpg pooled": pooled_asyncpg_caller,
    "psycopg": psycopg_caller,
    "psycopg raw": raw_psycopg_caller,
    "sqlalchemy asyncpg": _sqlalchemy_caller("asyncpg", asyncpg.connect, AsyncEngine.connect),
    "sqlalchemy psycopg": _sqlalchemy_caller("psycopg", connect_psycopg, AsyncEngine.connect),
    "sqlalchemy session": _sqlalchemy_caller("asyncpg", asyncpg.connect, AsyncSession),
    "sqlalchemy scoped session": _sqlalchemy_caller(
        "psycopg", connect_psycopg, _scoped_async_session
    ),
}


@contextmanager
def blocking_psycopg_caller(url):
    with psycopg.connect(url) as c:
        yield Caller(c, c.execute, c.commit, c.rollback)
        c.rollback()


@contextmanager
def psycopg2_caller(url):
    """With the cursor that returns dicts."""
    connection = psycopg2.connect(url, cursor_factory=psycopg2.extras.RealDictCursor)

    def run(text):
        with connection.cursor() as cursor:
            cursor.execute(text)

    yield Caller(connection, run, connection.commit, connection.rollback)
    connection.close()


def _blocking_sqlalchemy_caller(driver, connect, opened):
    @contextmanager
    def caller(url):
        engine = sqlalchemy.create_engine(
            f"postgresql+{driver}://", creator=lambda: connect(url), poolclass=NullPool
        )
        with opened(engine) as c:
            yield Caller(c, lambda text: c.execute(sqlalchemy.text(text)), c.commit, c.rollback)

    return caller


def _scoped_session(engine):
    return closing(scoped_session(sessionmaker(engine)))


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
    """With Django's connection, without autocommit as in `atomic`."""
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
    "sqlalchemy psycopg": _blocking_sqlalchemy_caller("psycopg", psycopg.connect, Engine.connect),
    "sqlalchemy psycopg2": _blocking_sqlalchemy_caller(
        "psycopg2", psycopg2.connect, Engine.connect
    ),
    "sqlalchemy session": _blocking_sqlalchemy_caller("psycopg", psycopg.connect, Session),
    "sqlalchemy scoped session": _blocking_sqlalchemy_caller(
        "psycopg2", psycopg2.connect, _scoped_session
    ),
    "django": django_caller,
    "django alias": django_alias_caller,
}

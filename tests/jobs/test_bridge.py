"""Sync code on the bridge.

The same verbs, from any thread, after a fork, and no wait at the end.
"""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import psycopg
import pytest

from headrace import Headrace
from headrace.engines.endpoints import Endpoints
from headrace.jobs import JobState, NewJob
from headrace.jobs.errors import InvalidTask, QueueUnknown
from headrace.jobs.handle import AwaitInstead, BridgeClosed
from headrace.jobs.tasks import Task
from headrace.kernel.logs import current_traceparent, new_traceparent

APP = """
import os, sys
from headrace import Headrace
from headrace.engines.endpoints import Endpoints

app = Headrace()
app.use_endpoints(Endpoints(os.environ["PG"], os.environ["VALKEY"], "file:///nowhere"))

@app.task("mail")
async def mail(to: str):
    pass
"""


@pytest.fixture
async def app(running_engines, database_url, tmp_path):
    """An app on this test's database, closed when the test ends."""
    app = Headrace(flags={"data.folder": str(tmp_path)})
    valkey_url = running_engines.endpoints.valkey_url
    app.use_endpoints(Endpoints(database_url, valkey_url, tmp_path.as_uri()))
    yield app
    await app.close()


@pytest.fixture
def mail(app):
    """A task of the app."""

    @app.task("mail")
    async def mail(to: str, group: dict | None = None):
        """Never run here."""

    return mail


@pytest.fixture
def script(running_engines, database_url, tmp_path):
    """Run a script with APP before it, in a process of its own; gives the words that it printed."""

    def run(text, *, closes_all=True):
        env = {
            **os.environ,
            "PG": database_url,
            "VALKEY": running_engines.endpoints.valkey_url,
            "HEADRACE_DATA_FOLDER": str(tmp_path),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        }
        warned = ["-W", "error::ResourceWarning"] if closes_all else []
        ran = subprocess.run(
            [sys.executable, *warned, "-c", APP + text],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr + ran.stdout
        return ran.stdout.split()

    return run


async def test_every_verb_of_tasks_and_rooms(app, mail, sql):
    def work():
        first = mail.sync.enqueue(to="ann", priority=2)
        second = app.sync(mail.enqueue)(to="bob")
        third, fourth = mail.sync.enqueue_many([{"to": "cid"}, {"to": "dan"}])
        assert app.sync.run(mail.enqueue(to="eve")) > fourth
        assert app.sync.jobs.job(first).priority == 2
        app.sync.jobs.cancel(second)
        assert app.sync.jobs.job(second).state is JobState.CANCELLED
        assert app.sync.jobs.enqueue(NewJob(queue="mail", payload={"to": "fay"})) > third
        assert app.sync.jobs.config is app.jobs.config
        assert mail.sync.queue == "mail"
        assert app.sync.registry is app.registry
        assert app.sync.jobs.takes.take("mail", 1).jobs[0].payload == {"to": "ann"}
        assert mail.sync.job(to="gus") == mail.job(to="gus")
        with pytest.raises(QueueUnknown):
            app.sync.jobs.queues.get("none")
        with pytest.raises(AttributeError):
            mail.sync.no_such_verb()
        with pytest.raises(AttributeError):
            app.sync.no_such_room.verb()

    await asyncio.to_thread(work)
    assert len(await sql("SELECT 1 FROM headrace.job_ready")) == 4


async def test_async_code_and_sync_threads_use_the_app_at_once(app, mail, sql):
    def work(number):
        return [mail.sync.enqueue(to=f"{number}.{n}") for n in range(10)]

    with ThreadPoolExecutor(8) as threads:
        loop = asyncio.get_running_loop()
        waiting = [loop.run_in_executor(threads, work, number) for number in range(8)]
        own = [await mail.enqueue(to="own") for _ in range(10)]
        ids = [job_id for found in await asyncio.gather(*waiting) for job_id in found]
    assert len({*ids, *own}) == 90
    assert len(await sql("SELECT 1 FROM headrace.job_ready")) == 90
    bridges = [thread for thread in threading.enumerate() if thread.name == "headrace-sync"]
    assert len(bridges) == 1


async def test_a_call_inside_an_event_loop_is_refused_and_leaves_nothing(app, mail, recwarn):
    with pytest.raises(AwaitInstead, match="use `await`"):
        mail.sync.enqueue(to="ann")
    with pytest.raises(AwaitInstead):
        app.sync.run(mail.enqueue(to="ann"))
    gc.collect()
    assert not [warned for warned in recwarn if "never awaited" in str(warned.message)]

    async def inner():
        return mail.sync.enqueue(to="from the bridge's own loop")

    def work():
        with pytest.raises(AwaitInstead):
            app.sync.run(inner())

    await asyncio.to_thread(work)


async def test_the_context_goes_along(app, mail, sql):
    def work():
        current_traceparent.set(parent)
        mail.sync.enqueue(to="ann")

    parent = new_traceparent()
    await asyncio.to_thread(work)
    rows = await sql("SELECT headers FROM headrace.job_ready")
    assert rows[0]["headers"].split("-")[1] == parent.split("-")[1]


async def test_an_async_block_becomes_a_block(app):
    seen = []

    @asynccontextmanager
    async def block(name):
        seen.append(f"in {name}")
        try:
            yield name.upper()
        except KeyError:
            seen.append("kept")
        finally:
            seen.append(f"out {name}")

    def work():
        with app.sync(block)("a") as entered:
            seen.append(entered)
        with app.sync(block)("b"):
            raise KeyError
        with pytest.raises(ValueError, match="mine"), app.sync(block)("c"):
            raise ValueError("mine")

    await asyncio.to_thread(work)
    assert seen == ["in a", "A", "out a", "in b", "kept", "out b", "in c", "out c"]


async def test_a_group_is_filled_in_a_block_and_in_the_callers_transaction(
    app, mail, sql, database_url
):
    def work():
        with psycopg.connect(database_url) as connection:
            with app.sync.group(on_done=mail.job(to="all"), tx=connection) as group:
                mail.sync.enqueue(to="ann", group=group, tx=connection)
            connection.rollback()
            with app.sync.group(on_done=mail.job(to="all"), tx=connection) as group:
                mail.sync.enqueue_many([{"to": "ann"}, {"to": "bob"}], group=group, tx=connection)

    await asyncio.to_thread(work)
    assert [row["pending"] for row in await sql("SELECT pending FROM headrace.job_group")] == [2]
    assert len(await sql("SELECT 1 FROM headrace.job_ready")) == 2


async def test_closed_it_ends_its_thread_and_starts_anew(app, mail):
    def work():
        return app.sync.run(asyncio.Event().wait())

    hanging = asyncio.create_task(asyncio.to_thread(work))
    while not any(thread.name == "headrace-sync" for thread in threading.enumerate()):
        await asyncio.sleep(0)
    await app.close()
    with pytest.raises(BridgeClosed):
        await hanging
    assert not [thread for thread in threading.enumerate() if thread.name == "headrace-sync"]
    assert await asyncio.to_thread(mail.sync.enqueue, to="ann") > 0


async def test_the_app_may_be_closed_through_the_bridge(app, mail):
    def work():
        mail.sync.enqueue(to="ann")
        app.sync.run(app.close())
        mail.sync.enqueue(to="bob")

    await asyncio.to_thread(work)


def test_a_task_without_an_app_says_so():
    task = Task(queue="mail", handler=print, payload=dict)
    with pytest.raises(InvalidTask, match=r"@app\.task"):
        task.sync.enqueue({})


@pytest.mark.slow
async def test_a_forked_child_has_a_bridge_of_its_own(script, sql):
    out = await asyncio.to_thread(
        script,
        """
import warnings
# Python 3.12 and newer warn of every fork beside a thread; the bridge is what makes this one safe.
warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
def show(job):
    os.write(1, f"{job}\\n".encode())  # one write: lines of several processes stay whole
show(mail.sync.enqueue(to="parent"))
pids = []
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        show(mail.sync.enqueue(to="child"))
        sys.exit(0)
    pids.append(pid)
show(mail.sync.enqueue(to="parent"))
assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0, 0]
show(mail.sync.enqueue(to="parent"))
""",
    )
    assert len(set(out)) == 6
    assert len(await sql("SELECT 1 FROM headrace.job_ready")) == 6


@pytest.mark.slow
async def test_loops_follow_each_other_and_a_hanging_call_does_not_delay_the_exit(script, sql):
    out = await asyncio.to_thread(
        script,
        closes_all=False,
        text="""
import asyncio, atexit, threading, time
async def main(number):
    return [await mail.enqueue(to="loop") for _ in range(2)]
ids = [*asyncio.run(main(1)), *asyncio.run(main(2)), mail.sync.enqueue(to="sync")]
assert len({*ids, *asyncio.run(main(3))}) == 7
def report():
    print(time.monotonic() - began_s)
def hang():
    try:
        app.sync.run(asyncio.Event().wait())
    except Exception as error:
        print(error.code)
atexit.register(report)
mail.sync.enqueue(to="ann")
threading.Thread(target=hang, daemon=True).start()
holding = app.engines.postgres.session()
app.sync.run(holding.__aenter__())
began_s = time.monotonic()
""",
    )
    # The thread that hangs may print before or after.
    [waited_s] = [float(line) for line in out if line[0].isdigit()]
    assert waited_s < 20, "its session would hold it up for ever"
    assert len(await sql("SELECT 1 FROM headrace.job_ready")) == 8


@pytest.mark.slow
async def test_django_commits_jobs_with_its_rows(script, sql):
    out = await asyncio.to_thread(
        script,
        """
from callers import use_django
use_django(os.environ["PG"])
from django.db import connection, models, transaction
class Note(models.Model):
    class Meta:
        app_label = "notes"
with connection.schema_editor() as editor:
    editor.create_model(Note)
with transaction.atomic():
    Note.objects.create()
    mail.sync.enqueue(to="kept", tx=connection)
    try:
        with transaction.atomic():
            Note.objects.create()
            mail.sync.enqueue(to="savepoint", tx=connection)
            raise KeyError
    except KeyError:
        pass
try:
    with transaction.atomic():
        mail.sync.enqueue(to="never", tx=connection)
        Note.objects.create(id=1)
except Exception as error:
    print(type(error).__name__)
try:
    mail.sync.enqueue(to="never", tx=connection)
except Exception as error:
    print(error.code)
connection.close()
""",
    )
    assert out == ["IntegrityError", "postgres.transaction_unfit"]
    rows = await sql("SELECT payload FROM headrace.job_ready")
    assert [row["payload"] for row in rows] == [b'{"to":"kept"}']
    assert len(await sql("SELECT 1 FROM notes_note")) == 1

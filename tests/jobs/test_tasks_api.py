"""Declarations of code: options and bounds, stored settings, overrides, former names."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from typing import Annotated

import msgspec
import pytest
from msgspec import Meta

from headrace.jobs import Batch, Jobs, NewJob, QueueUnknown, Registry, Task
from headrace.jobs.columns import JobColumns
from headrace.jobs.crons import NewCron
from headrace.jobs.errors import InvalidSetting, InvalidTask, LimiterFixed
from headrace.jobs.handle import JobRef
from headrace.jobs.service.lanes import Lanes
from headrace.jobs.service.queues import Queues
from headrace.jobs.tasks import LimiterDeclared


async def handle():
    pass


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch": 0}, "batch 0 is not within 1 and 10000"),
        ({"batch": True}, "batch: expected an integer, got True"),
        ({"retries": "5"}, "retries: expected an integer, got '5'"),
        ({"retries": 1.5}, "retries: expected an integer, got 1.5"),
        ({"importance": "high"}, "importance: expected an integer, got 'high'"),
        ({"slots": ("1", 4)}, "the fewest slots: expected an integer, got '1'"),
        ({"concurrency": None}, "concurrency: expected an integer, got None"),
        ({"timeout": "8d"}, "timeout 691200.0 is not within"),
        ({"timeout": 5}, "timeout: expected a duration such as 30s"),
        ({"retries": -1}, "retries -1 is not within 0 and 1000"),
        ({"concurrency": 0}, "concurrency 0 is not within 1 and 10000"),
        ({"importance": 10}, "importance 10 is not within 0 and 9"),
        ({"slots": (-1, 5)}, "the fewest slots -1 is not within"),
        ({"slots": (5, 4)}, "the most slots 4 is not within 5 and"),
        ({"slots": 4}, "slots: expected the fewest and the most"),
        ({"keep_done": "2y"}, "keep_done: expected a duration"),
        ({"keep_done": "400d"}, "keep_done 34560000.0 is not within"),
        ({"keep_result": "soon"}, "keep_result: expected a duration"),
        ({"version": 0}, "version 0 is not within 1 and 32767"),
        ({"version": 2, "upgrade": {2: dict}}, "a version to upgrade 2 is not within 1 and 1"),
        ({"upgrade": {1: dict}}, "a version to upgrade 1 is not within"),
        ({"limiter": "a b"}, "names such as 'a b'"),
        ({"aliases": ["é"]}, "names such as 'é'"),
        ({"aliases": "old"}, "aliases: expected a list of names"),
        ({"tag": ""}, "names such as ''"),
        (
            {"retry": 1},
            r"^task 'q': no option 'retry', did you mean retries\? \(options: aliases, ",
        ),
        ({"frob": 1, "nap": 2}, r"no option 'frob'; no option 'nap' \(options"),
    ],
)
def test_options_out_of_bounds_are_refused(options, text):
    with pytest.raises(InvalidTask, match=text):
        Task(queue="q", handler=handle, **options)


@pytest.mark.parametrize(
    ("handler", "options", "text"),
    [
        (lambda at, to: None, {}, "takes at, options of `enqueue`"),
        (lambda unique, lane: None, {}, "takes unique, lane, options of"),
        (lambda tx: None, {}, "takes tx, options of"),
        (lambda *args: None, {}, r"takes only \*args"),
        (
            lambda *args, **kwargs: None,
            {"batch": 5},
            r"only \*args, \*\*kwargs, .* functools.wraps",
        ),
        (lambda **fields: None, {}, r"takes only \*\*fields"),
    ],
)
def test_handlers_that_no_payload_can_reach_are_refused(handler, options, text):
    with pytest.raises(InvalidTask, match=text):
        Task(queue="q", handler=handler, **options)


def test_a_batch_handler_takes_a_batch():
    async def number(x: int): ...

    async def numbers(batch: list[int]): ...

    async def bare(batch: Batch): ...

    async def typed(batch: Batch[int]): ...

    for handler in (number, numbers):
        with pytest.raises(InvalidTask, match=r"takes a Batch\[...\], not "):
            Task(queue="q", handler=handler, batch=10)
    for handler in (bare, typed, lambda batch: None):
        Task(queue="q", handler=handler, batch=10)


def test_kept_times_follow_from_both_options():
    def kept(**options):
        declared = Task(queue="q", handler=handle, **options).declared
        return declared.keep_done_s, declared.keep_result

    assert kept() == (None, False)
    assert kept(keep_done="24h") == (86_400.0, False)
    assert kept(keep_result=True) == (3_600.0, True)
    assert kept(keep_result="2h") == (7_200.0, True)
    assert kept(keep_done="24h", keep_result=True) == (86_400.0, True)


def test_limiters_and_crons_are_collected():
    registry = Registry()
    registry.limiter("fetch", rate="600/m", concurrency=20)
    registry.limiter("slow", rate="10/30s", slack="1s")
    assert registry.limiters["fetch"] == LimiterDeclared(
        name="fetch", starts_max=600, window_s=60.0, concurrency=20, slack_s=0.25
    )
    assert registry.limiters["slow"].window_s == 30.0
    for options in ({"rate": "0/m"}, {"rate": "fast"}, {"concurrency": 0}, {"slack": "2h"}):
        with pytest.raises(InvalidTask):
            registry.limiter("other", **options)
    with pytest.raises(InvalidTask, match="declared twice"):
        registry.limiter("fetch")

    @registry.cron("0 4 * * *", tz="Europe/Moscow", retries=1)
    async def clean_up():
        pass

    assert clean_up.queue == "cron.clean_up"
    assert clean_up.retries == 1
    assert list(registry.crons.values()) == [
        NewCron(name="clean_up", spec="0 4 * * *", tz="Europe/Moscow", queue="cron.clean_up")
    ]
    for spec, tz, reason in (
        ("0 4 * * *", "Mars/Base", "time zone"),
        ("4 am", "UTC", "five fields"),
    ):
        with pytest.raises(InvalidTask, match=reason):
            registry.cron(spec, tz=tz)(handle)


def test_the_handler_of_a_cron_needs_no_payload(registry):
    def of_day(day: str, limit: int = 5): ...
    def of_count(count: Annotated[int, Meta(ge=1)] = 1): ...
    async def of_batch(jobs: Batch[dict[str, int]]): ...

    with pytest.raises(InvalidTask, match=r"cron 'of_day'.*\(/day: the field is missing\)"):
        registry.cron("0 4 * * *")(of_day)
    with pytest.raises(InvalidTask, match="the payload: expected object, got null"):
        registry.cron("0 4 * * *", batch=10)(of_batch)
    assert not registry.crons
    assert registry.find("cron.of_day") is None
    registry.cron("0 4 * * *")(of_count)


def test_a_name_belongs_to_one_queue(registry):
    registry.task("a", aliases=["b"])(handle)
    for name, aliases in (("a", ()), ("b", ()), ("c", ("a",)), ("d", ("b",))):
        with pytest.raises(InvalidTask, match="has a task already"):
            registry.queue(name, aliases=aliases)


def test_people_decide_only_jobs_of_a_queue_without_code(registry):
    people = registry.queue("people", decisions=("approve", "reject"))
    assert people.declared.decisions == {"approve": None, "reject": None}
    with pytest.raises(InvalidTask, match="without a handler"):
        registry.task("q", decisions=("approve",))(handle)
    wrong = ("approve", 3, ["a b"], {"approve": 3}, {"approve": ""}, [None, {}], ["a", "a"])
    for decisions in (*wrong, {"approve": "other"}):
        with pytest.raises(InvalidTask, match="decisions: expected up to 9 names"):
            registry.queue("other", decisions=decisions)


async def test_declarations_are_stored_and_follow_the_code(jobs, registry, postgres, config):
    registry.task(
        "q",
        batch=50,
        timeout="10m",
        retries=3,
        importance=8,
        slots=(2, 40),
        tag="gpu",
        keep_done="24h",
        keep_result=True,
    )(_batch)
    registry.queue("people", importance=1, decisions={"yes": "q", "no": None})
    await jobs.queues.declare()
    assert (await jobs.queues.settings("people")).decisions == {"yes": "q", "no": None}
    settings = await jobs.queues.settings("q")
    assert msgspec.structs.asdict(settings) == {
        "queue": "q",
        "limiter": "q",
        "paused": False,
        "importance": 8,
        "slots_min": 2,
        "slots_max": 40,
        "retries": 3,
        "batch": 50,
        "timeout_s": 600.0,
        "tag": "gpu",
        "keep_done_s": 86_400.0,
        "keep_result": True,
        "needs_lane": False,
        "aliases": [],
        "decisions": {},
        "overridden": {},
    }
    assert (await jobs.queues.settings("people")).importance == 1
    newer = Registry()
    newer.task("q", retries=9)(handle)
    await Jobs(postgres, config, newer).queues.declare()
    settings = await jobs.queues.settings("q")
    assert (settings.retries, settings.batch, settings.tag) == (9, 1, None)
    with pytest.raises(QueueUnknown):
        await jobs.queues.settings("nobody\0")


async def test_declaring_again_writes_nothing(jobs, registry, sql):
    registry.task("q")(handle)
    for _ in range(2):
        await jobs.queues.declare()
    rows = await sql("SELECT declared_at, xmin::text FROM headrace.queue")
    await jobs.queues.declare()
    assert await sql("SELECT declared_at, xmin::text FROM headrace.queue") == rows


async def test_settings_of_an_operator_win_and_are_reset(jobs, registry):
    registry.task("q", retries=3, slots=(2, 40), importance=3)(handle)
    settings = await jobs.queues.set("q", slots_min=5, importance=9, paused=True)
    assert (settings.slots_min, settings.importance, settings.paused) == (5, 9, True)
    assert settings.overridden == {"importance": 9, "slots_min": 5}
    await jobs.queues.declare()
    settings = await jobs.queues.set("q", importance=None, retries=0)
    assert settings.overridden == {"slots_min": 5, "retries": 0}
    assert (settings.importance, settings.retries, settings.paused) == (3, 0, True)
    settings = await jobs.queues.set("q", slots_min=None, retries=None, paused=False)
    assert (settings.overridden, settings.slots_min, settings.paused) == ({}, 2, False)


async def test_a_renamed_queue_keeps_its_jobs_and_old_code_reaches_it(jobs, postgres, config, sql):
    jobs.registry.task("old", retries=1)(handle)
    waiting = await jobs.enqueue(NewJob(queue="old"))
    lane = await jobs.enqueue(NewJob(queue="old", lane="a"))
    newer = Registry()
    newer.task("new", retries=7, aliases=["older", "old"])(handle)
    after = Jobs(postgres, config, newer)
    assert (await after.queues.declare())["new"].limiter == "old"
    for job_id in (waiting, lane):
        assert (await jobs.job(job_id)).queue == "new"
    # The old process continues, and starts again.
    late = await jobs.enqueue(NewJob(queue="old"))
    again = Jobs(postgres, config, jobs.registry)
    assert (await again.queues.declare())["old"].is_alias
    later = await again.enqueue(NewJob(queue="older"))
    for job_id in (late, later):
        assert (await jobs.job(job_id)).queue == "new"
    assert [row["name"] for row in await sql("SELECT name FROM headrace.queue")] == ["new"]
    settings = await after.queues.settings("old")
    assert (settings.queue, settings.retries, settings.aliases) == ("new", 7, ["old", "older"])
    await after.queues.set("old", paused=True)
    assert (await after.queues.settings("new")).paused


async def test_enqueue_returns_a_reference_that_equals_the_id(jobs, registry):
    task = registry.task("q")(handle)
    job = await task.enqueue(after_s=3600)
    assert isinstance(job, JobRef)
    assert (job, hash(job), f"{job}", str(job)) == (job.id, hash(job.id), str(job.id), str(job.id))
    assert repr(job) == f"JobRef({job.id})"
    assert json.dumps([job]) == f"[{job.id}]"
    assert type(job.id) is int
    assert (await job.job()).state == (await jobs.job(job)).state == "scheduled"
    assert (await job.why()).reason == "not_due"
    await job.cancel()
    assert (await job.job()).state == "cancelled"
    assert await (await task.enqueue(after_s=3600)).cancel(running=True) is True
    again, other = await task.enqueue_many([{}, {}])
    assert other.id == again.id + 1


async def test_options_of_enqueue_many_hold_for_all_its_jobs(jobs, registry):
    people = registry.queue("people")
    ids = await people.enqueue_many(
        [{"n": 1}, {"n": 2}], lane="a", priority=2, after_s=60, spread="1h"
    )
    for job_id in ids:
        job = await jobs.job(job_id)
        assert (job.lane, job.priority, job.state) == ("a", 2, "scheduled")
    for options, text in (
        ({"unique": "a"}, r"not \['unique'\]: .* task.job\(payload, unique=...\)"),
        ({"colour": 1}, r"not \['colour'\]"),
    ):
        with pytest.raises(InvalidTask, match=text):
            await people.enqueue_many([{}], **options)
    with pytest.raises(InvalidTask, match=r"a job has its own options: give \['lane'\]"):
        await people.enqueue_many([people.job({})], lane="a")


async def test_fields_are_passed_by_name(registry):
    @registry.task("sums")
    async def add(x: int, y: int = 0): ...

    people = registry.queue("people")
    for call, text in (
        (lambda: add.enqueue(2, 3), r"pass the fields by name: add.enqueue\(x=2, y=3\)"),
        (lambda: add.enqueue(2), r"add.enqueue\(x=2\)"),
        (lambda: add.enqueue_many([2]), r"add.enqueue\(x=2\)"),
        (lambda: people.enqueue({}, {}), r"2 payloads where one is taken"),
    ):
        with pytest.raises(InvalidTask, match=text):
            await call()
    with pytest.raises(InvalidTask, match="by name"):
        add.job(2, 3)


async def _batch(batch):
    pass


class Counted(Queues):
    """Queues that count how often they are declared."""

    declared = 0
    fails = False

    async def declare(self):
        self.declared += 1
        if self.fails:
            raise LimiterFixed("not now")
        return await super().declare()


def rows_of(queue):
    """One job of it."""
    return JobColumns(queues=[queue], lanes=[None])


async def test_enqueue_many_of_dicts_reads_no_signature_per_job(jobs, registry):
    @registry.task("mail")
    async def send_mail(to: str, text: str = "") -> None: ...

    await send_mail.enqueue_many([{"to": "ann"}])
    calls: Counter[str] = Counter()

    def count(frame, event, _argument):
        if event == "call":
            calls[frame.f_code.co_filename.rpartition("/")[2]] += 1

    sys.setprofile(count)
    try:
        await send_mail.enqueue_many([{"to": "ann", "text": "hi"}] * 500)
    finally:
        sys.setprofile(None)
    assert calls["inspect.py"] < 50
    assert sum(calls.values()) < 500 * 12


async def test_settings_out_of_bounds_are_refused(jobs, registry):
    registry.task("q", slots=(2, 40))(handle)
    before = await jobs.queues.settings("q")
    for changes in (
        {"importance": 10},
        {"retries": 1.5},
        {"slots_min": True},
        {"slots_min": 41},
        {"slots_max": 1},
        {"paused": None},
        {"colour": 1},
    ):
        with pytest.raises(InvalidSetting) as caught:
            await jobs.queues.set("q", **{"retries": 1, **changes})
        assert caught.value.problems[0].pointer in {f"/{name}" for name in [*changes, "slots_min"]}
        assert await jobs.queues.settings("q") == before
    with pytest.raises(QueueUnknown, match=r"queues set NAME --create.*\?create=true"):
        await jobs.queues.set("nobody", retries=1)


async def test_a_queue_without_code_takes_payloads_with_references(jobs, registry):
    people = registry.queue("people")
    first = await people.enqueue({"photo": 1}, unique="photo:1")
    second = await people.enqueue({"after": first, "all": [first]})
    assert (await second.job()).payload == {"after": first.id, "all": [first.id]}
    assert list(registry) == []


async def test_queues_are_declared_once_by_enqueues_at_once(postgres, registry):
    registry.task("a")(handle)
    queues = Counted(postgres, registry, Lanes(postgres, registry.declared))
    queues.fails = True
    answers = await asyncio.gather(
        *(queues.ids(rows_of("a")) for _ in range(5)), return_exceptions=True
    )
    assert {type(answer) for answer in answers} == {LimiterFixed}
    queues.fails, queues.declared = False, 0
    waiting = [asyncio.create_task(queues.ids(rows_of("a"))) for _ in range(50)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    registry.task("b")(handle)
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(answers[0], asyncio.CancelledError)
    assert answers[1:] == [answers[1]] * 49
    assert queues.declared == 1
    assert await queues.ids(rows_of("b")) != answers[1], "a queue added meanwhile is found"
    assert queues.declared == 2


async def test_payloads_have_the_fields_of_the_handler(jobs, registry, sql):
    @registry.task("mail")
    async def send_mail(to: str, *, text: str = "") -> None: ...

    for payload, text in (
        (
            {"to": "ann", "txt": "hi"},
            "unknown field 'txt' .did you mean 'text'.*takes: to, text .opt",
        ),
        ({"to": "ann", "after": 5}, "unknown field 'after' .did you mean the option 'after_s'"),
        ({"to": "ann", "delay": 5}, "unknown field 'delay' .did you mean the option 'after_s'"),
        ({"to": "ann", "countdown": 5}, "the option 'after_s'"),
        ({"to": "ann", "eta": "noon"}, "the option 'at'"),
        ({"to": "ann", "retry": 5}, "the option 'retries'"),
        ({"text": "hi"}, "missing field 'to'"),
        ({"too": "ann"}, "unknown field 'too' .*, missing field 'to'"),
        ({"to": "ann", 5: "hi"}, "unknown field '5'"),
        ({}, "missing field 'to'"),
    ):
        with pytest.raises(InvalidTask, match=text):
            await send_mail.enqueue_many([{"to": "ann"}, payload])
    text = r"its fields 'after' \(did you mean the option 'after_s'\?\), not both"
    with pytest.raises(InvalidTask, match=text):
        await send_mail.enqueue("ann", after=5)
    assert await sql("SELECT FROM headrace.job_ready") == []


def test_names_that_are_free_and_words_of_other_libraries(registry):
    assert Task(queue="q", handler=lambda payload, version, group: None).takes_fields

    async def take(lane: dict): ...

    assert Task(queue="q", handler=take).job({"at": 1}).payload == {"at": 1}
    for call, text in (
        (registry.task, r'write @app.task\("name"\)'),
        (registry.cron, "write @app"),
    ):
        with pytest.raises(InvalidTask, match=text):
            call(handle)
    task = registry.task("q")(handle)
    for name in ("delay", "apply_async"):
        with pytest.raises(AttributeError, match=rf"no {name}: .*task.enqueue.*from-celery.md"):
            getattr(task, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = task.nothing

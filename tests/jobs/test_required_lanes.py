"""Jobs without a lane: refused by a queue that needs one, whichever process declared it last."""

from __future__ import annotations

import pytest

from headrace.jobs import Jobs, NewGroup, NewJob, Registry
from headrace.jobs.errors import InvalidJob, InvalidTask


async def handle():
    pass


async def test_a_task_with_a_limiter_refuses_jobs_without_a_lane(jobs, registry, sql):
    registry.limiter("smtp", rate="5/m")

    @registry.task("mail", limiter="smtp")
    async def send_mail(to: str) -> None: ...

    registry.queue("done")
    text = "/1/lane: queue 'mail' has limiter 'smtp', which limits only jobs with a lane"
    good = send_mail.job(to="ann", lane="smtp")
    with pytest.raises(InvalidJob, match=text):
        await send_mail.enqueue_many([good, send_mail.job(to="bob")])
    with pytest.raises(InvalidJob, match="/0/lane"):
        await send_mail.enqueue(to="ann")
    with pytest.raises(InvalidJob, match="/1/lane"):
        await jobs.enqueue_groups(
            [NewGroup(members=[good, send_mail.job(to="bob")], on_done=NewJob(queue="done"))]
        )
    assert (
        await sql("SELECT id FROM headrace.job_ready UNION SELECT id FROM headrace.lane_job") == []
    )
    await send_mail.enqueue(to="ann", lane="smtp")
    assert (await jobs.queues.get("mail")).needs_lane


async def test_an_app_without_the_code_is_refused_as_well(jobs, registry, postgres, config):
    registry.task("mail", lane="required")(handle)
    await jobs.queues.declare()
    elsewhere = Jobs(postgres, config, Registry())
    with pytest.raises(InvalidJob, match="/0/lane"):
        await elsewhere.enqueue(NewJob(queue="mail", payload={}))
    await elsewhere.enqueue(NewJob(queue="mail", payload={}, lane="a"))


async def test_a_new_limiter_refuses_jobs_without_a_lane_from_the_first_call(
    jobs, registry, postgres, config, sql
):
    old_registry = Registry()
    old_registry.task("mail")(handle)
    old = Jobs(postgres, config, old_registry)
    await old.enqueue(NewJob(queue="mail"))
    registry.limiter("smtp", rate="5/m")
    registry.queue("done")

    @registry.task("mail", limiter="smtp")
    async def send_mail(to: str) -> None: ...

    async def check_refused():
        bad = send_mail.job(to="ann")
        with pytest.raises(InvalidJob, match="/0/lane: queue 'mail' has limiter 'smtp'"):
            await send_mail.enqueue(to="ann")
        with pytest.raises(InvalidJob, match="/0/lane"):
            await send_mail.enqueue_many([bad])
        with pytest.raises(InvalidJob, match="/0/lane"):
            await jobs.enqueue_groups([NewGroup(members=[bad], on_done=NewJob(queue="done"))])

    await check_refused()
    # Old code starts again, and its declaration is the last.
    old = Jobs(postgres, config, old_registry)
    await old.enqueue(NewJob(queue="mail"))
    await check_refused()
    assert len(await sql("SELECT id FROM headrace.job_ready")) == 2


async def test_a_task_declared_after_the_first_enqueue_has_its_limiter(
    jobs, registry, postgres, config
):
    old_registry = Registry()
    old_registry.task("mail")(handle)
    await Jobs(postgres, config, old_registry).enqueue(NewJob(queue="mail"))
    registry.task("first")(handle)
    await jobs.enqueue(NewJob(queue="first"))

    @registry.task("mail", limiter="smtp")
    async def send_mail(to: str) -> None: ...

    with pytest.raises(InvalidJob, match="/0/lane: queue 'mail' has limiter 'smtp'"):
        await send_mail.enqueue(to="ann")
    await send_mail.enqueue(to="ann", lane="a")
    assert (await jobs.queues.get("mail")).limiter == "smtp"


async def test_a_lane_may_be_optional(jobs, registry):
    @registry.task("mail", limiter="smtp", lane="optional")
    async def send_mail(to: str) -> None: ...

    await send_mail.enqueue(to="ann")
    with pytest.raises(InvalidTask, match="lane: expected 'required' or 'optional', got 'smtp'"):
        registry.task("other", lane="smtp")(handle)
    with pytest.raises(InvalidTask, match="its jobs have no lane"):
        registry.cron("0 4 * * *", name="nightly", limiter="smtp")(handle)
    registry.cron("0 4 * * *", name="nightly", limiter="smtp", lane="optional")(handle)

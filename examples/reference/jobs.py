"""Examples of jobs, queues, lanes, workflows, crons and the fleet."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec

from headrace import Headrace
from headrace.jobs import JobContext, JobFilter, NewCron, NewGroup, NewJob, TakenOutcome
from headrace.testing import drain

app = Headrace()
app.limiter("smtp", rate="1000/m")
app.queue("moderation", decisions=["approve", "reject"])


class Mail(msgspec.Struct):
    """A payload; dataclasses and pydantic models work, too."""

    to: str
    text: str = ""


@app.task("all-sent")
async def all_sent(group: dict) -> None:
    """The callback of a group; `group` has its id and its counts by outcome."""


@app.task("mail", keep_result=True, limiter="smtp", lane="optional")
async def send_mail(mail: Mail) -> str:
    """Send one mail."""
    return f"sent to {mail.to}"


#: context.progress
@app.task("report")
async def make_report(job: JobContext[dict]) -> None:
    """Report progress while pages are made."""
    for page in range(10):
        job.progress(page / 10, f"page {page}")


#: context.retry
@app.task("upload")
async def upload(job: JobContext[dict]) -> None:
    """Try again in a minute while the other side is closed."""
    if job.payload.get("is_closed"):
        job.retry(after_s=60, why="closed")


#: context.snooze
@app.task("wait")
async def wait_for_file(job: JobContext[dict]) -> None:
    """Look again in 30 seconds; no attempt is counted."""
    job.snooze(30)


#: context.fail
@app.task("charge")
async def charge(job: JobContext[dict]) -> None:
    """Fail for good: no retry would help."""
    job.fail("the card was refused")


#: context.cancel
@app.task("remind")
async def remind(job: JobContext[dict]) -> None:
    """Cancel a reminder that nobody needs."""
    job.cancel("already paid")


#: context.done
@app.task("measure", keep_result=True)
async def measure(job: JobContext[dict]) -> None:
    """Set the result explicitly."""
    job.done({"width": 640})


#: context.send_to
@app.task("sort")
async def sort(job: JobContext[dict]) -> None:
    """Leave large files to the queue of another machine."""
    job.send_to("report")


#: context.lane.spend
@app.task("crawl", limiter="smtp")
async def crawl(job: JobContext[dict]) -> None:
    """Take one token of the lane's rate for each further request."""
    await job.lane.spend()


#: context.lane.spend_blocking
@app.task("crawl-sync", limiter="smtp")
def crawl_sync(job: JobContext[dict]) -> None:
    """The same in a sync handler."""
    job.lane.spend_blocking()


#: -
def charge_card(number: int) -> str:
    """Charge a card, once."""
    return f"charge {number}"


#: workflow_context.step
@app.workflow("order")
async def order(ctx, number: int) -> str:
    """A step runs once, whatever crashes afterwards."""
    return await ctx.step("charge", charge_card, number, retries=3)


#: workflow_context.sleep
@app.workflow("trial")
async def trial(ctx, user: int) -> None:
    """Wait for two weeks without a slot."""
    await ctx.sleep("trial", 14 * 86_400)


#: workflow_context.wait_event
@app.workflow("delivery")
async def delivery(ctx, number: int) -> str:
    """Wait for an event; another process sends it."""
    paid = await ctx.wait_event("paid", f"order:{number}", timeout_s=3_600)
    return paid["by"]


#: workflow_context.run
@app.workflow("welcome")
async def welcome(ctx, name: str) -> str:
    """Run a job and continue with its result."""
    return await ctx.run("mail", send_mail.job(Mail(to=name)))


#: workflow_context.run_all
@app.workflow("newsletter")
async def newsletter(ctx, names: list[str]) -> int:
    """Run many jobs and wait for all of them."""
    mails = [send_mail.job(Mail(to=name)) for name in names]
    return len(await ctx.run_all("mails", mails))


#: workflow.older
@app.workflow("refund", version=2)
async def refund(ctx, number: int) -> None:
    """The code for workflows that begin now."""


@refund.older(1)
async def refund_1(ctx, number: int) -> None:
    """The code for workflows that began before the change."""


#: -
async def main() -> None:
    """Every call, in an order that works."""
    await tasks_and_jobs()
    await queues_and_lanes()
    await others()
    await app.close()


async def tasks_and_jobs() -> None:
    """Tasks, handles and `app.jobs`."""
    #: task.enqueue
    job = await send_mail.enqueue(Mail(to="ann"), unique="ann", after_s=60)
    #: task.enqueue_many
    jobs = await send_mail.enqueue_many([Mail(to="bob"), Mail(to="carol")], lane="example.com")
    #: task.job
    later = send_mail.job(Mail(to="dan"), priority=5)
    await app.jobs.enqueue(later)
    #: job.why
    print((await job.why()).text)
    #: job.job
    print((await job.job()).run_at)
    #: job.cancel
    is_cancelled = await job.cancel()
    #: -
    assert is_cancelled
    await drain(app)
    #: job.result
    text = await jobs[0].result(timeout_s=30)
    #: -
    assert text == "sent to bob"
    #: queue.enqueue
    moderation = app.queue("photos-to-check")
    await moderation.enqueue({"photo": 7})
    #: workflow.enqueue
    await order.enqueue(number=7, unique="order:7")
    #: app.jobs.enqueue
    job_id = await app.jobs.enqueue(NewJob(queue="mail", payload={"to": "eve"}))
    #: app.jobs.enqueue_many
    mails = [NewJob(queue="mail", payload={"to": name}) for name in ("f", "g")]
    ids = await app.jobs.enqueue_many(mails)
    #: app.jobs.enqueue_groups
    last = NewJob(queue="all-sent", payload={})
    await app.jobs.enqueue_groups([NewGroup(members=mails, on_done=last)])
    #: app.jobs.group
    async with app.jobs.group(on_done=last, keep_results=True) as group:
        await app.jobs.enqueue_many(mails, group=group)
    #: app.jobs.job
    state = (await app.jobs.job(job_id)).state
    #: app.jobs.why
    reason = (await app.jobs.why(job_id)).text
    #: app.jobs.find
    page = await app.jobs.find(queue="mail", state="ready", jobs_max=20)
    #: app.jobs.edit
    await app.jobs.edit(job_id, priority=9, after_s=0)
    #: app.jobs.cancel
    await app.jobs.cancel(job_id)
    #: app.jobs.retry
    await app.jobs.retry(job_id)
    #: -
    await app.jobs.cancel(ids[0])
    #: app.jobs.delete
    await app.jobs.delete(ids[0])
    #: app.jobs.bulk
    done = await app.jobs.bulk("cancel", JobFilter(queue="mail", state="ready"), dry_run=True)
    print(done.matched)
    #: -
    await drain(app)
    #: app.jobs.result
    result = await app.jobs.result(job_id, timeout_s=30)
    #: app.jobs.group_results
    results = await app.jobs.group_results(group.id)
    #: -
    assert (state, result) == ("ready", "sent to eve")
    assert reason
    assert page.jobs
    assert [one.result for one in results] == ["sent to f", "sent to g"]


async def queues_and_lanes() -> None:
    """`app.jobs.queues`, `lanes` and `takes`."""
    #: app.jobs.queues.all
    for queue in await app.jobs.queues.all():
        print(queue.queue, queue.ready, queue.failed)
    #: app.jobs.queues.get
    waiting = (await app.jobs.queues.get("mail")).ready
    #: app.jobs.queues.create
    await app.jobs.queues.create("calls")
    #: app.jobs.queues.set
    await app.jobs.queues.set("mail", importance=9, slots_max=4)
    #: app.jobs.queues.settings
    importance = (await app.jobs.queues.settings("mail")).importance
    #: app.jobs.queues.pause
    await app.jobs.queues.pause("mail")
    #: app.jobs.queues.resume
    await app.jobs.queues.resume("mail")
    #: app.jobs.queues.minutes
    for minute in await app.jobs.queues.minutes("mail"):
        print(minute.minute, minute.done, minute.wait_max_s)
    #: app.jobs.queues.hours
    yesterday = datetime.now(UTC) - timedelta(days=1)
    hours = await app.jobs.queues.hours("mail", from_at=yesterday)
    #: app.jobs.lanes.set
    await app.jobs.lanes.set(
        "smtp", "example.com", starts_max=60, window_s=60, concurrency=2, weight=3
    )
    #: app.jobs.lanes.get
    lane = await app.jobs.lanes.get("smtp", "example.com")
    #: app.jobs.lanes.list
    names = [lane.lane for lane in await app.jobs.lanes.list("smtp")]
    #: app.jobs.lanes.pause
    await app.jobs.lanes.pause("smtp", "example.com")
    #: app.jobs.lanes.resume
    await app.jobs.lanes.resume("smtp", "example.com")
    #: app.jobs.lanes.spend
    wait_s = await app.jobs.lanes.spend("smtp", "example.com", wait_max_s=1)
    #: app.jobs.lanes.reset
    await app.jobs.lanes.reset("smtp", "example.com")
    #: app.jobs.lanes.limiters
    limiters = [limiter.limiter for limiter in await app.jobs.lanes.limiters()]
    #: app.jobs.lanes.set_limiter
    await app.jobs.lanes.set_limiter("smtp", starts_max=500, window_s=60)
    #: app.jobs.lanes.get_limiter
    starts_max = (await app.jobs.lanes.get_limiter("smtp")).starts_max
    #: app.jobs.lanes.reset_limiter
    await app.jobs.lanes.reset_limiter("smtp")
    #: -
    assert (waiting, importance) == (0, 9)
    assert hours is not None
    assert (lane.starts_max, names, starts_max) == (60, ["example.com"], 500)
    assert wait_s is not None
    assert "smtp" in limiters
    await app.jobs.enqueue_many([NewJob(queue="moderation", payload=n) for n in range(2)])
    #: app.jobs.takes.take
    taken = await app.jobs.takes.take("moderation", 2, lease_s=600)
    #: app.jobs.takes.extend
    await app.jobs.takes.extend(taken.lease_id, 600)
    #: app.jobs.takes.ack
    first, second = taken.jobs
    approved, returned = TakenOutcome(decision="approve"), TakenOutcome(outcome="return")
    await app.jobs.takes.ack(taken.lease_id, {first.id: approved, second.id: returned})


async def others() -> None:
    """Crons, the fleet and workflows."""
    #: app.jobs.crons.add
    cron = NewCron(name="digest", spec="0 7 * * 1", queue="mail", payload={"to": "all"})
    await app.jobs.crons.add(cron)
    #: app.jobs.crons.change
    await app.jobs.crons.change("digest", spec="0 8 * * 1", tz="Europe/Berlin")
    #: app.jobs.crons.get
    next_at = (await app.jobs.crons.get("digest")).next_at
    #: app.jobs.crons.all
    names = [cron.name for cron in await app.jobs.crons.all()]
    #: app.jobs.crons.run
    job_id = await app.jobs.crons.run("digest")
    #: app.jobs.crons.pause
    await app.jobs.crons.pause("digest")
    #: app.jobs.crons.resume
    await app.jobs.crons.resume("digest")
    #: app.jobs.crons.remove
    await app.jobs.crons.remove("digest")
    #: -
    assert next_at
    assert names == ["digest"]
    assert job_id
    #: app.jobs.fleet.state
    for host in (await app.jobs.fleet.state()).hosts:
        print(host)
    #: app.jobs.fleet.load
    load = await app.jobs.fleet.load()
    #: app.jobs.fleet.alerts
    alerts = await app.jobs.fleet.alerts(is_open=True)
    #: app.jobs.fleet.decisions
    decisions = await app.jobs.fleet.decisions(decisions_max=10)
    #: app.jobs.fleet.failures
    failures = await app.jobs.fleet.failures()
    #: -
    assert load
    assert (alerts, decisions, failures) == ([], [], [])
    #: app.workflows.start
    workflow_id = await app.workflows.start("delivery", {"number": 7}, unique="delivery:7")
    #: -
    await drain(app)
    #: app.workflows.send_event
    await app.workflows.send_event("paid", "order:7", {"by": "ann"})
    #: -
    await drain(app)
    #: app.workflows.get
    run = await app.workflows.get(workflow_id)
    print(run.state, run.result, [step.name for step in run.steps])
    #: -
    assert run.result == "ann", run
    #: app.workflows.find
    page = await app.workflows.find("delivery", workflows_max=10)
    #: app.workflows.names
    print([status.queue for status in await app.workflows.names()])
    #: -
    assert page is not None
    trial_id = await app.workflows.start("trial", {"user": 8})
    await drain(app)
    #: app.workflows.cancel
    still_running = await app.workflows.cancel(trial_id)
    #: -
    assert still_running == []

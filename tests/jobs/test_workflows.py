"""Workflows: steps are recorded once, in order, and a run continues after the last recorded one."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from tests.kit.processes import wait_until
from tests.kit.waiting import wait_true

from headrace.engines.sql import compile_query
from headrace.jobs import (
    EventLate,
    Fail,
    InvalidTask,
    JobContext,
    JobNotWaiting,
    StepFailed,
    store,
)
from headrace.jobs.errors import InvalidStep, LeaseLost, WorkflowUnknown
from headrace.jobs.handle import Bridge


@pytest.fixture
def calls():
    """Names of the step functions that ran."""
    return []


@pytest.fixture
def act(calls):
    """`act("charge", 7)`: note the call and return 7."""

    async def function(name, value=None):
        calls.append(name)
        await asyncio.sleep(0)
        return value

    return function


async def test_steps_jobs_events_and_sleeps_in_one_workflow(
    *, registry, jobs, working, calls, act, wait_state
):
    @registry.task("mail", keep_result=True)
    async def mail(to: str):
        calls.append(f"mail {to}")
        return f"sent to {to}"

    @registry.workflow("checkout")
    async def checkout(ctx, order_id: int):
        paid = await ctx.step("charge", act, "charge", {"order": order_id})
        await ctx.sleep("cool down", 0.05)
        shipped = await ctx.wait_event("shipped", f"order:{order_id}", timeout_s=60)
        sent = await ctx.run("mail", mail.job(to="ann"))
        both = await asyncio.gather(
            ctx.step("one", act, "one", 1), ctx.run_all("more", [mail.job(to=n) for n in "bcd"])
        )
        return [paid, shipped, sent, *both]

    async with working():
        started = await checkout.enqueue(order_id=7)

        async def waits():
            return (await jobs.why(started)).text

        await wait_true(lambda: "charge" in calls)

        async def is_waiting():
            return "for event shipped" in await waits()

        await wait_true(is_waiting)
        why = await jobs.why(started)
        assert (why.reason, why.state) == ("workflow_waits", "scheduled")
        assert await jobs.workflows.send_event("shipped", "order:7", {"by": "post"})
        assert not await jobs.workflows.send_event("shipped", "order:7", "a second one")
        result = await started.result(timeout_s=30)
    assert result == [
        {"order": 7}, {"by": "post"}, "sent to ann", 1,
        ["sent to b", "sent to c", "sent to d"],
    ]  # fmt: skip
    assert sorted(calls) == ["charge", "mail ann", "mail b", "mail c", "mail d", "one"]
    shown = await jobs.workflows.get(started)
    assert [(step.kind, step.state) for step in shown.steps] == [
        ("step", "done"), ("sleep", "done"), ("event", "done"), ("jobs", "done"),
        ("step", "done"), ("jobs", "done"),
    ]  # fmt: skip
    assert (shown.workflow, shown.state, shown.result) == ("checkout", "done", result)


async def test_a_plain_handler_has_the_same_calls(registry, jobs, postgres, working, calls):
    bridge = Bridge(jobs, postgres.close)
    registry.bind(lambda: jobs, sync=lambda: bridge)

    @registry.task("double", keep_result=True)
    def double(n: int):
        return 2 * n

    @registry.workflow("sums")
    def sums(ctx, n: int):
        one = ctx.step("one", lambda: calls.append("one") or n)
        ctx.sleep("a little", 0.05)
        two = ctx.run("two", double.job(n=one))
        return ctx.wait_event("last", 1) + two

    async with working():
        started = await sums.enqueue(n=4)
        await wait_true(lambda: calls)
        await jobs.workflows.send_event("last", 1, 100)
        assert await started.result(timeout_s=30) == 108
    bridge.close()
    assert calls == ["one"]


async def test_a_step_that_raises_is_repeated_alone(registry, jobs, working, calls, act):
    @registry.workflow("flaky", retries=3)
    async def flaky(ctx):
        await ctx.step("first", act, "first")

        async def third_time():
            calls.append("second")
            if len(calls) < 4:
                raise ValueError("not yet")
            return len(calls)

        return await ctx.step("second", third_time)

    async with working():
        assert await (await flaky.enqueue()).result(timeout_s=30) == 4
    assert calls == ["first", "second", "second", "second"]


async def test_a_failed_step_can_be_caught_and_the_same_way_is_replayed(
    *, registry, jobs, working, calls, act
):
    @registry.workflow("saga")
    async def saga(ctx):
        async def declined():
            calls.append("charge")
            raise Fail("declined")

        try:
            await ctx.step("charge", declined)
        except StepFailed as error:
            await ctx.step("release", act, "release")
            await ctx.sleep("replayed after this", 0.02)
            return error.error

    async with working():
        assert await (await saga.enqueue()).result(timeout_s=30) == "declined"
    assert calls == ["charge", "release"]


async def test_a_retry_of_a_failed_workflow_repeats_the_failed_step_only(
    *, registry, jobs, working, calls, act, wait_state
):
    is_broken = [True]

    @registry.workflow("order")
    async def order(ctx):
        await ctx.step("first", act, "first")

        async def second():
            calls.append("second")
            if is_broken[0]:
                raise ConnectionError("down")

        await ctx.step("second", second, retries=1)
        return "done"

    async with working():
        started = await order.enqueue()
        job = await wait_state(started, "failed")
        assert "step 'second' failed: ConnectionError: down" in job.error
        is_broken[0] = False
        await jobs.retry(started)
        assert await started.result(timeout_s=30) == "done"
    assert calls == ["first", "second", "second", "second"]


async def test_an_event_that_is_late_and_jobs_that_fail(registry, jobs, working):
    @registry.task("bad", retries=0)
    async def bad():
        raise Fail("no")

    @registry.workflow("late")
    async def late(ctx):
        try:
            await ctx.wait_event("never", "k", timeout_s=0.05)
        except EventLate as error:
            text = str(error)
        errors = await ctx.run_all("jobs", [bad.job(), bad.job()], return_errors=True)
        return [text, [error.error for error in errors]]

    async with working():
        text, errors = await (await late.enqueue()).result(timeout_s=30)
    assert "was not sent in time" in text
    assert all("ended failed: no" in error for error in errors)
    assert len(errors) == 2


async def test_changed_code_is_quarantined_before_it_acts(
    *, registry, jobs, working, calls, act, wait_state
):
    names = ["one", "two", "three"]

    @registry.workflow("changed")
    async def changed(ctx):
        for name in names:
            await ctx.step(name, act, name)
        await ctx.wait_event("go", ctx.id)

    async with working():
        started = await changed.enqueue()
        await wait_state(started, "scheduled")
        names[:] = ["one", "three", "two"]
        await jobs.workflows.send_event("go", started)
        job = await wait_state(started, "quarantined")
        assert "step 2 was recorded as step 'two' and is now step 'three'" in job.error
        assert calls == ["one", "two", "three"]
        names[:] = ["one", "two"]
        await jobs.retry(started)
        await wait_state(started, "quarantined")
        names[:] = ["one", "two", "three"]
        await jobs.retry(started)
        await started.result(timeout_s=30)
    assert calls == ["one", "two", "three"]


async def test_a_workflow_runs_with_the_version_that_it_began_with(
    *, registry, jobs, working, calls, wait_state
):
    @registry.workflow("versions", version=3)
    async def newest(ctx, a: int, b: int):
        return ["three", a + b]

    @newest.older(1)
    async def oldest(ctx, n: int):
        return ["one", n]

    old = await jobs.workflows.start("versions", {"n": 1}, version=1)
    lost = await jobs.workflows.start("versions", {"n": 1}, version=2)
    new = await newest.enqueue(a=1, b=2)
    async with working():
        assert await jobs.result(old, timeout_s=30) == ["one", 1]
        assert await new.result(timeout_s=30) == ["three", 3]

        async def why():
            return "version 2, this code has 1, 3" in (await jobs.why(lost)).text

        await wait_true(why)
    assert (await jobs.job(lost)).state == "scheduled"


async def test_a_stale_run_records_nothing(registry, postgres, sql, working):
    """The lease ends while a step's function runs: its result is refused."""
    refused = []

    @registry.workflow("stale")
    async def stale(ctx):
        async def slow():
            await sql(f"DELETE FROM headrace.job_lease WHERE id = {ctx.job.lease_id} RETURNING id")
            return 1

        try:
            await ctx.step("slow", slow)
        except LeaseLost as error:
            refused.append(error)
        await ctx.step("next", list)

    async with working():
        started = await stale.enqueue()
        await wait_true(lambda: refused)
    assert await store.workflows.steps(postgres, started) == []


async def test_effects_in_a_transaction_commit_with_the_record(
    *, registry, jobs, postgres, sql, working, calls
):
    await sql("CREATE TABLE charge (n integer)")
    insert = compile_query("insert", "-- Insert a charge.\nINSERT INTO charge VALUES (1)")

    @registry.workflow("charges", retries=3)
    async def charges(ctx):
        async def charge(tx):
            await tx.run(insert)
            calls.append("charge")

        async with postgres.transaction() as tx:
            await ctx.step("charge", charge, tx, tx=tx)
            if len(calls) == 1:
                raise ConnectionError("before the commit")
        return len(await sql("SELECT n FROM charge"))

    async with working():
        assert await (await charges.enqueue()).result(timeout_s=30) == 1
    assert calls == ["charge", "charge"], "neither the effect nor the record was committed at first"


async def test_an_event_of_an_open_transaction_is_found(registry, jobs, postgres, working, calls):
    @registry.workflow("paid")
    async def paid(ctx):
        calls.append("run")
        return await ctx.wait_event("paid", 1)

    async with working():
        async with postgres.transaction() as tx:
            await jobs.workflows.send_event("paid", 1, "soon", tx=tx)
            started = await paid.enqueue()
            await wait_true(lambda: len(calls) > 1, what="it looks again after a second")
        assert await started.result(timeout_s=30) == "soon"


async def test_many_workflows_and_their_events_at_once(registry, jobs, working):
    """Events and parks meet in every order; no wake-up is lost."""

    @registry.workflow("herd", concurrency=20)
    async def herd(ctx, n: int):
        return await ctx.wait_event("go", n) + await ctx.wait_event("more", n)

    async with working():
        started = await herd.enqueue_many([{"n": n} for n in range(60)])
        sends = [
            jobs.workflows.send_event(name, n, n) for n in range(60) for name in ("go", "more")
        ]
        await asyncio.gather(*sends)
        results = await asyncio.gather(*[one.result(timeout_s=30) for one in started])
    assert results == [2 * n for n in range(60)]


async def test_a_tree_is_cancelled(registry, jobs, working, wait_state, sql):
    begun = asyncio.Event()
    go_on = asyncio.Event()

    @registry.task("leaf")
    async def leaf(): ...

    @registry.workflow("child")
    async def child(ctx):
        await ctx.run("leaf", leaf.job(after_s=3600))

    @registry.workflow("parent")
    async def parent(ctx):
        async def slow():
            begun.set()
            await go_on.wait()

        await asyncio.gather(ctx.run("child", child.job()), ctx.step("slow", slow))
        await ctx.step("never", list)

    async with working():
        started = await parent.enqueue()
        await begun.wait()

        async def has_child():
            steps = (await jobs.workflows.get(started)).steps
            return steps and steps[0].jobs

        await wait_true(has_child)
        children = [child for step in (await jobs.workflows.get(started)).steps
                    for child in step.jobs]  # fmt: skip
        await wait_state(children[0], "scheduled")
        assert await jobs.workflows.cancel(started) == [started]
        go_on.set()
        await wait_state(started, "cancelled")
        await wait_state(children[0], "cancelled")
    leaves = await sql("SELECT state FROM headrace.job_failed")
    assert [row["state"] for row in leaves] == ["cancelled"] * 3
    assert [step.name for step in (await jobs.workflows.get(started)).steps] == ["child"]


async def test_a_running_job_is_cancelled(registry, jobs, working, wait_state):
    begun, seen = [], []

    @registry.task("waits")
    async def waits(job: JobContext[dict]):
        begun.append(job.id)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cleaned up")
            raise

    @registry.task("looks")
    def looks(job: JobContext[dict]):
        begun.append(job.id)
        wait_until(lambda: job.is_cancelled, what="it is cancelled")
        seen.append("looked")

    async with working():
        ids = [await waits.enqueue({}), await looks.enqueue({})]
        await wait_true(lambda: len(begun) == 2)
        for job_id in ids:
            with pytest.raises(JobNotWaiting, match=f"jobs cancel {job_id} --running"):
                await jobs.cancel(job_id)
            assert await jobs.cancel(job_id, running=True) is False, "it is requested"
        await wait_state(ids[0], "cancelled")
        await wait_state(ids[1], "gone")
        assert sorted(seen) == ["cleaned up", "looked"]
        await jobs.retry(ids[0])
        await wait_true(lambda: len(begun) == 3, what="a retry forgets the cancellation")
        await jobs.cancel(ids[0], running=True)
        await wait_state(ids[0], "cancelled")
    await jobs.sweep()
    minutes = await jobs.queues.minutes("waits")
    assert sum(minute.cancelled for minute in minutes) == 2
    assert sum(minute.failed for minute in minutes) == 0


async def test_results_of_group_members_reach_the_callback(registry, jobs, working):
    received = []

    @registry.task("part", keep_result=True, retries=0)
    async def part(n: int):
        if n == 2:
            raise Fail("two")
        return n * n

    @registry.task("sum")
    async def total(job: dict):
        received.extend(await jobs.group_results(job["group"]["id"]))

    async with working():
        async with jobs.group(on_done=total.job(), keep_results=True) as group:
            await part.enqueue_many([{"n": n} for n in (1, 2, 3)], group=group)
        await wait_true(lambda: received)
    found = [(one.state, one.result, one.error) for one in received]
    assert found == [("done", 1, None), ("failed", None, "two"), ("done", 9, None)]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda ctx: ctx.step("x" * 129, list), "1 to 128 printable characters"),
        (lambda ctx: ctx.step("a\0b", list), "1 to 128 printable characters"),
        (lambda ctx: ctx.sleep("s", -1), "seconds from 0"),
        (lambda ctx: ctx.sleep("s", float("nan")), "seconds from 0"),
        (lambda ctx: ctx.sleep("s", datetime.now(UTC) + timedelta(days=999)), "seconds from 0"),
        (lambda ctx: ctx.wait_event("e", "k", timeout_s=-1), "seconds from 0"),
        (lambda ctx: ctx.wait_event("e", ""), "an event's key"),
        (lambda ctx: ctx.step("big", lambda: "x" * 70_000), "at most 65536"),
        (lambda ctx: ctx.step("odd", object), "expected a JSON value"),
        (lambda ctx: ctx.step("odd", lambda: float("nan")), "expected a JSON value"),
        (lambda ctx: ctx.step("odd", lambda: {"a": [None, float("inf")]}), "a JSON value"),
        (lambda ctx: ctx.run("none", "mail"), "expected jobs such as task.job"),
        (lambda ctx: ctx.run_all("none", []), "expected 1 to 5000 jobs"),
        (lambda ctx: ctx.step("outer", lambda: ctx.step("inner", list)), "function of step"),
        (lambda ctx: ctx.step("first", list), "is called twice"),
    ],
)
async def test_a_wrong_call_fails_the_workflow_with_its_reason(
    registry, working, wait_state, call, text
):
    @registry.workflow("wrong")
    async def wrong(ctx):
        await ctx.step("first", list)
        await call(ctx)

    async with working():
        started = await wrong.enqueue()
        assert text in (await wait_state(started, "failed")).error


async def test_a_call_that_is_not_awaited_fails_the_workflow(registry, working, wait_state):
    @registry.workflow("forgets")
    async def forgets(ctx):
        await asyncio.gather(ctx.step("first", list), ctx.step("second", list))
        ctx.step("third", list)

    async with working():
        started = await forgets.enqueue()
        error = (await wait_state(started, "failed")).error
    assert "a call of ctx.step was not awaited" in error


async def test_wrong_events_and_names_are_refused(jobs, registry):
    for name, key, payload in (
        ("n" * 129, 1, None), ("n", "a\0", None), ("", 1, None), ("n", 1, "\0"),
        ("n", 1, object()), ("n", 1, "x" * 70_000), ("n", 1, float("nan")), ("n", None, 1),
    ):  # fmt: skip
        with pytest.raises(InvalidStep):
            await jobs.workflows.send_event(name, key, payload)
    with pytest.raises(WorkflowUnknown):
        await jobs.workflows.start("nobody")
    with pytest.raises(WorkflowUnknown):
        await jobs.workflows.find("a\0b")
    with pytest.raises(InvalidTask, match="takes the context first"):
        registry.workflow("w")(lambda: None)
    with pytest.raises(InvalidTask, match="neither batch"):
        registry.workflow("w", batch=5)(lambda ctx: None)

"""Payload versions: old payloads are upgraded, newer ones are left to newer code."""

from __future__ import annotations

import msgspec
import pytest
from tests.kit.waiting import wait_true

from headrace.jobs import Batch, InvalidJob, NewJob, Registry
from headrace.jobs.errors import PayloadNewer
from headrace.jobs.messages import Ack, Work
from headrace.jobs.model import JobsConfig
from headrace.jobs.slots.runner import SlotRunner


class Mail(msgspec.Struct):
    """The current version."""

    to: list[str]
    text: str


def split_receivers(old):
    return {"to": old["to"].split(","), "body": old["body"]}


def rename_body(old):
    return {"to": old["to"], "text": old["body"]}


UPGRADE = {1: split_receivers, 3: rename_body}
PAYLOADS = {
    1: {"to": "ann,bob", "body": "hi"},
    2: {"to": ["ann", "bob"], "body": "hi"},
    3: {"to": ["ann", "bob"], "body": "hi"},
    4: {"to": ["ann", "bob"], "text": "hi"},
}
NOW = Mail(["ann", "bob"], "hi")


def declare(registry, kind):
    """Declare the task. Return it and the payloads that it received."""
    seen = []
    options = {"version": 4, "upgrade": UPGRADE}
    if kind == "batch":

        @registry.task("q", batch=10, **options)
        async def handle(batch: Batch[Mail]):
            seen.extend(batch.payloads)

    elif kind == "payload":

        @registry.task("q", **options)
        async def handle(mail: Mail):
            seen.append(mail)

    else:

        @registry.task("q", **options)
        async def handle(to: list[str], text: str):
            seen.append(Mail(to, text))

    return handle, seen


@pytest.mark.parametrize("kind", ["batch", "payload", "fields"])
async def test_old_payloads_are_upgraded_and_newer_ones_handed_back(kind):
    registry, said = Registry(), []
    _, seen = declare(registry, kind)
    slot = SlotRunner(registry, send=said.append, config=JobsConfig())
    await slot.start()
    payloads = [msgspec.json.encode(PAYLOADS[version]) for version in (1, 2, 3, 4)]
    broken = [b'{"body":"hi"}', b'{"of":"tomorrow"}', b'{"of":"today"}']
    slot.give(
        Work(
            queue="q",
            lease_id=1,
            ids=list(range(1, 8)),
            payloads=[*payloads, *broken],
            attempts=[0] * 7,
            losses=[0] * 7,
            lanes=[None] * 7,
            traceparents=[None] * 7,
            versions=[1, 2, 3, 4, 1, 5, 4],
            retries=5,
        )
    )
    await wait_true(lambda: slot.jobs_open == 0)
    await slot.stop(1.0)
    ack = [message for message in said if isinstance(message, Ack)]
    kinds = {id_: kind for one in ack for id_, kind in zip(one.ids, one.kinds, strict=True)}
    delays = {id_: s for one in ack for id_, s in zip(one.ids, one.delays_s, strict=True)}
    assert kinds == {
        **dict.fromkeys((1, 2, 3, 4), "done"),
        5: "retry",
        6: "snooze",
        7: "fail",
    }
    assert delays[6] == 15.0
    assert seen == [NOW] * 4


def test_a_newer_payload_is_told_as_such():
    handle, _ = declare(Registry(), "payload")
    assert handle.decode(msgspec.json.encode(PAYLOADS[1]), 1) == NOW
    assert handle.decode(msgspec.json.encode(PAYLOADS[4]), 4) == NOW
    with pytest.raises(PayloadNewer, match="version 5, this code supports 4"):
        handle.decode(b"{}", 5)


async def test_jobs_carry_the_version_of_their_task(jobs, registry, sql):
    handle, _ = declare(registry, "payload")
    await handle.enqueue(NOW)
    await handle.enqueue(NOW, lane="a")
    await jobs.enqueue(NewJob(queue="q", payload=PAYLOADS[1]))
    rows = await sql(
        "SELECT version FROM headrace.job_ready UNION ALL SELECT version FROM headrace.lane_job"
    )
    assert sorted(row["version"] for row in rows) == [1, 4, 4]
    for version in (0, 32_768, True, "1"):
        with pytest.raises(InvalidJob, match="version: expected a whole number 1 to 32767"):
            await jobs.enqueue(NewJob(queue="q", version=version))

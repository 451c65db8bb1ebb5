"""Moderation: people take the jobs of a queue one by one and decide by key.

The page's URL names the lease and the job, so every state is a plain page. A decision is an ack;
its response leads to the next job. `photo`, `photos` and `text` of a payload are shown as such:
photos are keys of stored objects, or URLs of the media role, as the security policy of the page
allows no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode

import msgspec

from headrace.console.actions import Action, Done, Field, quoted
from headrace.console.format import path_segment
from headrace.console.model import PREFIX
from headrace.console.security import new_form_id
from headrace.console.views import ViewContext, row_id
from headrace.jobs.errors import JobUnknown
from headrace.jobs.model import Job, JobState, TakenOutcome
from headrace.kernel.errors import HeadraceError

LEASE_S: Final = 600.0
SKIP_S: Final = 600.0
PHOTOS_MAX: Final = 20
OWN_KEYS: Final = "gjks"
"""Keys of the console and of the page that no decision gets."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision and the key that presses its button."""

    decision: str
    key: str


async def view_moderation(context: ViewContext) -> dict[str, Any]:
    """The job that the URL names, while its lease lasts. Raises: QueueUnknown."""
    status = await context.jobs.queues.get(context.params["queue"])
    job_id, lease_id = context.query.number("job", 0), context.query.number("lease", 0)
    job = await _leased(context, status.queue, job_id, lease_id) if job_id else None
    payload = None if job is None else job.payload
    fields = dict(payload) if isinstance(payload, Mapping) else {"payload": payload}
    photos = _taken_photos(context, fields)
    text: Any = fields.pop("text") if isinstance(fields.get("text"), str) else ""
    return {
        "status": status,
        "job": job,
        # The job in the URL if it is not under the lease in the URL.
        "lost": 0 if job else job_id,
        "photos": photos,
        "text": text,
        "fields": [(name, _shown(value)) for name, value in fields.items()],
        "choices": choices_of(status.decisions),
        "form_id": new_form_id(),
        "command": f"headrace queues set {quoted(status.queue)} --decisions approve,reject",
        "lease_s": LEASE_S,
        "skip_s": SKIP_S,
    }


def choices_of(decisions: Iterable[str]) -> list[Choice]:
    """Each decision with the first of its letters that is free, else a digit."""
    found: list[Choice] = []
    for decision in decisions:
        used = {*OWN_KEYS, *(one.key for one in found)}
        keys = [key for key in f"{decision.lower()}123456789" if key.isalnum() and key not in used]
        found.append(Choice(decision, keys[0]))
    return found


async def _leased(context: ViewContext, queue: str, job_id: int, lease_id: int) -> Job | None:
    try:
        job = await context.jobs.job(job_id)
    except JobUnknown:
        return None
    is_held = job.state is JobState.LEASED and job.lease_id == lease_id
    return job if is_held and job.queue == queue else None


def _taken_photos(context: ViewContext, fields: dict[str, Any]) -> list[str]:
    """URLs of the photos in `fields`; fields that are shown whole as photos are removed."""
    found: list[str] = []
    for name in ("photo", "photos"):
        value = fields.get(name)
        given = value if isinstance(value, list) else [value]
        urls = [url for one in given[:PHOTOS_MAX] if (url := photo_url(context, one))]
        found += urls
        if value is not None and len(urls) == len(given):
            del fields[name]
    return found


def photo_url(context: ViewContext, value: object) -> str | None:
    """The URL of a key or URL of the media role; None for anything else."""
    origin = context.media_origin
    if not isinstance(value, str) or not origin:
        return None
    if value.startswith(f"{origin}/m/"):
        return value
    try:
        return None if "://" in value else f"{origin}{context.media.objects.target(value)}"
    except HeadraceError:
        return None


def _shown(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


async def take_job(context: ViewContext, values: dict[str, Any]) -> Done:
    """Take the next job of a queue."""
    taken = await context.jobs.takes.take(values["queue"], lease_s=LEASE_S)
    page = f"{PREFIX}/jobs/queues/{path_segment(values['queue'])}/moderate"
    if not taken.jobs:
        return Done(f"no job of queue {values['queue']} is due", page)
    given = {"lease": taken.lease_id, "job": taken.jobs[0].id}
    return Done(f"job {given['job']} is taken", f"{page}?{urlencode(given)}")


async def decide(context: ViewContext, values: dict[str, Any]) -> Done:
    """Record a decision, then take the next job."""
    outcome = TakenOutcome(decision=values["decision"], by=context.caller.name)
    return await _ack(context, values, outcome, values["decision"])


async def skip_job(context: ViewContext, values: dict[str, Any]) -> Done:
    """Put a job back for some time, then take the next one."""
    return await _ack(context, values, TakenOutcome(**SKIPPED), "skipped")


async def _ack(
    context: ViewContext, values: dict[str, Any], outcome: TakenOutcome, word: str
) -> Done:
    job_id, lease_id = row_id(values["job"]), row_id(values["lease"])
    await context.jobs.takes.ack(lease_id, {job_id: outcome})
    text = f"job {job_id}: {word}"
    try:
        following = await take_job(context, values)
    except HeadraceError as error:
        # The decision is recorded, so it is reported as done.
        return Done(f"{text}; the next job cannot be taken: {error.public_text}", "")
    return Done(f"{text}; {following.text}", following.url)


SKIPPED: Final[dict[str, Any]] = {"outcome": "snooze", "after_s": SKIP_S}
QUEUE: Final = Field("queue", "Queue", kind="fixed")
LEASED: Final = (
    QUEUE,
    Field("lease", "Lease", kind="fixed"),
    Field("job", "Job", kind="fixed"),
)
MODERATION_ACTIONS: Final[tuple[Action, ...]] = (
    Action(
        name="jobs.take_job",
        title="Take job",
        what="Leases the next job of queue {queue} to you for ten minutes.",
        command="headrace jobs take {queue} --lease 10m",
        http="POST /v1/queues/{queue}/take?lease=10m",
        fields=(QUEUE,),
        run=take_job,
        is_direct=True,
    ),
    Action(
        name="jobs.decide",
        title="Decide",
        what="Records a decision about job {job} and takes the next job of queue {queue}.",
        command="headrace jobs ack {lease} --decide {job} {decision}",
        http="POST /v1/leases/{lease}/ack",
        body=lambda values: {"outcomes": {values["job"]: {"decision": values["decision"]}}},
        fields=(*LEASED, Field("decision", "Decision")),
        run=decide,
        is_direct=True,
    ),
    Action(
        name="jobs.skip_job",
        title="Skip job",
        what="Puts job {job} back for ten minutes and takes the next job of queue {queue}.",
        command="headrace jobs ack {lease} --snooze {job} --after 10m",
        http="POST /v1/leases/{lease}/ack",
        body=lambda values: {"outcomes": {values["job"]: SKIPPED}},
        fields=LEASED,
        run=skip_job,
        is_direct=True,
    ),
)

"""Why a job is in its state, decided from its row and a few facts. No I/O.

The first obstacle is reported, in the order in which an operator has to remove them: pause of the
queue, missing code, tag, pause and limits of the lane, slots, and finally jobs before it.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import msgspec

from headrace.jobs.model import Job, JobState, Why
from headrace.kernel.terminal import pluralize

ERROR_CHARACTERS_SHOWN: Final = 200
GONE_TEXT: Final = "it ended and was not kept, or its transaction is not committed"


def explain_wait(job: Job, facts: Any, *, ahead_max: int, retries: int = 0) -> Why:
    """Explain the job's state; `facts` are a row of the query why_waiting for a due job."""
    if job.state is JobState.FAILED:
        return _why(
            job, "failed", f"{job.error or 'no error text'}; {_why_not_retried(job, retries)}"
        )
    why = _why_held(job, facts, ahead_max)
    if job.error is None or job.ended_at is not None:
        return why
    error = job.error.partition("\n")[0][:ERROR_CHARACTERS_SHOWN]
    if not job.attempt:
        return msgspec.structs.replace(why, text=f"{error}; {why.text}")
    text = f"failed {job.attempt} of {pluralize(retries + 1, 'time')}: {error}; {why.text}"
    return msgspec.structs.replace(why, text=text)


def _why_held(job: Job, facts: Any, ahead_max: int) -> Why:
    match job.state:
        case JobState.READY:
            return _why_ready(job, facts, ahead_max)
        case JobState.SCHEDULED:
            if job.run_at is None:
                text = f"the jobs before it in chain {job.chain!r} have not ended"
                return _why(job, "waits_in_chain", text)
            due = "it is due" if job.error is None else "due again"
            return _why(job, "not_due", f"{due} at {_moment(job.run_at)}", job.run_at)
        case JobState.LEASED:
            return _why(job, "running", f"host {job.host} runs it under lease {job.lease_id}")
        case JobState.GONE:
            return _why(job, "gone", GONE_TEXT)
        case _:
            ended = "it ended" if job.ended_at is None else f"it ended at {_moment(job.ended_at)}"
            return _why(job, job.state.value, job.error or ended)


def _why_not_retried(job: Job, retries: int) -> str:
    """Whether no retries were left, or something else ended the job."""
    if job.attempt > retries:
        return f"no retry is left after {pluralize(job.attempt, 'failed run')}"
    return (
        f"not retried after run {job.attempt} of at most {retries + 1}: its handler raised `Fail`,"
        " its payload does not fit the handler, or a person or program that took it failed it"
    )


def _why_ready(job: Job, facts: Any, ahead_max: int) -> Why:
    if facts is None:
        return _why(
            job, "on_the_move", "it is being started or moved right now: try again in a moment"
        )
    if facts["is_paused"]:
        text = f"queue {job.queue!r} is paused: `headrace queues resume {job.queue}`"
        return _why(job, "queue_paused", text)
    return (
        _why_no_code(job, facts)
        or _why_in_lane(job, facts)
        or _why_no_slot(job, facts)
        or _why_turn(job, facts, ahead_max)
    )


def _why_no_code(job: Job, facts: Any) -> Why | None:
    if not facts["tagged_hosts"] and facts["tag"] is not None:
        tag = facts["tag"]
        text = (
            f"no host with tag {tag} serves queue {job.queue!r}:"
            f" start `headrace agent ... --tag {tag}`"
        )
        return _why(job, "no_tag", text)
    if not facts["hosts"]:
        text = (
            f"no running code serves queue {job.queue!r}: start an agent whose app has it, or take"
            f" its jobs with `headrace jobs take {job.queue}`"
        )
        return _why(job, "no_code", text)
    return None


def _why_in_lane(job: Job, facts: Any) -> Why | None:
    if facts["is_lane_paused"]:
        return _why(job, "lane_paused", f"lane {job.lane!r} is paused")
    if facts["concurrency"] is not None and facts["inflight"] >= facts["concurrency"]:
        text = f"lane {job.lane!r} is full: {facts['inflight']} of {facts['concurrency']} run"
        return _why(job, "lane_full", text)
    if facts["free_at"] is not None:
        text = (
            f"lane {job.lane!r} had its {facts['starts_max']} starts in {facts['window_s']:g} s:"
            f" free again at {_moment(facts['free_at'])}"
        )
        return _why(job, "lane_over_rate", text, facts["free_at"])
    return None


def _why_no_slot(job: Job, facts: Any) -> Why | None:
    text = None
    if facts["slots_max"] == 0:
        text = (
            f"queue {job.queue!r} has a maximum of 0 worker processes (slots): raise it with"
            f" `headrace queues set {job.queue} --slots-max 10`"
        )
    elif not facts["open_hosts"]:
        text = (
            "every host that serves its queue is draining: start another, or run"
            " `headrace fleet undrain HOST`"
        )
    elif facts["is_reported"] and not facts["slots"]:
        text = (
            "no worker process (slot) serves its queue, and none that serves any queue runs: see"
            " `headrace fleet show`"
        )
    return None if text is None else _why(job, "no_slot", text)


def _why_turn(job: Job, facts: Any, ahead_max: int) -> Why:
    count, where = facts["ahead"], "" if job.lane is None else f" in lane {job.lane!r}"
    ahead = "1 goes" if count == 1 else f"{count} go"
    if count >= ahead_max:
        ahead = f"{count} or more go"
    if facts["is_reported"] and not facts["free_slots"]:
        slots = f"all {facts['slots']} slots for it are busy"
    else:
        slots = "the next free slot takes it"
    return _why(job, "waits_its_turn", f"it is due: {ahead} before it{where}, and {slots}")


def _moment(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def _why(job: Job, reason: str, text: str, until_at: Any = None) -> Why:
    return Why(job_id=job.id, state=job.state, reason=reason, text=text, until_at=until_at)

"""Jobs: the fleet's table, queues, hosts and their slots, decisions, jobs, lanes, crons, alerts."""

from __future__ import annotations

from typing import Final

from headrace.console.screens.jobs import actions
from headrace.console.screens.jobs.crons import see_crons
from headrace.console.screens.jobs.fleet import see_fleet
from headrace.console.screens.jobs.hosts import see_alerts, see_decisions, see_hosts
from headrace.console.screens.jobs.lanes import see_limiter, see_limiters
from headrace.console.screens.jobs.queue import see_queue
from headrace.console.screens.jobs.work import see_job, see_jobs
from headrace.console.seeing import Room, Screen

READ: Final = "jobs:read"

ROOM: Final = Room(
    name="jobs",
    title="Jobs",
    key="j",
    service="jobs",
    screens=(
        Screen(
            path="/jobs",
            title="Fleet",
            tab="Fleet",
            template="jobs/fleet.html",
            scope=READ,
            view=see_fleet,
        ),
        Screen(
            path="/jobs/hosts",
            title="Hosts",
            tab="Hosts",
            template="jobs/hosts.html",
            scope=READ,
            view=see_hosts,
        ),
        Screen(
            path="/jobs/decisions",
            title="Why slots moved",
            tab="Decisions",
            template="jobs/decisions.html",
            scope=READ,
            view=see_decisions,
        ),
        Screen(
            path="/jobs/jobs",
            title="Jobs",
            tab="Jobs",
            template="jobs/jobs.html",
            scope=READ,
            view=see_jobs,
            live=False,
        ),
        Screen(
            path="/jobs/lanes",
            title="Lanes",
            tab="Lanes",
            template="jobs/limiters.html",
            scope=READ,
            view=see_limiters,
        ),
        Screen(
            path="/jobs/crons",
            title="Crons",
            tab="Crons",
            template="jobs/crons.html",
            scope=READ,
            view=see_crons,
        ),
        Screen(
            path="/jobs/alerts",
            title="Alerts",
            tab="Alerts",
            template="jobs/alerts.html",
            scope=READ,
            view=see_alerts,
        ),
        Screen(
            path="/jobs/queues/{queue:str}",
            title="Queue",
            template="jobs/queue.html",
            scope=READ,
            view=see_queue,
        ),
        Screen(
            path="/jobs/jobs/{job:str}",
            title="Job",
            template="jobs/job.html",
            scope=READ,
            view=see_job,
        ),
        Screen(
            path="/jobs/lanes/{limiter:str}",
            title="Limiter",
            template="jobs/limiter.html",
            scope=READ,
            view=see_limiter,
        ),
    ),
    actions=actions.ACTIONS,
)

"""The verbs of one link: try it now, say why it is as it is."""

from __future__ import annotations

from typing import Any, Final

from headrace.engines.postgres import Postgres
from headrace.fetch import store
from headrace.fetch.download import Downloader
from headrace.fetch.errors import UrlRefused
from headrace.fetch.guard import judge_url
from headrace.fetch.i18n import Texts
from headrace.fetch.images import NotAPhoto, inspect_image
from headrace.fetch.model import LIMITER, Host, Link, PhotoReport, UrlCustomer, UrlReport
from headrace.fetch.routing import host_of
from headrace.fetch.service.hosts import Hosts
from headrace.fetch.starts import Starts
from headrace.jobs import Jobs
from headrace.jobs.errors import LaneUnknown
from headrace.jobs.model import JobState, Why

CUSTOMERS_MAX: Final = 20
JOBS_LOOKED_AT: Final = 50
_UNDER_WAY: Final = (JobState.READY, JobState.SCHEDULED, JobState.LEASED)


class Urls:
    """What may be asked, and what came of it."""

    def __init__(
        self, postgres: Postgres, downloader: Downloader, jobs: Jobs, hosts: Hosts, *, texts: Texts
    ) -> None:
        self._texts = texts
        self._postgres = postgres
        self._downloader = downloader
        self._jobs = jobs
        self._hosts = hosts

    async def try_photo(self, url: str, starts: Starts | None = None) -> PhotoReport:
        """Download one photo now and say what became of it; nothing is stored.

        Without `starts` no lane is used.
        """
        found = await self._downloader.download(url, starts=starts)
        values: dict[str, Any] = {"url": url, "hops": found.hops, "took_s": round(found.took_s, 4)}
        values["steps"] = found.steps
        if found.body is None:
            return PhotoReport(outcome=found.outcome, text=found.text, **values)
        with found.body:
            data = found.body.read()
        values |= {"size_bytes": len(data), "sha256": found.sha256, "etag": found.etag}
        try:
            image = inspect_image(data)
        except NotAPhoto as refused:
            return PhotoReport(outcome=refused.outcome, text=refused.text, **values)
        values |= {"format": image.format, "width": image.width, "height": image.height}
        text = f"a {image.format} of {image.width} x {image.height} pixels, {len(data):,} bytes"
        return PhotoReport(outcome="stored", text=text, **values)

    async def why(self, url: str) -> UrlReport:
        """Whether `url` may be asked, what every customer's last run made of it, and when it is asked next."""
        try:
            target = judge_url(url, self._downloader.policy)
        except UrlRefused as error:
            allowed, judgement = False, f"refused:{error.reason}: {error.text}"
        else:
            allowed, judgement = True, f"may be asked at {target.host} port {target.port}"
        if not url.isprintable():
            return UrlReport(url=url, allowed=allowed, judgement=judgement, links=[], customers=[])
        links = {
            link.customer: link
            for link in await store.links.links_of_url(self._postgres, url, self._texts)
        }
        waiting = await store.links.waiting_runs(self._postgres, url)
        return UrlReport(
            url=url,
            allowed=allowed,
            judgement=judgement,
            links=list(links.values()),
            customers=[
                await self._customer(
                    customer,
                    url,
                    links.get(customer),
                    runs=waiting.get(customer, []),
                    allowed=allowed,
                )
                for customer in sorted({*links, *waiting})[:CUSTOMERS_MAX]
            ],
        )

    async def _customer(
        self, customer: str, url: str, link: Link | None, *, runs: list[int], allowed: bool
    ) -> UrlCustomer:
        hosts = await self._hosts.page(customer=customer, host=host_of(url), rows_max=1)
        host = hosts[0] if hosts else None
        job = await self._why_waiting(customer, url) if runs else None
        try:
            lane = await self._jobs.get_lane(LIMITER, customer)
        except LaneUnknown:
            lane = None
        return UrlCustomer(
            customer=customer,
            waiting_runs=runs,
            job=job,
            host=host,
            lane=lane,
            ahead=ahead_of(link, host, runs=runs, job=job, is_allowed=allowed),
        )

    async def _why_waiting(self, customer: str, url: str) -> Why | None:
        """Why the photo's job is where it is; where it is not among the newest, why one beside it is."""
        found = await self._jobs.find(lane=customer, jobs_max=JOBS_LOOKED_AT)
        ids = [job.id for job in found.jobs if job.state in _UNDER_WAY]
        for job_id in ids:
            payload = (await self._jobs.job(job_id)).payload
            if isinstance(payload, dict) and payload.get("url") == url:
                return await self._jobs.why(job_id)
        return await self._jobs.why(ids[0]) if ids else None


def ahead_of(
    link: Link | None, host: Host | None, *, runs: list[int], job: Why | None, is_allowed: bool
) -> str:
    """When a customer's link is asked next, in a sentence."""
    pause = ""
    if host is not None and host.paused_until is not None:
        pause = f"; its host asks to be left alone until {host.paused_until:%Y-%m-%d %H:%M:%S}"
    if runs:
        why = f": {job.text}" if job is not None else ""
        return f"run {runs[-1]} is about to ask it{why}{pause}"
    if not is_allowed:
        return "not asked while it is refused"
    if link is None or link.outcome in ("stored", "unchanged"):
        return "a good copy is stored; asked again when an item's list of links changes, or as fetch.refresh says"
    kept = "the last good copy is kept; " if link.sha256 else ""
    latest = (
        "" if link.recheck_at is None else f", {link.recheck_at:%Y-%m-%d %H:%M:%S} at the latest"
    )
    if link.rounds_left > 0:
        return (
            f"{kept}sits out {link.rounds_left} more whole catalogues; the next one that has it asks"
            f" again{latest}{pause}"
        )
    return f"{kept}the next catalogue that has it asks again{latest}{pause}"

"""Figures of hits that a process of the site counts, as `app.views.hit` in its web server does."""

from __future__ import annotations

import re

from tests.kit.waiting import wait_true

from headrace import Headrace

VIEWS_STORED = re.compile(r">([0-9.,]+) <small>views stored/s</small>")


async def test_views_that_an_own_process_counted_are_in_the_rate_of_the_overview(stack):
    """As a site does it that counts with `app.views.hit`, which no role of Headrace records."""
    counted = re.compile(r'views_hits_total{outcome="counted",role="api"} (\S+)')

    def counted_by_api():
        return counted.search(stack.browse.get("/metrics", headers=bearer).text)[1]

    bearer = {"authorization": f"Bearer {stack.token}", "accept": "text/plain"}
    before = counted_by_api()
    async with Headrace(flags={"data.folder": str(stack.folder / "headrace-data")}) as own:

        async def is_shown():
            await own.views.hit("own-process:1")
            page = stack.browse.get("/console").text
            return (found := VIEWS_STORED.search(page)) is not None and float(found[1]) > 0

        await wait_true(is_shown, what="the rate of views")
    assert counted_by_api() == before, "no role counted these hits"

"""`headrace up` with engines and roles is killed as a power cut would, in the middle of hits.

What was answered is there.
"""

from __future__ import annotations

import threading

import httpx
import pytest
from tests.kit.processes import wait_until

ITEMS = [f"ad:{number}" for number in range(20)]


class Callers:
    """Hits over HTTP until nobody answers; what was answered, and what may have been counted."""

    def __init__(self, site) -> None:
        self.answered = dict.fromkeys(ITEMS, 0)
        self.sent = dict.fromkeys(ITEMS, 0)
        self._site = site
        self._threads = [threading.Thread(target=self._call, args=(n,)) for n in range(4)]
        for thread in self._threads:
            thread.start()

    def join(self):
        """Wait until all found that nobody answers."""
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()

    def _call(self, number):
        # Each caller has items of its own, so its counts need no lock.
        mine = ITEMS[number::4]
        while True:
            for item in mine:
                self.sent[item] += 1
                try:
                    answer = self._site.call("POST", f"/v1/views/items/{item}?class=human")
                except httpx.HTTPError:
                    return
                if answer.status_code == 200:
                    self.answered[item] += 1


@pytest.mark.slow
def test_hits_answered_before_a_kill_of_everything_are_counted_once(site):
    process = site.up()
    callers = Callers(site)
    wait_until(lambda: sum(callers.answered.values()) > 150, what="hits were answered")
    process.kill_all()
    callers.join()

    site.up()

    def total(item):
        [told] = site.call("GET", f"/v1/views?ids={item}").json()
        return told["total"]

    totals = {item: total(item) for item in ITEMS}
    for item, seen in totals.items():
        assert callers.answered[item] <= seen <= callers.sent[item], item
    assert site.call("POST", f"/v1/views/items/{ITEMS[0]}?class=human").json() == {
        "id": ITEMS[0],
        "total": totals[ITEMS[0]] + 1,
    }
    wait_until(
        lambda: not sum(row["pending"] for row in site.call("GET", "/v1/views/lag").json()),
        what="everything is flushed",
    )
    told = site.run("views", "verify")
    assert told["differences"] == []
    assert told["views"] == sum(totals.values()) + 1
    hours = site.run("views", "series", ITEMS[1], "--by", "hour")
    assert sum(hour["human"] for hour in hours) == totals[ITEMS[1]]

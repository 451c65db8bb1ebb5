"""Marks of the history: what happened at a time, and the order of marks of one step."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final

import msgspec

from headrace.kernel.terminal import pluralize
from headrace.web.joined_outages import JoinedOutage

CAUSES: Final[Mapping[str, str]] = {
    "killed": "killed by SIGKILL: by hand, by a program, or by Linux if memory is short",
    "crashed": "crashed by a signal",
    "exited": "ended by their own code",
    "died": "exit status unknown",
}
"""Deaths of slots by value of `how`; slots that left, or ran over a timeout, are not among them."""
KINDS: Final = ("start", "deploy", "restart", "deaths", "outage")
MARK_ORDER: Final = {"start": 0, "deploy": 0, "deaths": 2, "restart": 3}
"""Places of kinds at one time; all others are 1."""
ENDS_STEP: Final = ("deaths", "restart")
"""Kinds that are recorded by step and sorted to its end."""


class Mark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that happened.

    `start`, `deploy` (a version changed) or `restart` (neither) of roles, `outage` of an engine, or
    `deaths` of slots or of processes of a media node. Starts and deaths are recorded by step.
    """

    at: datetime
    kind: str
    text: str
    within_s: int = 0
    """It happened at some time in this many seconds from `at` on; 0: at `at`."""
    until_at: datetime | None = None
    host: str = ""
    role: str = ""
    """The role that died or started again; empty if several did."""
    count: int = 0
    """Slots or processes that died, or roles that started again."""
    causes: dict[str, int] = {}
    """Their number by cause, by kind of process, or by role that started again."""
    engines: list[str] = []
    """The engines of an outage: postgres, valkey or blobs."""
    hosts: list[str] = []
    """The hosts of an outage."""
    cause: str = ""
    """The cause of an outage."""
    is_open: bool = False
    """Some host recorded no end of an outage: it lasts, or that host ended."""

    @property
    def order(self) -> tuple[datetime, int]:
        """Sort key: starts at the begin of their step, deaths and then restarts at its end."""
        ends = self.within_s if self.kind in ENDS_STEP else 0
        return self.at + timedelta(seconds=ends), MARK_ORDER.get(self.kind, 1)


def of_deaths(at: datetime, within_s: int, *, host: str, role: str, causes: dict[str, int]) -> Mark:
    """The mark of slots, or of processes of a media node, that died in a step."""
    died = sum(causes.values())
    if role == "media":
        noun = f"{pluralize(died, 'process', 'processes')} of the media node"
    else:
        noun = pluralize(died, "slot")
    return Mark(
        at=at,
        within_s=within_s,
        kind="deaths",
        text=f"{noun} died on {host}: {causes_text(causes)}",
        host=host,
        role=role,
        count=died,
        causes=causes,
    )


def causes_text(causes: Mapping[str, int]) -> str:
    """`2 killed, 1 crashed`."""
    return ", ".join(f"{count} {cause}" for cause, count in causes.items())


def of_outage(one: JoinedOutage) -> Mark:
    """The mark of an outage."""
    return Mark(
        at=one.began_at,
        until_at=one.until_at,
        kind="outage",
        text=one.text,
        host=one.hosts[0] if len(one.hosts) == 1 else "",
        engines=list(one.engines),
        hosts=list(one.hosts),
        cause=one.cause,
        is_open=one.is_open,
    )

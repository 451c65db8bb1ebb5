"""Faults on request: the demo carries out what the page `/break` records, and watches.

Only processes of this demo are ended: descendants of its own `headrace up`, by a pidfd that is
opened before the process is looked at, so that a pid that was given to another program is not hit.
How long recovery took is measured from the moment when the fault itself is over, until what it
broke was seen to work.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import signal
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final

from examples.bazaar.adverts import Adverts
from examples.bazaar.client import Client, ServerFailedError
from examples.bazaar.errands import Senders
from examples.bazaar.faults import Faults
from examples.bazaar.ledger import Ledger, wait_until
from examples.bazaar.origins import HANGING
from examples.bazaar.records import Break, Records
from examples.bazaar.stage import Stage
from examples.bazaar.story import Story
from examples.bazaar.visitors import Seen

from headrace.kernel.terminal import pluralize

LOOK_EVERY_S: Final = 0.2
RECOVERED_WITHIN_S: Final = 180.0
POSTGRES_DOWN_S: Final = 10.0
HANG_S: Final = 15.0
SLOT_FOUND_S: Final = 20.0


class NotDoneError(Exception):
    """The fault could not be made."""


class NotRecoveredError(Exception):
    """The fault was made, and what it broke did not work again in time."""


class Breaker:
    """Carries out requested faults, one after the other."""

    def __init__(
        self,
        stage: Stage,
        *,
        up_pid: int,
        story: Story,
        senders: Senders,
        ledger: Ledger,
        adverts: Adverts,
        records: Records,
        seen: Seen,
        noted: Faults,
    ) -> None:
        """`noted` receives faults that were not recovered from."""
        self._seen, self._noted = seen, noted
        self._stage, self._up_pid = stage, up_pid
        self._story, self._senders, self._ledger = story, senders, ledger
        self._adverts, self._records = adverts, records
        self._client = Client(stage.api_url, token=stage.token())
        self._ways: dict[str, Callable[[int], Awaitable[str]]] = {
            "slot": self._kill_slot,
            "seller": self._hang_seller,
            "valkey": self._empty_valkey,
            "postgres": self._stop_postgres,
            "media": self._kill_media,
        }

    async def run(self) -> None:
        """Carry out faults until cancelled."""
        while True:
            asked = await asyncio.to_thread(self._records.next_break)
            if asked is not None:
                await self._carry_out(asked)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _carry_out(self, asked: Break) -> None:
        self._records.note_break(asked.id, began_at=time.time())
        expecting = asyncio.create_task(self._keep_expecting())
        try:
            note = await self._ways[asked.kind](asked.id)
            self._records.note_break(asked.id, recovered_at=time.time(), note=note)
        except NotRecoveredError as error:
            note = f"not recovered: {error}"
            self._records.note_break(asked.id, note=note)
            self._noted.fail(f"/break: {note}")
        except (NotDoneError, ServerFailedError, OSError) as error:
            self._records.note_break(asked.id, note=f"not done: {error}")
        finally:
            expecting.cancel()
            Faults.expect()

    async def _keep_expecting(self) -> None:
        while True:
            Faults.expect()
            await asyncio.to_thread(self._records.keep_asked)
            await asyncio.sleep(1)

    def _over(self, break_id: int) -> None:
        self._records.note_break(break_id, ended_at=time.time())

    async def _kill_slot(self, break_id: int) -> str:
        """SIGKILL a worker process in the middle of the site's own jobs."""
        slots_before = len(list(self._slots()))

        deadline_s = time.monotonic() + SLOT_FOUND_S
        while (killed := self._kill_busy_slot()) is None:
            if time.monotonic() > deadline_s:
                raise NotDoneError("no slot was at work")
            await asyncio.sleep(0.02)
        self._over(break_id)
        cut_off = sorted(self._records.open_runs().get(killed[0], ()))
        is_back = await wait_until(
            lambda: (
                len(list(self._slots())) >= slots_before
                and len(self._records.effects_of(cut_off)) == len(cut_off)
            ),
            timeout_s=RECOVERED_WITHIN_S,
        )
        if not is_back:
            raise NotRecoveredError(f"the jobs of process {killed[0]} were not done again in time")
        jobs = "mail or question" if len(cut_off) == 1 else f"{len(cut_off)} mails and questions"
        were = "was" if len(cut_off) == 1 else "were"
        return (
            f"killed process {killed[0]} ({killed[1]}); the {jobs} in progress {were} done by"
            " other workers"
        )

    async def _hang_seller(self, break_id: int) -> str:
        """Let a fast seller's host stay silent, while it hands in a catalogue with a new photo."""
        await wait_until(self._story.calm_shops, timeout_s=SLOT_FOUND_S * 3)
        shops = self._story.calm_shops()
        if not shops:
            raise NotDoneError("no seller's first catalogue is done yet")
        shop = random.choice(shops)
        mark = max((one.id for one in self._adverts.happened()), default=0)
        self._records.note_break(
            break_id, note=f"{shop.title} is silent, and hands in a catalogue with a new photo"
        )
        until = time.time() + HANG_S
        file = self._stage.folder / HANGING
        draft = file.with_suffix(".new")
        draft.write_text(json.dumps({shop.name: until}))
        draft.replace(file)
        changing = asyncio.create_task(self._story.change_now(shop))
        await asyncio.sleep(HANG_S)
        self._over(break_id)
        others = sum(one.shop != shop.name for one in self._adverts.happened(after=mark))
        try:
            async with asyncio.timeout(RECOVERED_WITHIN_S):
                await changing
        except TimeoutError as error:
            raise NotRecoveredError("the new photo was not stored in time") from error
        return (
            f"{shop.title} was silent for {HANG_S:.0f} s; {others_text(others)} meanwhile. Then the"
            " new photo was stored"
        )

    async def _empty_valkey(self, break_id: int) -> str:
        """Delete all that Valkey holds."""
        before = self._ledger.accepted_views
        # So that it deletes no older views than the docs permit, also on a busy machine.
        if not await self._ledger.wait_flushed(timeout_s=RECOVERED_WITHIN_S):
            raise NotDoneError("views are not flushed to PostgreSQL")
        unflushed_max = self._ledger.accepted_views - before
        keys = await flush_valkey(self._stage.data / "run")
        self._over(break_id)

        async def is_back() -> bool:
            viewer = await self._client.get_json("/v1/feed/viewers/follower0?limit=20")
            shards = await self._client.get_json("/v1/feed/stats")
            is_read = bool(viewer["posts"]) and not viewer.get("is_slow")
            return is_read and all(shard.get("state", "ready") == "ready" for shard in shards)

        if not await wait_until(is_back, timeout_s=RECOVERED_WITHIN_S):
            raise NotRecoveredError("feeds were not read from Valkey again in time")
        recovered_at = time.time()
        if not await self._ledger.wait_flushed(timeout_s=RECOVERED_WITHIN_S):
            raise NotRecoveredError("views were not flushed to PostgreSQL again in time")
        given_up = await self._ledger.give_up_views(unflushed_max, timeout_s=RECOVERED_WITHIN_S)
        if given_up is None:
            raise NotRecoveredError("totals of views were not complete again in time")
        self._records.note_break(break_id, recovered_at=recovered_at)
        return (
            f"deleted {keys} keys; totals and feeds were filled again from PostgreSQL."
            f" {pluralize(given_up, 'view')} had not reached PostgreSQL and"
            f" {'is' if given_up == 1 else 'are'} lost: the one loss that Headrace permits"
            " (docs/promises.md)"
        )

    async def _stop_postgres(self, break_id: int) -> str:
        """Shut PostgreSQL down, and keep its supervisor from starting it again for a while."""
        found = [
            pid
            for pid in descendants(self._up_pid)
            if _parent_of(pid) == self._up_pid and _program_of(pid) == "postgres"
        ]
        if not found:
            raise NotDoneError("PostgreSQL is not running")
        photos = self._seen.photos_whole
        os.kill(self._up_pid, signal.SIGSTOP)
        try:
            # Immediate: as a crash is. Its log is replayed at the next start.
            self._kill(found[0], "postgres", signal.SIGQUIT)
            await asyncio.sleep(POSTGRES_DOWN_S)
        finally:
            os.kill(self._up_pid, signal.SIGCONT)
        self._over(break_id)
        photos = self._seen.photos_whole - photos
        probes: list[str] = []

        async def is_back() -> bool:
            if not probes:
                probes.append(await self._senders.send_probe(self._client))
            return bool(self._records.effects_of(probes))

        if not await wait_until(is_back, timeout_s=RECOVERED_WITHIN_S):
            raise NotRecoveredError("no job ran again in time")
        return (
            f"PostgreSQL was down for {POSTGRES_DOWN_S:.0f} s; visitors read {photos} photos"
            " meanwhile. Calls that need it were refused with 503"
        )

    async def _kill_media(self, break_id: int) -> str:
        """SIGKILL the process that streams photos and tracks."""
        photos = [one for ad in self._adverts.shown() for one in ad.photos if one.key]
        if not photos:
            raise NotDoneError("no photo is on the site yet")
        photo = random.choice(photos)
        nodes = [
            pid for pid in descendants(self._up_pid) if "headrace media serve" in _title_of(pid)
        ]
        killed = next((pid for pid in nodes if self._kill(pid, "headrace media serve")), None)
        if killed is None:
            raise NotDoneError("no media node is running")
        self._over(break_id)

        async def is_back() -> bool:
            client = Client(self._stage.media_url, patience_s=0)
            try:
                reply = await client.request("GET", f"/m/{photo.key}")
            finally:
                client.close()
            is_right = hashlib.sha256(reply.body).hexdigest() == photo.sha256
            return reply.status == 200 and is_right

        if not await wait_until(is_back, timeout_s=RECOVERED_WITHIN_S, every_s=0.05):
            raise NotRecoveredError("no photo was served again in time")
        return f"killed process {killed}; a photo was read again, with the right SHA-256"

    def _kill_busy_slot(self) -> tuple[int, str] | None:
        """Kill a slot in the middle of an errand; returns its pid and title."""
        at_work = self._records.open_runs()
        busy = [one for one in self._slots() if one[0] in at_work]
        return next((one for one in busy if self._kill_at_work(one[0])), None)

    def _kill_at_work(self, pid: int) -> bool:
        """Stop a slot, and kill it unless its errand has ended meanwhile."""
        if not self._kill(pid, "headrace slot", signal.SIGSTOP):
            return False
        try:
            return pid in self._records.open_runs() and self._kill(pid, "headrace slot")
        except sqlite3.OperationalError:  # stopped while it wrote: it holds the lock
            return False
        finally:
            self._kill(pid, "headrace slot", signal.SIGCONT)

    def _slots(self) -> Iterator[tuple[int, str]]:
        for pid in descendants(self._up_pid):
            title = _title_of(pid)
            if title.startswith("headrace slot "):
                yield pid, title

    def _kill(self, pid: int, title: str, number: int = signal.SIGKILL) -> bool:
        """Signal `pid` if it is a process of this demo with this title."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return False
        try:
            if title not in _title_of(pid) or pid not in descendants(self._up_pid):
                return False
            signal.pidfd_send_signal(pidfd, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(pidfd)
        return True


def others_text(items: int) -> str:
    """What other sellers did while one was silent; none may have handed in a catalogue."""
    if not items:
        return "no other seller handed in a changed catalogue"
    count = "1 item of another seller was" if items == 1 else f"{items} items of others were"
    return f"{count} published, edited or unpublished"


def descendants(pid: int) -> set[int]:
    """All processes below `pid`."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            children.setdefault(_parent_of(int(entry.name)), []).append(int(entry.name))
    found: set[int] = set()
    left = [pid]
    while left:
        below = children.get(left.pop(), [])
        left += [one for one in below if one not in found]
        found.update(below)
    return found


async def flush_valkey(run_folder: Path) -> int:
    """Empty the Valkey whose socket is in the folder; returns how many keys it had."""
    # A socket's path may have 107 bytes, a folder's more: reach it through its descriptor.
    folder_fd = os.open(run_folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        path = f"/proc/self/fd/{folder_fd}/valkey.sock"
        reader, writer = await asyncio.open_unix_connection(path)
    finally:
        os.close(folder_fd)
    try:
        writer.write(b"DBSIZE\r\nFLUSHALL SYNC\r\n")
        keys = int((await reader.readline()).lstrip(b":"))
        answer = await reader.readline()
    finally:
        writer.close()
    if answer.strip() != b"+OK":
        raise NotDoneError(f"Valkey refused: {answer.decode(errors='replace').strip()}")
    return keys


def _title_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ")
        return words.decode(errors="replace")
    return ""


def _program_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/exe").readlink().name.split(" ")[0]
    return ""


def _parent_of(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0

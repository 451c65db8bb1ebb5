"""The demo: a small classifieds site with fifty sellers, on Headrace, on this machine.

    python -m examples.bazaar.demo [--seconds 20] [--folder demo-data] [--port 8080]

Starts the sellers' hosts, `headrace up` with the site's code and the shop's pages, lets sellers
hand in catalogues and visitors look at photos and adverts, follow sellers and play tracks, prints a
line a room every second (every 10 s unless to a terminal), and checks all the while that what
happens is right. Each wrong answer is printed at once and shown on `/break`; what is refused while
an engine is away is counted, printed once when it is over, and wrong if it does not end. Carries
out faults that the site's page `/break` requests. Runs until Ctrl-C, whatever fails meanwhile, or
for `--seconds` once everything is up (longer where the machine is too busy to have shown everything
by then); ends with a summary, exit code 0, or 1 with what did not work. Leaves its data folder
behind and no process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import shlex
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from examples.bazaar.adverts import Adverts
from examples.bazaar.breaks import Breaker
from examples.bazaar.buyers import Buyers
from examples.bazaar.client import ServerFailedError
from examples.bazaar.errands import Senders
from examples.bazaar.faults import Faults
from examples.bazaar.figures import Figures
from examples.bazaar.followers import Followers
from examples.bazaar.ledger import LINES, WRONG, Ledger
from examples.bazaar.lock import FOLDER, DemoError, StoppedError, folder_of_one, option
from examples.bazaar.readers import Readers
from examples.bazaar.records import Records
from examples.bazaar.sellers import Desk
from examples.bazaar.shops import SHOPS_COUNT, shops
from examples.bazaar.stage import Stage
from examples.bazaar.story import Story
from examples.bazaar.visitors import Crowd

from headrace.kernel.terminal import pluralize

LINES_EVERY_S: Final = 1.0
LOGGED_EVERY_S: Final = 10.0
"""Between the lines of the start, and of figures in a file or a pipe."""
PATIENCE_S: Final = 60.0
"""The extra time that a run may take on a busy machine to show everything."""
AGAIN_S: Final = 2.0
SLEPT_S: Final = 10.0
CHECKED_FROM_S: Final = 10.0
"""A shorter run ends on time and lists what it did not check; others wait for it."""


@dataclass(frozen=True, slots=True)
class People:
    """Those who come to the site."""

    crowd: Crowd
    readers: Readers
    followers: Followers
    buyers: Buyers
    senders: Senders

    def faults(self) -> Iterator[Faults]:
        """What each group noted."""
        yield from (self.crowd.seen, self.readers.viewed, self.followers.followed)
        yield from (self.buyers.bought, self.senders.sent)


class Demo:
    """One run of it."""

    def __init__(self, stage: Stage, *, seconds: float | None) -> None:
        self._stage, self._seconds = stage, seconds
        self._adverts, self._records = Adverts(stage.database), Records(stage.database)
        self._stop = asyncio.Event()
        self._broken = Faults()
        self._printed: list[str] = []
        """Wrong answers and outages that were printed."""
        self._verdicts: dict[str, str] = {}
        """By line of the ledger: what was printed of it, and is still so."""

    async def run(self) -> int:
        """Play it; returns the exit code. Raises: DemoError, when it cannot begin."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
        try:
            self._adverts.create()
            self._records.create()
            self._records.begin_run()
        except sqlite3.OperationalError as error:
            raise DemoError(
                f"{self._stage.folder} has data of another version of the demo ({error}): delete"
                f" the folder, or choose another with {option('folder', 'other-data')}"
            ) from error
        began_with = max((one.id for one in self._adverts.happened()), default=0)
        print(f"starting headrace and {len(self._stage.sellers)} sellers' hosts ...", flush=True)
        began = time.monotonic()
        showing = asyncio.create_task(show_start(self._stage))
        async with contextlib.AsyncExitStack() as stack:
            try:
                up = await stack.enter_async_context(self._stage.running(self._stop))
                took_s = time.monotonic() - began
                desk, people = Desk(self._stage), self._invite()
                story = Story(self._stage, desk, self._adverts)
                await self._print_addresses(took_s)
            finally:
                showing.cancel()
            await story.prepare(self._stop)
            ledger = Ledger(
                self._stage,
                desk,
                story=story,
                adverts=self._adverts,
                records=self._records,
                viewed=people.readers.viewed,
                noted=self._broken,
            )
            await ledger.begin()
            figures = Figures(
                stage=self._stage,
                desk=desk,
                happened=lambda: self._adverts.happened(after=began_with),
                shown=self._adverts.shown,
                progress=story.progress,
                seen=people.crowd.seen,
                viewed=people.readers.viewed,
                views=lambda: ledger.accepted_views,
                followed=people.followers.followed,
                bought=people.buyers.bought,
            )
            await self._play(up, story=story, people=people, figures=figures, ledger=ledger)
            desk.close()
            return self._finish(story, people, figures, ledger)

    def _invite(self) -> People:
        stage, opened_before = self._stage, self._adverts.opened()
        names = [shop.name for shop in stage.sellers]
        return People(
            crowd=Crowd(stage.media_url),
            readers=Readers(
                stage.api_url,
                stage.token(),
                opened=lambda: self._adverts.opened() - opened_before,
            ),
            followers=Followers(stage.api_url, stage.token(), names),
            buyers=Buyers(stage.shop_url, stage.media_url),
            senders=Senders(stage.api_url, stage.token(), self._records, names),
        )

    async def _play(
        self,
        up: asyncio.subprocess.Process,
        *,
        story: Story,
        people: People,
        figures: Figures,
        ledger: Ledger,
    ) -> None:
        breaker = Breaker(
            self._stage,
            up_pid=up.pid,
            story=story,
            senders=people.senders,
            ledger=ledger,
            adverts=self._adverts,
            records=self._records,
            seen=people.crowd.seen,
            noted=self._broken,
        )
        who: dict[str, Callable[[], Awaitable[None]]] = {
            "the sellers": story.run,
            "the visitors": people.crowd.run,
            "the readers": people.readers.run,
            "the followers": people.followers.run,
            "the buyers": people.buyers.run,
            "the senders": people.senders.run,
            "the ledger": ledger.run,
            "the faults": breaker.run,
            "the figures": lambda: self._show_lines(figures, story, people, ledger),
        }
        tasks = [asyncio.create_task(self._keep(name, run)) for name, run in who.items()]
        watching = asyncio.create_task(self._watch(up))
        watching.add_done_callback(lambda _: self._stop.set())
        await self._wait_end(story, people, figures, ledger)
        for task in (*tasks, watching):
            task.cancel()
        await asyncio.wait([*tasks, watching])
        error = None if watching.cancelled() else watching.exception()
        if error is not None:
            self._broken.fail(f"headrace up: {error}")
        with contextlib.suppress(ServerFailedError):
            await figures.gather()
            await ledger.gather()

    async def _keep(self, who: str, run: Callable[[], Awaitable[None]]) -> None:
        """Run it until cancelled: a demo continues, and reports at its end what went wrong."""
        while True:
            try:
                await run()
            except Exception as error:  # noqa: BLE001 - any error is reported
                for leaf in leaves(error):
                    self._broken.fault(f"{who}: {leaf!r}")
            await asyncio.sleep(AGAIN_S)

    async def _wait_end(
        self, story: Story, people: People, figures: Figures, ledger: Ledger
    ) -> None:
        """Until it is stopped.

        Or for `seconds`, and on a slow machine for what is yet to be seen and for an outage's end.
        """
        if self._seconds is None:
            await self._stop.wait()
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), self._seconds)
        deadline = time.monotonic() + (PATIENCE_S if self._seconds >= CHECKED_FROM_S else 0)
        while time.monotonic() < deadline and not self._stop.is_set():
            unseen = missing(story, people, figures, ledger)
            if not any((*unseen, *self._refused(story, people), *ledger.open)):
                return
            await asyncio.sleep(0.2)

    async def _watch(self, up: asyncio.subprocess.Process) -> None:
        code = await up.wait()
        raise DemoError(f"it ended with {code}, see {self._stage.headrace_log}")

    async def _show_lines(
        self, figures: Figures, story: Story, people: People, ledger: Ledger
    ) -> None:
        is_live, rewritten, due_s = sys.stdout.isatty(), 0, 0.0
        shown_at = time.time()
        reading = asyncio.create_task(self._read(figures))
        while True:
            if time.time() - shown_at > SLEPT_S:
                Faults.expect()  # a laptop's lid was closed: connections and leases have ended
            shown_at = time.time()
            # While it waits for an engine, the lines show which figures could not be read.
            if (await asyncio.wait([reading], timeout=LINES_EVERY_S))[0]:
                reading.result()
                reading = asyncio.create_task(self._read(figures))
            shown = self._adverts.shown()
            people.crowd.show(shown)
            people.readers.show(shown)
            people.followers.show(shown)
            lines = figures.lines(self._checks(story, people, ledger))
            found = await self._note_wrong(story, people, ledger)
            if is_live:
                width = shutil.get_terminal_size().columns
                lines = [f"{line[: width - 1]}\x1b[K" for line in lines]
                above = [f"{line}\x1b[K" for line in found]
                up = f"\x1b[{rewritten}A\r" if rewritten else ""
                print(up + "\n".join([*above, *lines]), end="\x1b[J\n", flush=True)
                rewritten = len(lines)
            else:
                is_due = time.monotonic() >= due_s
                due_s = time.monotonic() + LOGGED_EVERY_S if is_due else due_s
                if output := [*found, *(lines if is_due else ())]:
                    print("\n".join(output), flush=True)
            await asyncio.sleep(LINES_EVERY_S)

    async def _read(self, figures: Figures) -> None:
        with self._broken.attempt("readings of the figures"):
            await figures.gather()

    async def _note_wrong(self, story: Story, people: People, ledger: Ledger) -> list[str]:
        """Keep what is wrong until now for `/break`. Return the lines to print of what is new."""
        faults = self._faults(story, people, ledger)
        await asyncio.to_thread(self._records.put_paper, WRONG, {"texts": faults})
        verdicts = ledger.faults
        withdrawn = [text for line, text in self._verdicts.items() if line not in verdicts]
        self._printed = [text for text in self._printed if text not in withdrawn]
        self._verdicts = verdicts
        new = [text for text in faults if text not in self._printed]
        over = [one.text for one in Faults.outages if one.is_over]
        over = [text for text in over if text not in self._printed]
        self._printed += [*new, *over]
        at = time.strftime("%H:%M:%S UTC", time.gmtime())
        texts = [f"found: {text}" for text in new]
        texts += [f"withdrawn: {text} (later readings show none)" for text in withdrawn]
        return [f"{at}  {text}" for text in [*texts, *over]]

    def _noted(self, story: Story, people: People) -> list[Faults]:
        return [self._broken, story.progress, *people.faults()]

    def _faults(self, story: Story, people: People, ledger: Ledger) -> list[str]:
        noted = self._noted(story, people)
        return [text for one in noted for text in one.faults] + [*ledger.faults.values()]

    def _checks(self, story: Story, people: People, ledger: Ledger) -> list[str]:
        wrong = sum(one.faults_count for one in self._noted(story, people))
        first, *others = ledger.summary
        return [f"{pluralize(wrong, 'wrong answer')} · {first}", *others]

    def _refused(self, story: Story, people: People) -> list[str]:
        """Kinds of calls of which the last one was refused."""
        return [kind for one in self._noted(story, people) for kind in one.refused_since_s]

    async def _print_addresses(self, took_s: float) -> None:
        stage = self._stage
        console = await stage.console_link() if sys.stdout.isatty() else f"{stage.api_url}/console"
        command = shlex.quote(str(Path(sys.executable).with_name("headrace")))
        command += f" --config {shlex.quote(str(stage.config))}"
        login = "" if sys.stdout.isatty() else f"  log in        {command} console link\n"
        print(
            f"up after {took_s:.1f} s\n\n"
            f"  the site      {stage.shop_url}/  (with a tour)\n"
            f"  break it      {stage.shop_url}/break\n"
            f"  the console   {console}\n"
            f"{login}"
            f"  the API       {stage.api_url}/  (/openapi.json, /metrics)\n"
            f"  the photos    {stage.media_url}/m/KEY\n"
            f"  the token     {stage.token_file}\n"
            f"  by hand       {command} queues ls\n"
            f"  logs          {stage.headrace_log}, {stage.origins_log}, {stage.shop_log}\n",
            *(f"{note}\n" for note in stage.notes.values()),
            sep="\n",
            flush=True,
        )

    def _finish(self, story: Story, people: People, figures: Figures, ledger: Ledger) -> int:
        print("\nSummary")
        for line in figures.summary(self._checks(story, people, ledger)):
            print(f"  {line}")
        faults = self._faults(story, people, ledger)
        for line in broken_lines(self._noted(story, people)):
            print(f"  {line}")
        for outage in Faults.outages:
            print(f"  {outage.text}")
        unseen = list(missing(story, people, figures, ledger))
        refused = [f"refused at the end: {kind}" for kind in self._refused(story, people)]
        is_checked = self._seconds is not None and self._seconds >= CHECKED_FROM_S
        if is_checked:
            faults += [*unseen, *refused]
            unseen, refused = [], []
        for line in [*faults, *refused, *(f"not checked: {text}" for text in unseen)]:
            print(f"  {line}")
        is_whole = not any((*unseen, *refused, *ledger.open))
        print(conclusion(faults, is_whole=is_whole), flush=True)
        return 1 if faults else 0


def broken_lines(noted: Iterable[Faults]) -> Iterator[str]:
    """What was expected while a button of /break had broken a part."""
    found = list(noted)
    failed = sum(one.expected_count for one in found)
    differing = sum(one.differing_count for one in found)
    if not failed + differing:
        return
    yield "expected while a button of /break had broken a part, and 15 s longer:"
    if failed:
        yield f"  {pluralize(failed, 'call')} cut off, or answered with an error such as status 500"
    if differing:
        answers = pluralize(differing, "answer")
        yield f"  {answers} with another status or other data, such as fewer views"
    yield "  the ledger counts what was lost by it"


async def show_start(stage: Stage) -> None:
    """Print every ten seconds what the start waits for, until cancelled."""
    began = time.monotonic()
    while True:
        await asyncio.sleep(LOGGED_EVERY_S)
        print(f"  {time.monotonic() - began:.0f} s: waiting for {stage.waits_for} ...", flush=True)


def leaves(error: Exception) -> Iterator[Exception]:
    """The errors in a group, however deep; an error that is no group is its own leaf."""
    if isinstance(error, ExceptionGroup):
        for part in error.exceptions:
            yield from leaves(part)
    else:
        yield error


def conclusion(faults: list[str], *, is_whole: bool) -> str:
    """The last line; `is_whole`: everything was checked, and no call was refused at the end."""
    if faults:
        return f"{pluralize(len(faults), 'thing')} did not work"
    return "everything worked" if is_whole else "everything that was checked worked"


def missing(story: Story, people: People, figures: Figures, ledger: Ledger) -> Iterator[str]:
    """What a run must have seen to check everything, and has not."""
    if figures.jobs_done == 0:
        yield "jobs: none was done"
    if story.progress.first_round_s is None:
        yield "fetch: the first items of the fast sellers are not all on the site"
    elif not story.progress.changes_right:
        yield "fetch: no next version of a catalogue was imported"
    if people.crowd.seen.photos_whole == 0:
        yield "media: no photo was seen"
    if people.readers.viewed.views == 0:
        yield "views: none was counted"
    if people.followers.followed.pages == 0:
        yield "feed: no page was read"
    if people.buyers.bought.ways == 0:
        yield "site: no visit from an advert to a feed ended"
    if people.buyers.bought.tracks == 0:
        yield "media: no track was played"
    statuses = people.crowd.seen.statuses
    yield from (f"media: no answer had status {s}" for s in (206, 304, 416) if not statuses[s])
    yield from (f"ledger: {name} were not compared" for name in LINES if name not in ledger.lines)


def seconds_of(text: str) -> float:
    """The value of `--seconds`. Raises: argparse.ArgumentTypeError."""
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) < math.inf:
            return seconds
    raise argparse.ArgumentTypeError(f"expected a number of seconds over 0, got {text[:40]!r}")


def main() -> int:
    """Parse the command line and play; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="headrace demo", description="Run a small classifieds site with simulated users."
    )
    parser.add_argument(
        "--seconds",
        type=seconds_of,
        help="stop after this many seconds (default: on Ctrl-C); a run of under"
        f" {CHECKED_FROM_S:.0f} s lists what it did not check",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=FOLDER,
        help="the folder of all its data (default: demo-data)",
    )
    parser.add_argument(
        "--port",
        type=int,
        help="the console's port; the photos have the next one, the site the one after it",
    )
    parser.add_argument(
        "--sellers", type=int, default=SHOPS_COUNT, help="how many sellers, 5 to 50"
    )
    given = parser.parse_args()
    sellers = shops(min(max(given.sellers, 5), SHOPS_COUNT))
    try:
        with folder_of_one(given.folder) as lock_fd:
            stage = Stage(given.folder, sellers, lock_fd=lock_fd, port=given.port)
            return asyncio.run(Demo(stage, seconds=given.seconds).run())
    except StoppedError:
        print("stopped during start-up", file=sys.stderr)
        return 0 if given.seconds is None else 1
    except (DemoError, ServerFailedError, OSError) as error:
        print(f"the demo cannot run: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

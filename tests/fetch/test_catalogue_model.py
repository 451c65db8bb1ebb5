"""Runs of a customer against a plain model: upload, hold, confirm, discard, undo, sent items."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from room import HEAD

from headrace.fetch.errors import RunNotHeld, RunNotUndoable
from headrace.fetch.model import UNDOABLE_RUNS, RunState, SentItem

PRICES = ("1990.50", "1 990.50", "1990,50")
"""One price, however it is written: rows that differ only in this are equal."""
NAMES = count()
ids = st.sampled_from([f"i{n}" for n in range(14)])
variants = st.integers(0, 2)
rows = st.tuples(variants, st.integers(0, 2)) | st.none()
catalogues = st.dictionaries(ids, rows, max_size=14)
calls = st.dictionaries(ids, variants | st.none(), min_size=1, max_size=6)
steps = st.lists(
    st.tuples(st.sampled_from(["catalogue", "catalogue", "dry"]), catalogues)
    | st.tuples(st.just("send"), calls)
    | st.tuples(st.sampled_from(["confirm", "discard", "undo", "undo", "undo_older"]), st.none()),
    max_size=14,
)


@dataclass
class Known:
    """An item as the model has it."""

    variant: int
    is_gone: bool = False
    version: int = 1
    sent_at: int = 0


@dataclass
class Applied:
    """A catalogue that was applied, and what its undo restores."""

    run: int
    at: int
    before: dict[str, int | None]
    """The variant of each changed item; None if the item was not published."""
    is_undone: bool = False


@dataclass
class Model:
    """The expected items of the customer."""

    items: dict[str, Known] = field(default_factory=dict)
    held: tuple[int, dict, int] | None = None
    applied: list[Applied] = field(default_factory=list)

    def put(self, item: str, variant: int) -> str:
        known = self.items.get(item)
        if known is None:
            self.items[item] = Known(variant)
            return "new"
        if not known.is_gone and known.variant == variant:
            return "unchanged"
        kind = "new" if known.is_gone else "changed"
        known.variant, known.is_gone = variant, False
        known.version += 1
        return kind

    def drop(self, item: str) -> str:
        known = self.items.get(item)
        if known is None or known.is_gone:
            return "unchanged"
        known.is_gone = True
        known.version += 1
        return "gone"

    def catalogue(self, run: int, named: dict, at: int) -> dict[str, str]:
        """Apply a catalogue; return the kind of change of each item."""
        kinds, before = {}, {}
        for item in {**named, **self.items}:
            known = self.items.get(item)
            if known is not None and known.sent_at > at:
                continue
            was = None if known is None or known.is_gone else known.variant
            if item not in named:
                kinds[item] = self.drop(item)
            elif named[item] is not None:
                kinds[item] = self.put(item, named[item][0])
            if kinds.get(item, "unchanged") != "unchanged":
                before[item] = was
        self.applied.append(Applied(run, at, before))
        self.held = None
        return kinds

    def send(self, named: dict[str, int | None], at: int) -> dict[str, str]:
        kinds = {}
        for item, variant in named.items():
            kinds[item] = self.drop(item) if variant is None else self.put(item, variant)
            if item in self.items:
                self.items[item].sent_at = at
        return kinds

    def undo(self, applied: Applied) -> dict[str, str]:
        applied.is_undone = True
        self.held = None
        return {
            item: self.drop(item) if was is None else self.put(item, was)
            for item, was in applied.before.items()
            if self.items[item].sent_at < applied.at
        }

    def undoable(self) -> Applied | None:
        """The only run that can be undone now: the newest one that changed items."""
        kept = [one for one in self.applied[-UNDOABLE_RUNS:] if not one.is_undone]
        return next((one for one in reversed(kept) if one.before), None)


def text_of(named: dict[str, tuple[int, int] | None]) -> str:
    lines = []
    for item, row in named.items():
        if row is None:
            lines.append(f"{item},,5,\n")
        else:
            variant, spelling = row
            photo = f"http://x.example/{variant}.jpg" if variant else ""
            lines.append(f'{item},N{variant},"{PRICES[spelling]}",{photo}\n')
    return HEAD + "".join(lines)


def item_of(customer: str, item: str, variant: int | None) -> SentItem:
    if variant is None:
        return SentItem(customer=customer, item=item, gone=True)
    photos = [f"http://x.example/{variant}.jpg"] if variant else []
    fields = {"name": f"N{variant}", "price": "1990.50"}
    return SentItem(customer=customer, item=item, photos=photos, fields=fields)


class Driver:
    """Takes each step on the room and on the model, and compares."""

    def __init__(self, shop, customer: str) -> None:
        self.shop = shop
        self.customer = customer
        self.model = Model()
        self.at = 0

    async def take(self, word: str, named) -> None:
        self.at += 1
        await getattr(self, word)(named)
        await self.require_items()

    async def catalogue(self, named) -> None:
        run = await self.shop.run(text_of(named), customer=self.customer)
        valid = sum(row is not None for row in named.values())
        assert (run.rows, run.invalid) == (len(named), len(named) - valid)
        published = sum(not known.is_gone for known in self.model.items.values())
        if valid == 0 or valid * 10 <= published:
            assert run.state is RunState.HELD
            would = deepcopy(self.model).catalogue(run.run, named, self.at)
            await self.require_changes(run, would)
            self.model.held = (run.run, named, self.at)
        else:
            await self.require_changes(run, self.model.catalogue(run.run, named, self.at))

    async def dry(self, named) -> None:
        options = {"customer": self.customer, "is_dry_run": True, "is_sampled": False}
        run = await self.shop.run(text_of(named), **options)
        assert run.state is RunState.DRY
        would = deepcopy(self.model).catalogue(run.run, named, self.at)
        await self.require_changes(run, would)

    async def send(self, named) -> None:
        sent = [item_of(self.customer, item, variant) for item, variant in named.items()]
        [run] = await self.shop.fetch.send_items(sent)
        await self.require_changes(run, self.model.send(named, self.at))

    async def confirm(self, _named) -> None:
        if self.model.held is None:
            return
        run_id, named, at = self.model.held
        run = await self.shop.fetch.runs.confirm(run_id)
        await self.require_changes(run, self.model.catalogue(run_id, named, at))
        with pytest.raises(RunNotHeld):
            await self.shop.fetch.runs.confirm(run_id)

    async def discard(self, _named) -> None:
        if self.model.held is None:
            return
        run_id, self.model.held = self.model.held[0], None
        assert (await self.shop.fetch.runs.discard(run_id)).state is RunState.SUPERSEDED
        for verb in (self.shop.fetch.runs.confirm, self.shop.fetch.runs.discard):
            with pytest.raises(RunNotHeld):
                await verb(run_id)

    async def undo(self, _named) -> None:
        last = self.model.undoable()
        shown = await self.shop.fetch.runs.newest(self.customer)
        assert [run.run for run in shown if run.can_undo] == ([] if last is None else [last.run])
        if last is None:
            return
        run = await self.shop.fetch.runs.undo(last.run)
        await self.require_changes(run, self.model.undo(last))
        for run_id, why in ((last.run, f"run {run.run} has already"), (run.run, "undoes another")):
            with pytest.raises(RunNotUndoable, match=why):
                await self.shop.fetch.runs.undo(run_id)

    async def undo_older(self, _named) -> None:
        last = self.model.undoable()
        for one in self.model.applied:
            if one is not last:
                with pytest.raises(RunNotUndoable):
                    await self.shop.fetch.runs.undo(one.run)

    async def require_changes(self, run, kinds: dict[str, str]) -> None:
        """The counts and the changes of a run are those of the model."""
        expected = {item: kind for item, kind in kinds.items() if kind != "unchanged"}
        found = await self.shop.fetch.runs.changes(run.run)
        assert {change.item: change.kind for change in found} == expected
        counted = [list(expected.values()).count(kind) for kind in ("new", "changed", "gone")]
        assert [run.new, run.changed, run.gone] == counted

    async def require_items(self) -> None:
        """The stored items are those of the model, and so is the run that is held."""
        found = await self.shop.sql(
            "SELECT item, fields, is_gone, version, photos FROM #fetch_item"
            " WHERE customer = :customer",
            customer=self.customer,
        )
        stored = {
            item: (is_gone, version, fields[fields.index('"N') + 2], len(photos))
            for item, fields, is_gone, version, photos in map(tuple, found)
        }
        assert stored == {
            item: (known.is_gone, known.version, str(known.variant), int(known.variant > 0))
            for item, known in self.model.items.items()
        }
        held = await self.shop.sql(
            "SELECT id FROM #fetch_run WHERE customer = :customer AND state = 'held'",
            customer=self.customer,
        )
        assert [row["id"] for row in held] == ([self.model.held[0]] if self.model.held else [])


@pytest.mark.slow
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(plan=steps)
async def test_items_and_runs_are_those_of_a_plain_model(shop, plan):
    customer = f"c{next(NAMES)}"
    await shop.fetch.customers.set(customer, starts_max=10, window_s=1, connections=1)
    driver = Driver(shop, customer)
    for word, named in plan:
        await driver.take(word, named)

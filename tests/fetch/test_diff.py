"""The diff against a plain model.

Catalogues, items sent by themselves, held runs and confirmations.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.engines.sql import compile_query
from headrace.fetch.errors import RunNotHeld
from headrace.fetch.model import RunState, SentItem

HEAD = "id,name,price,photos\n"
PRICES = ("1990.50", "1 990.50", "1990,50")
"""One price, however it is written: rows that differ in this alone are equal."""
NAMES = count()
ids = st.sampled_from([f"i{n}" for n in range(14)])
variants = st.integers(0, 2)
rows = st.tuples(variants, st.integers(0, 2)) | st.none()
catalogues = st.dictionaries(ids, rows, max_size=14)
calls = st.dictionaries(ids, variants | st.none(), min_size=1, max_size=6)
steps = st.lists(
    st.tuples(st.just("catalogue"), catalogues)
    | st.tuples(st.just("send"), calls)
    | st.just(("confirm", None)),
    max_size=10,
)


@dataclass
class Known:
    """An item as the model has it."""

    variant: int
    is_gone: bool = False
    version: int = 1
    sent_at: int = 0


@dataclass
class Model:
    """What the customer's items must be."""

    items: dict[str, Known] = field(default_factory=dict)
    steps: int = 0
    applied_at: int = 0

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

    def catalogue(self, named: dict[str, tuple[int, int] | None], at: int) -> list[str]:
        self.applied_at = at
        kinds = []
        for item in {**named, **self.items}:
            known = self.items.get(item)
            if known is not None and known.sent_at > at:
                continue
            if item not in named:
                kinds.append(self.drop(item))
            elif named[item] is not None:
                kinds.append(self.put(item, named[item][0]))
        return kinds

    def send(self, named: dict[str, int | None], at: int) -> list[str]:
        kinds = []
        for item, variant in named.items():
            kinds.append(self.drop(item) if variant is None else self.put(item, variant))
            if item in self.items:
                self.items[item].sent_at = at
        return kinds


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
    return SentItem(
        customer=customer,
        item=item,
        photos=photos,
        fields={"name": f"N{variant}", "price": "1990.50"},
    )


ITEMS = compile_query(
    "items",
    "-- Items of a customer.\n"
    "SELECT item, fields, is_gone, version, photos FROM headrace.fetch_item"
    " WHERE customer = :customer",
)


async def require_equal(shop, customer: str, model: Model) -> None:
    found = {row["item"]: row for row in await shop.postgres.all(ITEMS, customer=customer)}
    assert found.keys() == model.items.keys()
    for item, known in model.items.items():
        row = found[item]
        assert (row["is_gone"], row["version"]) == (known.is_gone, known.version), item
        assert f'"N{known.variant}"' in row["fields"], item
        assert len(row["photos"]) == bool(known.variant), item


def require_counted(run, kinds: list[str]) -> None:
    counted = (run.new, run.changed, run.gone)
    assert counted == tuple(kinds.count(kind) for kind in ("new", "changed", "gone"))


@pytest.mark.slow
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(plan=steps)
async def test_items_are_what_a_plain_model_says(shop, plan):
    customer = f"c{next(NAMES)}"
    await shop.fetch.customers.set(customer, starts_max=10, window_s=1, connections=1)
    model, held = Model(), None
    for at, (word, named) in enumerate(plan, 1):
        if word == "send":
            (run,) = await shop.fetch.send_items(
                [item_of(customer, item, variant) for item, variant in named.items()]
            )
            require_counted(run, model.send(named, at))
        elif word == "catalogue":
            path = shop.folder / "c.csv"
            path.write_text(text_of(named))
            valid = sum(row is not None for row in named.values())
            published = sum(not known.is_gone for known in model.items.values())
            run = await shop.fetch.run_catalogue(path, customer)
            if valid == 0 or valid * 10 <= published:
                assert run.state is RunState.HELD
                held = (run.run, named, at)
            else:
                require_counted(run, model.catalogue(named, at))
                assert run.invalid == len(named) - valid
        elif held is not None and held[2] > model.applied_at:
            run = await shop.fetch.runs.confirm(held[0])
            require_counted(run, model.catalogue(held[1], held[2]))
            held = None
        elif held is not None:
            with pytest.raises(RunNotHeld):
                await shop.fetch.runs.confirm(held[0])
            held = None
        await require_equal(shop, customer, model)


async def test_a_run_shows_item_by_item_what_changed(shop):
    await shop.run(f"{HEAD}a,A,5,\nb,B,5,http://x.example/1.jpg\nc,C,5,\nd,D,5,\n")
    dry = await shop.run(
        f"{HEAD}a,A2,6,\nb,B,5,http://x.example/2.jpg\nd,D,5.00,\ne,E,5,\n",
        is_dry_run=True,
        is_sampled=False,
    )
    found = await shop.fetch.runs.changes(dry.run)
    assert [(change.item, change.kind, change.fields) for change in found] == [
        ("a", "changed", ["name", "price"]),
        ("b", "changed", ["photos"]),
        ("c", "gone", []),
        ("d", "changed", ["price"]),
        ("e", "new", []),
    ]
    behind = await shop.fetch.runs.changes(dry.run, after="b", rows_max=2)
    assert [change.item for change in behind] == ["c", "d"]
    assert dry.sample is None


async def test_of_dry_runs_the_last_five_are_kept(shop):
    dry = [
        await shop.run(f"{HEAD}a,A,{n},\n", is_dry_run=True, is_sampled=False) for n in range(1, 8)
    ]
    found = await shop.fetch.runs.newest("shop")
    assert [run.run for run in found] == [run.run for run in reversed(dry[2:])]
    kept = compile_query("kept", "-- Of a test.\nSELECT count(*) FROM headrace.fetch_change")
    assert await shop.postgres.value(kept) == 5

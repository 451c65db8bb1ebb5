"""The examples of docs/catalogues.md are valid and have the rows that the page describes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from headrace.fetch.mappings import parse_mapping
from headrace.fetch.schemas import parse_schema

PAGE = (Path(__file__).parents[2] / "docs" / "catalogues.md").read_text()


def example(kind: str) -> str:
    found = re.search(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)
    assert found, f"the page has an example of {kind}"
    return found[1]


async def test_the_examples_are_read_without_a_problem(shop):
    for kind, form, rows, photos in (
        ("csv", "csv", 2, 4),
        ("tsv", "tsv", 1, 1),
        ("xml", "yml", 1, 2),
        ("json", "json", 2, 3),
        ("ndjson", "ndjson", 2, 1),
        ("avito", "avito", 1, 2),
        ("rss", "google_rss", 1, 2),
    ):
        await shop.fetch.customers.set(kind, starts_max=1, window_s=1, connections=1)
        file = shop.folder / kind
        file.write_text(example(kind))
        run = await shop.fetch.run_catalogue(file, kind, is_dry_run=True)
        assert (run.format, run.rows, run.new, run.photos) == (form, rows, rows, photos)
        links = [p.code for _, p in await shop.fetch.reports.problems(run.run)]
        assert links == ["port"] * photos, "only the test's own host is allowed here"


async def test_yml_in_the_encoding_it_declares(shop):
    text = example("xml").replace("UTF-8", "windows-1251").replace("City bike", "Велосипед")
    await shop.run(text.encode("windows-1251"), name="shop.yml")
    item = await shop.fetch.items.get("shop", "bike-1")
    assert item.fields["name"] == "Велосипед"
    assert item.fields["category_name"] == "Bicycles"
    assert item.fields["param:Colour"] == "red"


async def test_the_examples_of_a_mapping_and_a_schema(shop):
    mapping = parse_mapping(tomllib.loads(example("toml-mapping")))
    await shop.fetch.mappings.set("example-shop", mapping)
    schema = parse_schema(tomllib.loads(example("toml-schema")))
    await shop.fetch.schemas.set("Cars", schema)
    await shop.run(example("shop"), mapping="example-shop")
    item = await shop.fetch.items.get("shop", "bike-1")
    assert item.fields == {"name": "City bike", "price": "120", "brand": "Acme"}
    assert [photo.url[-6:] for photo in item.photos] == ["b1.jpg", "b2.jpg"]
    run = await shop.run(
        "id,name,category,year,state\ncar-1,Car,CARS,1850,broken\n", is_dry_run=True
    )
    found = [(p.field, p.code) for _, p in await shop.fetch.reports.problems(run.run)]
    assert found == [*(("year", "too_small"), ("state", "invalid_value"), ("photos", "missing"))]

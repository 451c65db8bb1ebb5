"""Schemas and mappings through Python, HTTP and the command line, and their effect on runs."""

from __future__ import annotations

import json
from urllib.parse import quote

import msgspec
import pytest

from headrace.fetch.errors import (
    InvalidMapping,
    InvalidSchema,
    MappingUnknown,
    SchemaUnknown,
)
from headrace.fetch.mappings import Mapping
from headrace.fetch.schemas import FieldRule, Schema
from headrace.kernel.ids import InvalidId

CARS = {"fields": {"year": {"type": "integer", "least": 1900, "required": True}}}
CARS_TOML = '[fields.year]\ntype = "integer"\nleast = 1900\nrequired = true\n'
SHEET = {"id": "Code", "name": "Caption", "photos": ["Pic 1", "Pic 2"], "others": "drop"}
HEAD = "id,name,category,year\n"


async def problems(shop, run) -> list[tuple[str | None, str, str]]:
    return [(p.item, p.field, p.code) for _, p in await shop.fetch.reports.problems(run.run)]


async def test_a_schema_is_one_through_python_http_and_commands(shop, client, command, tmp_path):
    path = "/v1/fetch/schemas/" + quote("Used Cars")
    made = await client.put(path, json=CARS)
    assert made.status_code == 200, made.text
    assert (made.json()["category"], made.json()["schema"]) == ("Used Cars", CARS)
    for category in ("used cars", "  USED  cars"):
        found = await shop.fetch.schemas.get(category)
        assert found.schema == msgspec.convert(CARS, Schema)
        assert (await client.get("/v1/fetch/schemas/" + quote(category))).json() == made.json()
    assert (await client.get("/v1/fetch/schemas")).json() == {"schemas": [made.json()]}
    code, text = await command("schema", "ls")
    assert (code, text) == (0, "Used Cars: year (integer, required); others are kept")
    assert json.loads((await command("schema", "show", "used cars"))[1]) == CARS
    for name, content in (("s.toml", CARS_TOML), ("s.json", json.dumps(CARS))):
        file = tmp_path / name
        file.write_text(content)
        assert (await command("schema", "set", "Boats", str(file)))[0] == 0
        assert (await shop.fetch.schemas.get("boats")).schema == msgspec.convert(CARS, Schema)
    assert (await command("schema", "rm", "BOATS"))[0] == 0
    assert (await client.delete(path)).status_code == 204
    assert await shop.fetch.schemas.all() == []


@pytest.mark.parametrize("category", ["Cars/Used", "Home > Lamps", "Лампы & свет", "100%", "a?b#c"])
async def test_a_category_may_be_called_anything(client, shop, category):
    path = "/v1/fetch/schemas/" + quote(category, safe="")
    assert (await client.put(path, json=CARS)).json()["category"] == category
    assert (await client.get(path)).json()["category"] == category
    rows = f'id,name,category\na,A,"{category}"\nb,B,other\n'
    assert (await shop.run(rows)).invalid == 1
    assert (await client.delete(path)).status_code == 204


async def test_a_mapping_is_one_through_python_http_and_commands(shop, client, command, tmp_path):
    made = await client.put("/v1/fetch/mappings/sheet", json=SHEET)
    assert made.status_code == 200, made.text
    assert (made.json()["name"], made.json()["mapping"]) == ("sheet", SHEET)
    assert (await shop.fetch.mappings.get("sheet")).mapping == msgspec.convert(SHEET, Mapping)
    assert (await client.get("/v1/fetch/mappings/sheet")).json() == made.json()
    assert (await client.get("/v1/fetch/mappings")).json() == {"mappings": [made.json()]}
    assert (await command("mapping", "ls"))[1] == "sheet: any format, id from Code"
    assert json.loads((await command("mapping", "show", "sheet"))[1]) == SHEET
    file = tmp_path / "m.toml"
    file.write_text('format = "xml"\nrows = "a/b"\nid = ["@id", "code"]\n')
    assert await command("mapping", "set", "feed", str(file)) == (
        0,
        "feed: xml, rows at a/b, id from @id or code",
    )
    assert (await command("mapping", "rm", "feed"))[0] == 0
    assert (await client.delete("/v1/fetch/mappings/sheet")).status_code == 204
    assert await shop.fetch.mappings.all() == []


@pytest.mark.parametrize(
    ("method", "path", "options", "status", "code"),
    [
        ("GET", "schemas/none", {}, 404, "fetch.schema_unknown"),
        ("GET", "schemas/%00", {}, 404, None),
        ("DELETE", "schemas/none", {}, 404, "fetch.schema_unknown"),
        ("PUT", "schemas/" + "x" * 201, {"json": CARS}, 422, "fetch.invalid_schema"),
        ("PUT", "schemas/x", {"json": {"fields": {"id": {}}}}, 422, "fetch.invalid_schema"),
        ("PUT", "schemas/x", {"json": {"fields": {"a": {"type": "uuid"}}}}, 422, None),
        ("PUT", "schemas/x", {"json": {"fields": {"a": {"pattern": "("}}}}, 422, None),
        ("PUT", "schemas/x", {"json": {"typo": 1}}, 422, None),
        ("PUT", "schemas/x", {"json": []}, 422, None),
        ("PUT", "schemas/x", {"content": b"fields = 1"}, 415, None),
        ("GET", "mappings/none", {}, 404, "fetch.mapping_unknown"),
        ("GET", "mappings/%00", {}, 404, None),
        ("DELETE", "mappings/none", {}, 404, "fetch.mapping_unknown"),
        ("PUT", "mappings/a%20b", {"json": SHEET}, 422, "invalid_id"),
        ("PUT", "mappings/x", {"json": {"name": "n"}}, 422, None),
        ("PUT", "mappings/x", {"json": {"id": ""}}, 422, "fetch.invalid_mapping"),
        ("PUT", "mappings/x", {"json": {"id": "a\u0000"}}, 422, None),
    ],
)
async def test_bad_input_changes_nothing(client, shop, *, method, path, options, status, code):
    answer = await client.request(method, f"/v1/fetch/{path}", **options)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"].startswith("application/problem+json")
    assert code is None or answer.json()["code"] == code
    assert await shop.fetch.schemas.all() == []
    assert await shop.fetch.mappings.all() == []
    assert (await client.put("/v1/fetch/schemas/x", json=CARS)).status_code == 200


async def test_commands_say_what_is_wrong_with_a_file(command, tmp_path):
    file = tmp_path / "bad"
    for content in ("= =", "{", "fields = 5", "\N{SNOWMAN}"):
        file.write_text(content)
        assert (await command("schema", "set", "x", str(file)))[0] == "fetch.invalid_schema"
        assert (await command("mapping", "set", "x", str(file)))[0] == "fetch.invalid_mapping"
    file.write_bytes(b"\xff\xff")
    assert (await command("schema", "set", "x", str(file)))[0] == "fetch.invalid_schema"
    assert (await command("schema", "show", "x"))[0] == "fetch.schema_unknown"
    assert (await command("mapping", "rm", "x"))[0] == "fetch.mapping_unknown"


async def test_the_verbs_refuse_what_cannot_be_meant(shop):
    with pytest.raises(InvalidSchema):
        await shop.fetch.schemas.set("x", Schema(fields={"a": FieldRule(pattern="(")}))
    with pytest.raises(SchemaUnknown, match="schema ls"):
        await shop.fetch.schemas.remove("x\x00")
    with pytest.raises(InvalidMapping):
        await shop.fetch.mappings.set("x", Mapping(id=""))
    with pytest.raises(InvalidId):
        await shop.fetch.mappings.set("x/y", Mapping(id="a"))
    with pytest.raises(MappingUnknown, match="mapping ls"):
        await shop.fetch.mappings.get("x y")


async def test_a_run_judges_each_row_by_its_category(shop):
    await shop.fetch.schemas.set("cars", msgspec.convert(CARS, Schema))
    text = HEAD + "a,A,Cars,1850\nb,B,cars,\nc,C,boats,1850\nd,D,CARS,2 000\n"
    run = await shop.run(text)
    assert (run.new, run.invalid) == (2, 2)
    assert await problems(shop, run) == [*(("a", "year", "too_small"), ("b", "year", "missing"))]
    told = [p.text for _, p in await shop.fetch.reports.problems(run.run)]
    assert told == [
        "the field year is 1850, the minimum is 1900",
        "the field year is missing: fill it in",
    ]
    assert (await shop.fetch.items.get("shop", "d")).fields["year"] == "2000"


async def test_a_schema_that_changed_judges_the_same_rows_anew(shop):
    text = HEAD + "a,A,cars,1850\nb,B,cars,1950\n"
    assert (await shop.run(text)).new == 2
    await shop.fetch.schemas.set("cars", msgspec.convert(CARS, Schema))
    run = await shop.run(text)
    assert (run.unchanged, run.invalid, run.gone) == (1, 1, 0)
    await shop.fetch.schemas.remove("cars")
    assert (await shop.run(text)).unchanged == 2


async def test_a_run_reads_by_a_mapping(shop, client, command, tmp_path):
    await shop.fetch.mappings.set("sheet", msgspec.convert(SHEET, Mapping))
    table = b"Code;Caption;Pic 2;Pic 1;Junk\n7;Table;ftp://x/2;ftp://x/1;j\n"
    run = await shop.run(table, mapping="sheet")
    assert (run.format, run.new) == ("csv", 1)
    item = await shop.fetch.items.get("shop", "7")
    assert item.fields == {"name": "Table"}
    assert [photo.url for photo in item.photos] == ["ftp://x/1", "ftp://x/2"]
    path = "/v1/fetch/customers/shop/catalogues?mapping="
    assert (await client.post(path + "sheet", content=table)).json()["unchanged"] == 1
    unknown = await client.post(path + "none", content=table)
    assert (unknown.status_code, unknown.json()["code"]) == (404, "fetch.mapping_unknown")
    file = tmp_path / "sheet.csv"
    file.write_bytes(table)
    words = ("catalogue", "run", str(file), "--customer", "shop", "--no-wait")
    assert "1 unchanged" in (await command(*words, "--mapping", "sheet"))[1]
    assert (await command(*words))[0] == "fetch.not_a_catalogue"


@pytest.mark.parametrize(
    ("query", "body", "status", "code"),
    [
        ("format=json", b"id,name\n1,A\n", 422, "fetch.catalogue_broken"),
        ("format=excel", b"id,name\n1,A\n", 422, "fetch.unknown_format"),
        ("format=xml", b"<a/>", 422, "fetch.unknown_format"),
        ("format=ndjson", b'{"id": 1, "name": "A"}', 202, None),
        ("file_name=x", b'{"id": 1, "name": "A", "url": "https://a.example/1"}', 202, None),
        ("format=csv", b"id,name\n1,A\n", 202, None),
    ],
)
async def test_an_upload_may_say_its_format(client, *, query, body, status, code):
    answer = await client.post(f"/v1/fetch/customers/shop/catalogues?{query}", content=body)
    assert (answer.status_code, answer.json().get("code")) == (status, code), answer.text


@pytest.mark.parametrize("opening", ["[", '{"url":'])
async def test_an_upload_nested_without_end_is_refused(client, command, tmp_path, opening):
    depth = 20_000
    body = (opening * depth + "1" + {"[": "]"}.get(opening, "}") * depth).encode()
    answer = await client.post("/v1/fetch/customers/shop/catalogues", content=body)
    assert answer.status_code in (202, 422), answer.text
    for path in ("/v1/fetch/mappings/deep", "/v1/fetch/schemas/deep", "/v1/fetch/customers/deep"):
        told = await client.put(path, content=body, headers={"content-type": "application/json"})
        assert told.status_code in (400, 422), told.text
    file = tmp_path / "deep.json"
    file.write_bytes(body)
    assert (await command("item", "send", str(file)))[0] == "fetch.invalid_items"
    assert (await command("schema", "set", "deep", str(file)))[0] == "fetch.invalid_schema"
    assert (await command("mapping", "set", "deep", str(file)))[0] == "fetch.invalid_mapping"

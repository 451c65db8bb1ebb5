"""Hostile and broken files over HTTP: the exact response, no changes, and the next good file works.

The table of all faults is in `test_reader_faults`; here is one file per way to fail.
"""

from __future__ import annotations

import gzip
from hashlib import sha256

import pytest

GOOD = b"id,name,price\na,A,5\nb,B,6\n"
LONG = b"id,name\n" + b"".join(
    b"%d,%s\n" % (n, sha256(b"%d" % n).hexdigest().encode()) for n in range(2000)
)
BOMB = gzip.compress(b"id,name\n" + b"1,A\n" * 1_000_000)


def lying(data: bytes) -> bytes:
    """gzip of `data` that claims another length and checksum."""
    return gzip.compress(data)[:-8] + b"\x00" * 8


LAUGHS = (
    b"<!DOCTYPE yml_catalog [<!ENTITY l0 'ha'>"
    + b"".join(b"<!ENTITY l%d '%s'>" % (n, b"&l%d;" % (n - 1) * 10) for n in range(1, 10))
    + b"]><yml_catalog>&l9;</yml_catalog>"
)
XXE = b"<!DOCTYPE Ads [<!ENTITY x SYSTEM 'file:///etc/passwd'>]><Ads><Ad><Id>&x;</Id></Ad></Ads>"
PARAMETER = b"<!DOCTYPE Ads [<!ENTITY % x SYSTEM 'http://127.0.0.1/x'> %x;]><Ads></Ads>"
REFUSED = [
    ("a gzip bomb", BOMB, 413, "fetch.catalogue_too_large"),
    ("gzip that lies about its length", lying(GOOD), 422, "fetch.catalogue_broken"),
    ("gzip in gzip", gzip.compress(gzip.compress(GOOD)), 422, "fetch.not_a_catalogue"),
    ("billion laughs", LAUGHS, 422, "fetch.catalogue_broken"),
    ("an external entity", XXE, 422, "fetch.catalogue_broken"),
    ("an external parameter entity", PARAMETER, 422, "fetch.catalogue_broken"),
    ("binary data", b"\x00\x01\x02" * 100, 422, "fetch.not_a_catalogue"),
    ("NUL in the first lines", b"id,name\na,A\x00\nb,B\n", 422, "fetch.not_a_catalogue"),
    ("50,000 columns", b"id,name," + b"x," * 50_000 + b"\n", 422, "fetch.catalogue_broken"),
    ("Latin-1", "id,name\n1,é\n".encode("latin-1"), 422, "fetch.catalogue_broken"),
    ("a line without end", b"id,name\n1," + b"x" * 1_100_000, 413, "fetch.catalogue_too_large"),
    ("JSON without rows", b'{"error": "no access", "code": 5}', 422, "fetch.catalogue_broken"),
]
HELD = [
    ("gzip cut short", gzip.compress(LONG)[:-9]),
    ("an open quote", GOOD + b'c,"C'),
    ("no rows", b"id,name\n"),
    ("an empty feed", b"<rss><channel></channel></rss>"),
    ("nothing but nesting", b"[" + b"[" * 100_000 + b"]" * 100_000 + b"]"),
]
ROWS = [
    (
        "NUL in JSON",
        b'[{"id": "a", "name": "A\\u0000"}, {"id": "b", "name": "B"}]',
        "name",
        "invalid_text",
    ),
    (
        "half a letter",
        b'[{"id": "a", "name": "\\ud83d"}, {"id": "b", "name": "B"}]',
        "name",
        "invalid_text",
    ),
    (
        "half a letter in a name",
        b'{"id": "a", "\\udc00": 1}\n{"id": "b", "name": "B"}\n',
        "\N{REPLACEMENT CHARACTER}",
        "invalid_text",
    ),
    (
        "a number without end",
        b'[{"id": "a", "name": "A", "price": ' + b"9" * 5000 + b'}, {"id": "b", "name": "B"}]',
        "price",
        "invalid_number",
    ),
    (
        "a key given twice",
        b'[{"id": "a", "id": "a"}, {"id": "b", "name": "B"}]',
        "row",
        "invalid_json",
    ),
    ("another number of cells", b"id,name\na\nb,B\n", "row", "column_count"),
    ("a wild id", b"id,name\nbell\x07,A\na,A\nb,B\n", "id", "invalid_id"),
]


@pytest.fixture
async def published(client, shop):
    """The items of a good catalogue, as they must stay."""
    object.__setattr__(shop.fetch.config, "catalogue_max_bytes", 1_000_000)
    assert (await upload(client, GOOD))["new"] == 2

    async def items():
        return [await shop.fetch.items.get("shop", item) for item in ("a", "b")]

    before = await items()
    yield
    assert await items() == before
    assert (await upload(client, GOOD))["unchanged"] == 2


async def upload(client, data: bytes) -> dict:
    answer = await client.post("/v1/fetch/customers/shop/catalogues", content=data)
    assert answer.status_code == 202, answer.text
    return answer.json()


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize(
    ("data", "status", "code"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED]
)
async def test_a_file_that_cannot_be_read_is_refused(client, data, status, code):
    answer = await client.post("/v1/fetch/customers/shop/catalogues", content=data)
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert answer.headers["content-type"].startswith("application/problem+json")
    assert "root:" not in answer.text


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize("data", [h[1] for h in HELD], ids=[h[0] for h in HELD])
async def test_a_file_that_is_not_whole_is_held(client, data):
    run = await upload(client, data)
    assert run["state"] == "held"
    would = run["new"] + run["changed"] + run["unchanged"] + run["invalid"]
    assert (would, run["gone"] + run["changed"] + run["unchanged"]) == (run["rows"], 2)


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize(("data", "field", "code"), [r[1:] for r in ROWS], ids=[r[0] for r in ROWS])
async def test_a_row_that_cannot_be_taken_leaves_its_item(client, data, field, code):
    answer = await client.post("/v1/fetch/customers/shop/catalogues?dry_run=true", content=data)
    run = answer.json()
    assert (run["state"], run["invalid"], run["gone"]) == ("dry", 1, 0), answer.text
    found = (await client.get(f"/v1/fetch/runs/{run['run']}/errors")).json()["problems"]
    assert [(problem["field"], problem["code"]) for problem in found] == [(field, code)]
    assert found[0]["text"]


@pytest.mark.usefixtures("published")
async def test_formula_cells_stay_as_they_are_written(client, shop):
    cells = ["=cmd|' /C calc'!A0", "+1", "-1", "@SUM(A1)"]
    rows = "".join(f'{n},"{cell}",5\n' for n, cell in enumerate(cells))
    run = await upload(client, GOOD + rows.encode())
    assert run["new"] == 4
    assert [(await shop.fetch.items.get("shop", str(n))).fields["name"] for n in range(4)] == cells

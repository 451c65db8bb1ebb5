"""Hostile and broken files: one table per kind of fault, by the readers and over HTTP."""

from __future__ import annotations

import gzip
import json
import tomllib
import tracemalloc
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reading import read

from headrace.fetch.errors import CatalogueBroken, CatalogueTooLarge, NotACatalogue
from headrace.fetch.guard import Policy
from headrace.fetch.mappings import parse_mapping
from headrace.fetch.readers import FORMAT_NAMES, Truncated, open_catalogue
from headrace.fetch.validation import Rules, read_chunk
from headrace.kernel.errors import InvalidInput, TooLarge

CASES = tomllib.loads(Path(__file__).with_name("hostile_files.toml").read_text())
YML = b'<?xml version="1.0" encoding="UTF-8"?>\n<yml_catalog><shop><offers>'
ADS = b"<Ads>\n"
AD = b"<Ad><Id>1</Id><Title>A</Title></Ad>"
VARIED = b"id,name\n" + b"".join(
    b"%d,%s\n" % (n, sha256(b"%d" % n).hexdigest().encode()) for n in range(4000)
)
PACKED = gzip.compress(VARIED, mtime=0)
BILLION_LAUGHS = (
    b"<!DOCTYPE yml_catalog [<!ENTITY l0 'ha'>"
    + b"".join(b"<!ENTITY l%d '%s'>" % (n, b"&l%d;" % (n - 1) * 10) for n in range(1, 10))
    + b"]><yml_catalog>&l9;</yml_catalog>"
)
GOOD = b"id,name,price\na,A,5\nb,B,6\n"
LARGE = b"x" * 70_000
HUGE = b"x" * 1_500_000
NESTED = b"[" * 100_000 + b"]" * 100_000
REPLACED = "\N{REPLACEMENT CHARACTER}"


def files(kind: str, column: int = 2) -> list[list]:
    """Cases of a kind; the text of the file in this column becomes bytes."""
    rows = CASES[kind]
    return [[*row[:column], row[column].encode("latin-1"), *row[column + 1 :]] for row in rows]


NO_FORMAT = files("no_format", 0)


@pytest.mark.parametrize(("data", "words"), NO_FORMAT)
def test_a_file_of_no_format_is_refused(tmp_path, data, words):
    with pytest.raises(NotACatalogue, match="accepted are") as refused:
        read(tmp_path, data)
    assert words in refused.value.text


BROKEN = [
    *files("broken"),
    ("line_too_long", "line 2", b"id,name\n" + b"1,A" * 500_000),
    ("too_many_columns", "line 1", b"id,name," + b",".join(b"c%d" % n for n in range(600))),
    ("gzip", "file", PACKED[:-8] + b"12345678"),
    ("text_too_long", "line 1", b'[{"id": 1}, "' + HUGE + b'"]'),
    ("line_too_long", "line 2", b'{"id": 1}\n{"id": "' + HUGE + b'"}\n'),
    ("field_too_large", "line 2", YML + b"<offer id='1'><name>" + LARGE + b"</name>"),
    ("field_too_large", "line 2", YML + b"<offer id='" + LARGE + b"'>"),
    ("field_too_large", "line 2", ADS + AD + b"<Ad a='" + LARGE + b"'>"),
    ("tag_too_large", "line 2", ADS + AD + b"<!--" + HUGE + b"-->"),
    ("tag_too_large", "line 2", ADS + AD + b"<Ad " + HUGE),
    ("dtd_forbidden", "file", BILLION_LAUGHS),
    ("too_many_columns", "line 1", b"id,name," + b"x," * 50_000 + b"\n"),
]


@pytest.mark.parametrize(("code", "place", "data"), BROKEN)
def test_a_broken_file_is_refused_with_its_fault_and_line(tmp_path, code, place, data):
    with pytest.raises(CatalogueBroken) as refused:
        read(tmp_path, data)
    assert refused.value.problems[0].code == code
    assert refused.value.problems[0].pointer.startswith(place)


CUT = [
    *files("cut"),
    ("gzip", 1, PACKED[:-300]),
]


@pytest.mark.parametrize(("where", "rows_before", "data"), CUT)
def test_a_truncated_file_yields_its_rows_and_reports_its_end(tmp_path, where, rows_before, data):
    path = tmp_path / "file"
    path.write_bytes(data)
    rows = []
    with pytest.raises(Truncated) as cut:  # noqa: PT012
        for row in open_catalogue(path, bytes_max=10**9).rows:
            rows.append(row)  # noqa: PERF402 - the rows before the error count
    assert where in cut.value.where
    assert len(rows) >= rows_before


@pytest.mark.parametrize("bomb", [b"id,name\n" + b"1,A\n" * 40_000, b"[" + b'{"id": 1},' * 15_000])
def test_a_gzip_bomb_is_stopped_at_the_limit(tmp_path, bomb):
    with pytest.raises(CatalogueTooLarge, match=r"larger than 97\.66 KB"):
        read(tmp_path, gzip.compress(bomb), bytes_max=100_000)


ITEM = {"id": "i", "name": "Item", "photos": ["http://example.com/i.jpg"], "d": "d" * 400}
JSON_ROW = json.dumps(ITEM)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "row", "between", "end"),
    [
        ("id,name,photos,d\n", ",".join(["i", "Item", *ITEM["photos"], ITEM["d"]]), "\n", "\n"),
        ("[", JSON_ROW, ",\n", "]"),
        ("", JSON_ROW, "\n", ""),
    ],
    ids=["csv", "json", "ndjson"],
)
def test_a_large_file_is_read_in_bounded_memory(tmp_path, start, row, between, end):
    path = tmp_path / "large"
    with path.open("w") as file:
        file.write(start + row)
        file.writelines(between + row for _ in range(7_999))
        file.write(end)
    tracemalloc.start()
    try:
        count = sum(1 for _ in open_catalogue(path, bytes_max=10**9).rows)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 8_000
    assert peak_bytes < path.stat().st_size / 2


# Over HTTP: the response, no changes, and the next good file works

BAD_ROWS = [
    (b'[{"id": "a", "name": "A\\u0000"}, {"id": "b", "name": "B"}]', "name", "invalid_text"),
    (b'[{"id": "a", "name": "\\ud83d"}, {"id": "b", "name": "B"}]', "name", "invalid_text"),
    (b'{"id": "a", "\\udc00": 1}\n{"id": "b", "name": "B"}\n', REPLACED, "invalid_text"),
    (
        b'[{"id": "a", "name": "A", "price": ' + b"9" * 5000 + b'}, {"id": "b", "name": "B"}]',
        "price",
        "invalid_number",
    ),
    (b'[{"id": "a", "id": "a"}, {"id": "b", "name": "B"}]', "row", "invalid_json"),
    (b"id,name\na\nb,B\n", "row", "column_count"),
    (b"id,name\nbell\x07,A\na,A\nb,B\n", "id", "invalid_id"),
]
TOO_LARGE = [
    gzip.compress(b"id,name\n1,A\n" + b"\n" * 2_100_000),
    b"id,name\n1," + b"x" * 2_100_000,
]
PATH = "/v1/fetch/customers/shop/catalogues"


async def test_no_hostile_file_changes_an_item(client, shop):
    object.__setattr__(shop.fetch.config, "catalogue_max_bytes", 2_000_000)

    async def upload(data: bytes, **params):
        answer = await client.post(PATH, content=data, params=params)
        return answer.status_code, answer.json()

    async def items():
        return [await shop.fetch.items.get("shop", item) for item in ("a", "b")]

    assert (await upload(GOOD))[1]["new"] == 2
    before = await items()
    refused = [(data, 422, "fetch.not_a_catalogue") for data, _ in NO_FORMAT]
    of_each_code = {code: data for code, _, data in BROKEN}
    refused += [(data, 422, "fetch.catalogue_broken") for data in of_each_code.values()]
    refused += [(data, 413, "fetch.catalogue_too_large") for data in TOO_LARGE]
    for data, status, code in refused:
        found, problem = await upload(data)
        assert (found, problem["code"]) == (status, code), data[:80]
        assert "root:" not in problem["detail"]
    held = [b"id,name\n", b"<rss><channel></channel></rss>", NESTED, GOOD + b'c,"C']
    for data in (*held, *(data for _, _, data in CUT[::3])):
        status, run = await upload(data)
        assert (status, run["state"]) == (202, "held"), data[:80]
        would = run["new"] + run["changed"] + run["unchanged"] + run["invalid"]
        assert (would, run["gone"] + run["changed"] + run["unchanged"]) == (run["rows"], 2)
        assert "truncated" not in await shop.fetch.reports.page(run["run"]), "in words"
    for data, field, code in BAD_ROWS:
        status, run = await upload(data, dry_run=True)
        assert (run["state"], run["invalid"], run["gone"]) == ("dry", 1, 0), data[:80]
        found = (await client.get(f"/v1/fetch/runs/{run['run']}/errors")).json()["problems"]
        assert [(problem["field"], problem["code"]) for problem in found] == [(field, code)]
        assert found[0]["text"]
    assert await items() == before
    assert (await upload(GOOD))[1]["unchanged"] == 2
    cells = ["=cmd|' /C calc'!A0", "+1", "-1", "@SUM(A1)"]
    rows = "".join(f'{n},"{cell}",5\n' for n, cell in enumerate(cells))
    assert (await upload(GOOD + rows.encode()))[1]["new"] == 4
    found = [(await shop.fetch.items.get("shop", str(n))).fields["name"] for n in range(4)]
    assert found == cells, "formula cells are stored as they are written"


async def test_a_nested_document_is_refused_everywhere(client, command, tmp_path):
    for opening, closing in (("[", "]"), ('{"url":', "}")):
        body = (opening * 20_000 + "1" + closing * 20_000).encode()
        assert (await client.post(PATH, content=body)).status_code in (202, 422)
        for path in ("mappings/deep", "schemas/deep", "customers/deep"):
            json_type = {"content-type": "application/json"}
            answer = await client.put(f"/v1/fetch/{path}", content=body, headers=json_type)
            assert answer.status_code in (400, 422), answer.text
        file = tmp_path / "deep.json"
        file.write_bytes(body)
        for words in (("item", "send"), ("schema", "set", "deep"), ("mapping", "set", "deep")):
            code = {"item": "items"}.get(words[0], words[0])
            assert (await command(*words, str(file)))[0] == f"fetch.invalid_{code}"


# Any bytes

RULES = Rules(Policy())
MAPPING = parse_mapping({"id": "id", "rows": "items", "photos": ["photos", "a.@b"]})
SIGNS = (
    "id name photos items 1 A é &amp; &a; ]]> \" ' \\ \\u0000 \\ud800"
    " { } [ ] : , ; | < > / NaN 1e999"
)
TAGS = "<Ads> <Ad> </Ad> <Id>1</Id> <rss> <channel> <item> <g:id> <feed> <entry> <yml_catalog> <!--"
PIECES = [
    *(
        *SIGNS.split(),
        *TAGS.split(),
        "<offers>",
        "<![CDATA[",
        "<?xml",
        "-",
        "null",
        "<offer id='1'>",
    ),
    *("\ud800", "\x00", "\ufeff", "\t", "\n", "\r\n", "id,name\n", "1,A\n", "sep=;\n"),
    *('{"id": 1, "name": "A"}', '{"items": ['),
]
DOCUMENTS = st.one_of(
    st.binary(max_size=300),
    st.lists(st.sampled_from(PIECES), max_size=40).map(
        lambda pieces: "".join(pieces).encode("utf-8", "surrogatepass")
    ),
    st.lists(st.sampled_from(PIECES), max_size=20).map(
        lambda pieces: "".join(pieces).encode("utf-16", "surrogatepass")
    ),
)
QUICK = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def outcome(path, **options) -> str:
    """`rows`, or the code of the error."""
    try:
        rows = open_catalogue(path, bytes_max=10**6, **options).rows
        is_last = False
        while not is_last:
            chunk = read_chunk(rows, RULES)
            is_last = chunk.is_last
            for problem in chunk.problems:
                msgspec.json.encode(problem)
                assert problem.field.isprintable()
    except (InvalidInput, TooLarge) as error:
        return error.code if error.text else "no words"
    return "rows"


@pytest.mark.slow
@QUICK
@given(data=DOCUMENTS, name=st.sampled_from(FORMAT_NAMES))
def test_any_bytes_end_in_rows_or_a_typed_error(tmp_path, data, name):
    path = tmp_path / "any"
    path.write_bytes(data)
    mapping = MAPPING if name == "xml" else None
    for options in ({}, {"mapping": MAPPING}, {"format_name": name, "mapping": mapping}):
        found = outcome(path, **options)
        assert found == "rows" or found.startswith("fetch.")


TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
ROWS = st.lists(st.dictionaries(TEXTS, VALUES, min_size=1, max_size=4), min_size=1, max_size=5)


@pytest.mark.slow
@QUICK
@given(rows=ROWS, indent=st.sampled_from([None, 2]), is_wrapped=st.booleans(), data=st.data())
def test_json_gives_every_row_and_no_cut_goes_unnoticed(
    tmp_path, *, rows, indent, is_wrapped, data
):
    path = tmp_path / "rows.json"
    document = json.dumps({"n": [1], "items": rows} if is_wrapped else rows, indent=indent)
    path.write_text(document)
    found = list(open_catalogue(path, bytes_max=10**6, format_name="json").rows)
    assert len(found) == len(rows)
    assert all(row.fault is None for row in found)
    path.write_text(document[: data.draw(st.integers(1, len(document) - 1))])
    with pytest.raises(Truncated):
        list(open_catalogue(path, bytes_max=10**6, format_name="json").rows)

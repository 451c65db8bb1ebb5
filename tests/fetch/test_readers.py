"""What the readers make of valid files and of faulty rows, format by format."""

from __future__ import annotations

import gzip
import json
import time
import tomllib
from pathlib import Path

import pytest
from reading import codes, read

from headrace.fetch.errors import CatalogueBroken, NotACatalogue
from headrace.fetch.mappings import split_photos
from headrace.fetch.readers import open_catalogue

CASES = tomllib.loads(Path(__file__).with_name("readers.toml").read_text())
HEAD = '<?xml version="1.0" encoding="UTF-8"?>\n<yml_catalog date="2026-01-01"><shop>'
OFFER = '<offer id="1" available="true"><name>A</name><price>5</price></offer>'
TAIL = "</offers></shop></yml_catalog>"
CATEGORIES = '<categories><category id="7">Lamps</category></categories><offers>'
ROW = {"id": "1", "name": "Лампа", "price": "5.50", "photos": ["http://a/1.jpg", "http://a/2.jpg"]}
READ = ({"id": "1", "name": "Лампа", "price": "5.50"}, ["http://a/1.jpg", "http://a/2.jpg"], None)
LONG = b'"' + b"y" * 150_000 + b'"'
GOOD_LINES = '{"id": "b", "name": "B"}\n{"id": "c", "name": "C"}\n'
AVITO = """<?xml version="1.0" encoding="UTF-8"?>
<Ads formatVersion="3" target="Avito.ru">
  <Ad>
    <Id>bike-1</Id><Category>Велосипеды</Category><Title>City bike</Title><Price>120</Price>
    <Description><![CDATA[<p>Good</p>]]></Description>
    <Images><Image url="http://a/1.jpg"/><Image url=" http://a/2.jpg "/></Images>
    <Delivery><Option>PVZ</Option><Option>Courier</Option></Delivery>
  </Ad>
</Ads>"""
RSS = """<?xml version="1.0"?>
<rss version="2.0" xmlns:g="http://base.google.com/ns/1.0"><channel><title>Shop</title><link>http://s</link>
<item><g:id>bike-1</g:id><title>Plain title</title><g:title>City bike</g:title><link>http://s/1</link>
<g:price>120.00 EUR</g:price><g:product_type>Bicycles &gt; City</g:product_type>
<g:google_product_category>1025</g:google_product_category><g:image_link>http://a/1.jpg</g:image_link>
<g:additional_image_link>http://a/2.jpg</g:additional_image_link>
<g:additional_image_link>http://a/3.jpg</g:additional_image_link>
<g:shipping><g:country>DE</g:country><g:price>4.90 EUR</g:price></g:shipping></item>
</channel></rss>"""
ATOM = """<feed xmlns="http://www.w3.org/2005/Atom" xmlns:c="http://base.google.com/ns/1.0">
<id>tag:shop</id><entry><id>tag:shop,1</id><c:id>bike-1</c:id><title>City bike</title>
<link rel="self" href="http://s/feed"/><link href="http://s/1"/><c:image_link>http://a/1.jpg</c:image_link>
<c:price>120</c:price></entry></feed>"""
AD = "<Ad><Id>1</Id><Title>A</Title></Ad>"


def avito(ads: str) -> str:
    return AVITO[: AVITO.index("<Ad>")] + ads + "</Ads>"


# CSV and TSV


@pytest.mark.parametrize(("text", "encoding"), CASES["dialects"])
def test_delimited_files_of_every_dialect_read_alike(tmp_path, text, encoding):
    for data in (text.encode(encoding), gzip.compress(text.encode(encoding))):
        kind, rows = read(tmp_path, data)
        assert kind in ("csv", "tsv")
        assert [(r.values, r.photos, r.fault) for r in rows] == [
            ({"id": "1", "name": "Лампа", "price": "5"}, ["http://a/1.jpg"], None)
        ]


@pytest.mark.parametrize(("cell", "links"), CASES["cells"])
def test_a_cell_of_photos_is_split_where_links_begin(cell, links):
    assert split_photos(cell) == links


LONG_CSV = [["1," + "x" * 70_000, "field_too_large"], ["1," + "x" * 140_000, "csv_quote"]]


@pytest.mark.parametrize(("line", "code"), CASES["csv_rows"] + LONG_CSV)
def test_a_faulty_row_of_csv_does_not_affect_others(tmp_path, line, code):
    _, rows = read(tmp_path, f"id,name\n0,Before\n{line}\n2,After\n")
    assert codes(rows) == [None, code, None]
    assert rows[2].values == {"id": "2", "name": "After"}
    assert (rows[1].number, rows[1].line) == (2, 3)


@pytest.mark.parametrize(
    ("line", "item"),
    [(b'1,"17" monitor",5', "1"), (b'"1"x,A,5', ""), (b'1,"two\nlines"x,5', "")],
)
def test_an_unreadable_csv_row_keeps_an_unambiguous_id(tmp_path, line, item):
    _, rows = read(tmp_path, b"id,name,price\n" + line + b"\n2,B,5\n")
    assert [row.item for row in rows] == [item, "2"]
    _, rows = read(tmp_path, b'name,id\n"17" monitor",1\nB,2\n')
    assert [row.item for row in rows] == ["", "2"]


# JSON and NDJSON


@pytest.mark.parametrize(
    ("document", "kind"),
    [
        (json.dumps([ROW]), "json"),
        (json.dumps([ROW], ensure_ascii=False, indent=4), "json"),
        (json.dumps({"items": [ROW]}), "json"),
        (json.dumps({"ok": True, "n": 1, "none": [], "data": {"page": {"rows": [ROW]}}}), "json"),
        (json.dumps({"items": [ROW], "tail": {"a": [1, {"b": "]}"}]}}), "json"),
        (json.dumps(ROW), "ndjson"),
        (json.dumps(ROW) + "\n", "ndjson"),
        (json.dumps(ROW).replace("price", "Price").replace("name", "TITLE") + "\r\n\r\n", "ndjson"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_json_of_every_shape_reads_alike(tmp_path, document, kind, encoding):
    for data in (document.encode(encoding), gzip.compress(document.encode(encoding))):
        found, rows = read(tmp_path, data)
        assert found == kind
        assert [(row.values, row.photos, row.fault) for row in rows] == [READ]


def test_values_stay_as_they_were_written(tmp_path):
    row = """[{"sku": 12345678901234567890, "title": " Bed ", "price": 1990.50, "weight": 1e3,
        "new": true, "old": false, "gone": null, "empty": "", "tags": ["a", "b"],
        "size": {"Width": 3, "unit": {"of": "m"}}, "variants": [{"c": "red"}, {"c": "blue"}],
        "images": [{"url": "http://a/1"}, {"url": "http://a/2"}],
        "picture": "http://a/3|http://a/4"}]"""
    _, rows = read(tmp_path, row)
    assert rows[0].values == {
        "id": "12345678901234567890",
        "name": "Bed",
        "price": "1990.50",
        "weight": "1e3",
        "new": "true",
        "old": "false",
        "tags": ["a", "b"],
        "size.width": "3",
        "size.unit.of": "m",
        "variants.c": ["red", "blue"],
    }
    assert rows[0].photos == ["http://a/1", "http://a/2", "http://a/3", "http://a/4"]


def test_json_rows_have_their_lines_and_an_empty_list_has_none(tmp_path):
    for data in (b"[]", b"[ \n]", b'{"items": []}', b'{"a": [], "b": {"c": []}}'):
        assert read(tmp_path, data) == ("json", [])
    _, rows = read(tmp_path, '{\n"items": [\n{"id": 1,\n"name": "A"},\n\n{"id": 2}, {"id": 3}]}')
    assert [(row.number, row.line) for row in rows] == [(1, 3), (2, 6), (3, 6)]
    _, rows = read(tmp_path, '{"id": 1}\n\n{"id": 2}\n')
    assert [(row.number, row.line) for row in rows] == [(1, 1), (2, 3)]


DEEP_JSON = [
    ['{"id": 9, "a":' + "[" * 40 + "]" * 40 + "}", "too_deep", "9"],
    ['{"a":' * 40 + "1" + "}" * 40, "too_deep", ""],
    ["[" * 50_000 + "]" * 50_000, "too_deep", ""],
]


@pytest.mark.parametrize(("row", "code", "item"), CASES["json_rows"] + DEEP_JSON)
def test_a_faulty_row_of_json_does_not_affect_others(tmp_path, row, code, item):
    before, after = '{"id": 1, "name": "A"}', '{"id": 2}'
    for document in (f"[{before},\n{row},{after}]", f"{before}\n{row}\n{after}\n"):
        _, rows = read(tmp_path, document)
        assert codes(rows) == [None, code, None]
        assert (rows[1].number, rows[1].line, rows[1].item) == (2, 2, item)
        assert rows[2].values == {"id": "2"}


def test_a_quote_inside_a_text_is_reported_with_its_line(tmp_path):
    """Brackets can then no longer be followed; lines can."""
    before, bad, after = '{"id": 1}', '{"id": "9", "name": "17" monitor"}', '{"id": 2}'
    _, rows = read(tmp_path, f"{before}\n{bad}\n{after}\n")
    assert [(row.item, row.fault and row.fault.code) for row in rows] == [
        *(("1", None), ("9", "invalid_json"), ("2", None))
    ]
    for behind in (f"{after}]", f"{after}]" + " " * 1_200_000):
        with pytest.raises(CatalogueBroken, match=r"line 3: .*expecting ',' delimiter"):
            read(tmp_path, f"[{before},\n\n{bad},\n{behind}")


def test_a_row_too_large_is_skipped(tmp_path):
    large = b'{"id": 9' + b', "a": '.join([b"", *[LONG] * 12]) + b"}"
    _, rows = read(tmp_path, b'[{"id": 1},' + large + b',{"id": 2}]')
    assert codes(rows) == [None, "row_too_large", None]


DEEP_LINE = '{"id": "a", "x": ' + "[" * 9000 + "]" * 9000 + "}"


@pytest.mark.parametrize("first", [*CASES["first_lines"], DEEP_LINE])
def test_a_bad_first_line_of_ndjson_is_one_bad_row(tmp_path, first):
    kind, rows = read(tmp_path, f"{first}\n{GOOD_LINES}")
    assert kind == "ndjson"
    assert [row.fault is None for row in rows] == [False, True, True]
    assert [row.values["id"] for row in rows[1:]] == ["b", "c"]


@pytest.mark.parametrize("document", CASES["documents"])
def test_a_document_with_an_object_a_line_is_json(tmp_path, document):
    kind, rows = read(tmp_path, document)
    assert (kind, codes(rows)[0]) == ("json", None)


def test_a_format_can_be_forced(tmp_path):
    one = b'{"number": 7, "parts": [{"id": 1}]}'
    assert read(tmp_path, one)[0] == "json"
    kind, rows = read(tmp_path, one, format_name="ndjson")
    assert (kind, rows[0].values) == ("ndjson", {"number": "7", "parts.id": "1"})
    with pytest.raises(NotACatalogue, match="not a header"):
        read(tmp_path, one, format_name="csv")


@pytest.mark.slow
def test_a_row_of_very_many_names_takes_time_in_proportion(tmp_path):
    """Names looked up in a list took minutes for such a row."""
    path = tmp_path / "wide.json"
    wide = {f"k{n}": "v" for n in range(50_000)}
    path.write_text(json.dumps([{"sku": "1", "title": "A", **wide}]))
    used_s = time.process_time()
    (row,) = open_catalogue(path, bytes_max=10**7).rows
    assert time.process_time() - used_s < 10
    assert (row.item, row.fault.code) == ("1", "too_many_fields"), "its item is kept"


# XML


def test_the_doctype_of_the_format_is_allowed_and_never_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shops.dtd").write_text('<!ENTITY bike "loaded"><!ATTLIST offer id CDATA "loaded">')
    plain = (HEAD + "<offers>" + OFFER + TAIL).encode()
    doctype = b'<!DOCTYPE yml_catalog SYSTEM "shops.dtd"><yml_catalog'
    assert read(tmp_path, plain.replace(b"<yml_catalog", doctype, 1)) == read(tmp_path, plain)


LAMP = """<offer id="a1" available="false"><typePrefix>Floor lamp</typePrefix>
<vendor>Acme</vendor><model>X &amp; Y</model><price>10.5</price><categoryId>7</categoryId><url>http://s/a1</url>
<picture>http://p/1.jpg</picture><picture> http://p/2.jpg </picture>
<param name="Colour">red</param><description><![CDATA[<b>bright</b>]]></description></offer>"""
BIKE = {"id": "bike-1", "name": "City bike", "price": "120"}
XML_FORMATS = [
    (
        *("yml", HEAD + CATEGORIES + LAMP + OFFER + TAIL, 2, ["http://p/1.jpg", "http://p/2.jpg"]),
        {
            "id": "a1",
            "name": "Floor lamp Acme X & Y",
            "price": "10.5",
            "url": "http://s/a1",
            "typePrefix": "Floor lamp",
            "vendor": "Acme",
            "model": "X & Y",
            "category": "7",
            "category_name": "Lamps",
            "available": "false",
            "param:Colour": "red",
            "description": "<b>bright</b>",
        },
    ),
    (
        *("avito", AVITO, 3, ["http://a/1.jpg", "http://a/2.jpg"]),
        {
            **BIKE,
            "category": "Велосипеды",
            "description": "<p>Good</p>",
            "delivery.option": ["PVZ", "Courier"],
        },
    ),
    (
        *("google_rss", RSS, 3, [f"http://a/{n}.jpg" for n in (1, 2, 3)]),
        {
            **BIKE,
            "price": "120.00 EUR",
            "category": "Bicycles > City",
            "url": "http://s/1",
            "shipping.country": "DE",
            "shipping.price": "4.90 EUR",
        },
    ),
    ("google_atom", ATOM, 2, ["http://a/1.jpg"], {**BIKE, "url": "http://s/1"}),
]


@pytest.mark.parametrize(
    ("kind", "document", "line", "photos", "values"), XML_FORMATS, ids=[x[0] for x in XML_FORMATS]
)
def test_each_xml_format_is_read(tmp_path, *, kind, document, line, photos, values):
    for data in (document.encode(), gzip.compress(document.encode())):
        found, rows = read(tmp_path, data)
        assert found == kind
        assert [row.number for row in rows] == list(range(1, len(rows) + 1))
        assert (rows[0].line, rows[0].fault) == (line, None)
        assert (rows[0].photos, rows[0].values) == (photos, values)


@pytest.mark.parametrize("encoding", ["utf-16", "windows-1251"])
def test_the_encoding_is_the_one_that_the_xml_declares(tmp_path, encoding):
    data = AVITO.replace("UTF-8", encoding).encode(encoding)
    assert read(tmp_path, data)[1][0].values["category"] == "Велосипеды"
    document = HEAD.replace("UTF-8", encoding) + "<offers>" + OFFER.replace("A", "Стол") + TAIL
    assert read(tmp_path, document.encode(encoding))[1][0].values["name"] == "Стол"


def test_a_row_over_its_bounds_is_a_faulty_one(tmp_path):
    many = "<Ad><Id>2</Id>" + "<X>1</X>" * 10_001 + "</Ad>"
    large = "<Ad><Id>3</Id>" + f"<X>{'y' * 60_000}</X>" * 5 + "</Ad>"
    _, rows = read(tmp_path, avito(AD + many + large + AD))
    assert codes(rows) == [*(None, "row_too_large", "row_too_large", None)]
    assert [row.item for row in rows] == ["1", "2", "3", "1"]


def test_space_between_rows_is_no_text(tmp_path):
    _, rows = read(tmp_path, avito(("\n" * 1000 + AD) * 100))
    assert len(rows) == 100

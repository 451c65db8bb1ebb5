"""What the readers make of valid files and of faulty rows, format by format."""

from __future__ import annotations

import gzip
import json
import time

import pytest
from reading import codes, read

from headrace.fetch.errors import CatalogueBroken, NotACatalogue
from headrace.fetch.mappings import split_photos
from headrace.fetch.readers import open_catalogue

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


def yml(offers: str) -> bytes:
    return (HEAD + "<offers>" + offers + TAIL).encode()


def avito(ads: str) -> str:
    return AVITO[: AVITO.index("<Ad>")] + ads + "</Ads>"


# CSV and TSV


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("id,name,price,photos\n1,Лампа,5,http://a/1.jpg\n", "utf-8"),
        ("id,name,price,photos\n1,Лампа,5,http://a/1.jpg\n", "utf-8-sig"),
        ("id;name;price;photos\r\n1;Лампа;5;http://a/1.jpg\r\n", "utf-16"),
        ("SKU\tTitle\tPrice\tImage_Link\n1\tЛампа\t5\thttp://a/1.jpg", "utf-8"),  # noqa: RUF001
        ('"id","name","price","photo1"\n"1","Лампа","5","http://a/1.jpg"\n', "utf-8"),
        ("id|name|price|pictures\r1|Лампа|5|http://a/1.jpg\r", "utf-8"),
        ("id,name,price,photos\n\n1,Лампа,5,http://a/1.jpg\n\n", "utf-8"),
        ("sep=;\r\nid;name;price;photos\r\n1;Лампа;5;http://a/1.jpg\r\n", "utf-8-sig"),
    ],
)
def test_delimited_files_of_every_dialect_read_alike(tmp_path, text, encoding):
    for data in (text.encode(encoding), gzip.compress(text.encode(encoding))):
        kind, rows = read(tmp_path, data)
        assert kind in ("csv", "tsv")
        assert [(r.values, r.photos, r.fault) for r in rows] == [
            ({"id": "1", "name": "Лампа", "price": "5"}, ["http://a/1.jpg"], None)
        ]


@pytest.mark.parametrize(
    ("cell", "links"),
    [
        ("http://a/1|http://a/2", ["http://a/1", "http://a/2"]),
        ("http://a/1, http://a/2;https://a/3", ["http://a/1", "http://a/2", "https://a/3"]),
        ("http://a/1 http://a/2\nhttp://a/3", ["http://a/1", "http://a/2", "http://a/3"]),
        ("http://a/1,2.jpg", ["http://a/1,2.jpg"]),
        ("http://a/my photo.jpg", ["http://a/my photo.jpg"]),
        ("http://a/1,ftp://a/2", ["http://a/1", "ftp://a/2"]),
        (" | ", []),
    ],
)
def test_a_cell_of_photos_is_split_where_links_begin(cell, links):
    assert split_photos(cell) == links


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"1", "column_count"),
        (b"1,A,extra", "column_count"),
        (b'"1"x,A', "csv_quote"),
        (b"1," + b"x" * 70_000, "field_too_large"),
        (b"1," + b"x" * 140_000, "csv_quote"),
    ],
)
def test_a_faulty_row_of_csv_does_not_affect_others(tmp_path, line, code):
    _, rows = read(tmp_path, b"id,name\n0,Before\n" + line + b"\n2,After\n")
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


def test_rows_have_their_lines(tmp_path):
    _, rows = read(tmp_path, '{\n"items": [\n{"id": 1,\n"name": "A"},\n\n{"id": 2}, {"id": 3}]}')
    assert [(row.number, row.line) for row in rows] == [(1, 3), (2, 6), (3, 6)]
    _, rows = read(tmp_path, '{"id": 1}\n\n{"id": 2}\n')
    assert [(row.number, row.line) for row in rows] == [(1, 1), (2, 3)]


@pytest.mark.parametrize(
    ("row", "code", "item"),
    [
        ("{bad}", "invalid_json", ""),
        ('{"Sku":9, "name": 17 inch}', "invalid_json", "9"),
        ('{"of": {"id": "8"}, "name": x}', "invalid_json", ""),
        ('{"id": 9, "a":' + "[" * 40 + "]" * 40 + "}", "too_deep", "9"),
        ('{"id": 9, "price": NaN}', "invalid_json", "9"),
        ('{"id": 9, "id": 8}', "invalid_json", "8"),
        ('{"id": 9, "price": Infinity}', "invalid_json", "9"),
        ('{"id": 9, "text": "a\tb"}', "invalid_json", "9"),
        ("[1, 2]", "not_an_object", ""),
        ("7", "not_an_object", ""),
        ('"text"', "not_an_object", ""),
        ("null", "not_an_object", ""),
        ('{"a":' * 40 + "1" + "}" * 40, "too_deep", ""),
        ("[" * 50_000 + "]" * 50_000, "too_deep", ""),
    ],
)
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


@pytest.mark.parametrize("data", [b"[]", b"[ \n]", b'{"items": []}', b'{"a": [], "b": {"c": []}}'])
def test_an_empty_list_is_a_catalogue_without_rows(tmp_path, data):
    assert read(tmp_path, data) == ("json", [])


@pytest.mark.parametrize(
    "first",
    [
        '{"id": "a", "name": A}',
        '{"id": "a", "name": "A"',
        '{"id": "a", "name":',
        '{"id": "a", "na',
        '{"id": "a", "id": "a"}',
        '{"id": "a", "x": ' + "[" * 9000 + "]" * 9000 + "}",
        '{"id": "a", "name": "A"}}',
        "[1, 2]",
        "null",
        "my catalogue",
    ],
)
def test_a_bad_first_line_of_ndjson_is_one_bad_row(tmp_path, first):
    kind, rows = read(tmp_path, f"{first}\n{GOOD_LINES}")
    assert kind == "ndjson"
    assert [row.fault is None for row in rows] == [False, True, True]
    assert [row.values["id"] for row in rows[1:]] == ["b", "c"]


@pytest.mark.parametrize(
    "document",
    [
        '{"items": [\n{"id": "b", "name": "B"}\n]}',
        '{"items":\n[\n{"id": "b", "name": "B"},\n{"id": "c", "name": "C"}\n]}',
        '[\n{"id": "b", "name": "B"},\n{"id": "c", "name": "C"}\n]',
        '{\n"rows": [{"id": "b", "name": "B"},\n{"id": "c", "name": "C"}]}',
    ],
)
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


def test_an_offer_keeps_what_it_says(tmp_path):
    offer = """<offer id="a1" available="false"><typePrefix>Floor lamp</typePrefix>
    <vendor>Acme</vendor><model>X &amp; Y</model><price>10.5</price><categoryId>7</categoryId><url>http://s/a1</url>
    <picture>http://p/1.jpg</picture><picture> http://p/2.jpg </picture>
    <param name="Colour">red</param><description><![CDATA[<b>bright</b>]]></description></offer>"""
    kind, rows = read(tmp_path, (HEAD + CATEGORIES + offer + OFFER + TAIL).encode())
    assert kind == "yml"
    assert [row.number for row in rows] == [1, 2]
    assert rows[0].line == 2
    assert rows[0].photos == ["http://p/1.jpg", "http://p/2.jpg"]
    assert rows[0].values == {
        "id": "a1",
        "available": "false",
        "typePrefix": "Floor lamp",
        "vendor": "Acme",
        "model": "X & Y",
        "name": "Floor lamp Acme X & Y",
        "price": "10.5",
        "category": "7",
        "category_name": "Lamps",
        "url": "http://s/a1",
        "param:Colour": "red",
        "description": "<b>bright</b>",
    }


def test_a_catalogue_in_windows_1251_reads(tmp_path):
    text = HEAD.replace("UTF-8", "windows-1251") + "<offers>" + OFFER.replace("A", "Стол") + TAIL
    _, rows = read(tmp_path, text.encode("cp1251"))
    assert rows[0].values["name"] == "Стол"


def named(document: bytes) -> bytes:
    """With the DOCTYPE line that the format long asked for."""
    line = b'<!DOCTYPE yml_catalog SYSTEM "shops.dtd"><yml_catalog'
    return document.replace(b"<yml_catalog", line, 1)


def test_the_doctype_line_of_the_format_is_let_pass_and_never_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shops.dtd").write_text('<!ENTITY bike "loaded"><!ATTLIST offer id CDATA "loaded">')
    plain, with_doctype = read(tmp_path, yml(OFFER)), read(tmp_path, named(yml(OFFER)))
    assert with_doctype == plain


def test_avito_ads(tmp_path):
    kind, rows = read(tmp_path, AVITO)
    assert kind == "avito"
    assert [(row.number, row.line, row.fault) for row in rows] == [(1, 3, None)]
    assert rows[0].photos == ["http://a/1.jpg", "http://a/2.jpg"]
    assert rows[0].values == {
        "id": "bike-1",
        "name": "City bike",
        "price": "120",
        "category": "Велосипеды",
        "description": "<p>Good</p>",
        "delivery.option": ["PVZ", "Courier"],
    }


def test_google_products_of_rss(tmp_path):
    kind, rows = read(tmp_path, gzip.compress(RSS.encode()))
    assert kind == "google_rss"
    assert rows[0].photos == ["http://a/1.jpg", "http://a/2.jpg", "http://a/3.jpg"]
    assert rows[0].values == {
        "id": "bike-1",
        "name": "City bike",
        "price": "120.00 EUR",
        "category": "Bicycles > City",
        "url": "http://s/1",
        "shipping.country": "DE",
        "shipping.price": "4.90 EUR",
    }


def test_google_products_of_atom_under_another_prefix(tmp_path):
    kind, rows = read(tmp_path, ATOM)
    assert kind == "google_atom"
    assert rows[0].photos == ["http://a/1.jpg"]
    assert rows[0].values == {
        "id": "bike-1",
        "name": "City bike",
        "price": "120",
        "url": "http://s/1",
    }


@pytest.mark.parametrize("encoding", ["utf-16", "windows-1251"])
def test_the_encoding_is_the_one_that_the_xml_declares(tmp_path, encoding):
    data = AVITO.replace("UTF-8", encoding).encode(encoding)
    assert read(tmp_path, data)[1][0].values["category"] == "Велосипеды"


def test_a_row_over_its_bounds_is_a_faulty_one(tmp_path):
    many = "<Ad><Id>2</Id>" + "<X>1</X>" * 10_001 + "</Ad>"
    large = "<Ad><Id>3</Id>" + f"<X>{'y' * 60_000}</X>" * 5 + "</Ad>"
    _, rows = read(tmp_path, avito(AD + many + large + AD))
    assert codes(rows) == [*(None, "row_too_large", "row_too_large", None)]
    assert [row.item for row in rows] == ["1", "2", "3", "1"]


def test_space_between_rows_is_no_text(tmp_path):
    _, rows = read(tmp_path, avito(("\n" * 1000 + AD) * 100))
    assert len(rows) == 100

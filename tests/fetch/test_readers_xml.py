"""Avito, Google's RSS and Atom, and any XML by a mapping; the floor that they share is tried by YML too."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from headrace.fetch.errors import (
    CatalogueBroken,
    InvalidMapping,
    NotACatalogue,
    UnknownFormat,
)
from headrace.fetch.mappings import parse_mapping
from headrace.fetch.readers import Truncated, open_catalogue

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


def read(folder: Path, data: str | bytes, **options):
    """(format, rows) of a file that holds `data`."""
    path = folder / "file"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    catalogue = open_catalogue(path, bytes_max=10**9, **options)
    return catalogue.format, list(catalogue.rows)


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


FOREIGN = """<shop><meta><name>x</name></meta><goods>
<good code="7" kind="b"><title lang="ru">Стол</title><pics><pic>http://a/1</pic><pic>http://a/2</pic></pics>
<main href="http://a/0"/><maker><name>Acme</name></maker><note> </note></good>
</goods></shop>"""
MAPPING = {
    "rows": "goods/good",
    "id": "@code",
    "name": ["caption", "Title"],
    "photos": ["main.@href", "pics.pic[]"],
    "fields": {"brand": "maker.name"},
}


@pytest.mark.parametrize("rows", ["goods/good", "shop.goods.good", "Shop/Goods/Good"])
def test_any_xml_reads_by_a_mapping(tmp_path, rows):
    kind, found = read(tmp_path, FOREIGN, mapping=parse_mapping(MAPPING | {"rows": rows}))
    assert (kind, len(found)) == ("xml", 1)
    assert found[0].photos == ["http://a/0", "http://a/1", "http://a/2"]
    assert found[0].values == {
        "id": "7",
        "name": "Стол",
        "brand": "Acme",
        "@kind": "b",
        "title.@lang": "ru",
    }


def test_a_mapping_may_drop_what_it_does_not_name(tmp_path):
    _, found = read(tmp_path, FOREIGN, mapping=parse_mapping(MAPPING | {"others": "drop"}))
    assert found[0].values == {"id": "7", "name": "Стол", "brand": "Acme"}


def test_a_mapping_of_csv_and_json(tmp_path):
    mapping = parse_mapping(
        {
            "id": "Артикул",
            "name": "Название",
            "photos": ["Фото", "Фото 2"],
            "fields": {"size": "A.B"},
        }
    )
    table = (
        "Артикул;Название;Фото 2;Фото;Цвет;A.B\n1;Стол;http://a/2;http://a/1, http://a/0;red;5\n"
    )
    rows = '[{"артикул": 1, "НАЗВАНИЕ": "Стол", "a": {"b": 5}, "цвет": "red",'
    rows += ' "фото": ["http://a/1", "http://a/0"], "фото 2": "http://a/2"}]'
    expected = {"id": "1", "name": "Стол", "size": "5", "цвет": "red"}
    for document in (table, rows):
        _, found = read(tmp_path, document, mapping=mapping)
        assert found[0].values == expected
        assert found[0].photos == ["http://a/1", "http://a/0", "http://a/2"]


def test_rows_of_json_are_found_by_their_path(tmp_path):
    document = '{"a": [{"id": 0}], "b": {"x": 1, "Rows": [{"n": 1}, {"n": 2}], "y": [{}]}, "z": 1}'
    mapping = parse_mapping({"rows": "b.rows", "id": "n"})
    assert [r.item for r in read(tmp_path, document, mapping=mapping)[1]] == ["1", "2"]
    for path in ("b.none", "b.x", "a.b", "b"):
        with pytest.raises(CatalogueBroken) as refused:
            read(tmp_path, document, mapping=parse_mapping({"rows": path, "id": "n"}))
        assert refused.value.problems[0].code == "no_rows_at"


def test_a_mapping_says_the_encoding_of_a_table_that_declares_none(tmp_path):
    table = "код|имя\n1|Стол\n".encode("cp866")
    mapping = {"id": "код", "name": "имя", "encoding": "cp866", "delimiter": "|"}
    assert read(tmp_path, table, mapping=parse_mapping(mapping))[1][0].values["name"] == "Стол"
    with pytest.raises(NotACatalogue, match="line 1: the text is not valid UTF-8"):
        read(tmp_path, table, mapping=parse_mapping({"id": "код"}))
    with pytest.raises(NotACatalogue, match="id of the mapping"):
        read(tmp_path, "код|имя\n1|Стол\n".encode(), mapping=parse_mapping({"id": "code"}))


@pytest.mark.parametrize(
    ("data", "format_name", "mapping", "error"),
    [
        (FOREIGN, None, None, NotACatalogue),
        (FOREIGN, "xml", None, UnknownFormat),
        (FOREIGN, "excel", None, UnknownFormat),
        (AVITO, "avito", {"id": "Id"}, UnknownFormat),
        (AVITO, "xml", {"id": "Id"}, InvalidMapping),
        (AVITO, "json", {"id": "Id"}, CatalogueBroken),
    ],
)
def test_what_cannot_be_read_so_is_said(tmp_path, data, format_name, mapping, error):
    with pytest.raises(error):
        read(tmp_path, data, format_name=format_name, mapping=mapping and parse_mapping(mapping))


@pytest.mark.parametrize(
    ("mapping", "pointer"),
    [
        ({}, None),
        ({"id": 5}, None),
        ({"id": "a", "typo": "b"}, None),
        ({"id": []}, "/id"),
        ({"id": ""}, "/id"),
        ({"id": "x" * 300}, "/id"),
        ({"id": "a", "format": "yml"}, "/format"),
        ({"id": "a", "encoding": "utf-7"}, "/encoding"),
        ({"id": "a", "delimiter": "x"}, "/delimiter"),
        ({"id": "a", "rows": " / "}, "/rows"),
        ({"id": "a", "fields": {"id": "b"}}, "/fields"),
        ({"id": "a", "fields": {"b\n": "b"}}, "/fields"),
        ({"id": "a", "photos": ["b", "\x00"]}, "/photos"),
        ({"id": "a", "photos": ["b"] * 101}, "/photos"),
        ({"id": "a", "fields": {"f": [""]}}, "/fields/f"),
    ],
)
def test_a_mapping_that_cannot_be_meant_is_refused(mapping, pointer):
    with pytest.raises(InvalidMapping, match="mapping is not valid") as refused:
        parse_mapping(mapping)
    assert pointer is None or pointer in [problem.pointer for problem in refused.value.problems]


def avito(ads: str) -> str:
    return AVITO[: AVITO.index("<Ad>")] + ads + "</Ads>"


AD = "<Ad><Id>1</Id><Title>A</Title></Ad>"


def test_a_row_over_its_bounds_is_a_faulty_one(tmp_path):
    many = "<Ad><Id>2</Id>" + "<X>1</X>" * 10_001 + "</Ad>"
    large = "<Ad><Id>3</Id>" + f"<X>{'y' * 60_000}</X>" * 5 + "</Ad>"
    _, rows = read(tmp_path, avito(AD + many + large + AD))
    assert [row.fault and row.fault.code for row in rows] == [
        *(None, "row_too_large", "row_too_large", None)
    ]
    assert [row.item for row in rows] == ["1", "2", "3", "1"]


def test_space_between_rows_is_no_text(tmp_path):
    _, rows = read(tmp_path, avito(("\n" * 1000 + AD) * 100))
    assert len(rows) == 100


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (avito(AD + "<Ad " + 'a="' + "x" * 70_000 + '">'), "field_too_large"),
        (avito(AD + "<!--" + "x" * 1_500_000 + "-->"), "tag_too_large"),
        (avito(AD + "<Ad " + "x" * 1_500_000), "tag_too_large"),
        (avito(AD + "<Ad><Id>" + "<b>" * 80), "too_deep"),
        (avito(AD + "</Wrong>"), "malformed_xml"),
        (avito(AD).replace("UTF-8", "utf-7"), "invalid_encoding"),
        (avito(AD).replace("UTF-8", "no-such"), "invalid_encoding"),
        (avito(AD) + "<Ads/>", "malformed_xml"),
        ("<!DOCTYPE Ads [<!ENTITY a 'b'>]>" + AVITO[AVITO.index("<Ads") :], "dtd_forbidden"),
        (avito("<Ad><Id>&xxe;</Id></Ad>"), "malformed_xml"),
    ],
)
def test_a_broken_file_is_refused(tmp_path, data, code):
    with pytest.raises((CatalogueBroken, NotACatalogue)) as refused:
        read(tmp_path, data)
    if isinstance(refused.value, CatalogueBroken):
        assert refused.value.problems[0].code == code
    else:
        assert code == "invalid_encoding", "told before the root was seen"


@pytest.mark.parametrize("cut", [10, 60, 200])
@pytest.mark.parametrize("document", [AVITO, RSS, ATOM])
def test_a_file_cut_short_is_truncated(tmp_path, document, cut):
    with pytest.raises(Truncated, match="line"):
        read(tmp_path, document.encode()[:-cut])

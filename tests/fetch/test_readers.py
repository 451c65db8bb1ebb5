"""Readers: what sellers really send, and a table of broken files with the exact answer to each."""

from __future__ import annotations

import gzip
import resource
from hashlib import sha256
from pathlib import Path

import pytest

from headrace.fetch.errors import CatalogueBroken, CatalogueTooLarge, NotACatalogue
from headrace.fetch.mappings import split_photos
from headrace.fetch.readers import Truncated, open_catalogue

HEAD = '<?xml version="1.0" encoding="UTF-8"?>\n<yml_catalog date="2026-01-01"><shop>'
OFFER = '<offer id="1" available="true"><name>A</name><price>5</price></offer>'
TAIL = "</offers></shop></yml_catalog>"
CATEGORIES = '<categories><category id="7">Lamps</category></categories><offers>'


def read(folder: Path, data: bytes, bytes_max: int = 10**9):
    path = folder / "file"
    path.write_bytes(data)
    catalogue = open_catalogue(path, bytes_max=bytes_max)
    return catalogue.format, list(catalogue.rows)


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


def test_an_offer_keeps_what_it_says(tmp_path):
    offer = """<offer id="a1" available="false"><typePrefix>Floor lamp</typePrefix><vendor>Acme</vendor>
    <model>X &amp; Y</model><price>10.5</price><categoryId>7</categoryId><url>http://s/a1</url>
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


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"  \n ", "empty"),
        (b"hello world\n", "first line 'hello world'"),
        (b"1,2,3\n4,5,6\n", "first line"),
        (b"name,price\nA,5\n", "first line"),
        (b"id\n1\n", "first line"),
        (b"\x89PNG\r\n\x1a\n" + b"x" * 100, "PNG"),
        (b"%PDF-1.7", "PDF"),
        (b"PK\x03\x04" + b"x" * 100, "spreadsheet is damaged"),
        (b"\x7fELF\x00\x00", "binary"),
        (b"<html><body>x</body></html>", "<html>"),
        (b"<?xml version='1.0'?><shop></shop>", "<shop>"),
        (b"<<<", "cannot be read"),
        (b"\x1f\x8b\x08\x00", "cannot be unpacked"),
        (gzip.compress(gzip.compress(b"id,name\n1,A\n", mtime=0), mtime=0), "binary"),
    ],
)
def test_what_is_no_catalogue_is_said_to_be_what_it_is(tmp_path, data, words):
    with pytest.raises(NotACatalogue, match="accepted are") as refused:
        read(tmp_path, data)
    assert words in refused.value.text


VARIED = b"id,name\n" + b"".join(
    b"%d,%s\n" % (n, sha256(b"%d" % n).hexdigest().encode()) for n in range(4000)
)


def yml(offers: str) -> bytes:
    return (HEAD + "<offers>" + offers + TAIL).encode()


def named(document: bytes) -> bytes:
    """With the DOCTYPE line that the format long asked for."""
    line = b'<!DOCTYPE yml_catalog SYSTEM "shops.dtd"><yml_catalog'
    return document.replace(b"<yml_catalog", line, 1)


BOMB = b'<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><yml_catalog>&b;</yml_catalog>'


def test_the_doctype_line_of_the_format_is_let_pass_and_never_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shops.dtd").write_text('<!ENTITY bike "loaded"><!ATTLIST offer id CDATA "loaded">')
    plain, with_doctype = read(tmp_path, yml(OFFER)), read(tmp_path, named(yml(OFFER)))
    assert with_doctype == plain


@pytest.mark.parametrize(
    ("data", "code", "place"),
    [
        (BOMB, "dtd_forbidden", "file"),
        (named(yml(OFFER + "<offer id='9'><name>&nbsp;</name></offer>")), "entity_unknown", "file"),
        (yml("<offer id='1'>" + "<a>" * 70), "too_deep", "line 2"),
        (
            yml("<offer id='1'><name>" + "x" * 70_000 + "</name></offer>"),
            "field_too_large",
            "line 2",
        ),
        (yml("<offer id='" + "x" * 70_000 + "'>"), "field_too_large", "line 2"),
        (yml(OFFER + "\n\n<offer id=2>"), "malformed_xml", "line 4"),
        (yml(OFFER + "</wrong>"), "malformed_xml", "line 2"),
        (yml(OFFER + "&undefined;"), "malformed_xml", "line 2"),
        (HEAD.encode() + b"<offers>\xff\xfe", "malformed_xml", "line 2"),
        (b"id,id,name\n1,1,A\n", "duplicate_header", "line 1"),
        (b"id,name\n1,A\n\n2,\xff\xff\n", "invalid_encoding", "line 4"),
        (b"id,name\n" + b"1,A" * 500_000, "line_too_long", "line 2"),
        (b"id,name," + b",".join(b"c%d" % n for n in range(600)), "too_many_columns", "line 1"),
        (gzip.compress(VARIED, mtime=0)[:-8] + b"12345678", "gzip", "file"),
    ],
)
def test_a_broken_file_is_refused_with_its_fault_and_line(tmp_path, data, code, place):
    with pytest.raises(CatalogueBroken) as refused:
        read(tmp_path, data)
    assert refused.value.problems[0].code == code
    assert refused.value.problems[0].pointer.startswith(place)


@pytest.mark.parametrize(
    ("data", "where", "rows_before"),
    [
        (b'id,name\n1,A\n2,"B\n3,C\n', "line 3", 1),
        ("id,name\n1,A\n2,Л".encode()[:-1], "line", 1),
        (yml(OFFER), "yml_catalog/shop/offers", 1),
        (yml(OFFER + "<offer id='2'><na"), "line 2", 1),
        (yml(OFFER + "<offer id='2'><name><![CDATA[x"), "line 2", 1),
        (gzip.compress(VARIED, mtime=0)[:-300], "gzip", 1),
    ],
)
def test_a_truncated_file_gives_its_rows_and_says_where_it_ends(tmp_path, data, where, rows_before):
    path = tmp_path / "file"
    path.write_bytes(data.removesuffix(TAIL.encode()))
    rows = []
    with pytest.raises(Truncated) as cut:  # noqa: PT012
        for row in open_catalogue(path, bytes_max=10**9).rows:
            rows.append(row)  # noqa: PERF402 - what came before the end counts
    assert where in cut.value.where
    assert len(rows) >= rows_before


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
def test_a_faulty_row_does_not_spoil_its_neighbours(tmp_path, line, code):
    _, rows = read(tmp_path, b"id,name\n0,Before\n" + line + b"\n2,After\n")
    assert [row.fault and row.fault.code for row in rows] == [None, code, None]
    assert rows[2].values == {"id": "2", "name": "After"}
    assert (rows[1].number, rows[1].line) == (2, 3)


@pytest.mark.parametrize(
    ("line", "item"),
    [(b'1,"17" monitor",5', "1"), (b'"1"x,A,5', ""), (b'1,"two\nlines"x,5', "")],
)
def test_a_row_that_is_no_csv_keeps_an_id_that_is_surely_its_own(tmp_path, line, item):
    _, rows = read(tmp_path, b"id,name,price\n" + line + b"\n2,B,5\n")
    assert [row.item for row in rows] == [item, "2"]
    _, rows = read(tmp_path, b'name,id\n"17" monitor",1\nB,2\n')
    assert [row.item for row in rows] == ["", "2"]


def test_a_gzip_bomb_is_stopped_at_the_bound(tmp_path):
    bomb = gzip.compress(b"id,name\n" + b"1,A\n" * 400_000)
    with pytest.raises(CatalogueTooLarge, match=r"larger than 976\.6 KB"):
        read(tmp_path, bomb, bytes_max=1_000_000)


@pytest.mark.slow
def test_a_large_catalogue_is_read_in_bounded_memory(tmp_path):
    path = tmp_path / "large.csv"
    line = "i{0},Item {0},10,http://example.com/{0}.jpg," + "d" * 400 + "\n"
    with path.open("w") as file:
        file.write("id,name,price,photos,description\n")
        file.writelines(line.format(n) for n in range(120_000))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    count = sum(1 for _ in open_catalogue(path, bytes_max=10**9).rows)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert count == 120_000
    assert grown_kib < 20_000

"""Files that cannot be read: one table per kind of error, over all formats."""

from __future__ import annotations

import gzip
import json
import resource
import zlib
from hashlib import sha256

import pytest
from reading import read

from headrace.fetch.errors import CatalogueBroken, CatalogueTooLarge, NotACatalogue
from headrace.fetch.readers import Truncated, open_catalogue

YML = b'<?xml version="1.0" encoding="UTF-8"?>\n<yml_catalog><shop><offers>'
OFFER = b'<offer id="1"><name>A</name><price>5</price></offer>'
TAIL = b"</offers></shop></yml_catalog>"
ADS = b"<Ads>\n"
AD = b"<Ad><Id>1</Id><Title>A</Title></Ad>"
RSS = b"<rss><channel><item><title>A</title></item></channel></rss>"
ATOM = b"<feed><entry><id>1</id><title>A</title></entry></feed>"
VARIED = b"id,name\n" + b"".join(
    b"%d,%s\n" % (n, sha256(b"%d" % n).hexdigest().encode()) for n in range(4000)
)
PACKED = gzip.compress(VARIED, mtime=0)
TWICE = gzip.compress(gzip.compress(b"id,name\n1,A\n", mtime=0), mtime=0)
LAUGHS = b'<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><yml_catalog>&b;</yml_catalog>'
XXE = b"<!DOCTYPE Ads [<!ENTITY x SYSTEM 'file:///etc/passwd'>]><Ads><Ad><Id>&x;</Id></Ad></Ads>"
PARAMETER = b"<!DOCTYPE Ads [<!ENTITY % x SYSTEM 'http://127.0.0.1/x'> %x;]><Ads></Ads>"
LARGE = b"x" * 70_000
HUGE = b"x" * 1_500_000


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
        (b"<?xml version='1.0' encoding='utf-7'?><Ads/>", "cannot be read"),
        (b"<?xml version='1.0' encoding='no-such'?><Ads/>", "cannot be read"),
        (b"<<<", "cannot be read"),
        (b"\x1f\x8b\x08\x00", "cannot be unpacked"),
        (TWICE, "binary"),
        (zlib.compress(b"id,name\n1,A\n" * 100), "binary"),
        (b"id,name\na,A\x00\nb,B\n", "binary"),
    ],
)
def test_a_file_of_no_format_is_refused(tmp_path, data, words):
    with pytest.raises(NotACatalogue, match="accepted are") as refused:
        read(tmp_path, data)
    assert words in refused.value.text


@pytest.mark.parametrize(
    ("code", "place", "data"),
    [
        # Tables
        ("duplicate_header", "line 1", b"id,id,name\n1,1,A\n"),
        ("invalid_encoding", "line 4", b"id,name\n1,A\n\n2,\xff\xff\n"),
        ("line_too_long", "line 2", b"id,name\n" + b"1,A" * 500_000),
        ("too_many_columns", "line 1", b"id,name," + b",".join(b"c%d" % n for n in range(600))),
        ("gzip", "file", PACKED[:-8] + b"12345678"),
        # JSON
        ("malformed_json", "line 1", b'[{"id": 1},]'),
        ("malformed_json", "line 2", b'[{"id": 1}\n{"id": 2}]'),
        ("malformed_json", "line 1", b'[{"id": 1}] x'),
        ("malformed_json", "line 1", b'[{"id": 1}][]'),
        ("malformed_json", "line 1", b'[{"id": ]}, {"id": 2}]'),
        ("malformed_json", "line 1", b'{"items" [{"id": 1}]}'),
        ("malformed_json", "line 1", b"{items: [{}]}"),
        ("malformed_json", "line 1", b'{"items": [{"id": 1}], }'),
        ("no_rows", "file", b'{"a": {"b": {"c": {"items": [{"id": 1}]}}}}'),
        ("no_rows", "file", b'{"a": 1, "b": "x"}'),
        ("invalid_encoding", "line 2", b'[{"id": 1},\n"\xff"]'),
        ("invalid_encoding", "line 1", b'[{"id": "\xc3"}]'),
        ("text_too_long", "line 1", b'[{"id": 1}, "' + HUGE + b'"]'),
        ("invalid_encoding", "line 2", b'{"id": 1}\n{"id": "\xff"}\n'),
        ("line_too_long", "line 2", b'{"id": 1}\n{"id": "' + HUGE + b'"}\n'),
        # XML
        ("dtd_forbidden", "file", LAUGHS),
        ("dtd_forbidden", "file", XXE),
        ("dtd_forbidden", "file", PARAMETER),
        ("dtd_forbidden", "file", LAUGHS.replace(b"yml_catalog", b"rss")),
        ("dtd_forbidden", "file", b"<!DOCTYPE Ads [<!ENTITY a 'b'>]>" + ADS + AD),
        (
            "entity_unknown",
            "file",
            b'<!DOCTYPE yml_catalog SYSTEM "shops.dtd">'
            + (YML + OFFER).partition(b"\n")[2]
            + b"<offer id='9'><name>&nbsp;</name></offer>",
        ),
        ("malformed_xml", "line 2", YML + OFFER + b"&undefined;"),
        ("malformed_xml", "line 2", ADS + b"<Ad><Id>&xxe;</Id></Ad>"),
        ("malformed_xml", "line 4", YML + OFFER + b"\n\n<offer id=2>"),
        ("malformed_xml", "line 2", YML + OFFER + b"</wrong>"),
        ("malformed_xml", "line 2", ADS + AD + b"</Ads><Ads/>"),
        ("malformed_xml", "line 2", YML + b"\xff\xfe"),
        ("too_deep", "line 2", YML + b"<offer id='1'>" + b"<a>" * 70),
        ("field_too_large", "line 2", YML + b"<offer id='1'><name>" + LARGE + b"</name>"),
        ("field_too_large", "line 2", YML + b"<offer id='" + LARGE + b"'>"),
        ("field_too_large", "line 2", ADS + AD + b"<Ad a='" + LARGE + b"'>"),
        ("tag_too_large", "line 2", ADS + AD + b"<!--" + HUGE + b"-->"),
        ("tag_too_large", "line 2", ADS + AD + b"<Ad " + HUGE),
    ],
)
def test_a_broken_file_is_refused_with_its_fault_and_line(tmp_path, code, place, data):
    with pytest.raises(CatalogueBroken) as refused:
        read(tmp_path, data)
    assert refused.value.problems[0].code == code
    assert refused.value.problems[0].pointer.startswith(place)


@pytest.mark.parametrize(
    ("where", "rows_before", "data"),
    [
        ("line 3", 1, b'id,name\n1,A\n2,"B\n3,C\n'),
        ("line", 1, "id,name\n1,A\n2,Л".encode()[:-1]),
        ("gzip", 1, PACKED[:-300]),
        ("line", 0, b"["),
        ("line", 1, b'[{"id": 1},'),
        ("line", 1, b'[{"id": 1}, {"id"'),
        ("line", 1, b'[{"id": 1}, {"id": "x'),
        ("line", 1, b'[{"id": 1}'),
        ("line", 1, b'{"items": [{"id": 1}]'),
        ("line", 1, b'{"items": [{"id": 1}], "more": [1, 2'),
        ("line", 0, b'{"a": 1, "items"'),
        ("line", 0, '[{"id": 1}, {"id": "Л'.encode()[:-1]),
        ("line", 0, '[{"id": 1}]'.encode("utf-16")[:-1]),
        ("line", 1, b'{"id": 1}\n{"id": 2'),
        ("yml_catalog/shop/offers", 1, YML + OFFER),
        ("line 2", 1, YML + OFFER + b"<offer id='2'><na"),
        ("line 2", 1, YML + OFFER + b"<offer id='2'><name><![CDATA[x"),
        *[("line", 0, whole[:-cut]) for whole in (ADS + AD, RSS, ATOM) for cut in (3, 15, 30)],
    ],
)
def test_a_truncated_file_yields_its_rows_and_reports_its_end(tmp_path, where, rows_before, data):
    path = tmp_path / "file"
    path.write_bytes(data)
    rows = []
    with pytest.raises(Truncated) as cut:  # noqa: PT012
        for row in open_catalogue(path, bytes_max=10**9).rows:
            rows.append(row)  # noqa: PERF402 - the rows before the error count
    assert where in cut.value.where
    assert len(rows) >= rows_before


@pytest.mark.parametrize(
    "bomb", [b"id,name\n" + b"1,A\n" * 400_000, b"[" + b'{"id": 1},' * 150_000]
)
def test_a_gzip_bomb_is_stopped_at_the_limit(tmp_path, bomb):
    with pytest.raises(CatalogueTooLarge, match=r"larger than 976\.6 KB"):
        read(tmp_path, gzip.compress(bomb), bytes_max=1_000_000)


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
        file.writelines(between + row for _ in range(79_999))
        file.write(end)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    count = sum(1 for _ in open_catalogue(path, bytes_max=10**9).rows)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert count == 80_000
    assert grown_kib < 20_000

"""JSON and NDJSON: where the rows are, what a row becomes, and which faults are of a row or of the file."""

from __future__ import annotations

import gzip
import json
import resource
import time
from pathlib import Path

import pytest

from headrace.fetch.errors import CatalogueBroken, CatalogueTooLarge, NotACatalogue
from headrace.fetch.readers import Truncated, open_catalogue

ROW = {"id": "1", "name": "Лампа", "price": "5.50", "photos": ["http://a/1.jpg", "http://a/2.jpg"]}
READ = ({"id": "1", "name": "Лампа", "price": "5.50"}, ["http://a/1.jpg", "http://a/2.jpg"], None)
LONG = b'"' + b"y" * 150_000 + b'"'


def read(folder: Path, data: str | bytes, **options):
    """(format, rows) of a file that holds `data`."""
    path = folder / "file"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    catalogue = open_catalogue(path, bytes_max=10**9, **options)
    return catalogue.format, list(catalogue.rows)


def faults(rows) -> list[str | None]:
    return [row.fault and row.fault.code for row in rows]


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
    row = """[{"sku": 12345678901234567890, "title": " Bed ", "price": 1990.50, "weight": 1e3, "new": true,
        "old": false, "gone": null, "empty": "", "tags": ["a", "b"], "size": {"Width": 3, "unit": {"of": "m"}},
        "variants": [{"c": "red"}, {"c": "blue"}], "images": [{"url": "http://a/1"}, {"url": "http://a/2"}],
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


def test_rows_know_their_lines(tmp_path):
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
def test_a_faulty_row_does_not_spoil_its_neighbours(tmp_path, row, code, item):
    before, after = '{"id": 1, "name": "A"}', '{"id": 2}'
    for document in (f"[{before},\n{row},{after}]", f"{before}\n{row}\n{after}\n"):
        _, rows = read(tmp_path, document)
        assert faults(rows) == [None, code, None]
        assert (rows[1].number, rows[1].line, rows[1].item) == (2, 2, item)
        assert rows[2].values == {"id": "2"}


def test_a_quote_inside_a_text_is_told_with_its_line(tmp_path):
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
    assert faults(rows) == [None, "row_too_large", None]


@pytest.mark.parametrize(
    ("data", "code", "place"),
    [
        (b'[{"id": 1},]', "malformed_json", "line 1"),
        (b'[{"id": 1}\n{"id": 2}]', "malformed_json", "line 2"),
        (b'[{"id": 1}] x', "malformed_json", "line 1"),
        (b'[{"id": 1}][]', "malformed_json", "line 1"),
        (b'[{"id": ]}, {"id": 2}]', "malformed_json", "line 1"),
        (b'{"items" [{"id": 1}]}', "malformed_json", "line 1"),
        (b"{items: [{}]}", "malformed_json", "line 1"),
        (b'{"items": [{"id": 1}], }', "malformed_json", "line 1"),
        (b'{"a": {"b": {"c": {"items": [{"id": 1}]}}}}', "no_rows", "file"),
        (b'{"a": 1, "b": "x"}', "no_rows", "file"),
        (b'[{"id": 1},\n"\xff"]', "invalid_encoding", "line 2"),
        (b'[{"id": 1}, "' + b"y" * 1_500_000 + b'"]', "text_too_long", "line 1"),
        (b'{"id": 1}\n{"id": "\xff"}\n', "invalid_encoding", "line 2"),
        (b'{"id": 1}\n{"id": "' + b"y" * 1_500_000 + b'"}\n', "line_too_long", "line 2"),
    ],
)
def test_a_broken_file_is_refused_with_its_fault_and_line(tmp_path, data, code, place):
    with pytest.raises(CatalogueBroken) as refused:
        read(tmp_path, data)
    assert refused.value.problems[0].code == code
    assert refused.value.problems[0].pointer.startswith(place)


@pytest.mark.parametrize(
    "data",
    [
        b"[",
        b'[{"id": 1},',
        b'[{"id": 1}, {"id"',
        b'[{"id": 1}, {"id": "x',
        b'[{"id": 1}',
        b'{"items": [{"id": 1}]',
        b'{"items": [{"id": 1}], "more": [1, 2',
        b'{"a": 1, "items"',
        '[{"id": 1}, {"id": "Л'.encode()[:-1],
        '[{"id": 1}]'.encode("utf-16")[:-1],
        b'{"id": 1}\n{"id": 2',
    ],
)
def test_a_truncated_file_is_told(tmp_path, data):
    with pytest.raises(Truncated, match="line"):
        read(tmp_path, data)


@pytest.mark.parametrize("data", [b"[]", b"[ \n]", b'{"items": []}', b'{"a": [], "b": {"c": []}}'])
def test_an_empty_list_is_a_catalogue_without_rows(tmp_path, data):
    assert read(tmp_path, data) == ("json", [])


GOOD_LINES = '{"id": "b", "name": "B"}\n{"id": "c", "name": "C"}\n'


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
    assert (kind, faults(rows)[0]) == ("json", None)


def test_a_format_may_be_said(tmp_path):
    one = b'{"number": 7, "parts": [{"id": 1}]}'
    assert read(tmp_path, one)[0] == "json"
    kind, rows = read(tmp_path, one, format_name="ndjson")
    assert (kind, rows[0].values) == ("ndjson", {"number": "7", "parts.id": "1"})
    with pytest.raises(NotACatalogue, match="not a header"):
        read(tmp_path, one, format_name="csv")


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["json", "ndjson"])
def test_a_large_file_is_read_in_bounded_memory(tmp_path, shape):
    row = (
        '{"id": "i%d", "name": "Item", "photos": ["http://example.com/%d.jpg"], "d": "' + "d" * 400
    )
    path = tmp_path / "large"
    between, ends = (",\n", ("[", "]")) if shape == "json" else ("\n", ("", ""))
    with path.open("w") as file:
        file.write(ends[0])
        file.write(between.join(row % (n, n) + '"}' for n in range(80_000)))
        file.write(ends[1])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    count = sum(1 for _ in open_catalogue(path, bytes_max=10**9).rows)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert count == 80_000
    assert grown_kib < 20_000


def test_a_bomb_is_stopped_at_the_bound(tmp_path):
    path = tmp_path / "bomb"
    path.write_bytes(gzip.compress(b"[" + b'{"id": 1},' * 150_000))
    with pytest.raises(CatalogueTooLarge, match=r"larger than 976\.6 KB"):
        list(open_catalogue(path, bytes_max=1_000_000).rows)


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

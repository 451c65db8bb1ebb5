"""Spreadsheets are read like tables; damaged and hostile ones are refused and leave no process."""

# ruff: noqa: RUF001 - Cyrillic is meant
from __future__ import annotations

import base64
import gc
import gzip
import io
import os
import signal
import zipfile
import zlib
from pathlib import Path

import pytest
from reading import read
from tests.kit.workbooks import Raw, formula, number, ods, sheet_xml, xlsx

from headrace.fetch.decoding import client as decoding
from headrace.fetch.decoding.client import SheetRow, SheetUnreadable, sheet_rows
from headrace.fetch.errors import CatalogueBroken, NotACatalogue
from headrace.fetch.mappings import parse_mapping

HEADER = ("Артикул*", "Название", "Цена, руб.", "Фото 1", "Фото 2", "Вес")
ROW = ("A-1", "Стол", "10 000,50", "https://shop.example/1.jpg", "https://shop.example/2.jpg", 5)


def book(rows, *, merged=()) -> bytes:
    return xlsx({"Лист": sheet_xml(dict(enumerate(rows, 1)), merged)})


def children() -> set[str]:
    """The decoders that this process started."""
    found = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {pid for pid in found if b"sheet_child" in Path(f"/proc/{pid}/cmdline").read_bytes()}


@pytest.fixture(autouse=True, scope="module")
def leaves_no_process():
    before = children()
    yield
    gc.collect()
    assert children() <= before


def test_a_sheet_of_excel_reads_like_a_table(tmp_path):
    for data in (book([HEADER, ROW]), gzip.compress(book([HEADER, ROW]))):
        kind, (row,) = read(tmp_path, data)
        assert (kind, row.number, row.line, row.fault) == ("sheet", 1, 2, None)
        assert row.values == {
            "id": "A-1",
            "name": "Стол",
            "price": "10 000,50",
            "вес": "5",
        }
        assert row.photos == ["https://shop.example/1.jpg", "https://shop.example/2.jpg"]


def test_an_open_document_sheet_reads(tmp_path):
    _, (row,) = read(tmp_path, ods([("id", "name", "price"), ("1", "Стол", "5")]))
    assert row.values == {"id": "1", "name": "Стол", "price": "5"}


def test_an_old_excel_file_reads(tmp_path):
    data = zlib.decompress(base64.b85decode((Path(__file__).parent / "sheet.xls.b85").read_bytes()))
    _, rows = read(tmp_path, data)
    assert [row.values for row in rows] == [{"id": "1", "name": "Стол", "price": "5.5"}]


def test_cells_become_what_a_person_would_type(tmp_path):
    header = ["id", "name", "price", "f", "date", "at", "yes", "big", "part", "error"]
    cells = [
        number("1.0"),
        "line\nbreak",
        number("19.899999999999999"),
        formula('CONCAT("a","b")', "ab"),
        number("46000", 1),
        number("46000.5", 2),
        True,
        number("4600000000017"),
        number("0.1"),
        Raw('t="e"><v>#REF!</v></c>'),
    ]
    _, (row,) = read(tmp_path, book([header, cells]))
    assert row.values == {
        "id": "1",
        "name": "line\nbreak",
        "price": "19.9",
        "f": "ab",
        "date": "2025-12-09",
        "at": "2025-12-09T12:00:00",
        "yes": "true",
        "big": "4600000000017",
        "part": "0.1",
        **({"error": row.values["error"]} if "error" in row.values else {}),
    }


def test_titles_empty_rows_and_merged_cells(tmp_path):
    rows = {
        1: ["Прайс-лист"],
        4: [None, "Артикул", "Категория", "Цена", "Название"],
        5: [None, "Столы"],
        7: [None, "a", "Кухня", 5, "Стол"],
        8: [None, "b", None, 6, "Стол 2"],
        20: [None, "c", "Сад", 7, "Стол 3", "примечание"],
    }
    _, found = read(tmp_path, xlsx({"A": sheet_xml(rows, ["A1:E1", "B5:E5", "C7:C8"])}))
    assert [(row.line, row.item, row.values["category"]) for row in found] == [
        (7, "a", "Кухня"),
        (8, "b", "Кухня"),
        (20, "c", "Сад"),
    ]
    assert not any(row.fault for row in found)


def test_every_visible_sheet_with_a_header_is_read(tmp_path):
    parts = {
        "О файле": sheet_xml({1: ["Заполните таблицу"]}),
        "One": sheet_xml({1: HEADER, 2: ROW}),
        "Empty": sheet_xml({}),
        "Hidden": sheet_xml({1: HEADER, 2: ["hidden", *ROW[1:]]}),
        "Two": sheet_xml({1: ["id", "name"], 2: ["B-2", "B"]}),
    }
    _, rows = read(tmp_path, xlsx(parts, hidden=["Hidden"]))
    assert [(row.number, row.line, row.item) for row in rows] == [(1, 2, "A-1"), (2, 2, "B-2")]


def test_a_mapping_names_the_columns_of_a_sheet(tmp_path):
    mapping = parse_mapping({"id": "Код 1С", "name": "Что это", "format": "sheet"})
    _, (row,) = read(tmp_path, book([["Код 1С", "Что это"], ["7", "Стол"]]), mapping=mapping)
    assert row.values == {"id": "7", "name": "Стол"}


def zipped(**parts: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    return out.getvalue()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (zipped(table=b"id,name\n1,A\n"), "is a ZIP archive"),
        (b"PK\x03\x04" + b"x" * 100, "damaged"),
        (b"\xd0\xcf\x11\xe0" + b"x" * 5000, "damaged"),
        (book([HEADER, ROW])[:-200], "damaged"),
        (book([["hello"], ["world"]]), "no sheet has a header"),
        (xlsx({"A": "<worksheet><sheetData><row"}), "damaged"),
        (xlsx({"A": sheet_xml({})}), "no sheet has a header"),
    ],
)
def test_what_is_no_sheet_of_items_is_refused(tmp_path, data, words):
    with pytest.raises(NotACatalogue) as refused:
        read(tmp_path, data)
    assert words in refused.value.text
    assert "accepted are" in refused.value.text


def test_a_sheet_is_no_other_format(tmp_path):
    with pytest.raises(NotACatalogue, match="do not set a format"):
        read(tmp_path, book([HEADER, ROW]), format_name="csv")
    with pytest.raises(NotACatalogue, match="damaged"):
        read(tmp_path, b"id,name\n1,A\n", format_name="sheet")


BOMB = sheet_xml({1: ["id", "name"], 2: ["1", "A"]})


def _bomb(last):
    return xlsx({"A": BOMB.replace("</sheetData>", f"{last}</sheetData>")})


@pytest.mark.parametrize(
    "data",
    [
        # Cells so far apart that the whole area between them needs 400 GB
        _bomb('<row r="1048576"><c r="XFD1048576"><v>1</v></c></row>'),
        # 1.2 GB of one letter in 1.2 MB
        _bomb(f"<!--{'x' * (1_200_000_000 if os.environ.get('LARGE_BOMB') else 40_000_000)}-->"),
    ],
)
def test_a_bomb_is_refused_within_its_limits(monkeypatch, data):
    limits = {"memory_bytes_max": 400 * 2**20, "unpacked_bytes_max": 30_000_000}
    with pytest.raises(SheetUnreadable) as refused:
        list(sheet_rows(io.BufferedReader(io.BytesIO(data)), **limits))
    assert refused.value.code == "sheet_too_large"


def test_a_bomb_of_rows_after_the_header_breaks_the_file_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(decoding, "ROW_BYTES_MAX", 10_000)
    with pytest.raises(CatalogueBroken, match=r"damaged|too large"):
        read(tmp_path, book([HEADER, ROW, ["x" * 20_000, *ROW[1:]]]))


def test_a_decoder_that_is_killed_or_too_slow_is_an_error():
    before, data = children(), book([HEADER] + [ROW] * 6_000)
    answers = sheet_rows(io.BufferedReader(io.BytesIO(data)))
    next(answers)
    (child,) = children() - before
    os.kill(int(child), signal.SIGKILL)
    with pytest.raises(SheetUnreadable):
        list(answers)
    with pytest.raises(SheetUnreadable):
        list(sheet_rows(io.BufferedReader(io.BytesIO(data)), cpu_s_max=0))


def test_a_reader_that_stops_early_ends_the_decoder():
    before = children()
    answers = sheet_rows(io.BufferedReader(io.BytesIO(book([HEADER] + [ROW] * 5000))))
    assert isinstance([next(answers), next(answers)][1], SheetRow)
    answers.close()
    assert children() <= before


@pytest.mark.usefixtures("worker")
async def test_a_sheet_is_published_from_each_surface(shop, command, client):
    links = [shop.origin.url("/photo/1"), shop.origin.url("/photo/2")]
    data = book([HEADER, [*ROW[:3], *links, 5]])
    run = await shop.run_to_end(data, name="price.xlsx")
    assert (run.format, run.new, run.invalid, run.photos) == ("sheet", 1, 0, 2)
    item = await shop.fetch.items.get("shop", "A-1")
    assert (item.fields["price"], item.fields["name"]) == ("10000.50", "Стол")
    answer = await client.post("/v1/fetch/customers/shop/catalogues", content=data)
    assert (answer.status_code, answer.json()["unchanged"]) == (202, 1)
    path = ("catalogue", "run", str(shop.folder / "price.xlsx"), "--customer", "shop", "--dry-run")
    assert "1 row of sheet" in (await command(*path))[1]

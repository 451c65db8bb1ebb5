"""Tables as Russian Excel writes them: encodings, separators, titles above the header."""

# ruff: noqa: RUF001 - Cyrillic is meant
from __future__ import annotations

import pytest
from reading import read

from headrace.fetch.errors import CatalogueBroken, NotACatalogue
from headrace.fetch.mappings import parse_mapping
from headrace.fetch.readers import Truncated
from headrace.fetch.readers.detect import find_encoding
from headrace.kernel.errors import InvalidInput

TABLE = (
    "Артикул;Название;Цена, руб.;Категория;Ссылка;Фото 1;Фото 2;Цвет\r\n"
    "A-1;Велосипед «Школьник» №5;10 000,50 ₽;Спорт;https://shop.example/a1;"
    "https://shop.example/1.jpg;https://shop.example/2.jpg;красный\r\n"
)
VALUES = {
    "id": "A-1",
    "name": "Велосипед «Школьник» №5",
    "price": "10 000,50 ₽",
    "category": "Спорт",
    "url": "https://shop.example/a1",
    "цвет": "красный",
}
PHOTOS = ["https://shop.example/1.jpg", "https://shop.example/2.jpg"]
RUSSIAN = (
    "Съешь ещё этих мягких французских булок, да выпей же чаю. Широкая электрификация губерний. "
)


@pytest.mark.parametrize("encoding", ["cp1251", "utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize(
    "above", ["", "sep=;\r\n", "\r\n", "Прайс-лист;;;;;;;\r\n;;;;;;;\r\n", "Прайс\r\n\r\n\r\n"]
)
def test_a_table_of_russian_excel_reads(tmp_path, encoding, above):
    table = (above + TABLE).replace("₽", "руб." if encoding == "cp1251" else "₽")
    kind, rows = read(tmp_path, (table + ";;;;;;;\r\n").encode(encoding))
    assert kind == "csv"
    (row,) = rows
    assert (row.fault, row.photos, row.line) == (None, PHOTOS, 2 + above.count("\r\n"))
    assert row.values == {**VALUES, "price": row.values["price"]}
    assert row.values["price"].startswith("10 000,50 ")


def test_an_english_header_above_russian_rows(tmp_path):
    _, rows = read(tmp_path, "id;name;price\n1;Стол письменный;5\n".encode("cp1251"))
    assert rows[0].values["name"] == "Стол письменный"


def test_lines_above_the_header_do_not_move_it(tmp_path):
    _, (row,) = read(tmp_path, ("Прайс\x0bлист\u2028ООО\n" + TABLE).encode())
    assert (row.item, row.line) == ("A-1", 3)
    _, (row,) = read(tmp_path, ('"Прайс\nООО"\n' + TABLE).encode())
    assert (row.item, row.line) == ("A-1", 4)
    with pytest.raises(Truncated) as cut:
        read(tmp_path, ('"Прайс\n' + TABLE).encode())
    assert (cut.value.fault.code, cut.value.fault.line) == ("truncated_quote", 1)
    with pytest.raises(CatalogueBroken) as refused:
        read(tmp_path, ('"Прайс\n' + TABLE.replace("A-1", '"\nA-1')).encode())
    assert refused.value.problems[0].code in ("header_csv", "csv_quote")


@pytest.mark.parametrize(
    ("text", "encoding", "found"),
    [
        (RUSSIAN, "utf-8", "utf-8"),
        (RUSSIAN, "cp1251", "windows-1251"),
        (RUSSIAN.upper(), "cp1251", "windows-1251"),
        ("Дуже гарний український текст із літерами їжак", "cp1251", "windows-1251"),
        ("цвет белый", "cp1251", "windows-1251"),
        (RUSSIAN, "koi8-r", "utf-8"),
        (RUSSIAN, "cp866", "utf-8"),
        (RUSSIAN, "iso-8859-5", "utf-8"),
        ("Le café où l'été brûlait à Noël, déjà vu", "cp1252", "utf-8"),
        ("Größe, Übung, Äpfel, Straße, schön, weiß", "cp1252", "utf-8"),
        ("El niño pequeño comió piñón en España, corazón", "cp1252", "utf-8"),
        ("<a>" + RUSSIAN, "cp1251", "utf-8"),
        ('{"a": "' + RUSSIAN, "cp1251", "utf-8"),
    ],
)
def test_only_what_reads_as_russian_is_windows_1251(text, encoding, found):
    assert find_encoding(text.encode(encoding)) == found


def test_a_letter_cut_at_the_end_of_the_first_block_is_utf_8():
    assert find_encoding(RUSSIAN.encode()[:-3]) == "utf-8"


@pytest.mark.parametrize("encoding", ["koi8-r", "cp866"])
def test_another_encoding_is_refused_and_not_guessed(tmp_path, encoding):
    table = f"id;name\n1;{RUSSIAN}\n"
    with pytest.raises(CatalogueBroken) as refused:
        read(tmp_path, table.encode(encoding))
    assert refused.value.problems[0].code == "invalid_encoding"
    with pytest.raises(NotACatalogue):
        read(tmp_path, table.replace("id;name", "артикул;цена").encode(encoding))


def test_a_table_in_another_encoding_is_reported_with_its_line_and_read_by_a_mapping(tmp_path):
    mapping = parse_mapping({"id": ["id", "артикул"], "encoding": "cp866"})
    for text, line in (
        ("артикул;название\n1;Лампа\n", 1),
        ("id;name;цвет\n1;A;белый\n", 1),
        ("id;name\n1;Лампа\n", 2),
    ):
        data = text.encode("cp866")
        for options in ({}, {"format_name": "csv"}):
            with pytest.raises(InvalidInput, match=f"line {line}: the text is not valid") as no:
                read(tmp_path, data, **options)
            assert "mapping" in no.value.text
            assert "\N{REPLACEMENT CHARACTER}" not in no.value.text
        [row] = read(tmp_path, data, mapping=mapping)[1]
        assert (row.item, row.fault) == ("1", None)

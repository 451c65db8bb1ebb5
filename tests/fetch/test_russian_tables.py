"""Tables as Russian Excel writes them.

Encodings, `;`, headings, titles, prices with their currency.
"""

# ruff: noqa: RUF001 - Cyrillic is meant
from __future__ import annotations

import msgspec
import pytest
from reading import read

from headrace.fetch.errors import CatalogueBroken, NotACatalogue
from headrace.fetch.guard import Policy
from headrace.fetch.i18n import Texts, languages
from headrace.fetch.mappings import field_of, known_names
from headrace.fetch.readers import RawRow, Truncated
from headrace.fetch.readers.detect import find_encoding
from headrace.fetch.validation import Rules, problem_of, validate_row

RULES = Rules(Policy())
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


def price(text: str) -> dict[str, str]:
    """The price and currency of a row with this price."""
    row, faults = validate_row(row_of(price=text), RULES)
    assert not faults, faults
    fields = msgspec.json.decode(row.fields)
    return {name: fields[name] for name in ("price", "currency") if name in fields}


def row_of(**values):
    return RawRow(1, 2, {"id": "1", "name": "A", **values})


@pytest.mark.parametrize("encoding", ["cp1251", "utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize(
    "above", ["", "sep=;\r\n", "\r\n", "Прайс-лист;;;;;;;\r\n;;;;;;;\r\n", "Прайс\r\n\r\n\r\n"]
)
def test_a_table_of_russian_excel_reads(tmp_path, encoding, above):
    table = (above + TABLE).replace("₽", "руб." if encoding == "cp1251" else "₽")
    kind, rows = read(tmp_path, table.encode(encoding))
    assert kind == "csv"
    (row,) = rows
    assert (row.fault, row.photos, row.line) == (None, PHOTOS, 2 + above.count("\r\n"))
    assert row.values == {**VALUES, "price": row.values["price"]}
    assert price(row.values["price"]) == {"price": "10000.50", "currency": "RUB"}


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


def test_rows_of_separators_alone_are_no_rows(tmp_path):
    _, rows = read(tmp_path, (TABLE + ";;;;;;;\r\n;;;;;;;\r\n").encode())
    assert len(rows) == 1


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


@pytest.mark.parametrize(
    ("heading", "field"),
    [
        ("Артикул*", "id"),
        ("АРТИКУЛ (обязательно)", "id"),
        ("Код товара", "id"),
        ("Наименование товара", "name"),
        ("Цена,\n руб.", "price"),
        ("Цена (₽):", "price"),
        ("Фото", "photos"),
        ("Фото №2", "photos"),
        ("Ссылка\u00a0на фото 10", "photos"),
        ("picture_2", "photos"),
        ("images.url", "photos"),
        ("Ссылка", "url"),
        ("Описание", "description"),
        ("Цена закупки", None),
        ("фотобумага", None),
        ("*" * 90, None),
        ("*" * 100_000, None),
    ],
)
def test_headings_mean_fields(heading, field):
    found = field_of(heading.lower())
    assert (found and found[0]) == field


def test_of_several_headings_the_first_in_the_table_counts():
    assert known_names(["код", "артикул", "товар", "название"]) == ["код", "id", "товар", "name"]
    assert known_names(["sku", "offer_id"]) == ["id", "offer_id"]
    assert known_names(["id", "артикул"]) == ["id", "артикул"]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("10 руб.", "10 RUB"),
        ("10 000,50 ₽", "10000.50 RUB"),
        ("10\u00a0000,50\u00a0₽", "10000.50 RUB"),
        ("10\u202f000 р.", "10000 RUB"),
        ("1990р", "1990 RUB"),
        ("1 990 рублей", "1990 RUB"),
        ("₽ 5", "5 RUB"),
        ("$19.90", "19.90 USD"),
        ("19,90 €", "19.90 EUR"),
        ("25 000 тг", "25000 KZT"),
        ("12,5 бел. руб.", "12.5 BYN"),
        ("1 234,00", "1234.00"),
        ("5", "5"),
    ],
)
def test_a_price_as_russian_sellers_write_it(text, kept):
    number, _, currency = kept.partition(" ")
    assert price(text) == {"price": number} | ({"currency": currency} if currency else {})


@pytest.mark.parametrize(
    "text", ["от 500 руб.", "10 штук", "5 руб. 50 коп.", "10-20 руб.", "₽", "руб. 5 руб."]
)
def test_what_is_no_single_price_is_a_fault(text):
    _, faults = validate_row(row_of(price=text), RULES)
    assert [fault.code for fault in faults] == ["invalid_number"]


@pytest.mark.parametrize("text", ["1,990", "$1,990", "12,500 руб.", "12,500\u00a0₽", "USD 999,000"])
def test_one_comma_before_three_digits_is_a_fault(text):
    """Such a comma parts thousands or decimals: a price of 1,990 was kept as 1.990."""
    row = row_of(price=text)
    _, [fault] = validate_row(row, RULES)
    assert (fault.field, fault.code) == ("price", "ambiguous_number")
    for lang in languages():
        assert "1990.50" in Texts.load(lang).of_row(problem_of(row, "1", fault))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("0,125", "0.125"),
        ("0.125", "0.125"),
        ("1.990", "1.990"),
        ("1990,5", "1990.5"),
        ("1990,500", "1990.500"),
        ("1 990,500", "1990.500"),
        ("1,99", "1.99"),
        ("1,9900", "1.9900"),
        ("1,990.50", "1990.50"),
        ("1 990", "1990"),
    ],
)
def test_a_separator_that_is_clear_stays_as_it_is(text, kept):
    assert price(text) == {"price": kept}


@pytest.mark.usefixtures("worker")
async def test_a_russian_table_is_published(shop):
    table = TABLE.replace("₽", "руб.").replace("https://shop.example/", shop.origin.url("/photo/"))
    run = await shop.run_to_end(table.encode("cp1251"))
    assert (run.format, run.new, run.invalid, run.photos) == ("csv", 1, 0, 2)
    item = await shop.fetch.items.get("shop", "A-1")
    assert item.fields["name"] == VALUES["name"]
    assert (item.fields["price"], item.fields["currency"]) == ("10000.50", "RUB")
    assert item.fields["цвет"] == "красный"

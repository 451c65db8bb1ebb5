"""Spreadsheets as programs write them: XLSX with typed cells, and OpenDocument."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from html import escape

TYPES = (
    '<?xml version="1.0" encoding="UTF-8"?>'
    '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
    '<Default Extension="xml" ContentType="application/xml"/>'
    '<Default Extension="rels"'
    ' ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
    '<Override PartName="/xl/workbook.xml" ContentType='
    '"application/vnd.openxmlformats-officedocument.spreadsheetml.sheet.main+xml"/></Types>'
)
MAIN = 'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'
LINKS = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
PACKAGE = 'xmlns="http://schemas.openxmlformats.org/package/2006/relationships"'
STYLES = (
    f"<styleSheet {MAIN}><cellXfs>"
    "<xf numFmtId='0'/><xf numFmtId='14'/><xf numFmtId='22'/>"
    "</cellXfs></styleSheet>"
)


class Raw(str):
    """A cell in XML, after `<c r="A1" `."""

    __slots__ = ()


def number(text: str, style: int = 0) -> Raw:
    return Raw(f's="{style}"><v>{text}</v></c>')


def formula(text: str, cached: str) -> Raw:
    return Raw(f't="str"><f>{escape(text)}</f><v>{escape(cached)}</v></c>')


def _column(index: int) -> str:
    return chr(65 + index) if index < 26 else _column(index // 26 - 1) + chr(65 + index % 26)


def _cell(value: object, row: int, column: int) -> str:
    place = f'<c r="{_column(column)}{row}" '
    if isinstance(value, Raw):
        return place + value
    if isinstance(value, bool):
        return f'{place}t="b"><v>{int(value)}</v></c>'
    if isinstance(value, int | float):
        return f"{place}><v>{value}</v></c>"
    return f'{place}t="inlineStr"><is><t xml:space="preserve">{escape(str(value))}</t></is></c>'


def sheet_xml(rows: Mapping[int, Sequence[object]], merged: Sequence[str] = ()) -> str:
    """A worksheet with these rows by number; None is an empty cell."""
    body = "".join(
        f'<row r="{at}">'
        + "".join(_cell(value, at, i) for i, value in enumerate(cells) if value is not None)
        + "</row>"
        for at, cells in rows.items()
    )
    merges = "".join(f'<mergeCell ref="{ref}"/>' for ref in merged)
    merges = f"<mergeCells>{merges}</mergeCells>" if merges else ""
    return f"<worksheet {MAIN}><sheetData>{body}</sheetData>{merges}</worksheet>"


def xlsx(sheets: Mapping[str, str], *, hidden: Sequence[str] = ()) -> bytes:
    """A workbook of these worksheets by name."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("[Content_Types].xml", TYPES)
        archive.writestr(
            "_rels/.rels",
            f'<Relationships {PACKAGE}><Relationship Id="r1" Type="{LINKS}/officeDocument"'
            ' Target="xl/workbook.xml"/></Relationships>',
        )
        listed = "".join(
            f'<sheet name="{escape(name)}" sheetId="{at}" r:id="r{at}"'
            + (' state="hidden"' if name in hidden else "")
            + "/>"
            for at, name in enumerate(sheets, 1)
        )
        archive.writestr(
            "xl/workbook.xml",
            f'<workbook {MAIN} xmlns:r="{LINKS}"><sheets>{listed}</sheets></workbook>',
        )
        parts = "".join(
            f'<Relationship Id="r{at}" Type="{LINKS}/worksheet" Target="worksheets/{at}.xml"/>'
            for at in range(1, len(sheets) + 1)
        )
        parts += f'<Relationship Id="s" Type="{LINKS}/styles" Target="styles.xml"/>'
        archive.writestr(
            "xl/_rels/workbook.xml.rels", f"<Relationships {PACKAGE}>{parts}</Relationships>"
        )
        archive.writestr("xl/styles.xml", STYLES)
        for at, text in enumerate(sheets.values(), 1):
            archive.writestr(f"xl/worksheets/{at}.xml", text)
    return out.getvalue()


def ods(rows: Sequence[Sequence[str]]) -> bytes:
    """An OpenDocument sheet of texts."""
    office = "urn:oasis:names:tc:opendocument:xmlns"
    body = "".join(
        "<table:table-row>"
        + "".join(
            f'<table:table-cell office:value-type="string"><text:p>{escape(text)}</text:p>'
            "</table:table-cell>"
            for text in cells
        )
        + "</table:table-row>"
        for cells in rows
    )
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("mimetype", "application/vnd.oasis.opendocument.spreadsheet")
        archive.writestr("META-INF/manifest.xml", "<manifest/>")
        archive.writestr(
            "content.xml",
            f'<office:document-content xmlns:office="{office}:office:1.0"'
            f' xmlns:table="{office}:table:1.0" xmlns:text="{office}:text:1.0"><office:body>'
            f'<office:spreadsheet><table:table table:name="Sheet1">{body}</table:table>'
            "</office:spreadsheet></office:body></office:document-content>",
        )
    return out.getvalue()

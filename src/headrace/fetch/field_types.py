"""The types of fields: how the text of each type is parsed, and its normalized form."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Final, Literal, TypeAlias

import re2

from headrace.fetch.mappings import by_word, plain_word

Kind: TypeAlias = Literal[
    "text", "integer", "number", "price", "boolean", "date", "url", "list", "one_of"
]
PATTERN_CHARACTERS_MAX: Final = 500
PATTERN_MEMORY_BYTES: Final = 2**20
_SPACES: Final = re.compile(r"[\s\u00a0\u202f]")
_THOUSANDS: Final = re.compile(r"-?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?")
_AMBIGUOUS: Final = re.compile(r"-?[1-9][0-9]{0,2},[0-9]{3}")
"""A comma that may separate thousands or decimals, depending on the country."""
_NUMBER: Final = re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,15})?")
_PRICE: Final = re.compile(r"[0-9]{1,15}(\.[0-9]{1,6})?")
_INTEGER: Final = re.compile(r"(-?[0-9]{1,18})(\.0{1,6})?")
_ISO_DATE: Final = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
    r"([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,6})?)?(Z|[+-][0-9]{2}:[0-9]{2})?)?"
)
_DOTTED_DATE: Final = re.compile(r"([0-9]{2})\.([0-9]{2})\.([0-9]{4})")
_BETWEEN_ENTRIES: Final = re.compile(r"\s*[|;\n\r]\s*")
_TRUTH: Final = {
    **dict.fromkeys(("true", "yes", "1", "y", "да"), "true"),
    **dict.fromkeys(("false", "no", "0", "n", "нет"), "false"),
}
_CURRENCY: Final = re.compile(r"([^0-9\s.,-]*)\s*([-0-9].*?)\s*([^0-9\s,][^0-9]*)?", re.DOTALL)
_CODE: Final = re.compile(r"[A-Z]{3}")
_CURRENCIES: Final = by_word("currencies")


def split_currency(text: str) -> tuple[str, str | None]:
    """The number and the currency code, or None, of `1990.50 EUR` or `10 000,50 ₽`."""
    match = _CURRENCY.fullmatch(text.strip())
    if match is None or bool(match[1]) == bool(match[3]):
        return text, None
    word = (match[1] or match[3]).strip()
    code = word if _CODE.fullmatch(word) else currency_of(word)
    return (text, None) if code is None else (match[2], code)


def currency_of(word: str) -> str | None:
    """The code of the currency written as `word`; None if it is unknown."""
    return _CURRENCIES.get(plain_word(word).rstrip(". "))


def split_list(text: str) -> list[str]:
    """The entries of a text separated by `|`, `;` or line breaks."""
    return [entry for entry in _BETWEEN_ENTRIES.split(text.strip()) if entry]


def _digits(text: str) -> str:
    """The text without spaces and with a decimal point; an ambiguous comma is left."""
    plain = _SPACES.sub("", text)
    if "," in plain and not _AMBIGUOUS.fullmatch(text.strip()):
        if "." not in plain:
            return plain.replace(",", ".")
        if _THOUSANDS.fullmatch(plain):
            return plain.replace(",", "")
    return plain


def _price(text: str) -> str | None:
    plain = _digits(text)
    if not _PRICE.fullmatch(plain):
        return None
    return plain if plain[0] != "0" else format(Decimal(plain), "f")


def _number(text: str) -> str | None:
    plain = _digits(text)
    return format(Decimal(plain), "f") if _NUMBER.fullmatch(plain) else None


def _integer(text: str) -> str | None:
    match = _INTEGER.fullmatch(_SPACES.sub("", text))
    return str(int(match[1])) if match else None


def _boolean(text: str) -> str | None:
    return _TRUTH.get(text.casefold())


def _date(text: str) -> str | None:
    dotted = _DOTTED_DATE.fullmatch(text)
    try:
        if dotted:
            return date(int(dotted[3]), int(dotted[2]), int(dotted[1])).isoformat()
        if not _ISO_DATE.fullmatch(text):
            return None
        is_day = len(text) == len("2026-11-21")
        return (date.fromisoformat(text) if is_day else datetime.fromisoformat(text)).isoformat()
    except ValueError:
        return None


CANONICAL: Final[dict[Kind, Callable[[str], str | None]]] = {
    "integer": _integer,
    "number": _number,
    "price": _price,
    "boolean": _boolean,
    "date": _date,
}
"""The functions that normalize a text of each type; they return None for an invalid text."""
_INVALID: Final[dict[Kind, str]] = {
    "integer": "invalid_integer",
    "number": "invalid_number",
    "price": "invalid_number",
    "boolean": "invalid_boolean",
    "date": "invalid_date",
}
NUMBERS: Final[tuple[Kind, ...]] = ("integer", "number", "price")


def invalid_code(kind: Kind, text: str) -> str:
    """The fault code for a text that is invalid for its type."""
    is_ambiguous = kind in ("number", "price") and _AMBIGUOUS.fullmatch(text.strip())
    return "ambiguous_number" if is_ambiguous else _INVALID[kind]


def is_under(kind: Kind, found: str, least: float | str | None) -> bool:
    """Whether the normalized value `found` is below the limit; dates are compared by day."""
    if least is None:
        return False
    if kind == "date":
        return found[:10] < str(least)
    return Decimal(found) < Decimal(str(least))


def is_over(kind: Kind, found: str, most: float | str | None) -> bool:
    """Whether the normalized value `found` is above the limit."""
    if most is None:
        return False
    if kind == "date":
        return found[:10] > str(most)
    return Decimal(found) > Decimal(str(most))


def is_bound(kind: Kind, bound: float | str) -> bool:
    """Whether `bound` is a valid limit for fields of that type."""
    if kind == "date":
        return isinstance(bound, str) and len(bound) == len("2026-11-21") and _date(bound) == bound
    return kind in NUMBERS and not isinstance(bound, str) and Decimal(str(bound)).is_finite()


@lru_cache(1000)
def matcher(pattern: str) -> Callable[[str], bool]:
    """A function that returns whether a whole text matches `pattern`. Raises: ValueError."""
    if len(pattern) > PATTERN_CHARACTERS_MAX:
        raise ValueError(f"it has more than {PATTERN_CHARACTERS_MAX} characters")
    options = re2.Options()
    options.log_errors = False
    options.never_capture = True
    options.max_mem = PATTERN_MEMORY_BYTES
    try:
        compiled = re2.compile(pattern, options)
    except re2.error as error:
        text = error.args[0] if error.args else b""
        raise ValueError(
            text.decode(errors="replace") if isinstance(text, bytes) else str(text)
        ) from None
    except UnicodeEncodeError:
        raise ValueError("it has an incomplete character") from None
    return lambda text: compiled.fullmatch(text) is not None

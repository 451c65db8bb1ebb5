"""All that sellers read, in their language: one TOML file of sentences a language.

Codes and values are kept in the database, sentences never: a report can be read in any language, also
one that was added after its run. A sentence whose values are not known (kept by an older release) falls
back to the text that was kept, a code without a sentence is said by its kind, so nobody ever reads a
bare code or an error. A test holds every language to the same keys and placeholders, and every code of
the room to a sentence.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final, Self, TypeAlias

from penstock.fetch.errors import LanguageUnknown
from penstock.fetch.model import RowProblem

Values: TypeAlias = Mapping[str, str | int | float]
DEFAULT: Final = "en"
VALUE_CHARACTERS_MAX: Final = 120
_NAME: Final = re.compile(r"\{(\w+)\}")
_NUMBER: Final = re.compile(r"[0-9]+")
_WOULD_BE: Final = "would be held, "
"""How the reason of a dry run begins."""
_ABANDONED: Final = "its process ended"


@dataclass(frozen=True, slots=True)
class Texts:
    """The sentences of one language, by section and code."""

    lang: str
    sections: Mapping[str, Mapping[str, str]]

    @classmethod
    def load(cls, lang: str = DEFAULT) -> Self:
        """The sentences of `lang`, such as `en`. Raises: LanguageUnknown."""
        sections = _languages().get(lang.lower())
        if sections is None:
            raise LanguageUnknown(lang, languages())
        return cls(lang.lower(), sections)

    def of_row(self, problem: RowProblem) -> str:
        """What is wrong with a row and what to do, in one sentence."""
        return self.row(problem.field, problem.code, problem.values) or problem.text

    def row(self, field: str, code: str, values: Values) -> str:
        """The sentence of a row's code; empty where the values for it are not known."""
        template = self.sections["row"].get(code)
        if template is None:
            # Codes of links in the list of photos are those of outcomes.
            template = self.sections["row"].get(f"url_{code}")
        if template is None:
            return "" if not values else _filled(self.sections["kind"]["row"], {"code": code})
        return _filled(template, {"field": field, **values})

    def outcome(self, outcome: str) -> str:
        """One sentence about what became of a photo."""
        sentence = self.sections["photo"].get(outcome)
        if sentence is not None:
            return sentence
        kind, _, code = outcome.partition(":")
        status = re.fullmatch(r"http_(\d+)", code)
        if status is not None:
            return _filled(self.sections["kind"]["status"], {"status": status[1]})
        kind = kind if kind in ("refused", "failed") else "failed"
        plain = (code or outcome).replace("_", " ")
        return _filled(self.sections["kind"][kind], {"code": plain})

    def reason(self, reason: str) -> str:
        """Why a run is held, or was abandoned, in words; a reason of another shape is said as it is."""
        if reason.startswith(_WOULD_BE):
            held = self.reason(reason.removeprefix(_WOULD_BE))
            return _filled(self.sections["run"]["would_be"], {"reason": held})
        code, _, detail = reason.partition(": ")
        code = "abandoned" if reason == _ABANDONED else code
        template = self.sections["run"].get(code)
        if template is None:
            return reason
        numbers = _NUMBER.findall(detail)
        names = ("removed" if code == "removed" else "rows", "published")
        values = dict(zip(names, numbers, strict=False))
        return _filled(template, {"detail": detail, **values}) or reason

    def heading(self, name: str, **values: str | int) -> str:
        """A heading of the report page."""
        return _filled(self.sections["page"][name], values)


def languages() -> list[str]:
    """The languages there are, the default one first."""
    return sorted(_languages(), key=lambda lang: (lang != DEFAULT, lang))


def preferred(accept_language: str) -> str:
    """The best of ours for a header such as `ru-RU, en;q=0.8`; the default where none fits."""
    ranked: list[tuple[float, int, str]] = []
    for position, part in enumerate(accept_language.split(",")[:20]):
        tag, _, weight = part.strip().partition(";")
        match = re.fullmatch(r"\s*q=([01](?:\.[0-9]{0,3})?)\s*", weight)
        quality = float(match[1]) if match else 1.0 if not weight else 0.0
        lang = tag.strip().partition("-")[0].lower()
        if quality > 0 and (lang in _languages() or lang == "*"):
            ranked.append((-quality, position, DEFAULT if lang == "*" else lang))
    return min(ranked)[2] if ranked else DEFAULT


def placeholders(template: str) -> set[str]:
    """The names of the values that a sentence shows."""
    return set(_NAME.findall(template))


def _filled(template: str, values: Values) -> str:
    """`template` with its values, each bounded; empty where one is missing."""
    if not placeholders(template) <= values.keys():
        return ""
    return _NAME.sub(lambda name: _shown(values[name[1]]), template)


def _shown(value: str | float) -> str:
    text = value if isinstance(value, str) else f"{value:,}"
    plain = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    cut = plain[: VALUE_CHARACTERS_MAX - 3] + "..."
    return plain if len(plain) <= VALUE_CHARACTERS_MAX else cut


@cache
def _languages() -> dict[str, dict[str, dict[str, str]]]:
    found: dict[str, dict[str, dict[str, str]]] = {}
    for file in files("penstock.fetch.texts").iterdir():
        if file.name.endswith(".toml"):
            document = tomllib.loads(file.read_text(encoding="utf-8"))
            sections = {name: part for name, part in document.items() if isinstance(part, dict)}
            found[file.name.removesuffix(".toml")] = sections
    return found

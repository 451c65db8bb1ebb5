"""The sentences that sellers read, in their language: one TOML file per language.

The database stores codes and values, never sentences, so a report is available in every language,
even in one added later. If values are missing, the stored English text is used. A code without a
sentence uses the general sentence of its kind. So readers always see a sentence. A test requires
the same keys and placeholders in each language, and a sentence for each code.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final, Self, TypeAlias

from headrace.fetch.errors import FileFault, LanguageUnknown
from headrace.fetch.model import RowProblem, Run, RunState
from headrace.fetch.settings import FetchConfig

Values: TypeAlias = Mapping[str, str | int | float]
DEFAULT: Final = "en"
VALUE_CHARACTERS_MAX: Final = 120
_NAME: Final = re.compile(r"\{(\w+)(:size)?\}")
_NUMBER: Final = re.compile(r"[0-9]+")
_UNITS: Final = (("gigabytes", 2**30), ("megabytes", 2**20), ("kilobytes", 2**10), ("bytes", 1))
_WOULD_BE: Final = "would be held, "
"""The prefix of the reason of a dry run that would be held."""
_ABANDONED: Final = "its process ended"


@dataclass(frozen=True, slots=True)
class Texts:
    """The sentences of one language, by section and code."""

    lang: str
    sections: Mapping[str, Mapping[str, str]]
    limits: Values
    """The limits of the deployment, which sentences show instead of names of settings."""

    @classmethod
    def load(cls, lang: str = DEFAULT, config: FetchConfig | None = None) -> Self:
        """The sentences of a language, such as `en`, with the limits of `config`.

        Raises: LanguageUnknown.
        """
        sections = _languages().get(lang.lower())
        if sections is None:
            raise LanguageUnknown(lang, languages())
        limits = _default_limits() if config is None else limits_of(config)
        return cls(lang.lower(), sections, limits)

    def of_row(self, problem: RowProblem) -> str:
        """The problem of a row and what to do, as a sentence."""
        return self.row(problem.field, problem.code, problem.values) or problem.text

    def row(self, field: str, code: str, values: Values) -> str:
        """The sentence of a row fault; empty if its values are missing."""
        template = self.sections["row"].get(code)
        if template is None:
            # Photo links have the codes of outcomes.
            template = self.sections["row"].get(f"url_{code}")
        if template is None:
            return "" if not values else self._filled(self.sections["kind"]["row"], {"code": code})
        return self._filled(template, {"field": field, **values})

    def file(self, fault: FileFault) -> str:
        """The fault of a whole file and what to do, as a sentence that begins with its line."""
        sentences = self.sections["file"]
        template = sentences.get(fault.code, "").replace("{accepted}", sentences["accepted"])
        text = self._filled(template, fault.values) or fault.code
        if fault.line is None:
            return text
        return f"{self._filled(self.sections['kind']['line'], {'line': str(fault.line)})}: {text}"

    def of_run(self, run: Run) -> str:
        """Why a run is held, refused or abandoned; empty in other states."""
        if run.fault is not None:
            text = self.file(run.fault)
            if not run.fault.code.startswith("truncated"):
                return text
            held = self.sections["run"]["truncated"].replace("{detail}", text)
            would_be = self.sections["run"]["would_be"].replace("{reason}", held)
            return would_be if run.state is RunState.DRY else held
        return self.reason(run.reason) if run.reason else ""

    def outcome(self, outcome: str) -> str:
        """The sentence of a photo outcome."""
        sentence = self.sections["photo"].get(outcome)
        if sentence is not None:
            return self._filled(sentence, {})
        kind, _, code = outcome.partition(":")
        status = re.fullmatch(r"http_(\d+)", code)
        if status is not None:
            return self._filled(self.sections["kind"]["status"], {"status": status[1]})
        kind = kind if kind in ("refused", "failed") else "failed"
        plain = (code or outcome).replace("_", " ")
        return self._filled(self.sections["kind"][kind], {"code": plain})

    def reason(self, reason: str) -> str:
        """Why a run is held or was abandoned; an unknown reason is returned unchanged."""
        if reason.startswith(_WOULD_BE):
            held = self.reason(reason.removeprefix(_WOULD_BE))
            return self.sections["run"]["would_be"].replace("{reason}", held)
        code, _, detail = reason.partition(": ")
        code = "abandoned" if reason == _ABANDONED else code
        template = self.sections["run"].get(code)
        if template is None:
            return reason
        numbers = _NUMBER.findall(detail)
        names = ("removed" if code in ("removed", "dropped") else "rows", "published")
        values = dict(zip(names, numbers, strict=False))
        return self._filled(template, {"detail": detail, **values}) or reason

    def heading(self, name: str, **values: str | int) -> str:
        """A heading of the report page."""
        return self._filled(self.sections["page"][name], values)

    def _filled(self, template: str, values: Values) -> str:
        """The template with its values and the limits filled in; empty if one is missing."""
        known = {**self.limits, **values}
        if not placeholders(template) <= known.keys():
            return ""
        return _NAME.sub(lambda name: self._shown(known[name[1]], is_size=bool(name[2])), template)

    def _shown(self, value: str | float, *, is_size: bool) -> str:
        if is_size and not isinstance(value, str):
            unit, factor = next(pair for pair in _UNITS if value >= pair[1] or pair[1] == 1)
            return f"{value / factor:.4g} {self.sections['unit'][unit]}"
        return _shown(value)


def limits_of(config: FetchConfig) -> Values:
    """The limits of a deployment by their placeholder names."""
    return {
        "photo_max": config.photo_max_bytes,
        "photo_s": f"{max(config.classes, default=0.0):g}",
        "ports": ", ".join(map(str, sorted(config.allow_ports))),
    }


@cache
def _default_limits() -> Values:
    return limits_of(FetchConfig())


def languages() -> list[str]:
    """The available languages, the default one first."""
    return sorted(_languages(), key=lambda lang: (lang != DEFAULT, lang))


def preferred(accept_language: str) -> str:
    """The best available language for a header such as `ru-RU, en;q=0.8`, else the default."""
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
    """The names of the placeholders in a sentence."""
    return {name for name, _ in _NAME.findall(template)}


def _shown(value: str | float) -> str:
    text = value if isinstance(value, str) else f"{value:,}"
    plain = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    cut = plain[: VALUE_CHARACTERS_MAX - 3] + "..."
    return plain if len(plain) <= VALUE_CHARACTERS_MAX else cut


@cache
def _languages() -> dict[str, dict[str, dict[str, str]]]:
    found: dict[str, dict[str, dict[str, str]]] = {}
    for file in files("headrace.fetch.i18n").iterdir():
        if file.name.endswith(".toml"):
            document = tomllib.loads(file.read_text(encoding="utf-8"))
            sections = {name: part for name, part in document.items() if isinstance(part, dict)}
            found[file.name.removesuffix(".toml")] = sections
    return found

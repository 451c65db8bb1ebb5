"""JSON Schema of `headrace.toml`, from the declared settings, for editors and reviews of changes.

It describes the form of each value. What only a parser can decide, such as whether a time zone
exists, is left to `headrace config show`, which lists every fault.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from headrace.kernel import config
from headrace.kernel.config import setting_rows

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_DURATION: Final = r"^\s*[0-9]+(\.[0-9]+)?(ms|s|m|h|d)\s*$"
_SIZE: Final = r"^\s*[0-9]+\s*(B|KiB|MiB|GiB|TiB)\s*$"
_COUNT: Final = r"^\s*[0-9]{1,15}\s*$"
_LISTEN: Final = r"^\s*\S+:[0-9]{1,5}\s*$"
_TEXT: Final = r"\S"
_FORMS: Final[Mapping[Callable[..., Any], dict[str, Any]]] = {
    config.parse_duration_s: {"type": "string", "pattern": _DURATION},
    config.parse_size_bytes: {"type": "string", "pattern": _SIZE},
    config.parse_listen: {"type": "string", "pattern": _LISTEN},
    config.parse_text: {"type": ["string", "number", "boolean"], "pattern": _TEXT},
    config.parse_count: {"type": ["integer", "string"], "minimum": 0, "pattern": _COUNT},
    config.parse_share: {"type": ["number", "string"], "minimum": 0, "maximum": 1},
}
"""By parser. TOML's own numbers are read as their text."""
_ANY: Final = {"type": ["string", "number", "boolean", "array"]}
"""Of parsers with a syntax of their own: a text, or a list in place of its commas."""


def config_schema(sections: Mapping[str, type[Any]]) -> dict[str, Any]:
    """The schema of a configuration file with these sections."""
    parsers = {
        (section, field.name): field.metadata["parse"]
        for section, kind in sections.items()
        for field in dataclasses.fields(kind)
    }
    tables: dict[str, dict[str, Any]] = {}
    for row in setting_rows(sections):
        described = {
            **_form_of(parsers[row.section, row.field]),
            "description": f"{row.help} Environment: {row.env}.",
        }
        if row.default:
            described["default"] = row.default
        tables.setdefault(row.section, {})[row.name] = described
    return {
        "$schema": DIALECT,
        "title": "headrace.toml",
        "description": "Settings of Headrace.",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            section: {"type": "object", "additionalProperties": False, "properties": settings}
            for section, settings in tables.items()
        },
    }


def _form_of(parse: Callable[..., Any]) -> dict[str, Any]:
    """The form of the values that a parser accepts."""
    if parse in _FORMS:
        return _FORMS[parse]
    if not inspect.isfunction(parse) or parse.__module__ != config.__name__:
        return _ANY
    given = inspect.getclosurevars(parse).nonlocals
    if "choices" in given:
        return {"type": "string", "enum": list(given["choices"])}
    if "least" in given:
        bounds = {"minimum": given["least"], "maximum": given["most"]}
        return {"type": ["integer", "string"], **bounds, "pattern": _COUNT}
    if "schemes" in given:
        return {"type": "string", "pattern": rf"^\s*({'|'.join(given['schemes'])})://"}
    return _ANY

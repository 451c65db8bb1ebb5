"""Rules that give answers with objects a Cache-Control and further header fields, by key prefix.

    [[media.headers]]
    prefix = "covers/"
    cache_control = "public, max-age=86400"
    fields = { Content-Disposition = "attachment" }

The rule with the longest prefix of a key applies, and no other. A signed URL keeps the
Cache-Control that ends with its signature: with a longer one caches would serve it after its end.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, NamedTuple

LINES_BYTES_MAX: Final = 1024
RULES_MAX: Final = 100
_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")
_VALUE: Final = re.compile(r"[!-~]([ -~]*[!-~])?")
_PREFIX: Final = re.compile(r"[A-Za-z0-9._@~/-]{0,512}")
OWN_FIELDS: Final = frozenset(
    (
        *("accept-ranges", "age", "cache-status", "connection", "content-encoding"),
        *("content-length", "content-range", "content-type", "date", "etag", "expires"),
        *("keep-alive", "last-modified", "location", "proxy-authenticate", "proxy-connection"),
        *("retry-after", "set-cookie", "te", "trailer", "transfer-encoding", "upgrade", "vary"),
        "x-content-type-options",
    )
)
"""Fields that frame an answer, belong to one connection, or are made from the object."""
_OWN_PREFIXES: Final = ("access-control-", "x-headrace-")


class HeaderRule(NamedTuple):
    """One rule; `lines` are complete header lines."""

    prefix: str
    cache_control: str | None
    lines: str


def parse_header_rules(text: str) -> tuple[HeaderRule, ...]:
    """Parse a JSON list of rules; empty: none. Raises: ValueError, with field and value."""
    try:
        given = json.loads(text or "[]")
    except ValueError as error:
        # Other errors, such as that of a number of 5,000 digits, have texts of Python.
        why = f": {error}" if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(f"a JSON list of rules, or [[media.headers]] in a file{why}") from error
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise ValueError("a list of rules with prefix, cache_control and fields")
    if len(given) > RULES_MAX:
        raise ValueError(f"at most {RULES_MAX} rules")
    rules = [_rule(one) for one in given]
    if len({rule.prefix for rule in rules}) < len(rules):
        raise ValueError("rules of which no two have the same prefix")
    return tuple(sorted(rules, key=lambda rule: -len(rule.prefix)))


def rule_for(rules: tuple[HeaderRule, ...], key: str) -> HeaderRule | None:
    """The rule that applies to `key`, or None."""
    return next((rule for rule in rules if key.startswith(rule.prefix)), None)


def _rule(given: dict[str, Any]) -> HeaderRule:
    prefix, cache_control = given.get("prefix"), given.get("cache_control")
    fields = given.get("fields", {})
    if unknown := given.keys() - {"prefix", "cache_control", "fields"}:
        raise ValueError(f"rules with prefix, cache_control and fields, without {sorted(unknown)}")
    if not isinstance(prefix, str) or _PREFIX.fullmatch(prefix) is None:
        raise ValueError(f"prefix: the start of keys such as covers/, or an empty text: {prefix!r}")
    if cache_control is not None:
        _require_value("cache_control", cache_control)
    if not isinstance(fields, dict):
        raise ValueError(f"fields: names with values, not {fields!r}")  # noqa: TRY004
    for name, value in fields.items():
        _require_name(name)
        _require_value(name, value)
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    if len(lines) + len(cache_control or "") > LINES_BYTES_MAX:
        raise ValueError(f"at most {LINES_BYTES_MAX} bytes of fields in the rule of {prefix!r}")
    return HeaderRule(prefix, cache_control, lines)


def _require_name(name: str) -> None:
    lower = name.lower()
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"fields: a name of letters, digits and -, instead of {name!r}")
    if lower == "cache-control":
        raise ValueError("fields: Cache-Control as cache_control of the rule")
    if lower in OWN_FIELDS or lower.startswith(_OWN_PREFIXES):
        raise ValueError(f"fields: no {name}, which is made by the server for each answer")


def _require_value(name: str, value: object) -> None:
    if not isinstance(value, str) or _VALUE.fullmatch(value) is None:
        raise ValueError(f"{name}: a value of visible ASCII without line ends, not {value!r}")

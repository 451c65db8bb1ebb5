"""Who names itself a program: the rules of `bots.toml`, searched in a User-Agent."""

from __future__ import annotations

import re
import tomllib
from functools import cache, lru_cache
from importlib.resources import files
from typing import Final

import msgspec

AGENTS_KEPT_MAX: Final = 4096
"""Judged user agents that are remembered; each at most as long as a head may be."""


class BotRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pattern, why what matches is no person, and a user agent that matches."""

    pattern: str
    reason: str
    example: str


class _Rules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rule: tuple[BotRule, ...]


@cache
def bot_rules() -> tuple[BotRule, ...]:
    """All rules, in the order of the file."""
    text = files("headrace.views").joinpath("bots.toml").read_text("utf-8")
    return msgspec.convert(tomllib.loads(text), _Rules).rule


@cache
def _pattern() -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{rule.pattern})" for rule in bot_rules()), re.IGNORECASE)


@lru_cache(maxsize=AGENTS_KEPT_MAX)
def is_bot(user_agent: str) -> bool:
    """Whether a rule matches the user agent."""
    return _pattern().search(user_agent) is not None

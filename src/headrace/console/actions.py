"""Actions: one declaration each for form, CLI command and HTTP call.

The form shows the equivalent command line and HTTP call with the values of its fields, so every
action can also be scripted. `run` calls one public method, and a sentence describes its result.
The audit log records every attempt.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import msgspec

from headrace.console.model import FieldsInvalid
from headrace.kernel.config import parse_moment
from headrace.kernel.errors import FieldProblem
from headrace.kernel.terminal import is_visible, visible
from headrace.web.bodies import require_plain
from headrace.web.model import BodyInvalid, BodyMalformed

if TYPE_CHECKING:
    from headrace.console.views import ViewContext

TEXT_CHARACTERS_MAX: Final = 64 * 1024
INT64_MAX: Final = 2**63 - 1
_DIGITS_MAX: Final = 19
_PLACE: Final = re.compile(r"\{(\w+)(?:\|(\w+))?\}")
_FLAG: Final = re.compile(r"(--[\w-]+) ([?!])([\w,]+)")
_OPTIONAL: Final = re.compile(r" ?\[([^\[\]]*)\]")


class Invalid(str):
    """The typed text of a field that is not valid."""

    __slots__ = ()


class Missing(Invalid):
    """Placeholder for a required field that is empty: its name in capitals."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Field:
    """A field of an action's form; a `fixed` field is set by the link and hidden."""

    name: str
    label: str
    _: KW_ONLY
    kind: str = "text"
    required: bool = True
    hint: str = ""
    options: tuple[tuple[str, str], ...] = ()
    default: str = ""
    numbers: tuple[float, float] = (-INT64_MAX, INT64_MAX)
    """Least and greatest value of a number."""

    def parse(self, given: str | None) -> Any:
        """The value of the typed text; None if it is empty. Raises: ValueError."""
        text = (given or "").strip()
        if self.kind == "check":
            return text not in ("", "0")
        if not text:
            if self.required:
                raise ValueError("is required")
            return None
        if len(text) > TEXT_CHARACTERS_MAX or "\0" in text:
            raise ValueError(f"expected at most {TEXT_CHARACTERS_MAX} characters, none of them NUL")
        return _PARSERS.get(self.kind, _parse_text)(self, text)


def _parse_text(_: Field, text: str) -> str:
    return text


def _parse_number(field: Field, text: str) -> int:
    if re.fullmatch(r"-?[0-9]+", text) is None:
        raise ValueError("expected a whole number")
    least, most = field.numbers
    if len(text.lstrip("-0")) > _DIGITS_MAX or not least <= int(text) <= most:
        raise ValueError(f"expected a whole number from {least:,} to {most:,}")
    return int(text)


def _parse_decimal(field: Field, text: str) -> float:
    if re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,6})?", text) is None:
        raise ValueError("expected a number such as 0.25")
    least, most = field.numbers
    if not least <= float(text) <= most:
        raise ValueError(f"expected a number from {least:,} to {most:,}")
    return float(text)


def _parse_select(field: Field, text: str) -> str:
    if text not in [value for value, _ in field.options]:
        raise ValueError(f"expected one of {', '.join(v for v, _ in field.options if v)}")
    return text


def _parse_json(field: Field, text: str) -> Any:
    body = text.encode()
    try:
        value = msgspec.json.decode(body)
        # Validate it as in the body of the HTTP call, so the form refuses what the API refuses.
        require_plain(msgspec.json.encode({field.name: msgspec.Raw(body)}))
    except BodyInvalid as error:
        raise ValueError("; ".join(f"{p.pointer}: {p.text}" for p in error.problems)) from error
    except (BodyMalformed, RecursionError) as error:
        raise ValueError("expected JSON with less nesting") from error
    except ValueError as error:
        raise ValueError(f"expected JSON: {error}") from error
    return value


def _parse_moment(_: Field, text: str) -> str:
    """The moment as the API accepts it, in UTC if the text has no offset."""
    try:
        return parse_moment(text).isoformat()
    except ValueError as error:
        raise ValueError(f"expected {error}") from error


_PARSERS: Final[Mapping[str, Callable[[Field, str], Any]]] = {
    "number": _parse_number,
    "decimal": _parse_decimal,
    "select": _parse_select,
    "json": _parse_json,
    "moment": _parse_moment,
}


@dataclass(frozen=True, slots=True)
class Done:
    """The result of an action, text that is not logged, and the page that follows if any."""

    text: str
    url: str = ""
    unlogged: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """An operation with its form, command and HTTP call.

    Placeholders of `command`: `{field}` is a shell-quoted value, `{field|none}` has a word for an
    empty one, `[--option {field}]` is left out while empty, `[--flag ?field]` appears if a field is
    given, `[--flag !field,field]` if none is. `body` returns the JSON of the HTTP call. `preview`
    describes what the action would affect.
    """

    name: str
    """The room, and a verb: `jobs.pause_queue`."""
    title: str
    what: str
    command: str
    http: str
    """Method and path with placeholders, such as `DELETE /v1/jobs/{job}`."""
    run: Callable[[ViewContext, dict[str, Any]], Awaitable[Any]]
    """Returns the result as text or as `Done`; with `done`, any value."""
    done: str = ""
    """Format of the result: `{field}` is a value of the form, `{found}` what `run` returned."""
    unchanged: str = ""
    """Format of the result if `run` returned nothing, such as 0 changes."""
    body: Callable[[dict[str, Any]], Any] | None = None
    fields: tuple[Field, ...] = ()
    is_danger: bool = False
    preview: Callable[[ViewContext, dict[str, Any]], Awaitable[str]] | None = None
    is_direct: bool = False
    """A page sends it without this form, so a refusal is shown on that page."""

    @property
    def scope(self) -> str:
        """The scope that the action and its HTTP call need."""
        room = self.name.replace(".", "-").partition("-")[0]
        return f"{room}:{'read' if self.method == 'GET' else 'write'}"

    @property
    def method(self) -> str:
        """The method of the HTTP call."""
        return self.http.partition(" ")[0]

    @property
    def path(self) -> str:
        """The path of the HTTP call."""
        return self.http.partition(" ")[2]

    async def apply(self, context: ViewContext, values: dict[str, Any]) -> Done:
        """Run the action with the values of its form."""
        found = await self.run(context, values)
        if isinstance(found, Done):
            return found
        text = self.unchanged if self.unchanged and not found else self.done
        return Done(text.format(**values, found=found) if text else found)

    def parse(self, given: Mapping[str, str]) -> dict[str, Any]:
        """The values of a form. Raises: FieldsInvalid, with every problem."""
        values, problems = self._read(given)
        FieldsInvalid.require_none(problems, self.title)
        return values

    def sketch(self, given: Mapping[str, str]) -> dict[str, Any]:
        """Values for display; invalid ones as typed, missing ones as their name in capitals."""
        return self._read(given)[0]

    def _read(self, given: Mapping[str, str]) -> tuple[dict[str, Any], list[FieldProblem]]:
        values: dict[str, Any] = {}
        problems = []
        for field in self.fields:
            text = given.get(field.name, field.default)
            try:
                values[field.name] = field.parse(text)
            except ValueError as fault:
                is_typed = bool(text.strip())
                values[field.name] = Invalid(text) if is_typed else Missing(field.name.upper())
                problems.append(FieldProblem(field.name, "invalid", str(fault)))
        return values, problems

    def described(self, values: Mapping[str, Any]) -> str:
        """The description on the form."""
        return _PLACE.sub(lambda m: visible(_text(values.get(m[1]))), self.what)

    def as_command(self, values: Mapping[str, Any]) -> str:
        """The equivalent command line."""

        def optional(match: re.Match[str]) -> str:
            is_given = all(_is_given(values.get(name)) for name, _ in _PLACE.findall(match[1]))
            flag = _FLAG.fullmatch(match[1])
            if flag is not None:
                any_given = any(_is_given(values.get(name)) for name in flag[3].split(","))
                return f" {flag[1]}" if any_given == (flag[2] == "?") else ""
            return f" {match[1]}" if is_given else ""

        def typed(match: re.Match[str]) -> str:
            return quoted(self._typed(match[1], values) or match[2] or "")

        words = _OPTIONAL.sub(optional, self.command).split()
        line = [_PLACE.sub(typed, word) for word in words]
        at = [number for number, word in enumerate(words) if _is_argument(word, words[number - 1])]
        if not any(line[number].startswith(("-", "'-", "$'-")) for number in at):
            return " ".join(line)
        # After --, nothing is parsed as an option.
        options = [word for number, word in enumerate(line) if number not in at]
        return " ".join([*options, "--", *(line[number] for number in at)])

    def _typed(self, name: str, values: Mapping[str, Any]) -> str:
        value = values.get(name)
        is_json = any(f.name == name and f.kind == "json" for f in self.fields)
        if is_json and not isinstance(value, Invalid):
            return msgspec.json.encode(value).decode()
        return _text(value)

    def as_http(self, values: Mapping[str, Any]) -> str:
        """The equivalent HTTP call with its body; empty while a field is invalid."""
        if not is_complete(values):
            return ""
        line = _PLACE.sub(lambda m: quote(_text(values.get(m[1])), safe=""), self.http)
        if self.body is None:
            return line
        try:
            body = msgspec.json.format(msgspec.json.encode(self.body(dict(values))), indent=2)
        except (TypeError, ValueError, KeyError):
            return ""
        return f"{line}\nContent-Type: application/json\n\n{_escaped(body.decode())}"


def is_complete(values: Mapping[str, Any]) -> bool:
    """Whether every field is valid."""
    return not any(isinstance(value, Invalid) for value in values.values())


def has_invalid(values: Mapping[str, Any]) -> bool:
    """Whether typed text is invalid; a required field that is still empty does not count."""
    return any(isinstance(v, Invalid) and not isinstance(v, Missing) for v in values.values())


def quoted(text: str) -> str:
    """A word of a command line, quoted for a shell.

    Invisible characters and those that reverse text are written as byte escapes, which Bash, Zsh
    and Ksh read as the same text. So a command looks like what it does.
    """
    if all(map(is_visible, text)):
        return shlex.quote(text)
    return "$'" + "".join(map(_as_bytes, text)) + "'"


def _as_bytes(character: str) -> str:
    if character in "\\'":
        return f"\\{character}"
    if is_visible(character):
        return character
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogatepass"))


def _escaped(document: str) -> str:
    """JSON with escapes for invisible characters; line breaks stay."""
    return "".join(c if c == "\n" or is_visible(c) else json.dumps(c)[1:-1] for c in document)


def _is_argument(word: str, before: str) -> bool:
    return _PLACE.match(word) is not None and not before.startswith("-")


def _is_given(value: Any) -> bool:
    return value is not None and value is not False and value != ""


def decimal_text(value: float) -> str:
    """A number in its shortest form: `60`, `0.5`."""
    return f"{Decimal(repr(value)):f}".removesuffix(".0")


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return decimal_text(value)
    if isinstance(value, dict | list):
        return msgspec.json.encode(value).decode()
    return str(value)

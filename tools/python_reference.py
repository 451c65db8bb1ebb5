"""The pages of docs/reference/python: public classes and methods, from signatures and docstrings.

`inspect` reads what Python itself uses, and needs no further library (griffe does not expand the
options of an `Unpack` by itself). Examples are regions of `examples/reference/*.py`, which the
tests run. A region begins with `#: app.jobs.why`; `#: -` begins code that is not shown.
"""

from __future__ import annotations

import ast
import enum
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final, NamedTuple, TypeVar

import headrace.feed
import headrace.fetch
import headrace.jobs
import headrace.media
import headrace.testing
import headrace.views
from headrace.app import Headrace
from headrace.jobs.handle import Bridge
from headrace.kernel.errors import error_table

EXAMPLES: Final = Path(__file__).parents[1] / "examples" / "reference"
LINE_MAX: Final = 88
ROOMS: Final = ("jobs", "fetch", "views", "feed", "media")
INTRODUCTIONS: Final = {
    "headrace": "The application object and what belongs to no room.",
    "jobs": "Tasks, jobs, queues, lanes, workflows, crons and the fleet. Guides:"
    " [jobs](../../jobs.md), [workflows](../../workflows.md).",
    "fetch": "Customers, catalogues, items and photos. Guide: [fetch](../../fetch.md).",
    "views": "Counting, series, top lists and exports. Guide: [views](../../views.md).",
    "feed": "Posts, follows, pages and the index. Guide: [feed](../../feed.md).",
    "media": "Objects, their URLs, uploads, tags, the cluster. Guide: [media](../../media.md).",
    "testing": "Helpers for tests of your application. Guide: [testing](../../testing.md).",
}


INDEX: Final = """\
`from headrace import Headrace` is the entry; everything else is an attribute of an
`app = Headrace()`. Sync code calls the same methods through `app.sync`. `help(Headrace)` prints a
map. Names that begin with `_`, and names that are not on these pages, may change in any release."""


class Section(NamedTuple):
    """One class, under the name that reaches an object of it."""

    name: str
    kind: Any
    hidden: str = ""
    """Public names that only Headrace's own processes call."""
    shown: str = ""
    """Names to show; empty: all that are not hidden."""


def sections_of(app: Headrace) -> dict[str, list[Section]]:
    """The sections of each page."""

    def at(path: str, hidden: str = "", shown: str = "") -> Section:
        value: Any = app
        for name in path.split(".")[1:]:
            value = getattr(value, name)
        return Section(path, type(value), hidden, shown)

    own = "use_flags use_config_file use_as_slot use_endpoints installed_fetch load_rooms services"
    return {
        "headrace": [
            Section("app", Headrace, f"{own} routes pages configured_urls registry forget"),
            Section("app.sync", Bridge, "forget seen is_here"),
            at("app.tokens", "find_caller keep_root state_of"),
            at("app.audit", "begin end"),
            at("app.history"),
            at("app.blobs", shown="put get info list delete"),
        ],
        "jobs": [
            *_job_classes(),
            at("app.jobs", "close use_agent sweep lock_leases"),
            at("app.jobs.queues", "declare ids"),
            at("app.jobs.lanes", "spread"),
            at("app.jobs.takes"),
            at("app.jobs.crons", "declare fire_due forget"),
            at("app.jobs.fleet"),
            at("app.workflows", "begin jobs_ended mark_uncaught record start_jobs wait"),
        ],
        "fetch": [
            at("app.fetch", "close declare_consumers register on_item before_publish"),
            *map(at, ("app.fetch.customers", "app.fetch.runs", "app.fetch.reports")),
            *map(at, ("app.fetch.items", "app.fetch.held", "app.fetch.mappings")),
            at("app.fetch.sources", "handle order"),
            *map(at, ("app.fetch.schemas", "app.fetch.sellers")),
            at("app.fetch.webhooks", "set"),
            at("app.fetch.consumers", "add add_hook declare handler ids"),
            *map(at, ("app.fetch.hosts", "app.fetch.links")),
            at("app.fetch.duplicates", "compare register"),
        ],
        "views": [
            at("app.views", "register"),
            at("app.views.analytics", "hours_from viewers_today"),
            at("app.views.corrections", "move register"),
            at("app.views.exports"),
        ],
        "feed": [
            at("app.feed.posts", "register on_deleted"),
            at("app.feed.follows", "set_kind list_kind"),
            at("app.feed.pages"),
            at("app.feed.index", "open ready register require_ready retain"),
        ],
        "media": [
            *map(at, ("app.media.objects", "app.media.tags")),
            at("app.media.uploads", "run_sweeps"),
            *map(at, ("app.media.purges", "app.media.traces")),
            at("app.media.nodes", "membership owners table"),
            *map(at, ("app.media.partitions", "app.media.entry", "app.media.warming")),
            *map(at, ("app.media.disks", "app.media.hottest")),
        ],
        "testing": [Section("headrace.testing", headrace.testing)],
    }


def _job_classes() -> list[Section]:
    """Classes whose objects `@app.task`, `enqueue` and handlers give."""
    jobs = headrace.jobs
    inner = "close_done close_failed end mark_uncaught open_step require_unbroken value_of"
    return [
        Section("task", jobs.Task, "decode service version"),
        Section("queue", jobs.Queue, shown="enqueue"),
        Section("workflow", jobs.Workflow, shown="enqueue older"),
        Section("job", jobs.JobRef, "of id"),
        Section("context", jobs.JobContext, "unstart"),
        Section("context.lane", jobs.JobLane, "of"),
        Section("workflow_context", jobs.WorkflowContext, inner),
    ]


@cache
def source_of(kind: Any) -> ast.ClassDef | None:
    """The class statement of `kind`; None if its source is not of Headrace."""
    if not kind.__module__.startswith("headrace"):
        return None
    tree = ast.parse(inspect.getsource(sys.modules[kind.__module__]))
    named = (node for node in tree.body if isinstance(node, ast.ClassDef))
    return next((node for node in named if node.name == kind.__name__), None)


class Field(NamedTuple):
    """A field of a value, or an option of a call."""

    name: str
    type: str
    default: str
    help: str


def fields_of(kind: Any) -> list[Field]:
    """The annotated fields of a class and its bases, with the text below each."""
    node = source_of(kind)
    if node is None:
        return []
    found: dict[str, Field] = {}
    for base in node.bases:
        # Not the real bases: a TypedDict has none.
        inherited = getattr(sys.modules[kind.__module__], ast.unparse(base), None)
        if inspect.isclass(inherited):
            found |= {field.name: field for field in fields_of(inherited)}
    for line, after in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
            continue
        name = line.target.id
        if name.startswith("_") or "ClassVar" in ast.unparse(line.annotation):
            continue
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = " ".join(str(after.value.value).split())
        default = "" if line.value is None else _default_of(line.value)
        found[name] = Field(name, ast.unparse(line.annotation), default, text)
    return list(found.values())


def _default_of(value: ast.expr) -> str:
    """A default as written; of `field(default_factory=list)` the call of the factory."""
    if isinstance(value, ast.Call):
        for keyword in value.keywords:
            if keyword.arg == "default_factory":
                return f"{ast.unparse(keyword.value)}()"
            if keyword.arg == "default":
                return ast.unparse(keyword.value)
    return ast.unparse(value)


def table(fields: list[Field], heading: str) -> list[str]:
    """A Markdown table of fields; columns without any content are left out."""
    has_default = any(field.default for field in fields)
    has_help = any(field.help for field in fields)
    columns = [heading, "type", *["default"] * has_default, *["what it is"] * has_help]
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    for name, kind, default, text in fields:
        cells = [f"`{name}`", f"`{kind}`".replace("|", "\\|")]
        cells += [f"`{default}`" if default else "required"] * has_default
        cells += [text.replace("|", "\\|")] * has_help
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def readable(annotation: Any, names: dict[str, Any]) -> str:
    """An annotation as written, with the bound of a type variable in its place."""
    if annotation is inspect.Parameter.empty:
        return "Any"
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)

    def plain(match: re.Match[str]) -> str:
        value = names.get(match[0])
        if not isinstance(value, TypeVar) or value.__bound__ is None:
            return match[0]
        return re.sub(r"\b(?:typing|collections\.abc)\.", "", str(value.__bound__))

    return re.sub(r"\b[A-Z]\w*\b(?!\.)", plain, text)


def signature(path: str, function: Callable[..., Any]) -> str:
    """The call with each parameter's type, in lines of up to LINE_MAX characters."""
    inner = inspect.unwrap(function)
    names = inner.__globals__
    parameters, star, is_behind_slash = list[str](), False, False
    for one in list(inspect.signature(inner).parameters.values()):
        if one.name in ("self", "cls"):
            continue
        if is_behind_slash and one.kind is not one.POSITIONAL_ONLY:
            parameters.append("/")
        is_behind_slash = one.kind is one.POSITIONAL_ONLY
        if one.kind is one.KEYWORD_ONLY and not star:
            parameters.append("*")
            star = True
        text = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "") + one.name
        star = star or one.kind is one.VAR_POSITIONAL
        text += f": {readable(one.annotation, names)}"
        if one.default is not one.empty:
            text += f" = {_shown(one.default)}"
        parameters.append(text)
    answer = readable(inspect.signature(inner).return_annotation, names)
    before = "await " if inspect.iscoroutinefunction(inner) else ""
    if inner is not function and "Iterator[" in answer:
        before = "async with "
    elif inspect.isasyncgenfunction(inner):
        before = "async for ... in "
    line = f"{before}{path}({', '.join(parameters)}) -> {answer}"
    if len(line) <= LINE_MAX:
        return line
    listed = "".join(f"    {parameter},\n" for parameter in parameters)
    return f"{before}{path}(\n{listed}) -> {answer}"


def _shown(default: Any) -> str:
    if isinstance(default, enum.Enum):
        return repr(default.value)
    return "..." if type(default) is object else repr(default)


def options(function: Callable[..., Any]) -> list[str]:
    """A table of the options of `**options: Unpack[...]`, or nothing."""
    inner = inspect.unwrap(function)
    for one in inspect.signature(inner).parameters.values():
        if match := re.fullmatch(r"Unpack\[(\w+)\]", str(one.annotation)):
            kind = inner.__globals__.get(match[1]) or _named(match[1])
            fields = fields_of(kind)
            lacking = [field.name for field in fields if not field.help]
            assert not lacking, f"{match[1]}: {lacking} have no text below them"
            return table(fields, "option")
    return []


def _named(name: str) -> Any:
    """A TypedDict that its user imports for type checkers alone."""
    from headrace.jobs import tasks
    from headrace.media.service import objects

    return next(value for at in (tasks, objects) if (value := getattr(at, name, None)))


def prose(text: str) -> list[str]:
    """A docstring as Markdown, with its errors in a paragraph of their own."""
    before, separator, behind = inspect.cleandoc(text).partition("Raises:")
    errors, _, after = behind.partition("\n\n")
    lines = [part for text in (before, after) if text.strip() for part in (text.strip(), "")]
    # Code by indentation, as in docstrings, is marked as Python.
    lines = [re.sub(r"(?m)(?:^    .*\n?)+", _fenced, line) for line in lines]
    if separator:
        names = error_names()
        errors = re.sub(r"\b[A-Z]\w+\b", lambda m: f"`{m[0]}`" if m[0] in names else m[0], errors)
        lines += [f"Raises: {' '.join(errors.split())}", ""]
    return lines


def _fenced(match: re.Match[str]) -> str:
    return f"```python\n{textwrap.dedent(match[0]).rstrip()}\n```\n"


@cache
def error_names() -> dict[str, str]:
    """Code by name of each error class of Headrace."""
    found = {kind.__name__: code for code, kind in error_table().items()}
    return {name: code for name, code in found.items() if code}


@cache
def examples() -> dict[str, str]:
    """The code of each region of the examples, by its name."""
    found: dict[str, str] = {}
    for path in sorted(EXAMPLES.glob("[a-z]*.py")):
        name, lines = "-", list[str]()
        for line in [*path.read_text().splitlines(), "#: -"]:
            if match := re.fullmatch(r"\s*#: (\S+)", line):
                if name != "-":
                    assert name not in found, f"{path}: two examples of {name}"
                    found[name] = textwrap.dedent("\n".join(lines)).strip()
                name, lines = match[1], []
            else:
                lines.append(line)
    return found


def members(section: Section) -> Iterator[tuple[str, Any]]:
    """The public members of a section: methods, then attributes."""
    kind = section.kind
    if isinstance(kind, ModuleType):
        yield from ((name, getattr(kind, name)) for name in kind.__all__)
        return
    kinds = (FunctionType, classmethod, property, cached_property)
    of_headrace = [one for one in kind.__mro__ if one.__module__.startswith("headrace")]
    names = dict.fromkeys(name for one in reversed(of_headrace) for name in vars(one))
    found = {name: inspect.getattr_static(kind, name) for name in names}
    hidden, shown = set(section.hidden.split()), section.shown.split()
    unknown = (hidden | set(shown)) - found.keys()
    assert not unknown, f"{section.name}: {unknown} do not exist"
    for name, value in found.items():
        is_listed = name in shown if shown else name not in hidden
        if is_listed and not name.startswith("_") and isinstance(value, kinds):
            yield name, value


def section_lines(section: Section, used: set[str]) -> list[str]:
    """One section: its class, methods and attributes."""
    lines = [f"## {section.name}", ""]
    if not isinstance(section.kind, ModuleType):
        lines += [f"Class `{section.kind.__module__}.{section.kind.__name__}`.", ""]
    lines += prose(section.kind.__doc__)
    attributes = []
    for name, value in members(section):
        path = f"{section.name}.{name}"
        if isinstance(value, property | cached_property):
            getter = value.fget if isinstance(value, property) else value.func
            kind = readable(inspect.signature(getter).return_annotation, getter.__globals__)
            text = " ".join((getter.__doc__ or "").split())
            attributes.append(Field(name, kind, "", text))
            continue
        function = value.__func__ if isinstance(value, classmethod) else value
        lines += [f"### {path}", "", "```python", signature(path, function), "```", ""]
        assert function.__doc__, f"{path} has no docstring"
        lines += [*prose(function.__doc__), *options(function)]
        if (example := examples().get(path)) is not None:
            used.add(path)
            lines += ["Example:", "", "```python", example, "```", ""]
    if attributes:
        lines += [f"### Attributes of {section.name}", "", *table(attributes, "attribute")]
    return lines


def value_lines(room: ModuleType, sections: list[Section]) -> list[str]:
    """The values among the other public names of a room."""
    documented = {section.kind for section in sections}
    lines = ["## Values", ""]
    for name in sorted(room.__all__):
        value = getattr(room, name)
        if value in documented or name.endswith("Config") or not inspect.isclass(value):
            continue
        if issubclass(value, BaseException):
            continue
        lines += [f"### {name}", "", *prose(value.__doc__ or "")]
        if issubclass(value, enum.Enum):
            lines += [f"One of {', '.join(f'`{one.value}`' for one in value)}.", ""]
        elif fields := fields_of(value):
            lines += table(fields, "field")
    return lines


def exception_lines(room: ModuleType | None, text: str) -> list[str]:
    """The exceptions of a room's public names, and all that the page names."""
    found: dict[str, Any] = {
        kind.__name__: kind for kind in error_table().values() if f"`{kind.__name__}`" in text
    }
    for name in room.__all__ if room is not None else ():
        value = getattr(room, name)
        if inspect.isclass(value) and issubclass(value, BaseException):
            found[name] = value
    if not found:
        return []
    lines = ["## Exceptions", ""]
    lines += ["| exception | module | code | what it means |", "| --- | --- | --- | --- |"]
    codes = error_names()
    for name, kind in sorted(found.items()):
        place = room.__name__ if room is not None and name in room.__all__ else kind.__module__
        code = f"`{codes[name]}`" if name in codes else ""
        meaning = " ".join((kind.__doc__ or "").split())
        lines.append(f"| `{name}` | `{place}` | {code} | {meaning} |")
    return [*lines, ""]


def summary(text: str | None) -> str:
    """The first sentence of a docstring."""
    return " ".join(inspect.cleandoc(text or "").partition("\n\n")[0].split())


def python_pages(app: Headrace, note: str) -> dict[str, str]:
    """File name -> text, below docs/reference."""
    used: set[str] = set()
    pages = {}
    index = [
        "# Python",
        "",
        note,
        INDEX,
        "",
    ]
    for page, sections in sections_of(app).items():
        lines = [f"# Python: {page}", "", note, INTRODUCTIONS[page], ""]
        index += [f"## [{page}]({page}.md)", "", "| name | what it is |", "| --- | --- |"]
        for section in sections:
            lines += section_lines(section, used)
            index.append(f"| `{section.name}` | {summary(section.kind.__doc__)} |")
            named = [path for path in used if path.rpartition(".")[0] == section.name]
            assert named, f"no method of {section.name} has an example in examples/reference"
        room = getattr(headrace, page) if page in ROOMS else None
        if room is not None:
            lines += value_lines(room, sections)
        lines += exception_lines(room, "\n".join(lines))
        index.append("")
        pages[f"python/{page}.md"] = "\n".join(lines)
    unknown = examples().keys() - used
    assert not unknown, f"examples of names that are not public: {sorted(unknown)}"
    return {"python/index.md": "\n".join(index), **pages}

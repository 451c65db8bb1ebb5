"""The console as a browser without scripts receives it: parsed pages, their faults, and a crawl.

A page of the console must hold with any stored text. The parser lists markup that no template
contains, so a text that is not escaped appears as a fault of its page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from headrace.console.model import PREFIX
from headrace.console.pages import find_route
from headrace.console.screens import ROOMS

NAMED = {"a", "button", "caption", "dt", "figcaption", "h1", "h2", "h3", "label", "summary", "th"}
"""Elements that need a text or an `aria-label`."""
BANNED = {"base", "embed", "frame", "iframe", "marquee", "object", "style"}
URLS = ("action", "formaction", "href", "hx-get", "hx-post", "src")
SAFE_URL = re.compile(r"/(?!/)|#|\?|https?://127\.0\.0\.[12]:")
EXCEPTION = re.compile(r"Traceback \(|object at 0x|<class |asyncpg|\bNone[,)\]]")
"""Texts of failures; the error of a job is shown as code."""
EVALUATED = re.compile(r"\b1337\b")
"""Shown if a hostile text is evaluated as a template."""
HIDDEN = re.compile("[\u202a-\u202e\u2066-\u2069\ufeff\0-\x08]")
"""Control characters and those that reverse text."""
CHOICES = {"class", "lang", "limit", "list", "open", "show", "sort", "span", "state", "window"}
"""Query parameters whose values select a view; values of others are data."""


@dataclass(slots=True)
class Form:
    """A form with the values that it would send, and the options of its selections."""

    method: str
    action: str
    fields: dict[str, str] = field(default_factory=dict)
    options: dict[str, list[str]] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    """Names of its text fields."""


class Page(HTMLParser):
    """What a page shows, links to and sends, with the faults of its markup."""

    def __init__(self, url: str, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.url = url
        self.title = ""
        self.texts: list[str] = []
        self._prose: list[str] = []
        self.links: list[str] = []
        self.media: list[str] = []
        self.headings: list[str] = []
        self.codes: list[str] = []
        self.flash = ("", "")
        self.forms: list[Form] = []
        self.faults: list[str] = []
        self.main: dict[str, str] = {}
        self._open: list[tuple[str, dict[str, str], list[str]]] = []
        self._ids: set[str] = set()
        self._labels: set[str] = set()
        self._controls: list[tuple[str, bool]] = []
        self.feed(text)
        self.close()
        self._judge()

    @property
    def text(self) -> str:
        """All visible text."""
        return "".join(self.texts)

    def form(self, action: str) -> Form:
        """The form with this action."""
        [found] = [form for form in self.forms if urlsplit(form.action).path == action]
        return found

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element, and its faults."""
        given = {name: value or "" for name, value in attrs}
        self._check(tag, given)
        if tag in ("a", "img", "audio", "video", "source"):
            url = given.get("href") or given.get("src", "")
            (self.media if url.startswith("http") else self.links).append(url)
        if tag == "main":
            self.main = given
        if tag == "form":
            self.forms.append(Form(given.get("method", "get"), given.get("action", "")))
        if tag in ("input", "select", "textarea", "option"):
            self._control(tag, given)
        if tag == "label":
            self._labels.add(given.get("for", ""))
        if tag in NAMED | {"code", "form", "p", "pre", "script", "select", "textarea", "title"}:
            self._open.append((tag, given, []))

    def handle_endtag(self, tag: str) -> None:
        """Note the text of an element that ends."""
        if not any(open_tag == tag for open_tag, _, _ in self._open):
            return
        while True:
            ended, given, texts = self._open.pop()
            if ended == tag:
                break
        text = "".join(texts).strip()
        if tag in NAMED and not (text or given.get("aria-label") or given.get("title")):
            self.faults.append(f"an empty <{tag}> {given}")
        if tag == "title":
            self.title = text
        elif tag == "h1":
            self.headings.append(text)
        elif tag == "code":
            self.codes.append(text)
        elif tag == "textarea" and self.forms:
            self.forms[-1].fields[given["name"]] = text
        elif tag == "p" and given.get("class", "").startswith("flash"):
            self.flash = (given["class"].removeprefix("flash "), text)

    def handle_data(self, data: str) -> None:
        """Note a text."""
        inner = self._open[-1][0] if self._open else ""
        if inner in ("script", "textarea"):
            if inner == "textarea":
                self._open[-1][2].append(data)
            elif data.strip():
                self.faults.append(f"inline script {data[:60]!r}")
            return
        if data.strip() in ("None", "nan", "undefined"):
            self.faults.append(f"the text {data.strip()!r} after {self.texts[-4:]}")
        self.texts.append(data)
        if not any(tag in ("code", "pre") for tag, _, _ in self._open):
            self._prose.append(data)
        for tag, _, texts in reversed(self._open):
            texts.append(data)
            if tag == "select":
                break

    def _check(self, tag: str, given: dict[str, str]) -> None:
        if tag in BANNED:
            self.faults.append(f"<{tag}> {given}")
        for name, value in given.items():
            is_event = name.startswith("on") or name in ("style", "srcdoc")
            is_foreign = name in URLS and not SAFE_URL.match(value)
            is_request = name in ("hx-get", "hx-post") and not value.startswith(PREFIX)
            if is_event or is_foreign or is_request:
                self.faults.append(f"<{tag} {name}={value[:60]!r}>")
        if tag == "script" and not given.get("src", "").startswith(f"{PREFIX}/assets/"):
            self.faults.append(f"a foreign script {given}")
        if tag == "img":
            if "alt" not in given:
                self.faults.append(f"an image without alt {given}")
            for _, _, texts in self._open:
                texts.append(given.get("alt", ""))
        if given.get("id", "") in self._ids:
            self.faults.append(f"two elements with id {given['id']}")
        self._ids |= {given["id"]} if "id" in given else set()

    def _control(self, tag: str, given: dict[str, str]) -> None:
        if not self.forms:
            self.faults.append(f"a field outside of a form: {given}")
            return
        form, name, kind = self.forms[-1], given.get("name", ""), given.get("type", "text")
        if tag == "option":
            selects = [
                open_given["name"]
                for open_tag, open_given, _ in self._open[-2:]
                if open_tag == "select"
            ]
            if selects:
                options = form.options[selects[0]]
                if not options or "selected" in given:
                    form.fields[selects[0]] = given.get("value", "")
                options.append(given.get("value", ""))
            return
        if tag == "select":
            form.options[name] = []
        elif kind != "checkbox" or "checked" in given:
            form.fields[name] = given.get("value", "")
        if tag == "input" and kind in ("text", "search"):
            form.texts.append(name)
        if kind != "hidden":
            is_in_label = any(open_tag == "label" for open_tag, _, _ in self._open)
            self._controls.append((given.get("id", ""), is_in_label or "aria-label" in given))

    def _judge(self) -> None:
        unlabelled = [id_ for id_, has in self._controls if not has and id_ not in self._labels]
        self.faults += [f"a field without label: {id_!r}" for id_ in unlabelled]
        if not self.title.endswith("Headrace") or self.title.startswith("·"):
            self.faults.append(f"title {self.title!r}")
        if len(self.headings) != 1:
            self.faults.append(f"main headings {self.headings}")
        for pattern, text in (
            (EXCEPTION, "".join(self._prose)),
            (EVALUATED, self.text),
            (HIDDEN, self.text + self.title),
        ):
            found = pattern.search(text)
            if found is not None:
                around = text[max(0, found.start() - 40) : found.end() + 40]
                self.faults.append(f"the text has {around!r}")
        for form in self.forms:
            is_open = urlsplit(form.action).path in (f"{PREFIX}/theme", f"{PREFIX}/login")
            token = re.fullmatch("[0-9a-f]{32}", form.fields.get("csrf_token", ""))
            if (form.method == "post" and not is_open) != (token is not None):
                self.faults.append(f"CSRF token of form {form.action}: {token}")


def place_of(url: str) -> str:
    """Path template of the screen, or path of the action form, that `url` leads to."""
    path = urlsplit(url).path
    if path.startswith(f"{PREFIX}/do/"):
        return path
    found = find_route(ROOMS, url)
    assert found is not None, f"a link leads to no screen: {url}"
    return found[0].screen.path


class Crawl:
    """Follows links and filters; opens one page of each shape: place, parameters and choices."""

    def __init__(self, browse: Any) -> None:
        self._browse = browse
        self.pages: dict[str, Page] = {}
        self.faults: list[str] = []
        self._shapes: set[Any] = set()

    def run(self, seeds: list[str]) -> None:
        """Open everything that can be reached from `seeds`."""
        waiting = list(seeds)
        while waiting:
            url = waiting.pop(0).partition("#")[0]
            if not url.startswith(PREFIX) or url.startswith(f"{PREFIX}/assets"):
                continue
            shape = _shape_of(url)
            if shape is None or shape in self._shapes:
                continue
            self._shapes.add(shape)
            page = self.open(url)
            if "/do/" not in url:
                waiting += [*page.links, *_choices_of(page)]

    def open(self, url: str, *, statuses: tuple[int, ...] = (200,)) -> Page:
        """Open one page, and note its faults."""
        answer = self._browse.get(url)
        page = Page(url, answer.text)
        if answer.status_code not in statuses:
            self.faults.append(f"{url}: {answer.status_code}")
        self.faults += [f"{url}: {fault}" for fault in page.faults]
        self.pages[url] = page
        return page

    @property
    def places(self) -> dict[str, str]:
        """Place -> the first URL that leads there."""
        found: dict[str, str] = {}
        for url in self.pages:
            found.setdefault(place_of(url), url)
        return found

    def filters(self) -> Iterator[tuple[str, str]]:
        """URL path and parameter of each text field of a filter."""
        pages = [self.pages[url] for url in self.places.values()]
        forms = [form for page in pages for form in page.forms if form.method == "get"]
        yield from {(form.action, name) for form in forms for name in form.texts}


def _shape_of(url: str) -> Any:
    """What makes a page differ from others; None for a page with several choices at once."""
    place, query = place_of(url), dict(parse_qsl(urlsplit(url).query))
    if "/do/" in place:
        return place
    chosen = {(name, query[name]) for name in query.keys() & CHOICES}
    return None if len(chosen) > 1 else (place, frozenset(query), frozenset(chosen))


def _choices_of(page: Page) -> Iterator[str]:
    """The page with each option of its filters."""
    for form in page.forms:
        given = {name: form.fields[name] for name in form.texts if form.fields.get(name)}
        for name, values in form.options.items() if form.method == "get" else ():
            for value in values:
                yield f"{form.action}?{urlencode({**given, name: value})}"

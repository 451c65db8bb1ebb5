"""The verbs of fetch through each surface: Python, the HTTP API, the command line.

`await way.do("run", {"customer": "shop", "text": "id,name"})` returns a JSON value, the same on
each surface. A refused call raises `Refused` with the status and the code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
from room import Terminal
from tests.kit.ways_in import PythonVerbs, Refused

from headrace.fetch.mappings import Mapping
from headrace.fetch.model import SentItem
from headrace.fetch.schemas import Schema
from headrace.kernel.errors import error_table

WAYS = ("python", "http", "commands")


class Verb(NamedTuple):
    """One verb on each surface.

    `http`: `METHOD path [<body] [>part of the response]`; other arguments are query parameters.
    `command`: its words; `@name` is a file with that argument, `[...]` needs its argument.
    """

    python: Callable[..., Any]
    http: str
    command: str


VERBS = {
    "customers": Verb(lambda f: f.customers.all(), "GET customers >customers", "customer ls"),
    "customer": Verb(
        lambda f, customer: f.customers.get(customer),
        "GET customers/{customer}",
        "customer show {customer}",
    ),
    "confirm": Verb(
        lambda f, run: f.runs.confirm(run),
        "POST runs/{run}/confirm",
        "catalogue confirm {run} --no-wait",
    ),
    "discard": Verb(
        lambda f, run: f.runs.discard(run), "POST runs/{run}/discard", "catalogue discard {run}"
    ),
    "undo": Verb(
        lambda f, run: f.runs.undo(run), "POST runs/{run}/undo", "run undo {run} --no-wait"
    ),
    "run_shown": Verb(lambda f, run: f.runs.get(run), "GET runs/{run}", "run show {run}"),
    "runs": Verb(
        lambda f, customer: f.runs.newest(customer),
        "GET runs >runs",
        "run ls --customer {customer}",
    ),
    "changes": Verb(
        lambda f, run: f.runs.changes(run),
        "GET runs/{run}/changes >changes",
        "catalogue diff {run} >items",
    ),
    "item": Verb(
        lambda f, customer, item: f.items.get(customer, item),
        "GET customers/{customer}/item?id={item}",
        "item show -- {customer} {item}",
    ),
    "send_items": Verb(
        lambda f, items: f.send_items(msgspec.convert(items, list[SentItem])),
        "POST items <items >runs",
        "item send @items",
    ),
    "results": Verb(
        lambda f, after=0, limit=100: f.items.results(after=after, results_max=limit),
        "GET results >results",
        "results [--after {after}] [--limit {limit}]",
    ),
    "newest_results": Verb(
        lambda f, limit, cursor=None: f.items.newest_results(cursor=cursor, results_max=limit),
        "GET results/newest >results",
        "results --newest --limit {limit} [--cursor {cursor}]",
    ),
    "why": Verb(lambda f, url: f.links.why(url), "GET why", "why {url}"),
    "hosts": Verb(
        lambda f, customer: f.hosts.page(customer=customer),
        "GET hosts >hosts",
        "host ls --customer {customer}",
    ),
    "held": Verb(
        lambda f, customer: f.held.list(customer),
        "GET held >items",
        "held ls --customer {customer}",
    ),
    "release": Verb(
        lambda f, customer, item: f.held.release(customer, item),
        "POST customers/{customer}/held/release?id={item}",
        "held release -- {customer} {item}",
    ),
    "duplicates": Verb(
        lambda f, customer=None, across=None: f.duplicates.list(customer, across=across),
        "GET duplicates >duplicates",
        "duplicates ls [--customer {customer}]",
    ),
    "review": Verb(
        lambda f, pair: f.duplicates.review(pair),
        "POST duplicates/{pair}/review",
        "duplicates review {pair}",
    ),
    "consumers": Verb(lambda f: f.consumers.all(), "GET consumers >consumers", "consumer ls"),
    "replay": Verb(
        lambda f, name: f.consumers.replay(name),
        "POST consumers/{name}/replay >items",
        "consumer replay {name} >redelivered",
    ),
    "remove_consumer": Verb(
        lambda f, name: f.consumers.remove(name), "DELETE consumers/{name}", "consumer rm {name}"
    ),
    "webhooks": Verb(lambda f: f.webhooks.list(), "GET webhooks >webhooks", "webhook ls"),
    "webhook": Verb(
        lambda f, customer: f.webhooks.get(customer),
        "GET customers/{customer}/webhook",
        "webhook show {customer}",
    ),
    "rotate": Verb(
        lambda f, customer: f.webhooks.rotate(customer),
        "POST customers/{customer}/webhook/rotate",
        "webhook rotate {customer}",
    ),
    "replay_webhook": Verb(
        lambda f, customer, after: f.webhooks.replay(customer, after=after),
        "POST customers/{customer}/webhook/replay",
        "webhook replay {customer} --after {after}",
    ),
    "test_webhook": Verb(
        lambda f, customer: f.webhooks.test(customer),
        "POST customers/{customer}/webhook/test",
        "webhook test {customer}",
    ),
    "remove_webhook": Verb(
        lambda f, customer: f.webhooks.remove(customer),
        "DELETE customers/{customer}/webhook",
        "webhook rm {customer}",
    ),
    "schemas": Verb(lambda f: f.schemas.all(), "GET schemas >schemas", "schema ls"),
    "schema": Verb(
        lambda f, category: f.schemas.get(category),
        "GET schemas/{category}",
        "schema show {category}",
    ),
    "set_schema": Verb(
        lambda f, category, schema: f.schemas.set(category, msgspec.convert(schema, Schema)),
        "PUT schemas/{category} <schema",
        "schema set {category} @schema",
    ),
    "remove_schema": Verb(
        lambda f, category: f.schemas.remove(category),
        "DELETE schemas/{category}",
        "schema rm {category}",
    ),
    "mappings": Verb(lambda f: f.mappings.all(), "GET mappings >mappings", "mapping ls"),
    "mapping": Verb(
        lambda f, name: f.mappings.get(name),
        "GET mappings/{name}",
        "mapping show {name}",
    ),
    "set_mapping": Verb(
        lambda f, name, mapping: f.mappings.set(name, msgspec.convert(mapping, Mapping)),
        "PUT mappings/{name} <mapping",
        "mapping set {name} @mapping",
    ),
    "remove_mapping": Verb(
        lambda f, name: f.mappings.remove(name), "DELETE mappings/{name}", "mapping rm {name}"
    ),
}


class PythonWay(PythonVerbs):
    """The service itself."""

    def __init__(self, fetch, folder) -> None:
        self._fetch = fetch
        self._folder = folder

    def __getattr__(self, verb: str):
        return lambda **given: VERBS[verb].python(self._fetch, **given)

    async def do(self, verb, given):
        found = await super().do(verb, given)
        return None if verb.startswith("remove") else found

    async def set_customer(self, *, customer, **limits):
        return await self._fetch.customers.set(customer, **limits)

    async def run(self, *, customer, text, dry_run=False):
        file = self._folder / "upload"
        file.write_text(text)
        return await self._fetch.run_catalogue(file, customer, is_dry_run=dry_run)

    async def problems(self, *, run, lang="en"):
        problems = await self._fetch.reports.problems(run, lang=lang)
        photos = await self._fetch.reports.photo_problems(run, lang=lang)
        return {"problems": [p for _, p in problems], "photos": [p for _, p in photos]}

    async def csv(self, *, run, lang="en"):
        await self._fetch.runs.get(run)
        return "".join([part async for part in self._fetch.reports.csv(run, lang=lang)])

    async def page(self, *, run, lang="en"):
        return await self._fetch.reports.page(run, lang=lang)


class HttpWay:
    """The routes."""

    def __init__(self, client) -> None:
        self._client = client

    async def do(self, verb: str, given: dict):
        if verb not in VERBS:
            return await getattr(self, verb)(**given)
        method, path, *rest = VERBS[verb].http.split()
        given, options = dict(given), {}
        for name in re.findall(r"{(\w+)}", path):
            path = path.replace(f"{{{name}}}", quote(str(given.pop(name)), safe=""))
        part = None
        for word in rest:
            if word[0] == "<":
                options["json"] = given.pop(word[1:])
            else:
                part = word[1:]
        return await self.send(method, path, part, params=given or None, **options)

    async def send(self, method, path, part=None, **options):
        answer = await self._client.request(method, f"/v1/fetch/{path}", **options)
        if answer.status_code >= 400:
            raise Refused(answer.status_code, answer.json()["code"])
        if not answer.headers.get("content-type", "").startswith("application/json"):
            return answer.text or None
        return answer.json() if part is None else answer.json()[part]

    async def set_customer(self, *, customer, webhook=None, **limits):
        to = {} if webhook is None else {"webhook": {"url": webhook}}
        return await self.send("PUT", f"customers/{quote(customer)}", json={**limits, **to})

    async def run(self, *, customer, text, dry_run=False):
        path = f"customers/{quote(customer)}/catalogues"
        return await self.send("POST", path, content=text, params={"dry_run": dry_run})

    async def problems(self, *, run, lang="en"):
        params = {"lang": lang, "limit": 1000}
        found = await self.send("GET", f"runs/{run}/errors", params=params)
        for one in (*found["problems"], *found["photos"]):
            del one["position"]
        return found

    async def csv(self, *, run, lang="en"):
        options = {"params": {"lang": lang}, "headers": {"Accept": "text/csv"}}
        return await self.send("GET", f"runs/{run}/errors", **options)

    async def page(self, *, run, lang="en"):
        return await self.send("GET", f"runs/{run}/report", headers={"Accept-Language": lang})


class CommandWay:
    """The commands, under `--json`."""

    def __init__(self, fetch, folder) -> None:
        self._fetch = fetch
        self._folder = folder

    async def do(self, verb: str, given: dict):
        if verb not in VERBS:
            return await getattr(self, verb)(**given)
        command, _, part = VERBS[verb].command.partition(" >")
        for group in re.findall(r"\[.*?\]", command):
            name = re.search(r"{(\w+)}", group)[1]
            command = command.replace(group, group[1:-1] if name in given else "")
        found = await self.type(*(self._word(word, given) for word in command.split()))
        if verb.startswith(("remove", "release", "review")):
            return None
        return found[part] if part else found

    def _word(self, word: str, given: dict) -> str:
        if not word.startswith("@"):
            return word.format(**given)
        file = self._folder / f"{word[1:]}.json"
        file.write_text(json.dumps(given[word[1:]]))
        return str(file)

    async def type(self, *words):
        terminal = Terminal(self._fetch, is_json=True)
        ended = await terminal.type(*words)
        code = getattr(ended.exception, "code", None)
        if isinstance(code, str) and code != "fetch.run_held":
            raise Refused(error_table()[code].status, code)
        assert isinstance(code, str) or ended.exit_code in (0, 1), ended.output
        return terminal.value

    async def set_customer(self, *, customer, starts_max, window_s, connections, webhook=None):
        words = ["--rate", f"{starts_max}/{window_s:g}s", "--connections", connections]
        words += [] if webhook is None else ["--webhook", webhook]
        return await self.type("customer", "set", customer, *words)

    async def run(self, *, customer, text, dry_run=False):
        file = self._folder / "upload"
        file.write_text(text)
        words = ["catalogue", "run", file, "--customer", customer, "--no-wait"]
        return await self.type(*words, *(["--dry-run"] if dry_run else []))

    async def problems(self, *, run, lang="en"):
        found = await self.type("catalogue", "errors", run, "--lang", lang)
        assert found.pop("file") == ""
        return {"problems": found.pop("items"), **found}

    async def csv(self, *, run, lang="en"):
        return await self._written("--csv", run, lang)

    async def page(self, *, run, lang="en"):
        return await self._written("--html", run, lang)

    async def _written(self, option, run, lang):
        file = self._folder / "report"
        await self.type("catalogue", "errors", run, "--lang", lang, option, file)
        with file.open(newline="", encoding="utf-8") as text:
            return text.read()

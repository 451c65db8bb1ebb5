"""The verbs of fetch through each way in: Python, HTTP, the commands as they are typed.

`await way.do("run", {"customer": "shop", "text": "id,name"})` gives what JSON can hold, the same
on each way; what is refused raises `Refused` with the status and the code. A verb that has no
answer gives None.
"""

from __future__ import annotations

import asyncio
import json
from urllib.parse import quote

import msgspec
from click.testing import CliRunner
from tests.kit.ways_in import PythonVerbs, Refused, plain

from headrace.fetch.cli import fetch as fetch_command
from headrace.fetch.model import SentItem
from headrace.kernel.errors import error_table

WAYS = ("python", "http", "commands")


class PythonWay(PythonVerbs):
    """The service itself."""

    def __init__(self, fetch, folder) -> None:
        self._fetch = fetch
        self._folder = folder

    async def set_customer(self, *, customer, **limits):
        return await self._fetch.customers.set(customer, **limits)

    async def customers(self):
        return await self._fetch.customers.all()

    async def customer(self, *, customer):
        return await self._fetch.customers.get(customer)

    async def run(self, *, customer, text, dry_run=False):
        file = self._folder / "upload"
        file.write_text(text)
        return await self._fetch.run_catalogue(file, customer, is_dry_run=dry_run)

    async def confirm(self, *, run):
        return await self._fetch.runs.confirm(run)

    async def discard(self, *, run):
        return await self._fetch.runs.discard(run)

    async def run_shown(self, *, run):
        return await self._fetch.runs.get(run)

    async def runs(self, *, customer):
        return await self._fetch.runs.newest(customer)

    async def changes(self, *, run):
        return await self._fetch.runs.changes(run)

    async def problems(self, *, run, lang="en"):
        problems = await self._fetch.reports.problems(run, lang=lang)
        photos = await self._fetch.reports.photo_problems(run, lang=lang)
        return {"problems": [p for _, p in problems], "photos": [p for _, p in photos]}

    async def csv(self, *, run, lang="en"):
        await self._fetch.runs.get(run)
        return "".join([part async for part in self._fetch.reports.csv(run, lang=lang)])

    async def page(self, *, run, lang="en"):
        return await self._fetch.reports.page(run, lang=lang)

    async def item(self, *, customer, item):
        return await self._fetch.items.get(customer, item)

    async def send_items(self, *, items):
        return await self._fetch.send_items(msgspec.convert(items, list[SentItem]))

    async def results(self, *, after=0, limit=100):
        return await self._fetch.items.results(after=after, results_max=limit)

    async def newest_results(self, *, before=None, limit=100):
        return await self._fetch.items.newest_results(before=before, results_max=limit)

    async def why(self, *, url):
        return await self._fetch.links.why(url)

    async def hosts(self, *, customer):
        return await self._fetch.hosts.page(customer=customer)

    async def consumers(self):
        return await self._fetch.consumers.all()

    async def replay(self, *, name):
        return {"consumer": name, "items": await self._fetch.consumers.replay(name)}

    async def remove_consumer(self, *, name):
        await self._fetch.consumers.remove(name)

    async def webhooks(self):
        return await self._fetch.webhooks.list()

    async def webhook(self, *, customer):
        return await self._fetch.webhooks.get(customer)

    async def rotate(self, *, customer):
        return await self._fetch.webhooks.rotate(customer)

    async def replay_webhook(self, *, customer, after=0):
        return await self._fetch.webhooks.replay(customer, after=after)

    async def test_webhook(self, *, customer):
        return await self._fetch.webhooks.test(customer)

    async def remove_webhook(self, *, customer):
        await self._fetch.webhooks.remove(customer)


class HttpWay:
    """The routes."""

    def __init__(self, client) -> None:
        self._client = client

    async def do(self, verb, given):
        return await getattr(self, verb)(**given)

    async def ask(self, method, path, part=None, **options):
        answer = await self._client.request(method, f"/v1/fetch/{path}", **options)
        if answer.status_code >= 400:
            raise Refused(answer.status_code, answer.json()["code"])
        if not answer.headers.get("content-type", "").startswith("application/json"):
            return answer.text or None
        return answer.json() if part is None else answer.json()[part]

    async def set_customer(self, *, customer, webhook=None, **limits):
        to = {} if webhook is None else {"webhook": {"url": webhook}}
        return await self.ask("PUT", f"customers/{_part(customer)}", json={**limits, **to})

    async def customers(self):
        return await self.ask("GET", "customers", "customers")

    async def customer(self, *, customer):
        return await self.ask("GET", f"customers/{_part(customer)}")

    async def run(self, *, customer, text, dry_run=False):
        path = f"customers/{_part(customer)}/catalogues"
        return await self.ask("POST", path, content=text, params={"dry_run": dry_run})

    async def confirm(self, *, run):
        return await self.ask("POST", f"runs/{run}/confirm")

    async def discard(self, *, run):
        return await self.ask("POST", f"runs/{run}/discard")

    async def run_shown(self, *, run):
        return await self.ask("GET", f"runs/{run}")

    async def runs(self, *, customer):
        return await self.ask("GET", "runs", "runs", params={"customer": customer})

    async def changes(self, *, run):
        return await self.ask("GET", f"runs/{run}/changes", "changes")

    async def problems(self, *, run, lang="en"):
        found = await self.ask("GET", f"runs/{run}/errors", params={"lang": lang, "limit": 1000})
        for one in (*found["problems"], *found["photos"]):
            del one["position"]
        return found

    async def csv(self, *, run, lang="en"):
        return await self.ask(
            "GET", f"runs/{run}/errors", params={"lang": lang}, headers={"Accept": "text/csv"}
        )

    async def page(self, *, run, lang="en"):
        return await self.ask("GET", f"runs/{run}/report", headers={"Accept-Language": lang})

    async def item(self, *, customer, item):
        return await self.ask("GET", f"customers/{_part(customer)}/item", params={"id": item})

    async def send_items(self, *, items):
        return await self.ask("POST", "items", "runs", json=items)

    async def results(self, *, after=0, limit=100):
        params = {"after": after, "limit": limit}
        return await self.ask("GET", "results", "results", params=params)

    async def newest_results(self, *, before=None, limit=100):
        params = {"limit": limit, **({} if before is None else {"before": before})}
        return await self.ask("GET", "results/newest", "results", params=params)

    async def why(self, *, url):
        return await self.ask("GET", "why", params={"url": url})

    async def hosts(self, *, customer):
        return await self.ask("GET", "hosts", "hosts", params={"customer": customer})

    async def consumers(self):
        return await self.ask("GET", "consumers", "consumers")

    async def replay(self, *, name):
        return await self.ask("POST", f"consumers/{_part(name)}/replay")

    async def remove_consumer(self, *, name):
        return await self.ask("DELETE", f"consumers/{_part(name)}")

    async def webhooks(self):
        return await self.ask("GET", "webhooks", "webhooks")

    async def webhook(self, *, customer, method="GET", action="", **params):
        path = f"customers/{_part(customer)}/webhook{action}"
        return await self.ask(method, path, params=params)

    async def rotate(self, *, customer):
        return await self.webhook(customer=customer, method="POST", action="/rotate")

    async def replay_webhook(self, *, customer, after=0):
        action = {"method": "POST", "action": "/replay"}
        return await self.webhook(customer=customer, after=after, **action)

    async def test_webhook(self, *, customer):
        return await self.webhook(customer=customer, method="POST", action="/test")

    async def remove_webhook(self, *, customer):
        return await self.webhook(customer=customer, method="DELETE")


class JsonTerminal:
    """The terminal of a command under `--json`: runs verbs on the test's loop, keeps what is
    shown.
    """

    is_json = True

    def __init__(self, service, loop) -> None:
        self.service, self.loop, self.shown = service, loop, None

    def run(self, kind, verb):
        assert isinstance(self.service, kind)
        return asyncio.run_coroutine_threadsafe(verb(self.service), self.loop).result(30)

    def show(self, value, text) -> None:
        assert text
        self.shown = plain(value)

    def progress(self, text) -> None:
        assert text


class CommandWay:
    """The commands."""

    def __init__(self, fetch, folder) -> None:
        self._fetch = fetch
        self._folder = folder

    async def do(self, verb, given):
        return await getattr(self, verb)(**given)

    async def type(self, *words):
        terminal = JsonTerminal(self._fetch, asyncio.get_running_loop())
        typed = [str(word) for word in words]
        ended = await asyncio.to_thread(CliRunner().invoke, fetch_command, typed, obj=terminal)
        code = getattr(ended.exception, "code", None)
        if isinstance(code, str) and code != "fetch.run_held":
            raise Refused(error_table()[code].status, code)
        assert isinstance(code, str) or ended.exit_code in (0, 1), ended.output
        return terminal.shown

    async def written(self, option, run, lang):
        file = self._folder / "report"
        await self.type("catalogue", "errors", run, "--lang", lang, option, file)
        with file.open(newline="", encoding="utf-8") as text:
            return text.read()

    async def set_customer(self, *, customer, starts_max, window_s, connections, webhook=None):
        words = ["--rate", f"{starts_max}/{window_s:g}s", "--connections", connections]
        words += [] if webhook is None else ["--webhook", webhook]
        return await self.type("customer", "set", customer, *words)

    async def customers(self):
        return await self.type("customer", "ls")

    async def customer(self, *, customer):
        return await self.type("customer", "show", customer)

    async def run(self, *, customer, text, dry_run=False):
        file = self._folder / "upload"
        file.write_text(text)
        words = ["--dry-run"] if dry_run else []
        return await self.type(
            "catalogue", "run", file, "--customer", customer, "--no-wait", *words
        )

    async def confirm(self, *, run):
        return await self.type("catalogue", "confirm", run, "--no-wait")

    async def discard(self, *, run):
        return await self.type("catalogue", "discard", run)

    async def run_shown(self, *, run):
        return await self.type("run", "show", run)

    async def runs(self, *, customer):
        return await self.type("run", "ls", "--customer", customer)

    async def changes(self, *, run):
        return (await self.type("catalogue", "diff", run))["changes"]

    async def problems(self, *, run, lang="en"):
        found = await self.type("catalogue", "errors", run, "--lang", lang)
        assert found.pop("file") == ""
        return found

    async def csv(self, *, run, lang="en"):
        return await self.written("--csv", run, lang)

    async def page(self, *, run, lang="en"):
        return await self.written("--html", run, lang)

    async def item(self, *, customer, item):
        return await self.type("item", "show", "--", customer, item)

    async def send_items(self, *, items):
        file = self._folder / "items.json"
        file.write_text(json.dumps(items))
        return await self.type("item", "send", file)

    async def results(self, *, after=0, limit=100):
        return await self.type("results", "--after", after, "--limit", limit)

    async def newest_results(self, *, before=None, limit=100):
        words = [] if before is None else ["--before", before]
        return await self.type("results", "--newest", "--limit", limit, *words)

    async def why(self, *, url):
        return await self.type("why", url)

    async def hosts(self, *, customer):
        return await self.type("host", "ls", "--customer", customer)

    async def consumers(self):
        return await self.type("consumer", "ls")

    async def replay(self, *, name):
        return await self.type("consumer", "replay", name)

    async def remove_consumer(self, *, name):
        await self.type("consumer", "rm", name)

    async def webhooks(self):
        return await self.type("webhook", "ls")

    async def webhook(self, *, customer):
        return await self.type("webhook", "show", customer)

    async def rotate(self, *, customer):
        return await self.type("webhook", "rotate", customer)

    async def replay_webhook(self, *, customer, after=0):
        return await self.type("webhook", "replay", customer, "--after", after)

    async def test_webhook(self, *, customer):
        return await self.type("webhook", "test", customer)

    async def remove_webhook(self, *, customer):
        await self.type("webhook", "rm", customer)


def _part(name):
    """A name as a part of a path."""
    return quote(name, safe="")

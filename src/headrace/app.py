"""`Headrace()`: the application object. It creates rooms and connections on first use."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, Unpack

import headrace
from headrace.engines import Engines
from headrace.engines.blobs import Blobs, BlobsConfig
from headrace.engines.endpoints import Endpoints
from headrace.engines.mount_guard import RECORD_FILE, PostgresRecord, StoreRecord
from headrace.engines.postgres import PostgresConfig
from headrace.engines.valkey import ValkeyConfig
from headrace.kernel import spans
from headrace.kernel.config import DataConfig, InvalidConfig, Loaded, http_origin, load_config
from headrace.kernel.errors import Conflict, require_extra, require_takes
from headrace.kernel.signing import CURSOR_USE, derive_key, load_or_create_secret
from headrace.web.history import History
from headrace.web.model import WebConfig

if TYPE_CHECKING:
    from headrace.console.app import Console
    from headrace.engines.backup.service import Backups
    from headrace.engines.caller_transaction import Transaction
    from headrace.feed import Feed
    from headrace.fetch import Fetch
    from headrace.jobs import Jobs, NewJob, Queue, Registry, Task
    from headrace.jobs.handle import Bridge, Group
    from headrace.jobs.service.workflows import Workflows
    from headrace.jobs.tasks import LimiterDeclared, LimiterOptions, QueueOptions, TaskOptions
    from headrace.jobs.workflow import Workflow
    from headrace.media import Media
    from headrace.views import Views
    from headrace.web.sessions import Audit
    from headrace.web.tokens import Tokens

CONFIG_FILE: Final = "headrace.toml"
PACKAGES: Final = (
    "headrace.jobs",
    "headrace.fetch",
    "headrace.views",
    "headrace.feed",
    "headrace.web",
)
"""Packages with tables, in the order of their migrations."""
Handler = TypeVar("Handler", bound=Callable[..., Any])
Hook = TypeVar("Hook", bound=Callable[[], Any])
Check = TypeVar("Check", bound=Callable[..., Any])
OrderHandler = TypeVar("OrderHandler", bound=Callable[..., Any])
Around = TypeVar("Around", bound=Callable[..., Any])


def sections() -> dict[str, type[Any]]:
    """Every section of the configuration.

    Includes rooms that are not installed here, as machines of a site may share one configuration.
    """
    from headrace.console.model import ConsoleConfig
    from headrace.engines.backup.archive import BackupConfig
    from headrace.feed import FeedConfig
    from headrace.fetch import FetchConfig
    from headrace.jobs import JobsConfig
    from headrace.media import MediaConfig
    from headrace.views import ViewsConfig

    return {
        "data": DataConfig,
        "postgres": PostgresConfig,
        "valkey": ValkeyConfig,
        "blobs": BlobsConfig,
        "backup": BackupConfig,
        "jobs": JobsConfig,
        "views": ViewsConfig,
        "feed": FeedConfig,
        "fetch": FetchConfig,
        "media": MediaConfig,
        "web": WebConfig,
        "console": ConsoleConfig,
    }


class ConfiguredTooLate(Conflict):
    """A setting or handler was given after the application was used."""

    code = "app.configured_too_late"


class Headrace:
    """An application: its configuration, tasks, handlers and rooms.

        app = Headrace()
        # Declare while the module is imported:
        app.task, app.workflow, app.cron, app.queue, app.limiter  # work, and limits per lane
        app.on_item, app.before_publish  # handlers of imported items
        app.on_post_deleted, app.feed_ranking  # handlers of the feed
        app.on_slot_start, app.on_slot_stop, app.middleware  # code around every handler
        # Call in handlers, requests and scripts:
        app.jobs, app.workflows, app.group  # enqueue, wait, manage queues and lanes
        app.fetch, app.views, app.feed, app.media.objects  # the other rooms
        app.sync  # the same methods without `await`

    Nothing is opened until it is used; `close`, or `async with`, closes it. `headrace up
    MODULE:app` starts the engines and every role with this object. `config_file` defaults to
    `HEADRACE_CONFIG`, then to `headrace.toml` if it exists. `flags` are `section.name` values that
    override the environment and the file. Raises: InvalidConfig, on first use.
    """

    version: str = headrace.__version__
    packages: tuple[str, ...] = PACKAGES

    def __init__(
        self, config_file: str | Path | None = None, *, flags: Mapping[str, str] | None = None
    ) -> None:
        self._config_file = Path(config_file) if config_file else None
        self._flags = dict(flags or {})
        self._endpoints: Endpoints | None = None
        self._is_slot = False
        self._item_handlers: list[Callable[..., Any]] = []
        self._publish_check: tuple[Callable[..., Any], Collection[str]] | None = None
        self._deletion_handlers: list[Callable[..., Any]] = []
        self._rankings: list[tuple[str, Callable[..., Any], int]] = []

    @cached_property
    def config(self) -> Loaded:
        """Every setting with its source. Raises: InvalidConfig."""
        named = self._config_file or os.environ.get("HEADRACE_CONFIG")
        file = named or (CONFIG_FILE if Path(CONFIG_FILE).exists() else None)
        path = Path(file) if file else None
        return load_config(sections(), env=os.environ, file=path, flags=self._flags)

    def use_flags(self, flags: Mapping[str, str]) -> None:
        """Override settings by command-line flags. Raises: ConfiguredTooLate."""
        self._require_unused("config", "use_flags")
        self._flags.update(flags)

    def use_config_file(self, file: str) -> None:
        """Read this configuration file instead. Raises: ConfiguredTooLate."""
        self._require_unused("config", "use_config_file")
        self._config_file = Path(file)

    @property
    def data_folder(self) -> Path:
        """Absolute path of the data folder, which may not exist yet."""
        return Path(self.config.section(DataConfig).folder).absolute()

    @property
    def metrics_folder(self) -> Path:
        """Folder where the roles of this machine write metrics."""
        return self.data_folder / "run" / "metrics"

    @property
    def uses_embedded(self) -> bool:
        """Whether any engine is embedded."""
        urls = self.configured_urls()
        return urls.postgres_url == "" or urls.valkey_url == ""

    def configured_urls(self) -> Endpoints:
        """The configured URLs; empty for embedded engines. Raises: InvalidConfig."""
        blobs, postgres = self.config.section(BlobsConfig).url, self.config.section(PostgresConfig)
        if postgres.direct_url and not postgres.url:
            raise InvalidConfig(
                "postgres.direct_url is set without postgres.url: set postgres.url"
                " (HEADRACE_POSTGRES_URL) to the pooler, or remove postgres.direct_url"
            )
        return Endpoints(
            postgres_url=postgres.url or "",
            valkey_url=self.config.section(ValkeyConfig).url or "",
            blobs_url=blobs or (self.data_folder / "blobs").as_uri(),
        )

    def use_as_slot(self) -> None:
        """Limit connections to those of a slot. Raises: ConfiguredTooLate."""
        self._require_unused("engines", "use_as_slot")
        self._is_slot = True

    def use_endpoints(self, endpoints: Endpoints) -> None:
        """Use these engines instead of configured or embedded ones."""
        self._endpoints = endpoints

    @cached_property
    def engines(self) -> Engines:
        """PostgreSQL, Valkey and object store; connect on first use. Raises: NotRunning."""
        if not self._is_slot:  # a slot starts it after its fork
            spans.start()
        endpoints = self._endpoints or self.configured_urls()
        if not endpoints.postgres_url or not endpoints.valkey_url:
            from headrace.engines.embedded import running_endpoints

            endpoints = running_endpoints(self.data_folder, endpoints)
        return Engines.at(endpoints, self.config, self.blobs, is_slot=self._is_slot)

    @cached_property
    def blobs(self) -> Blobs:
        """The object store, which works without PostgreSQL and Valkey."""
        urls, configured = self._endpoints or self.configured_urls(), self.configured_urls()
        record = self._store_record() if urls.blobs_url == configured.blobs_url else None
        return Blobs(urls.blobs_url, self.config.section(BlobsConfig), record=record)

    def _store_record(self) -> StoreRecord:
        """Where the id of the object store folder is recorded.

        The default folder belongs to one host. A configured folder is shared by all hosts of the
        database, so PostgreSQL records it.
        """
        is_shared = self.config.section(PostgresConfig).url and self.config.section(BlobsConfig).url
        shared = PostgresRecord(lambda: self.engines.postgres) if is_shared else None
        return StoreRecord(self.data_folder / RECORD_FILE, shared)

    @cached_property
    def secret(self) -> str:
        """The root secret, from `HEADRACE_SECRET` or the data folder."""
        return os.environ.get("HEADRACE_SECRET") or load_or_create_secret(self.data_folder)

    @cached_property
    def registry(self) -> Registry:
        """Tasks of this application and of the rooms."""
        from headrace.jobs import Registry

        registry = Registry()
        registry.bind(lambda: self.jobs, sync=lambda: self.sync)
        return registry

    @cached_property
    def jobs(self) -> Jobs:
        """The jobs room: `await app.jobs.enqueue(...)`."""
        from headrace.jobs import Jobs, JobsConfig

        return Jobs(self.engines.postgres, self.config.section(JobsConfig), self.registry)

    @property
    def workflows(self) -> Workflows:
        """Workflows: `await app.workflows.send_event("paid", "order:7")`."""
        return self.jobs.workflows

    @cached_property
    def sync(self) -> Bridge:
        """The same methods for sync code: `app.sync.jobs.cancel(1)`, `app.sync.run(coroutine)`."""
        from headrace.jobs.handle import Bridge

        return Bridge(self, self._close_loop)

    @cached_property
    def fetch(self) -> Fetch:
        """The fetch room: catalogues and photos. Raises: ExtraMissing."""
        require_extra("fetch", "pycurl")
        from headrace.fetch import Fetch, FetchConfig
        from headrace.fetch.service.sellers import SELLER_USE, LinkSigning

        config = self.config.section(FetchConfig)
        origin = http_origin(self.config.section(WebConfig).listen)
        links = LinkSigning(lambda: derive_key(self.secret, SELLER_USE), origin)
        engines = self.engines
        fetch = Fetch(engines.postgres, engines.blobs, self.jobs, config, link_signing=links)
        for handler in self._item_handlers:
            fetch.on_item(handler)
        if (checked := self._publish_check) is not None:
            fetch.before_publish(changes=checked[1])(checked[0])
        self.registry.add_room(fetch.register)
        return fetch

    @cached_property
    def views(self) -> Views:
        """The views room: `await app.views.hit("ad:1")`."""
        from headrace.views import Views, ViewsConfig

        views = Views(self.engines, self.jobs, self.config.section(ViewsConfig))
        self.registry.add_room(views.register)
        return views

    @cached_property
    def feed(self) -> Feed:
        """The feed room: `await app.feed.page(7)`."""
        from headrace.feed import Feed, FeedConfig

        config = self.config.section(FeedConfig)
        feed = Feed(
            self.engines, self.jobs, config, make_key=lambda: derive_key(self.secret, CURSOR_USE)
        )
        for handler in self._deletion_handlers:
            feed.posts.on_deleted(handler)
        for name, order, newest in self._rankings:
            feed.pages.rankings.define(name, order, newest=newest)
        self.registry.add_room(feed.register)
        return feed

    @cached_property
    def media(self) -> Media:
        """The media room. Only nodes that serve objects need its extra."""
        from headrace.media import Media, MediaConfig

        return Media(
            self.blobs,
            self.config.section(MediaConfig),
            secret=lambda: self.secret,
            folder=self.data_folder / "run" / "media",
        )

    @cached_property
    def tokens(self) -> Tokens:
        """Tokens of the HTTP API. Raises: ExtraMissing."""
        require_extra("web", "litestar")
        from headrace.web.tokens import Tokens

        return Tokens(self.engines.postgres)

    @cached_property
    def audit(self) -> Audit:
        """The audit log of the console. Raises: ExtraMissing."""
        require_extra("web", "litestar")
        from headrace.web.sessions import Audit

        kept_s = self.config.section(WebConfig).audit_kept_s
        return Audit(self.engines.postgres, kept_s=kept_s)

    @cached_property
    def history(self) -> History:
        """What every room did by minute: `await app.history.read(["views_hits"])`."""
        return History(self.engines.postgres)

    @cached_property
    def backups(self) -> Backups:
        """Base backups and the lag of the archive: `await app.backups.state()`."""
        from headrace.engines.backup.archive import BackupConfig
        from headrace.engines.backup.service import Backups

        is_own = not self.configured_urls().postgres_url
        postgres = (lambda: self.engines.postgres) if is_own else None
        return Backups(self.config.section(BackupConfig), self.data_folder, postgres)

    def task(
        self, queue: str, **options: Unpack[TaskOptions]
    ) -> Callable[[Callable[..., Any]], Task]:
        """Register the decorated function as the handler of `queue`; see `Registry.task`."""
        return self.registry.task(queue, **options)

    def workflow(
        self, name: str, **options: Unpack[TaskOptions]
    ) -> Callable[[Callable[..., Any]], Workflow]:
        """Register a handler `(ctx, ...)` whose steps survive crashes; see docs/workflows.md."""
        return self.registry.workflow(name, **options)

    def queue(self, name: str, **options: Unpack[QueueOptions]) -> Queue:
        """Declare a queue without a handler; other programs or people take its jobs."""
        return self.registry.queue(name, **options)

    def limiter(self, name: str, **limits: Unpack[LimiterOptions]) -> LimiterDeclared:
        """Declare limits for every lane of limiter `name`: `rate="600/m"`, `concurrency=20`."""
        return self.registry.limiter(name, **limits)

    def cron(
        self, spec: str, *, tz: str = "UTC", name: str | None = None, **options: Unpack[TaskOptions]
    ) -> Callable[[Callable[..., Any]], Task]:
        """Run the decorated function on a schedule, without a payload: `@app.cron("0 4 * * *")`."""
        return self.registry.cron(spec, tz=tz, name=name, **options)

    def group(
        self, *, on_done: NewJob, keep_results: bool = False, tx: Transaction | None = None
    ) -> AbstractAsyncContextManager[Group]:
        """Open a group: `async with app.group(on_done=task.job(...)) as group:`."""
        return self.jobs.group(on_done=on_done, keep_results=keep_results, tx=tx)

    def on_slot_start(self, hook: Hook) -> Hook:
        """Run the decorated function in each slot after the fork, before its first job."""
        return self.registry.on_slot_start(hook)

    def on_slot_stop(self, hook: Hook) -> Hook:
        """Run the decorated function in each slot after its last job."""
        return self.registry.on_slot_stop(hook)

    def middleware(self, around: Around) -> Around:
        """Wrap handler calls with the decorated `(call, next)`; see `headrace.jobs.Registry`."""
        return self.registry.middleware(around)

    def on_item(self, handler: Handler) -> Handler:
        """Call `handler(item)` at least once per change of an item; a `def` runs in a thread."""
        self._require_unused("fetch", "on_item")
        require_takes("on_item", handler, "item")
        self._item_handlers.append(handler)
        return handler

    def before_publish(self, *, changes: Collection[str] = ()) -> Callable[[Check], Check]:
        """Call the decorated `(item)` before an item is published or edited.

        It returns None, new values of fields in `changes`, or `headrace.fetch.Hold("reason")`. A
        `def` runs in a thread.
        """
        self._require_unused("fetch", "before_publish")
        if self._publish_check is not None:
            raise ConfiguredTooLate("before_publish() was called twice: one handler checks items")

        def register(check: Check) -> Check:
            require_takes("before_publish", check, "item")
            self._publish_check = (check, changes)
            return check

        return register

    def on_post_deleted(self, handler: Handler) -> Handler:
        """Call `handler(post)` at least once per deleted post; a `def` runs in a thread."""
        self._require_unused("feed", "on_post_deleted")
        require_takes("on_post_deleted", handler, "post")
        self._deletion_handlers.append(handler)
        return handler

    def feed_ranking(
        self, name: str, *, newest: int = 200
    ) -> Callable[[OrderHandler], OrderHandler]:
        """Order the `newest` posts of a feed by the decorated `(viewer, posts)`.

        It returns the posts in another order, for `app.feed.page(7, rank=name)`.
        """
        self._require_unused("feed", "feed_ranking")

        def define(order: OrderHandler) -> OrderHandler:
            require_takes("feed_ranking", order, "viewer", "posts")
            self._rankings.append((name, order, newest))
            return order

        return define

    def load_rooms(self) -> None:
        """Create every installed room, so that workers know all tasks."""
        _ = (self.views, self.feed, self.installed_fetch())
        # Handlers of items use it for URLs; its import would stall each forked slot.
        _ = self.media

    def installed_fetch(self) -> Fetch | None:
        """The fetch room; None if its extra is not installed."""
        return self.fetch if find_spec("pycurl") else None

    def services(self) -> dict[str, Any]:
        """Services of installed rooms by name, as HTTP handlers receive them."""
        found: dict[str, Any] = {"jobs": self.jobs, "views": self.views, "feed": self.feed}
        found |= {"media": self.media, "history": self.history, "backups": self.backups}
        if (fetch := self.installed_fetch()) is not None:
            found["fetch"] = fetch
        if find_spec("litestar"):
            found |= {"tokens": self.tokens, "audit": self.audit}
        return found

    def routes(self) -> list[Any]:
        """HTTP handlers of the installed rooms."""
        rooms = ["jobs", "views", "feed", "media"] + (["fetch"] if find_spec("pycurl") else [])
        return [route for room in rooms for route in import_module(f"headrace.{room}.http").ROUTES]

    def pages(self) -> Console:
        """The ASGI app of the console."""
        from headrace.console.app import Console

        return Console(self)

    async def close(self) -> None:
        """Send pending notifications and close the engines; later use reconnects."""
        if "sync" in self.__dict__ and not self.sync.is_here:
            await asyncio.to_thread(self.sync.close)
        for room in ("fetch", "jobs"):
            if room in self.__dict__:
                await self.__dict__[room].close()
        if "engines" in self.__dict__:
            await self.engines.close()
        elif "blobs" in self.__dict__:
            await self.blobs.close()

    async def _close_loop(self) -> None:
        """Close resources of the running event loop before it ends."""
        if "jobs" in self.__dict__:
            await self.jobs.close()
        if "engines" in self.__dict__:
            await self.engines.postgres.close()
            await self.engines.multiplexer.close()

    def forget(self) -> None:
        """Forget all that was opened, and keep declarations. For tests; close first."""
        for name, value in vars(type(self)).items():
            if isinstance(value, cached_property) and name != "registry":
                self.__dict__.pop(name, None)
        self._endpoints, self._flags = None, {}
        self.registry.drop_rooms()

    def _require_unused(self, attribute: str, caller: str) -> None:
        """Refuse a late call. Raises: ConfiguredTooLate."""
        if attribute in self.__dict__:
            raise ConfiguredTooLate(
                f"{caller}() was called after app.{attribute} was used: call it while the module"
                " of the application is imported"
            )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

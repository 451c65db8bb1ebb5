"""Errors of fetch, each with its code and what to do about it."""

from __future__ import annotations

import msgspec

from headrace.kernel.errors import (
    Conflict,
    InvalidInput,
    LimitExceeded,
    NotFound,
    TooLarge,
    Unavailable,
)


class FileFault(msgspec.Struct, frozen=True, omit_defaults=True):
    """Fault of a whole file: `i18n/` has a message for `code`, which shows `values`."""

    code: str
    line: int | None = None
    values: dict[str, str | int] = {}


class CustomerUnknown(NotFound):
    """No customer has that name."""

    code = "fetch.customer_unknown"

    def __init__(self, customer: str) -> None:
        super().__init__(
            f"customer {customer[:128]!r} is not known: create it with"
            f" `headrace fetch customer set {customer[:128]} --rate 600/m --connections 8` or"
            f" `PUT /v1/fetch/customers/{customer[:128]}`"
        )


class RunUnknown(NotFound):
    """No run has that number."""

    code = "fetch.run_unknown"

    def __init__(self, run_id: int) -> None:
        super().__init__(
            f"no run has the number {run_id}: `headrace fetch run ls` or"
            " `GET /v1/fetch/runs` lists the runs"
        )


class SourceUnknown(NotFound):
    """The customer has no source of catalogues."""

    code = "fetch.source_unknown"

    def __init__(self, customer: str) -> None:
        super().__init__(
            f"customer {customer[:128]!r} has no source: create one with"
            f" `headrace fetch catalogue add URL --customer {customer[:128]} --cron '0 * * * *'`"
        )


class InvalidSource(InvalidInput):
    """Invalid parameters of a source or file."""

    code = "fetch.invalid_source"


class InvalidItems(InvalidInput):
    """Invalid items in an upload."""

    code = "fetch.invalid_items"


class ConsumerUnknown(NotFound):
    """No worker recorded an `on_item` handler of that name, or it was removed."""

    code = "fetch.consumer_unknown"

    def __init__(self, name: str) -> None:
        super().__init__(
            f"consumer {name[:400]!r} is not known: `headrace fetch consumer ls` or"
            " `GET /v1/fetch/consumers` lists the consumers"
        )


class WebhookUnknown(NotFound):
    """The customer has no webhook."""

    code = "fetch.webhook_unknown"

    def __init__(self, customer: str) -> None:
        super().__init__(
            f"customer {customer[:128]!r} has no webhook: set one with"
            f" `headrace fetch customer set {customer[:128]} --webhook URL` or"
            f" `PUT /v1/fetch/customers/{customer[:128]}` with webhook"
        )


class ItemUnknown(NotFound):
    """The customer has no item with that id."""

    code = "fetch.item_unknown"


class NotACatalogue(InvalidInput):
    """The file has no readable format; `fault` has a message in each language."""

    code = "fetch.not_a_catalogue"
    fault: FileFault | None = None


class CatalogueBroken(InvalidInput):
    """A fault in the catalogue makes the rest unreadable; nothing was applied."""

    code = "fetch.catalogue_broken"
    fault: FileFault | None = None


class CatalogueTooLarge(TooLarge):
    """The file exceeds the size limit, compressed or uncompressed."""

    code = "fetch.catalogue_too_large"
    fault: FileFault | None = None


class UnknownFormat(InvalidInput):
    """No such catalogue format, or it does not support the mapping."""

    code = "fetch.unknown_format"


class InvalidTime(InvalidInput):
    """A bound of a list of results is not a date or time."""

    code = "fetch.invalid_time"


class InvalidMapping(InvalidInput):
    """Invalid mapping; the message lists every fault."""

    code = "fetch.invalid_mapping"


class MappingUnknown(NotFound):
    """No mapping has that name."""

    code = "fetch.mapping_unknown"

    def __init__(self, name: str) -> None:
        super().__init__(
            f"mapping {name[:128]!r} is not known: `headrace fetch mapping ls` or"
            " `GET /v1/fetch/mappings` lists the mappings"
        )


class InvalidSchema(InvalidInput):
    """Invalid schema; the message lists every fault."""

    code = "fetch.invalid_schema"


class SchemaUnknown(NotFound):
    """The category has no schema."""

    code = "fetch.schema_unknown"

    def __init__(self, category: str) -> None:
        super().__init__(
            f"category {category[:200]!r} has no schema: `headrace fetch schema ls` or"
            " `GET /v1/fetch/schemas` lists the categories that have one"
        )


class DuplicateUnknown(NotFound):
    """No pair of near-duplicates has that number."""

    code = "fetch.duplicate_unknown"

    def __init__(self, pair: int) -> None:
        super().__init__(
            f"no pair of photos has the number {pair}: `headrace fetch duplicates ls` or"
            " `GET /v1/fetch/duplicates` lists them"
        )


class NotHeld(NotFound):
    """The item is not held, or it changed since."""

    code = "fetch.not_held"

    def __init__(self, customer: str, item: str) -> None:
        super().__init__(
            f"item {item[:200]!r} of customer {customer[:128]!r} is not held, or it changed since:"
            " `headrace fetch held ls` or `GET /v1/fetch/held` lists held items"
        )


class InvalidVerdict(InvalidInput):
    """A `before_publish` handler returned a value or changed a field that is not allowed."""

    code = "fetch.invalid_verdict"


class InvalidCustomer(InvalidInput):
    """A limit of a customer is out of range."""

    code = "fetch.invalid_customer"


class InvalidRate(InvalidInput):
    """Invalid rate or number of connections of a customer."""

    code = "fetch.invalid_rate"


class RunUnderWay(Conflict):
    """Another catalogue of the same customer is being read."""

    code = "fetch.run_under_way"


class RunsBusy(Unavailable):
    """This process already reads its maximum of catalogues; nothing was changed."""

    code = "fetch.busy"


class NothingToReplay(Conflict):
    """The consumer receives no deliveries."""

    code = "fetch.nothing_to_replay"


class RunNotHeld(Conflict):
    """The run is not held, or another catalogue was applied since."""

    code = "fetch.run_not_held"


class RunNotUndoable(Conflict):
    """The run is not an applied catalogue that changed items, or a later one is applied."""

    code = "fetch.run_not_undoable"


class UrlRefused(InvalidInput):
    """The URL is forbidden; `reason` is the code of the outcome `refused:<reason>`."""

    code = "fetch.url_refused"

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class RunHeld(Conflict):
    """The command ended with a held run that a person must confirm."""

    code = "fetch.run_held"


class RunRefused(InvalidInput):
    """The command ended with a refused run; nothing was changed."""

    code = "fetch.run_refused"


class RunUnfinished(Unavailable):
    """The run is applied; its photos were not decided within the wait limit."""

    code = "fetch.run_unfinished"


class LanguageUnknown(InvalidInput):
    """No messages exist in that language."""

    code = "fetch.language_unknown"

    def __init__(self, lang: str, languages: list[str]) -> None:
        super().__init__(f"language {lang[:40]!r} is not known: use one of {', '.join(languages)}")


class SellerLinkUnknown(NotFound):
    """The link to a seller's page was changed, or names a run that the page does not list."""

    code = "fetch.seller_link_unknown"


class SellerLinkEnded(NotFound):
    """The link to a seller's page has expired or was revoked."""

    code, status = "fetch.seller_link_ended", 410


class SellerPageBusy(LimitExceeded):
    """The page of one seller was requested too often."""

    code = "fetch.seller_page_busy"


class HostUnknown(NotFound):
    """No photo was requested from that host."""

    code = "fetch.host_unknown"

    def __init__(self, host: str) -> None:
        super().__init__(
            f"host {host[:253]!r} is not known: no photo was requested from it yet; write it"
            " as in the links, with its port unless that is the default;"
            " `headrace fetch host ls` lists hosts"
        )

"""What can go wrong with fetch, each with its code and what to do about it."""

from __future__ import annotations

import msgspec

from headrace.kernel.errors import Conflict, InvalidInput, NotFound, TooLarge, Unavailable


class FileFault(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is wrong with a whole file: `code` has a sentence in `texts/`, `values` are what it shows."""

    code: str
    line: int | None = None
    values: dict[str, str | int] = {}


class CustomerUnknown(NotFound):
    """No customer of that name was set."""

    code = "fetch.customer_unknown"

    def __init__(self, customer: str) -> None:
        super().__init__(
            f"customer {customer[:128]!r} is not known: make it with"
            f" `headrace fetch customer set {customer[:128]} --rate 600/m --connections 8` or"
            f" `PUT /v1/fetch/customers/{customer[:128]}`"
        )


class RunUnknown(NotFound):
    """No run has that number."""

    code = "fetch.run_unknown"

    def __init__(self, run_id: int) -> None:
        super().__init__(f"run {run_id} is not known: `headrace fetch catalogue ls` lists the runs")


class SourceUnknown(NotFound):
    """The customer's catalogue is brought from nowhere by itself."""

    code = "fetch.source_unknown"

    def __init__(self, customer: str) -> None:
        super().__init__(
            f"customer {customer[:128]!r} has no source: make one with `headrace fetch catalogue add URL"
            f" --customer {customer[:128]} --cron '0 * * * *'`"
        )


class InvalidSource(InvalidInput):
    """A catalogue cannot be brought as asked."""

    code = "fetch.invalid_source"


class InvalidItems(InvalidInput):
    """Items cannot be sent as asked."""

    code = "fetch.invalid_items"


class ConsumerUnknown(NotFound):
    """No worker ever recorded an `on_item` handler of that name, or it was removed."""

    code = "fetch.consumer_unknown"

    def __init__(self, name: str) -> None:
        super().__init__(
            f"consumer {name[:400]!r} is not known: `headrace fetch consumer ls` or"
            " `GET /v1/fetch/consumers` lists those there are"
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
    """The customer never had an item of that id."""

    code = "fetch.item_unknown"


class NotACatalogue(InvalidInput):
    """The file is of no format that can be read; `fault` says it in any language."""

    code = "fetch.not_a_catalogue"
    fault: FileFault | None = None


class CatalogueBroken(InvalidInput):
    """The file is a catalogue with a fault that makes the rest of it unreadable; nothing was applied."""

    code = "fetch.catalogue_broken"
    fault: FileFault | None = None


class CatalogueTooLarge(TooLarge):
    """The file, packed or unpacked, is larger than catalogues may be."""

    code = "fetch.catalogue_too_large"
    fault: FileFault | None = None


class UnknownFormat(InvalidInput):
    """There is no catalogue format of that name, or it cannot be read in that way."""

    code = "fetch.unknown_format"


class InvalidMapping(InvalidInput):
    """A mapping cannot be meant; every fault found is listed."""

    code = "fetch.invalid_mapping"


class MappingUnknown(NotFound):
    """No mapping of that name was set."""

    code = "fetch.mapping_unknown"

    def __init__(self, name: str) -> None:
        super().__init__(
            f"mapping {name[:128]!r} is not known: `headrace fetch mapping ls` or"
            " `GET /v1/fetch/mappings` lists those there are"
        )


class InvalidSchema(InvalidInput):
    """A schema cannot be meant; every fault found is listed."""

    code = "fetch.invalid_schema"


class SchemaUnknown(NotFound):
    """No schema was set for that category."""

    code = "fetch.schema_unknown"

    def __init__(self, category: str) -> None:
        super().__init__(
            f"category {category[:200]!r} has no schema: `headrace fetch schema ls` or"
            " `GET /v1/fetch/schemas` lists those that have"
        )


class InvalidCustomer(InvalidInput):
    """A limit of a customer is out of its range."""

    code = "fetch.invalid_customer"


class InvalidRate(InvalidInput):
    """A customer's rate or connections cannot be meant."""

    code = "fetch.invalid_rate"


class RunUnderWay(Conflict):
    """Another catalogue of the same customer is being read right now."""

    code = "fetch.run_under_way"


class RunsBusy(Unavailable):
    """As many catalogues as this process reads at once are being read; nothing was changed."""

    code = "fetch.busy"


class RunNotHeld(Conflict):
    """Only a held run can be confirmed, as long as no other catalogue was applied since."""

    code = "fetch.run_not_held"


class RunNotUndoable(Conflict):
    """Only an applied catalogue can be undone, while no later one is applied."""

    code = "fetch.run_not_undoable"


class UrlRefused(InvalidInput):
    """The URL may not be asked; `reason` is the code of the outcome `refused:<reason>`."""

    code = "fetch.url_refused"

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class RunHeld(Conflict):
    """The command ended with a run that a person must confirm."""

    code = "fetch.run_held"


class RunUnfinished(Unavailable):
    """The run is applied; its photos were not decided in the time the command waited."""

    code = "fetch.run_unfinished"


class LanguageUnknown(InvalidInput):
    """There are no sentences in that language."""

    code = "fetch.language_unknown"

    def __init__(self, lang: str, languages: list[str]) -> None:
        super().__init__(f"language {lang[:40]!r} is not known: use one of {', '.join(languages)}")


class HostUnknown(NotFound):
    """No photo was asked of that host."""

    code = "fetch.host_unknown"

    def __init__(self, host: str) -> None:
        super().__init__(
            f"host {host[:253]!r} is not known: no photo was asked of it yet; write it as in the links, with"
            " its port unless it is the usual one; `headrace fetch host ls` lists those there are"
        )

"""What all routes of fetch share: their scopes and the language of a response."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from litestar import Request

from headrace.fetch.errors import CatalogueBroken, CatalogueTooLarge, NotACatalogue
from headrace.fetch.i18n import Texts, preferred

READ: Final = {"scope": "fetch:read"}
WRITE: Final = {"scope": "fetch:write"}


def texts_for(request: Request[Any, Any, Any], lang: str | None) -> Texts:
    """Messages in the language of a request: `lang`, else Accept-Language, else English.

    Raises: LanguageUnknown.
    """
    return Texts.load(lang or preferred(request.headers.get("accept-language", "")))


@contextmanager
def in_words_of(texts: Texts) -> Iterator[None]:
    """Translate errors of a whole file into the language of `texts`."""
    try:
        yield
    except (NotACatalogue, CatalogueBroken, CatalogueTooLarge) as error:
        if error.fault is not None:
            error.text = texts.file(error.fault)
            error.problems = tuple(
                dataclasses.replace(problem, text=error.text) for problem in error.problems
            )
        raise

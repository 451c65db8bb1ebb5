"""Which language an answer is in: `?lang=`, else `Accept-Language`, else English."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from litestar import Request

from headrace.fetch.errors import CatalogueBroken, CatalogueTooLarge, NotACatalogue
from headrace.fetch.i18n import Texts, preferred


def texts_for(request: Request[Any, Any, Any], lang: str | None) -> Texts:
    """The sentences for a request. Raises: LanguageUnknown, where it names one that we do not have."""
    return Texts.load(lang or preferred(request.headers.get("accept-language", "")))


@contextmanager
def in_words_of(texts: Texts) -> Iterator[None]:
    """Give errors about a whole file their sentence in the language of `texts`."""
    try:
        yield
    except (NotACatalogue, CatalogueBroken, CatalogueTooLarge) as error:
        if error.fault is not None:
            error.text = texts.file(error.fault)
            error.problems = tuple(
                dataclasses.replace(problem, text=error.text) for problem in error.problems
            )
        raise

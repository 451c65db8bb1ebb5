"""Which language an answer is in: `?lang=`, else `Accept-Language`, else English."""

from __future__ import annotations

from typing import Any

from litestar import Request

from penstock.fetch.texts import Texts, preferred


def texts_for(request: Request[Any, Any, Any], lang: str | None) -> Texts:
    """The sentences for a request. Raises: LanguageUnknown, where it names one that we do not have."""
    return Texts.load(lang or preferred(request.headers.get("accept-language", "")))

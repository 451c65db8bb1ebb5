"""What somebody may write into any stored field, so that it does harm on a page that forgets to escape it."""

from __future__ import annotations

CSRF_TOKEN = "hostile"
"""Stands in each, so that a test can tell that the text is shown at all."""

CORPUS = (
    "<script>alert('hostile')</script>",
    '"><img src=x onerror="alert(\'hostile\')">',
    "'><svg/onload=alert('hostile')>",
    "</title></textarea></script><script>alert('hostile')</script>",
    "javascript:alert('hostile')",
    "{{ 7 * 191 }} hostile",
    "{% raw %} hostile ${alert(1)} `hostile`",
    "<iframe srcdoc=\"<script>alert('hostile')</script>\">",
    "<div hx-get='/logout' hx-trigger='load'>hostile</div>",
    "<style>*{display:none}</style>hostile",
    "<a href='javascript:alert(1)'>hostile</a>",
    "hostile \u202etxt.exe\u202c \u0007 \ufeff",
    "&lt;b&gt;hostile&amp;",
)
"""The template sign `7 * 191` would show 1337 where a text is taken for a template."""

TEXT = " | ".join(CORPUS)
"""All of it in one text."""

LAMP = "lamp/../all?&#;%2F №5 <i>"
"""The id of an item, as its seller writes it."""

"""Attack texts for every stored field, harmful on pages that do not escape them."""

from __future__ import annotations

CSRF_TOKEN = "hostile"
"""Part of each text, so tests can check that it is displayed."""

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
"""A text evaluated as a template would show 1337, from `7 * 191`."""

TEXT = " | ".join(CORPUS)
"""All texts combined."""

LAMP = "lamp/../all?&#;%2F №5 <i>"
"""An item id with attack characters."""

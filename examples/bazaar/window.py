"""The shop window: the site's one page, made of its own table, with photos from `media`."""

from __future__ import annotations

import asyncio
import contextlib
import html
from typing import Final

from examples.bazaar.adverts import Advert, Adverts

_ADVERTS_SHOWN: Final = 120
_STYLE: Final = (
    "body{font:15px/1.4 system-ui,sans-serif;margin:2rem;background:#f6f5f2;color:#222}"
    "main{display:grid;grid-template-columns:repeat(auto-fill,minmax(220px,1fr));gap:1rem}"
    "article{background:#fff;border-radius:8px;overflow:hidden;box-shadow:0 1px 3px #0002}"
    "img{width:100%;height:150px;object-fit:cover;display:block;background:#ddd}"
    "p{margin:.6rem .8rem}small{color:#666}"
)


class Window:
    """Serves the page on a loopback port of its own."""

    def __init__(self, adverts: Adverts, media_url: str) -> None:
        self._adverts, self._media_url = adverts, media_url

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request with the page and close."""
        with contextlib.suppress(OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            page = self.page(await asyncio.to_thread(self._adverts.shown)).encode()
            policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src {self._media_url}"
            head = (
                "HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\nConnection: close\r\n"
                f"Content-Security-Policy: {policy}\r\nContent-Length: {len(page)}\r\n\r\n"
            )
            writer.write(head.encode() + page)
            await writer.drain()
        writer.close()

    def page(self, adverts: list[Advert]) -> str:
        """The page of these adverts."""
        shown = sorted(adverts, key=lambda advert: advert.item[::-1])[:_ADVERTS_SHOWN]
        cards = "".join(self._card(advert) for advert in shown)
        head = "<!doctype html><html lang=en><meta charset=utf-8><title>Bazaar</title>"
        count = f"<p>{len(adverts)} adverts, {len(shown)} of them here."
        return f"{head}<style>{_STYLE}</style><h1>Bazaar</h1>{count}<main>{cards}</main>"

    def _card(self, advert: Advert) -> str:
        keys = [photo.key for photo in advert.photos if photo.key]
        source = html.escape(f"{self._media_url}/m/{keys[0]}") if keys else ""
        picture = f'<img src="{source}" alt="" loading=lazy>' if keys else ""
        missing = len(advert.photos) - len(keys)
        note = f" · {missing} of {len(advert.photos)} photos missing" if missing else ""
        title, price = html.escape(advert.title), html.escape(advert.price)
        text = f"{title}<br><b>{price} €</b><br><small>{html.escape(advert.shop)}{note}</small>"
        return f"<article>{picture}<p>{text}</article>"

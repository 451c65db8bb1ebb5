"""The limit for reads over HTTP.

Raw ASGI with the same Valkey call, on the server that our API runs on.

A token's SHA-256 is looked up in a dict, 20 ids become keys (remembered), one MGET over the shared
connection, JSON. No metrics, no trace, no request id, no checks of ids, Host or Origin, no ETag:
what our API adds is the difference.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

import msgspec

from headrace.engines.multiplex import Multiplexer
from headrace.engines.valkey import Valkey, ValkeyConfig
from headrace.views.model import shard_of
from headrace.views.valkey_store import ValkeyStore

SHARDS = int(os.environ.get("BENCH_SHARDS", "4"))
_known = {hashlib.sha256(os.environ.get("BENCH_TOKEN", "").encode()).digest(): "bench"}
_url = os.environ.get("BENCH_VALKEY", "unix:///nowhere")
_hot = ValkeyStore(Valkey(_url, ValkeyConfig()), Multiplexer(_url, ValkeyConfig()))
_keys: dict[str, str] = {}
_encoder = msgspec.json.Encoder()
_JSON = (b"content-type", b"application/json")


async def app(scope: Any, _receive: Any, send: Any) -> None:
    """GET /v1/views?ids=..."""
    token = b""
    for name, value in scope["headers"]:
        if name == b"authorization":
            token = value[7:]
    if hashlib.sha256(token).digest() not in _known:
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        return
    ids = scope["query_string"].decode()[4:].split(",")
    for one in ids:
        if one not in _keys:
            [_keys[one]] = _hot.total_keys([one], [shard_of(one, SHARDS)])
    found = await _hot.totals([_keys[one] for one in ids])
    body = _encoder.encode([{"id": one, "total": n} for one, n in zip(ids, found, strict=True)])
    headers = [_JSON, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})

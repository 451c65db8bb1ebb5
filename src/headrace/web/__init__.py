"""The web server: one ASGI app with every room's routes, and what these routes share.

`create_api` mounts the rooms' Litestar handlers; `run_api` serves them by a protocol class of its
own over httptools, on uvloop (decision 0026).

Promises: every error is `application/problem+json` (RFC 9457) with a code from the error table and
a request id. A revoked token stops working within 5 s. Only the SHA-256 of a token is stored. A
body over its limit is refused before it is read. A route without a scope prevents the start.

Limits: one organization, no tenants. A body is held in memory up to `web.body_max`, unless its
handler streams it. Pages of other origins may call only the routes marked for pages, with a
publishable key.

Engines: PostgreSQL stores tokens, console sessions, the audit log and idempotency keys.

model        settings, scopes, errors and the protocol of the served app
server       the app, Idempotency-Key         http         the routes at the root
guard        checks and headers of every request, CORS
auth         authentication and scopes           tokens       API tokens and their store
sessions     console sessions and the audit log  limits       connection and request limits
routes       parameter checks and OpenAPI        bodies       strict JSON bodies
problems     errors as problem documents         serving      listening and stopping
parsing      requests out of bytes               connection   requests of one connection, deadlines
exchange     one request and response as ASGI    fast_path    routes for thousands of reads a second
cli          commands
"""

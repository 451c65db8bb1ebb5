"""The web server: one ASGI app with every room's routes, and what these routes share.

`create_layers` mounts the rooms' Litestar handlers; `run_api` serves them with one protocol class
over httptools, on uvloop. `web.processes` processes may share the port (`cli.api_processes`).

Promises: every error is `application/problem+json` (RFC 9457) with a code from the error table and
a request id. A revoked token stops working within 5 s. Only the SHA-256 of a token is stored. A
body over its limit is refused before it is read. A route without a scope prevents the start.

Limits: one organization, no tenants. A body is held in memory up to `web.body_max`, unless its
handler streams it. Pages of other origins may call only the routes marked for pages, with a
publishable key.

Engines: PostgreSQL stores tokens, console sessions, the audit log and idempotency keys.

model        settings, scopes, errors and the protocol of the served app
server       the app, Idempotency-Key            http         the routes at the root
serving      listening, stop and drain           connection   order and deadlines of one connection
parsing      requests out of bytes               exchange     one request as ASGI sees it
fast_path    hot routes without ASGI             problems     errors as problem documents
guard        checks and headers of every request, CORS
auth         authentication and scopes           tokens       API tokens and their store
sessions     console sessions and the audit log  limits       connection and request limits
history      the minute history                   recorder     its writer, one per host
outages      outages of engines as each host saw them, joined
marks        what happened at a time: starts, deaths, outages
routes       parameter checks and OpenAPI        bodies       strict JSON bodies
cli          commands
"""

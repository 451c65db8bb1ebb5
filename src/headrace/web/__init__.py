"""The web floor: one ASGI app that carries every room's routes, and what all of them share.

What: `create_api` mounts the Litestar handlers of the rooms; `run_api` serves them with uvicorn
(uvloop, httptools), the pair measured best for the price of validation, OpenAPI 3.1 and a clean stop
(prototypes of 2026-11-21, 2 cores).

Promises: every error is `application/problem+json` (RFC 9457) with a code from the one error table and
a request id; a token works 5 s at most after it is revoked; only the SHA-256 of a token is stored; a
body over its bound is refused before it is read; a route without a scope does not start.

Limits: one organisation, no tenants; a body is held in memory up to `web.body_max`, longer ones are
streamed by the handler that says so; pages of other origins may call the routes for pages alone, with a publishable key.

Engines: PostgreSQL keeps the tokens. Nothing else is stored.

Files: `model.py` settings, scopes and errors; `tokens.py` tokens and their store; `auth.py` who calls
and may they; `bodies.py` JSON in; `problems.py` errors out; `guard.py` what holds for every request;
`cors.py` Host, Origin and what pages may call; `parameters.py` query and path parameters; `quotas.py` requests of one token;
`admission.py` which connections are held; `connection.py` deadlines and bounds of one connection; `hot.py` routes that are asked thousands of times a second,
`shortcut.py` the short way of their reads; `http.py` the routes at the root; `openapi.py` the description; `pages.py` pages for people beside the API; `sessions.py` their logins; `audit.py` what was done there;
`server.py` the app and its server; `cli.py` the commands.
"""

"""The console: pages for people over all rooms, at `/console` of the API; `/` leads there.

What: every screen shows what the rooms' public services say, never a store; every action says beforehand what it does and is
also shown as its command and its HTTP call, and has a line in the audit.

Promises: what is not known is shown as unknown, and an engine that is down empties its own panels only. Pages work as plain HTML:
links and forms; with scripts they also stay live, at 5 KB/s a viewer, whatever is on them. Every filter, order and page is
in the address. No page runs anything inline, and nothing is loaded from elsewhere but the media role's pictures and sound.

Limits: every page but the login needs a session (`security.py`). One sampler
a process looks for all viewers; pages are rendered on the API's own loop, so views must be cheap.

Measured: see tests/console/test_console_size.py (150 queues, 40 hosts).

Files: `seeing.py` and `actions.py` what a screen and an action are; `screens/` the rooms, `templates/` what they look like;
`app.py` the ASGI app, `pages.py` a page, `doing.py` the doing; `security.py` who may; `live.py` what keeps pages live;
`rates.py` rates of this machine's metrics; `shown.py` how values are shown; `rendering.py` templates and files; `assets/` what
pages load, with `vendor/` and its `VENDORED.md`.
"""

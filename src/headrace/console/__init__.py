"""The web console at `/console` of the API; `/` redirects to it.

Screens show what the public services of the rooms return and never read a store. Every action
describes its effect first, shows its CLI command and HTTP call, and is recorded in the audit log.

Unknown values are shown as unknown. An engine that is down affects only the panels that need it.
Pages work as plain HTML with links and forms; scripts add live updates of up to 5 KB/s per
viewer. The URL holds every filter, sort order and page. Nothing runs inline, and nothing is
loaded from other origins except pictures and sound from the media role.

Every page except the login form needs a session (`security.py`). One sampler per process serves
all live pages on the API's event loop, so view functions must be cheap.

`app.py` is the ASGI app with the forms of actions, `pages.py` renders pages,
`actions.py` and `views.py` define what actions and screens are, `screens/` holds the rooms,
`live.py` streams changes, `rendering.py` and `format.py` turn values into HTML.
"""

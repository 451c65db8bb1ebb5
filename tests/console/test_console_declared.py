"""Commands and HTTP calls shown by the console exist in the command line and the API."""

from __future__ import annotations

import re
import shlex

import click
import pytest

from headrace import Headrace
from headrace.cli.main import build_group
from headrace.console.screens import ROOMS
from headrace.engines.endpoints import Endpoints
from headrace.web.model import SCOPES
from headrace.web.server import describe_api

ACTIONS = [action for room in ROOMS for action in room.actions]
SAMPLES = {"number": "7", "decimal": "0.5", "json": "{}", "check": "1"}
NAMED = {"rate": "10/s", "from": "2026-11-21T10:00Z", "to": "2026-11-21T11:00Z", "job": "7"}
"""Values of fields that need a certain format."""
pytestmark = pytest.mark.slow


def sample_of(field):
    """A valid value of a field."""
    if field.kind == "select":
        return next(value for value, _ in field.options if value)
    return NAMED.get(field.name) or field.default or SAMPLES.get(field.kind, "some")


def command_of(words):
    """The click command of a command line, and its arguments."""
    found = build_group()
    while isinstance(found, click.Group):
        assert words[0] in found.commands, f"no command {words[0]!r} in {found.name}"
        found, words = found.commands[words[0]], words[1:]
    return found, words


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.name)
def test_the_command_of_an_action_exists(action):
    values = action.parse({field.name: sample_of(field) for field in action.fields})
    for given in (values, action.sketch({})):
        program, *words = shlex.split(action.as_command(given))
        assert program == "headrace"
        found, left = command_of(words)
        if given is values:
            found.make_context(found.name, left, resilient_parsing=False)


@pytest.mark.parametrize(
    ("name", "given", "command"),
    [
        ("jobs.set_limiter", {"limiter": "q"}, "headrace lanes limiter q --unlimited"),
        (
            "jobs.set_limiter",
            {"limiter": "-q", "concurrency": "2"},
            "headrace lanes limiter --concurrency 2 -- -q",
        ),
        ("jobs.pause_queue", {"queue": "-x"}, "headrace queues pause -- -x"),
        ("jobs.pause_queue", {"queue": "-x y"}, "headrace queues pause -- '-x y'"),
        (
            "jobs.add_job",
            {"queue": "q", "payload": "-5", "lane": "-l"},
            "headrace jobs add --lane -l -- q -5",
        ),
    ],
)
def test_the_command_is_quoted_for_any_value(name, given, command):
    [action] = [action for action in ACTIONS if action.name == name]
    assert action.as_command(action.parse(given)) == command
    _, *words = shlex.split(command)
    found, left = command_of(words)
    typed = found.make_context(found.name, left, resilient_parsing=False).params
    assert set(given.values()) <= {str(value) for value in typed.values()}


@pytest.fixture(scope="module")
def routes():
    """(method, path) of every route of the API, parameters as {}."""
    app = Headrace()
    app.use_endpoints(
        Endpoints("postgresql://nobody@/none?host=/nowhere", "unix:///nowhere", "file:///tmp")
    )
    app.load_rooms()
    paths = describe_api(app)["paths"]
    return {
        (method.upper(), re.sub(r"\{[^}]+\}", "{}", path))
        for path, operations in paths.items()
        for method in operations
    }


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.name)
def test_the_http_call_of_an_action_exists(action, routes):
    path = re.sub(r"\{[^}]+\}", "{}", action.path.partition("?")[0])
    assert (action.method, path) in routes
    assert action.scope in SCOPES


def test_names_are_unique():
    names = [action.name for action in ACTIONS]
    assert len(names) == len(set(names))
    paths = [re.sub(r"\{[^}]+\}", "{}", screen.path) for room in ROOMS for screen in room.screens]
    assert len(paths) == len(set(paths))
    keys = [room.key for room in ROOMS]
    assert len(keys) == len(set(keys))

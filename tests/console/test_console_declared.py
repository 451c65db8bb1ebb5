"""Commands and HTTP calls shown by the console exist in the command line and the API."""

from __future__ import annotations

import re
import shlex

import click
import msgspec
import pytest

from headrace import Headrace
from headrace.cli.main import build_group
from headrace.console.screens import ROOMS
from headrace.engines.endpoints import Endpoints
from headrace.web.model import SCOPES
from headrace.web.server import describe_api

ACTIONS = {action.name: action for room in ROOMS for action in room.actions}
SAMPLES = {"number": "7", "decimal": "0.5", "json": "{}", "check": "1"}
NAMED = {
    "rate": "10/s",
    "from": "2026-11-21T10:00Z",
    "to": "2026-11-21T11:00Z",
    "from_at": "2026-11-21T10:00Z",
    "to_at": "2026-11-21T11:00Z",
    "job": "7",
    "lease": "7",
}
"""Values of fields that need a certain format."""
pytestmark = pytest.mark.slow


def sample_of(field):
    """A valid value of a field."""
    if field.kind == "select":
        return next(value for value, _ in field.options if value)
    return NAMED.get(field.name) or field.default or SAMPLES.get(field.kind, "some")


def command_of(line):
    """The click command of a command line, and its arguments."""
    program, *words = shlex.split(line)
    assert program == "headrace"
    found = build_group()
    while isinstance(found, click.Group):
        assert words[0] in found.commands, f"no command {words[0]!r} in {found.name}"
        found, words = found.commands[words[0]], words[1:]
    return found, words


def test_command_and_call_of_every_action_exist():
    app = Headrace()
    app.use_endpoints(
        Endpoints("postgresql://nobody@/none?host=/nowhere", "unix:///nowhere", "file:///tmp")
    )
    app.load_rooms()
    routes = {
        (method.upper(), re.sub(r"\{[^}]+\}", "{}", path))
        for path, operations in describe_api(app)["paths"].items()
        for method in operations
    }
    for action in ACTIONS.values():
        values = action.parse({field.name: sample_of(field) for field in action.fields})
        command_of(action.as_command(action.sketch({})))
        found, left = command_of(action.as_command(values))
        found.make_context(found.name, left, resilient_parsing=False)
        path = re.sub(r"\{[^}]+\}", "{}", action.path.partition("?")[0])
        assert (action.method, path) in routes, action.name
        assert action.scope in SCOPES, action.name
    actions = [action.name for room in ROOMS for action in room.actions]
    paths = [re.sub(r"\{[^}]+\}", "{}", screen.path) for room in ROOMS for screen in room.screens]
    for names in (actions, paths, [room.key for room in ROOMS]):
        assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "given", "command"),
    [
        ("jobs.set_limiter", {"limiter": "q"}, "lanes limiter q --unlimited"),
        (
            "jobs.set_limiter",
            {"limiter": "-q", "concurrency": "2"},
            "lanes limiter --concurrency 2 -- -q",
        ),
        ("jobs.pause_queue", {"queue": "-x"}, "queues pause -- -x"),
        ("jobs.pause_queue", {"queue": "x'; rm -rf /"}, """queues pause 'x'"'"'; rm -rf /'"""),
        (
            "jobs.set_queue",
            {"queue": "q", "importance": "0"},
            "queues set q --importance 0 --slots-min none --slots-max none --retries none",
        ),
        (
            "jobs.set_lane",
            {"limiter": "l", "lane": "a b", "concurrency": "2", "paused": "1"},
            "lanes set l 'a b' --concurrency 2 --paused",
        ),
        ("jobs.pause_queue", {"queue": "-x y"}, "queues pause -- '-x y'"),
        (
            "jobs.add_job",
            {"queue": "q", "payload": "-5", "lane": "-l"},
            "jobs add --lane -l -- q -5",
        ),
        ("jobs.add_job", {"queue": "q", "payload": '"5"'}, "jobs add q '\"5\"'"),
        ("jobs.add_job", {"queue": "q", "payload": "1.0"}, "jobs add q 1.0"),
        ("jobs.add_job", {"queue": "q"}, "jobs add q null"),
        ("jobs.add_job", {"queue": "q", "payload": '{"a": [1]}'}, "jobs add q '{\"a\":[1]}'"),
    ],
)
def test_the_command_is_quoted_for_any_value(name, given, command):
    line = ACTIONS[name].as_command(ACTIONS[name].parse(given))
    assert line == f"headrace {command}"
    found, left = command_of(line)
    typed = found.make_context(found.name, left, resilient_parsing=False).params
    texts = {given[name] for name in given.keys() - {"payload", "paused"}}
    assert texts <= {str(value) for value in typed.values()}


@pytest.mark.parametrize(
    ("name", "given", "body"),
    [
        ("media-purge", {}, {"keys": []}),
        ("media-purge", {"key": "a"}, {"keys": ["a"]}),
        ("media-purge", {"prefix": "a/"}, {"prefix": "a/"}),
        ("jobs.add_job", {"queue": "q"}, {"payload": None}),
    ],
)
def test_the_call_has_the_values_of_the_form(name, given, body):
    call = ACTIONS[name].as_http(ACTIONS[name].sketch(given))
    assert msgspec.json.decode(call.partition("\n\n")[2]) == body

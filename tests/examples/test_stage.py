"""The demo's platform says which role keeps it from being up."""

from __future__ import annotations

from examples.bazaar.stage import dead_roles

DIED = '{"source":"penstock.cli.supervisor","name":"agent","exit_code":1,"event":"role_died"}'
STARTED = '{"source":"penstock.cli.supervisor","name":"api","pid":7,"event":"role_started"}'


def test_a_role_that_ends_again_and_again_is_named():
    assert dead_roles(f"{STARTED}\n{DIED}\n{DIED}\n") == "agent ended and was started again"
    assert dead_roles(STARTED) == "the roles"

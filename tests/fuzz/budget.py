"""The budget of a fuzz test: a fixed number of examples, or new ones for a time.

In `make test` each test tries the same small number of examples each time. `make fuzz FUZZ_S=600`
gives each interface that many seconds, split over its tests, with new seeds. A failure prints the
command that repeats it.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from typing import Any, Final

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

FUZZ_S: Final = float(os.environ.get("FUZZ_S", "0"))
"""Seconds per interface; 0: the fixed examples of `make test`."""
FUZZ_SEED: Final = int(os.environ.get("FUZZ_SEED", "0"))
"""Repeat the round of this seed and stop."""
ROUND_FACTOR: Final = 10
"""A round of a long run has this many times the examples of `make test`."""


def fuzz(
    strategy: SearchStrategy[Any],
    check: Callable[[Any], None],
    *,
    examples: int,
    share: float = 1.0,
) -> None:
    """Call `check` with values of `strategy`; `share` is this test's part of the interface's time.

    Raises: what `check` raises, for the smallest value, with a note of how to repeat it.
    """
    ends_s = time.monotonic() + FUZZ_S * share
    while True:
        number = FUZZ_SEED or (secrets.randbelow(2**32 - 1) + 1 if FUZZ_S else 0)
        run_round(
            strategy, check, examples=examples * (ROUND_FACTOR if number else 1), seed_=number
        )
        if FUZZ_SEED or time.monotonic() >= ends_s:
            return


def run_round(
    strategy: SearchStrategy[Any], check: Callable[[Any], None], *, examples: int, seed_: int
) -> None:
    """Try `examples` values: of the seed, or always the same ones if it is 0."""

    def example(value: Any) -> None:
        check(value)

    test = settings(
        max_examples=examples,
        derandomize=not seed_,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )(given(strategy)(example))
    try:
        (seed(seed_)(test) if seed_ else test)()
    except BaseException as error:
        if seed_:
            test_name = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
            error.add_note(f"repeat: FUZZ_SEED={seed_} .venv/bin/python -m pytest -n 0 {test_name}")
        raise

"""Modules of a library's choice that are imported when they are first used, if ever.

structlog imports rich, with pygments and attrs, for tracebacks in colour that no role prints: 81 of the 517 modules
of every command and role, a sixth of the CPU of their imports (0.24 s with, 0.20 without: `time.process_time()` around
`import headrace.app, headrace.cli.main`, least of three; 2 cores, 2026-11-22).
`late("rich", ...)` stands in for them while structlog is imported: whoever asks structlog for such a traceback still
gets it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any


@contextmanager
def late(package: str, *modules: str) -> Iterator[None]:
    """What is imported inside the block gets stand-ins for `package` and these modules of it.

    Nothing is stood in for where it is imported already, or not installed.
    """
    if package in sys.modules or find_spec(package) is None:
        yield
        return
    stands = {name: _Module(name) for name in (package, *(f"{package}.{name}" for name in modules))}
    for name in modules:
        setattr(stands[package], name, stands[f"{package}.{name}"])
    sys.modules.update(stands)
    try:
        yield
    finally:
        for name, stand in stands.items():
            if sys.modules.get(name) is stand:
                del sys.modules[name]


class _Module(ModuleType):
    """Stands for a module; what is asked of it stands for a thing of the module."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Thing(self.__name__, name)


class _Thing:
    """Stands for a function or class; the module is imported when it is called or looked into."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return getattr(import_module(self._module), self._name)(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(import_module(self._module), self._name), name)

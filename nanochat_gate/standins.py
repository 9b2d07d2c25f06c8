"""Stand-ins for third-party packages that this environment lacks, for the one class that needs none of them.

The module with KVCache usually imports the tokenizer too, and so packages that a CI runner which judges only the
mathematics has no use for. Only names whose import was seen to fail get a stand-in, so that optional imports stay as
absent as they are; using anything of a stand-in raises ImportError.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

ATTEMPTS = 20


class _Absent:
    def __init__(self, *_: Any, **__: Any) -> None:
        raise ImportError("this package is not installed here; the gate stood in for it")


class _Module(ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - the attribute that makes a module a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def import_without(full: str, own: str) -> ModuleType:
    """Import the target's module `full`, standing in for packages that are missing; `own` is its top-level name."""
    module: ModuleType = call_without(lambda: importlib.import_module(full), own)
    return module


def call_without(call: Callable[[], Any], *own: str) -> Any:
    """`call()`, again and again with stand-ins for the packages it fails to import; `own` are the target's names.

    Neither the stand-ins nor what was imported with their help stays in sys.modules. Raises what the call raises when
    something other than a missing package is wrong.
    """
    finder = _Finder()
    before = set(sys.modules)
    sys.meta_path.append(finder)
    try:
        for _ in range(ATTEMPTS):
            try:
                return call()
            except ModuleNotFoundError as error:
                top = (error.name or "").split(".")[0]
                if not top or top in own or top in finder.names:
                    raise
                finder.names.add(top)
                _forget(before, own, finder)
        raise ImportError(f"more than {ATTEMPTS} packages that are needed are not installed")
    finally:
        sys.meta_path.remove(finder)
        if finder.names:
            _forget(before, own, finder)


def _forget(before: set[str], own: tuple[str, ...], finder: _Finder) -> None:
    for name in set(sys.modules) - before:
        if name.split(".")[0] in finder.names | set(own):
            del sys.modules[name]

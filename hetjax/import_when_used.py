"""Packages whose public names are imported when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    """A package that knows where its public names live."""

    _homes: Mapping[str, str]

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        # A function that uses the package is sent to workers with its name.
        return importlib.import_module, (self.__name__,)

    def __getattr__(self, name: str) -> Any:
        if name not in self._homes:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(self._homes[name]), name)

    def __setattr__(self, name: str, value: object) -> None:
        # Python sets a submodule that is imported as an attribute of its package. One that shares
        # a public name would stand in its place.
        if name not in self._homes or not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted(self._homes)


def import_when_used(package: str, homes: Mapping[str, str]) -> None:
    """Have a package import its public names when they are first used.

    Args:
        package: its name; it is being imported.
        homes: of each public name the module that it is imported from.
    """
    module = sys.modules[package]
    module.__dict__["_homes"] = homes
    module.__class__ = _Package

"""What the reference page needs of Griffe, which reads the package for it; see mkdocs.yml."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^( *)Example:$", re.M)


class PublicNames(griffe.Extension):
    """Public names as Python has them, and examples as code.

    Griffe lets a submodule take the place of a name that its package defines or imports, such as
    the function `hetjax.plan`; in Python the name stays what the package says. And it makes lines
    under "Example:" a quote; those under "Examples:" are code.
    """

    def __init__(self) -> None:
        self._functions: dict[str, griffe.Function] = {}

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """Keep a function, whose place a submodule may take."""
        self._functions[func.path] = func

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Give sections of examples the name by which Griffe knows them."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(r"\1Examples:", obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Give public names back the places that submodules have taken."""
        # Afterwards nothing can be found by its path in these submodules.
        loader.resolve_aliases(implicit=True, external=False)
        for package in [pkg, *pkg.modules.values()]:
            for name in map(str, package.exports or ()):
                taken_by = package.members.get(name)
                if taken_by is None or taken_by.is_alias or not taken_by.is_module:
                    continue
                home = package.imports.get(name)
                function = self._functions.get(f"{package.path}.{name}")
                if function is not None:
                    package.set_member(name, function)
                elif home is not None:
                    found = self._functions.get(home) or loader.modules_collection[home]
                    package.set_member(name, griffe.Alias(name, found, parent=package))

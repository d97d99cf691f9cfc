"""The example configurations that come with the package, found by their names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hetjax.errors import InputError, shown, unknown_name

_PACKAGE = Path(__file__).parents[1]


def packaged_configurations() -> Mapping[str, Path]:
    """The configurations that come with hetjax.

    Returns:
        Their files by name: the path below ``configs``, without ``.gin``.

    Example:
        >>> packaged_configurations()["quickstart"].name
        'quickstart.gin'
    """
    # A wheel has them inside the package, a clone beside it.
    folders = (_PACKAGE / "configs", _PACKAGE.parent / "configs")
    folder = next((each for each in folders if each.is_dir()), _PACKAGE)
    files = sorted(folder.rglob("*.gin"))
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}


def configuration_file(name: str) -> Path:
    """The gin file that a person means.

    Args:
        name: the path of a file, or the name of a configuration that comes with hetjax.

    Returns:
        The file. One that is there goes before a name.

    Raises:
        InputError: there is neither.

    Example:
        >>> configuration_file("llama_quickstart").name
        'llama_quickstart.gin'
    """
    path, packaged = Path(name), packaged_configurations()
    # Unlike those of `Path`, these are False where there can be no such file.
    if os.path.isfile(path):
        return path
    if name in packaged:
        return packaged[name]
    if os.path.exists(path):
        raise InputError(
            f"--config is {shown(name, 200)}, which is no regular file; name a gin file"
        )
    if path.suffix:
        raise InputError(f"--config is {shown(name, 200)}; there is no such file")
    short = [each for each in packaged if "/" not in each]
    raise InputError(f"--config: {unknown_name('configuration', name, short)}; or name a gin file")

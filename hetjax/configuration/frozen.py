"""Frozen parameters by patterns of their names: an optimizer that trains all others."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

import jax
import optax
from jaxtyping import PyTree

from hetjax.errors import InputError, shown
from hetjax.pipeline.program.loss import path_names

_NEAREST = 3
"""How many names stand in an error."""


def with_frozen(
    optimizer: optax.GradientTransformation, parameters: PyTree, patterns: Sequence[str]
) -> optax.GradientTransformation:
    """An optimizer that leaves the parameters as they are whose names match a pattern.

    Args:
        optimizer: the optimizer of all others; a norm that it clips by is theirs alone.
        parameters: pytree of arrays or shapes.
        patterns: ``*`` is any text, ``/`` included, ``?`` and ``[...]`` are one letter. One matches
            a parameter by its name, such as ``"blocks/0/mlp/up/kernel"``, or by what that begins
            with: ``"blocks/0"``.

    Returns:
        The optimizer; it itself where there is no pattern.

    Raises:
        InputError: a pattern matches nothing, or together they leave nothing to train.

    Example:
        >>> import jax.numpy as jnp
        >>> weights = {"embedding": jnp.ones(2), "head": jnp.ones(2)}
        >>> sgd = with_frozen(optax.sgd(1.0), weights, ["embed*"])
        >>> updates, _ = sgd.update(weights, sgd.init(weights))
        >>> updates["embedding"].tolist(), updates["head"].tolist()
        ([0.0, 0.0], [-1.0, -1.0])
    """
    if not patterns:
        return optimizer
    labels = frozen_labels(parameters, patterns)
    return optax.multi_transform({"trained": optimizer, "frozen": optax.set_to_zero()}, labels)


def frozen_labels(parameters: PyTree, patterns: Sequence[str]) -> PyTree[str]:
    """A label for each parameter, for `optax.multi_transform`.

    Args:
        parameters: pytree of arrays or shapes.
        patterns: as for `with_frozen`.

    Returns:
        Pytree of ``"frozen"`` where a pattern matches, and of ``"trained"``.

    Raises:
        InputError: a pattern matches nothing, or together they leave nothing to train.

    Example:
        >>> frozen_labels({"embedding": 1.0, "blocks": [1.0, 1.0]}, ["embed*", "blocks/0"])
        {'blocks': ['frozen', 'trained'], 'embedding': 'frozen'}
    """
    names = path_names(parameters)
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in names):
            raise InputError(
                f"train.frozen has {shown(pattern)}, which matches no parameter; the nearest "
                f"names: {', '.join(map(repr, _nearest(pattern, names)))}"
            )
    is_frozen = [any(_matches(name, pattern) for pattern in patterns) for name in names]
    if all(is_frozen):
        raise InputError(
            f"train.frozen is {shown(tuple(patterns))}, which matches all {len(names)} parameters; "
            f"leave one or more to train"
        )
    labels = ["frozen" if each else "trained" for each in is_frozen]
    return jax.tree.unflatten(jax.tree.structure(parameters), labels)


def _matches(name: str, pattern: str) -> bool:
    return any(fnmatchcase(start, pattern) for start in _starts(name))


def _starts(name: str) -> Iterator[str]:
    """What a name begins with, part by part.

    Example:
        >>> list(_starts("blocks/0/scale"))
        ['blocks', 'blocks/0', 'blocks/0/scale']
    """
    return itertools.accumulate(name.split("/"), lambda start, part: f"{start}/{part}")


def _nearest(pattern: str, names: Iterable[str]) -> list[str]:
    starts = list(dict.fromkeys(start for name in names for start in _starts(name)))
    return difflib.get_close_matches(pattern, starts, _NEAREST, cutoff=0.0)

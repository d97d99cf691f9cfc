"""From Flax modules to pure functions: parameters as nested dicts with string keys, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from jaxtyping import PyTree


def parameters_of(module: nnx.Module) -> PyTree:
    """The parameters of a module: nested dicts, in which a list's indices are ``"0"``, ``"1"``.

    Args:
        module: the module.

    Returns:
        The parameters.
    """
    return _string_keys(nnx.to_pure_dict(nnx.state(module)))


def with_parameters(graph: nnx.GraphDef[Any], parameters: PyTree) -> Any:
    """A module put together around parameters.

    Args:
        graph: the module's structure without its arrays.
        parameters: as `parameters_of` gives them.

    Returns:
        The module.
    """
    return nnx.merge(graph, _integer_keys(parameters))


def num_parameters(init: Callable[[jax.Array], PyTree]) -> int:
    """How many numbers the parameters hold; nothing is allocated to count them.

    Args:
        init: from a key to the parameters.

    Returns:
        Their number.
    """
    shapes = jax.eval_shape(lambda: init(jax.random.key(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def _string_keys(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {str(key): _string_keys(value) for key, value in tree.items()}
    return tree


def _integer_keys(tree: Any) -> Any:
    """The inverse of `_string_keys`: no attribute of a module has a number for a name."""
    if isinstance(tree, Mapping):
        return {
            int(key) if key.isdecimal() else key: _integer_keys(value)
            for key, value in tree.items()
        }
    return tree

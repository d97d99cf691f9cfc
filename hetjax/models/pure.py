"""From Flax modules to pure functions: parameters as nested dicts with string keys, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

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


def structure_of(make: Callable[[], nnx.Module]) -> tuple[nnx.GraphDef[Any], PyTree]:
    """A module's structure without its arrays, and the shapes of its parameters.

    Args:
        make: makes the module; it is traced, and nothing is allocated.

    Returns:
        The structure, for `with_parameters`; shapes in the form of `parameters_of`.
    """
    graph, state = nnx.split(nnx.eval_shape(make))
    return graph, _string_keys(nnx.to_pure_dict(state))


def counted_rngs(key: jax.Array) -> nnx.Rngs:
    """The keys that ``nnx.Rngs(key)`` gives, counted in Python.

    Flax counts in an array: where a model is only traced, every key that is taken makes JAX search
    the whole trace for the origin of that array, which takes the square of a model's size.

    Args:
        key: what all keys come from.

    Returns:
        What a module takes in the place of Flax's, for keys of its parameters alone.
    """
    return cast(nnx.Rngs, _CountedRngs(key))


class _CountedRngs:
    def __init__(self, key: jax.Array):
        self._key, self._count = key, 0

    def params(self) -> jax.Array:
        key = jax.random.fold_in(self._key, self._count)
        self._count += 1
        return key


def num_parameters(shapes: PyTree) -> int:
    """How many numbers parameters hold.

    Args:
        shapes: the parameters' shapes.

    Returns:
        Their number.
    """
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

"""What a user gives to be trained: parameters, a batch, and a loss of some form, made uniform.

A loss returns a mean or a pair of sums, and with ``has_aux`` figures beside it; a batch may hold
typed random keys. What is traced always returns sums, and takes plain arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from hetjax import _compat
from hetjax.errors import InputError, shown

_NUMBERS = (jax.Array, np.ndarray, np.generic, float, int)


def path_names(tree: PyTree) -> tuple[str, ...]:
    """The path of every leaf of a pytree, as ``"a/b/0"``.

    Example:
        >>> path_names({"a": {"b": [1, 2]}})
        ('a/b/0', 'a/b/1')
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return tuple(jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves)


def abstract(tree: PyTree) -> PyTree[jax.ShapeDtypeStruct]:
    """The shapes and dtypes of a pytree's leaves, without sharding or values."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


# Parameters


def makes_parameters(parameters: PyTree | Callable[[], PyTree]) -> bool:
    """Whether what is given as parameters is a function that makes them.

    A module that is a pytree and can be called, as Equinox's are, is parameters.

    Args:
        parameters: pytree of arrays, or a function without arguments.

    Returns:
        Whether it is to be called.

    Example:
        >>> makes_parameters(lambda: {"w": jnp.ones(2)}), makes_parameters({"w": jnp.ones(2)})
        (True, False)
    """
    leaves, structure = jax.tree.flatten(parameters)
    return callable(parameters) and (jax.tree_util.treedef_is_leaf(structure) or not leaves)


def parameter_shapes(parameters: PyTree | Callable[[], PyTree]) -> PyTree[jax.ShapeDtypeStruct]:
    """Shapes of the parameters, checked.

    Args:
        parameters: pytree of arrays or shapes, or a function without arguments that makes it.

    Returns:
        The shapes, as a pytree of the same structure.

    Raises:
        InputError: a leaf is no floating or complex array.
    """
    made = jax.eval_shape(parameters) if makes_parameters(parameters) else parameters
    for name, leaf in zip(path_names(made), jax.tree.leaves(made), strict=True):
        if not isinstance(leaf, (*_NUMBERS, jax.ShapeDtypeStruct)):
            raise InputError(
                f"parameter {name!r} is {shown(leaf)}, not an array; give what is not trained in "
                f"the batch, or close over it (of an Equinox module, train what "
                f"equinox.partition keeps as arrays)"
            )
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise InputError(
                f"parameter {name!r} has dtype {jnp.result_type(leaf)}: parameters must be "
                f"floating or complex; give what is not trained in the batch, or close over it"
            )
    return abstract(made)


# Batches


def check_examples(batch: PyTree[jax.ShapeDtypeStruct]) -> None:
    """Check that every leaf of a batch begins with the same number of examples.

    Args:
        batch: pytree of shapes.

    Raises:
        InputError: a leaf is a scalar, or has another number.
    """
    sizes = {}
    for name, leaf in zip(path_names(batch), jax.tree.leaves(batch), strict=True):
        if not leaf.shape:
            hint = "; give every example a key of its own, by jax.random.split"
            raise InputError(
                f"batch leaf {name!r} is a scalar: its first axis must be the examples"
                f"{hint if is_key(leaf) else ''}"
            )
        sizes[name] = leaf.shape[0]
    if len(set(sizes.values())) > 1:
        raise InputError(f"batch leaves differ in their number of examples: {shown(sizes, 200)}")


def is_key(leaf: Any) -> bool:
    """Whether an array or a shape is of typed random keys, as `jax.random.key` makes them."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def host_array(leaf: Any) -> np.ndarray:
    """A batch leaf as the array that a host reads and sends: random keys as their words.

    Args:
        leaf: an array of any kind.

    Returns:
        The NumPy array.

    Example:
        >>> host_array(jax.random.key(7)).tolist()
        [0, 7]
    """
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)


def host_shape(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The shape of `host_array` of an array of some shape."""
    return jax.eval_shape(jax.random.key_data, shape) if is_key(shape) else shape


def from_host(array: Any, shape: jax.ShapeDtypeStruct) -> Any:
    """A batch leaf of what a host has of it; can be traced."""
    if not is_key(shape):
        return array
    implementation = jax.random.key_impl(jnp.empty((), shape.dtype))
    return jax.random.wrap_key_data(array, impl=implementation)


# Losses


def traced_once(loss_function: Callable[..., Any], parameters: PyTree, batch: PyTree) -> Any:
    """Call a loss function in a trace by the trace that JAX keeps of it.

    It keeps one for each function, as long as that lives, and for each set of shapes: who plans and
    then trains waits for one trace of the model.

    Args:
        loss_function: the function.
        parameters: what is traced in the place of its parameters.
        batch: the same of its batch.

    Returns:
        What it returns; scalars that it knew when it was traced are numbers.
    """
    try:
        results = jax.jit(loss_function)(parameters, batch)
        closed = jax.make_jaxpr(loss_function)(parameters, batch)
    except TypeError:
        # It cannot be hashed, or returns what is no array.
        return loss_function(parameters, batch)
    leaves, tree = jax.tree.flatten(results)
    known = _compat.known_outputs(closed)
    return jax.tree.unflatten(
        tree, [leaf if value is None else value for leaf, value in zip(leaves, known, strict=True)]
    )


@functools.cache
def accumulator_dtype(dtype: Any) -> np.dtype:
    """The dtype in which losses, or gradients of a parameter, are summed: at least float32."""
    return np.dtype(jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype)


def sums(
    result: Any, num_examples: int, *, has_aux: bool | None
) -> tuple[Any, Any, list[Any], Any]:
    """What a loss function returned, as sums over examples; can be traced.

    Args:
        result: a scalar (the mean over the examples) or a pair of scalars (total, count); with
            `has_aux` a pair of that and a pytree of scalars.
        num_examples: how many examples there are.
        has_aux: whether there are figures beside the loss; None where there cannot be any.

    Returns:
        The summed loss, the count, the figures in sums (each times the count) and their structure.

    Raises:
        InputError: it returned something else.
    """
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise InputError(
            f"has_aux is True, so the loss function must return a pair (loss, aux); it returned "
            f"{_told(result)}"
        )
    loss, aux = result if has_aux else (result, ())
    advice = "return the loss alone" if has_aux is None else "give has_aux=True"
    total, count = _total_and_count(loss, num_examples, advice)
    count = jnp.asarray(count, accumulator_dtype(jnp.result_type(total)))
    figures = []
    for name, leaf in zip(path_names(aux), jax.tree.leaves(aux), strict=True):
        if not _is_scalar(leaf):
            raise InputError(
                f"aux leaf {name!r} is {_told(leaf)}; it must be a real scalar, of which the "
                f"mean over microbatches is taken"
            )
        figures.append(jnp.asarray(leaf).astype(count.dtype) * count)
    return total, count, figures, jax.tree.structure(aux)


def _total_and_count(result: Any, num_examples: int, advice: str) -> tuple[Any, Any]:
    """A loss as a pair; a scalar alone is the mean over the examples."""
    is_pair = isinstance(result, tuple) and len(result) == 2
    total, count = result if is_pair else (result, np.float32(num_examples))
    scalars = _is_scalar(total) and _is_scalar(count)
    if not scalars or not jnp.issubdtype(jnp.result_type(total), jnp.floating):
        raise InputError(
            f"the loss function must return a floating scalar, or a pair of scalars "
            f"(total, count); it returned {_told(result)}"
            + (f"; for a pair (loss, aux), {advice}" if is_pair else "")
        )
    if is_pair:
        return total, count
    # Microbatches of unlike sizes weigh as many as they have examples; narrow floats cannot count.
    wide = accumulator_dtype(jnp.result_type(total))
    return jnp.asarray(total, wide) * jnp.asarray(num_examples, wide), count


def check_count(depends: Sequence[bool], names: Sequence[str]) -> None:
    """Check that what the summed loss is divided by has nothing to do with the parameters.

    Args:
        depends: for each parameter leaf, whether the count depends on it.
        names: the leaves' paths.

    Raises:
        InputError: it depends on one.
    """
    guilty = next((name for name, found in zip(names, depends, strict=True) if found), None)
    if guilty is not None:
        raise InputError(
            f"the loss function returned a pair whose second scalar depends on parameter "
            f"{guilty!r}: a pair is (total, count), and the loss is their quotient, in which the "
            f"count is a constant; for a pair (loss, aux), give has_aux=True"
        )


def _is_scalar(value: Any) -> bool:
    real = isinstance(value, _NUMBERS) and not is_key(value)
    return real and jnp.shape(value) == () and not jnp.iscomplexobj(value)


def _told(result: Any) -> Any:
    """A result with shapes in the place of its arrays."""
    return jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else x, result)

"""Compiling a program for a mesh: its arguments, what becomes of their memory, its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from hetjax.pipeline.program.loss import from_host, is_key


@dataclass(frozen=True, eq=False)
class Argument:
    """An argument of a program, which is a sequence of arrays.

    Args:
        shapes: their shapes.
        shardings: their shardings, on a mesh of typed axes also those of partial sums; or, of a
            program that is divided among several members, their annotations.
        donated: whether the program's results may take their memory.
    """

    shapes: Sequence[jax.ShapeDtypeStruct]
    shardings: Sequence[Any]
    donated: bool = False

    def chosen(self, places: Sequence[int]) -> Argument:
        """Some of the arrays alone."""
        return Argument(
            [self.shapes[place] for place in places],
            [self.shardings[place] for place in places],
            self.donated,
        )


def donated_places(arguments: Sequence[Argument]) -> tuple[int, ...]:
    """Which arguments are donated, as `jax.jit` wants to be told.

    Example:
        >>> donated_places([Argument((), ()), Argument((), (), donated=True)])
        (1,)
    """
    return tuple(place for place, argument in enumerate(arguments) if argument.donated)


def compile_program(
    function: Callable[..., Any], arguments: Sequence[Argument], out_shardings: Any
) -> Any:
    """Compile a function of sequences of arrays.

    Args:
        function: takes as many sequences as there are arguments.
        arguments: what it takes.
        out_shardings: of its results, as `jax.jit` takes them.

    Returns:
        The compiled function.
    """
    jitted = jax.jit(
        function,
        in_shardings=tuple(list(argument.shardings) for argument in arguments),
        out_shardings=out_shardings,
        donate_argnums=donated_places(arguments),
        keep_unused=True,
    )
    return jitted.lower(*(list(argument.shapes) for argument in arguments)).compile()


def put_from_host(array: np.ndarray, dtype: Any, sharding: NamedSharding) -> jax.Array:
    """Put what `host_array` made of an array onto a mesh: of random keys that is their words.

    Args:
        array: the whole of it, in this process.
        dtype: the dtype of the array that it was made of.
        sharding: how it shall lie; the mesh may span processes.

    Returns:
        The array.
    """
    placed, like = put_whole(array, sharding), jax.ShapeDtypeStruct((), dtype)
    if not is_key(like):
        return placed
    wrapped: Callable[[Any], Any] = jax.jit(
        lambda words: from_host(words, like), out_shardings=sharding
    )
    return wrapped(placed)


def put_whole(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Put an array that this process has whole onto a mesh, which may span processes."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

"""Annotated functions: a function of arrays and how they lie, for inputs of any size.

Where sizes are symbols, one annotated function serves several totals: what the symbols stand for
follows from the inputs, and the program is deduced and compiled once for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from hetjax import _compat
from hetjax.errors import InputError, is_whole, shown, unknown_name
from hetjax.runtime.local.local_program import LocalProgram
from hetjax.runtime.moves.union_array import HArray, as_array, in_jax_types, is_weak
from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.annotation.symbol_numbers import numbers_of
from hetjax.sharding.deduction.deduce import deduce
from hetjax.sharding.deduction.reshard import RESHARD
from hetjax.sharding.deduction.specialize import specialize
from hetjax.sharding.resolution.network import Network


class AnnotatedFunction:
    """A function that is computed on unions of submeshes, compiled for each size of its inputs.

    Args:
        function: of arrays in any pytrees; it may use `hetjax.reshard`.
        annotations: for each argument how it lies: one annotation for all of it, or a pytree of
            them; None for what is known everywhere.
        devices: the device behind each number; those of this process unless given.
        network: the links, which decide between forms of communication; None: all alike.
        strategy: which of the annotations that a `hetjax.reshard` carries is meant.
        mend: whether to put in the reshards that are missing.

    Attributes:
        num_compiled: for how many sizes and types of inputs it has been compiled.

    Raises:
        InputError: an annotation is none, or the strategy no number of one.

    Source: Hetu v2, section 5.5.

    Example:
        >>> import numpy as np
        >>> from jax.sharding import PartitionSpec
        >>> from hetjax.sharding import Subgroup
        >>> groups = tuple(Subgroup((device,), (), PartitionSpec()) for device in (0, 1))
        >>> rows = HSharding(groups, hdim=0, sizes=("2*batch", "batch"))
        >>> double = AnnotatedFunction(lambda x: 2 * x, [rows], devices=jax.devices()[:1] * 2)
        >>> double(np.arange(6))[1], double(np.arange(3))[1]
        (Array([ 8, 10], dtype=int32), Array([4], dtype=int32))
        >>> double.num_compiled
        2
    """

    def __init__(
        self,
        function: Callable[..., Any],
        annotations: Sequence[PyTree],
        *,
        devices: Sequence[Any] | None = None,
        network: Network | None = None,
        strategy: int = 0,
        mend: bool = False,
    ):
        _check_annotations(annotations)
        if not (is_whole(strategy) and strategy >= 0):
            raise InputError(f"strategy: {shown(strategy)} is not allowed: a number from 0")
        self._function, self._annotations = function, tuple(annotations)
        self._devices, self._network = devices, network
        self._strategy, self._mend = strategy, mend
        self._compiled: dict[Any, tuple[LocalProgram, list[HSharding | None], Any]] = {}

    @property
    def num_compiled(self) -> int:
        """For how many sizes and types of inputs it has been compiled."""
        return len(self._compiled)

    def __call__(self, *arguments: PyTree, symbols: Mapping[str, int] | None = None) -> PyTree:
        """Compute the function.

        Args:
            *arguments: arrays, of random keys too, which are laid out, or `HArray`s, which come to
                lie as annotated.
            symbols: numbers for symbols that do not follow from the inputs.

        Returns:
            What the function returns, with a `HArray` for each array.

        Raises:
            InputError: an argument does not fit its annotation, a symbol has no number, or one that
                is given is in no annotation.
        """
        if len(arguments) != len(self._annotations):
            raise InputError(
                f"arguments: {len(arguments)} are given, and {len(self._annotations)} are annotated"
            )
        leaves, tree = jax.tree.flatten(arguments)
        weak = tuple(map(is_weak, leaves))
        leaves = [in_jax_types(as_array(each)) for each in leaves]
        annotations = [
            each
            for place, (wanted, argument) in enumerate(
                zip(self._annotations, arguments, strict=True)
            )
            for each in _for_leaves(wanted, argument, place)
        ]
        numbers = numbers_of(annotations, [leaf.shape for leaf in leaves], symbols or {})
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        key = tree, shapes, weak, tuple(sorted(numbers.items()))
        if key not in self._compiled:
            structs = [
                jax.ShapeDtypeStruct(*shape, weak_type=each)
                for shape, each in zip(shapes, weak, strict=True)
            ]
            self._compiled[key] = self._compile(tree, structs, annotations, numbers, symbols or {})
        run, bound, result_tree = self._compiled[key]
        placed = [self._laid_out(*pair) for pair in zip(leaves, bound, strict=True)]
        return jax.tree.unflatten(result_tree, run(*placed))

    def _compile(
        self,
        tree: Any,
        structs: Sequence[jax.ShapeDtypeStruct],
        annotations: Sequence[HSharding | None],
        numbers: Mapping[str, int],
        given: Mapping[str, int],
    ) -> tuple[LocalProgram, list[HSharding | None], Any]:
        def flat(*leaves: Any) -> Any:
            return self._function(*jax.tree.unflatten(tree, leaves))

        closed, results = jax.make_jaxpr(flat, return_shape=True)(*structs)
        held = [each for each in annotations if each is not None]
        known = {name for each in (*held, *_reshards(closed.jaxpr)) for name in each.symbols}
        for name in given:
            if name not in known:
                raise InputError(f"symbols: {unknown_name('symbol', name, known)}")
        bound = [annotation and annotation.bind(numbers) for annotation in annotations]
        program = deduce(closed, bound, strategy=self._strategy, symbols=numbers, mend=self._mend)
        compiled = LocalProgram(specialize(program), self._devices, self._network)
        return compiled, bound, jax.tree.structure(results)

    def _laid_out(self, array: Any, annotation: HSharding | None) -> Any:
        if annotation is None:
            return array
        if isinstance(array, HArray):
            alike = array.annotation == annotation
            return array if alike else array.reshard(annotation, self._network)
        return HArray.of(array, annotation, self._devices)


def _check_annotations(annotations: Any) -> None:
    if not isinstance(annotations, tuple | list):
        raise InputError(
            f"annotations: {shown(annotations)} is not allowed: a list with one for each argument"
        )
    for place, wanted in enumerate(annotations):
        for leaf in _leaves_of(wanted):
            if not (leaf is None or isinstance(leaf, HSharding)):
                raise InputError(
                    f"annotations[{place}]: {shown(leaf)} is not allowed: an HSharding or None"
                )


def _for_leaves(wanted: PyTree, argument: PyTree, place: int) -> list[HSharding | None]:
    """The annotation of each leaf of an argument."""
    count = len(jax.tree.leaves(argument))
    if wanted is None or isinstance(wanted, HSharding):
        return [wanted] * count
    found = _leaves_of(wanted)
    if len(found) != count:
        raise InputError(
            f"annotations[{place}]: it has {len(found)} leaves, and the argument has {count} "
            f"arrays; one annotation (or None) for each, or one for all"
        )
    return found


def _leaves_of(wanted: PyTree) -> list[Any]:
    """What is given as the annotations of an argument."""
    return jax.tree.leaves(wanted, is_leaf=lambda x: x is None or isinstance(x, HSharding))


def _reshards(jaxpr: _compat.Jaxpr) -> Iterator[HSharding]:
    """The annotations of all reshards in a program."""
    for equation in jaxpr.eqns:
        if equation.primitive is RESHARD:
            yield from equation.params["resharding"].annotations
        for inner in _compat.inner_jaxprs(equation):
            yield from _reshards(inner)

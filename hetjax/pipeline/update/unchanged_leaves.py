"""Which parameters an optimizer leaves as they are, and whose gradients it does not read.

Nothing is known of any optimizer by name. Its update is traced, and the trace is simplified by a
few rules that hold for all numbers: what adds zeros to a value gives the value, what is made of
zeros alone is zeros. A leaf is frozen where its new value is its old one then, and a gradient that
nothing else depends on need not be there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from hetjax.errors import InputError
from hetjax.pipeline.program.computations import is_extended
from hetjax.pipeline.program.frozen_leaves import FrozenLeaves
from hetjax.pipeline.program.loss import parameter_shapes
from hetjax.pipeline.program.traced_program import (
    Constant,
    FlatJaxpr,
    Operand,
    Program,
    Step,
    operand_value,
)
from hetjax.pipeline.update.state_shares import state_shares
from hetjax.pipeline.update.traced_update import trace_update

_ZEROS_OF_ZEROS = frozenset(
    """
    abs add add_any broadcast_in_dim concatenate convert_element_type copy mul neg pad reduce_sum
    reshape sign slice square squeeze sub transpose
    """.split()
)
"""What makes zeros of zeros alone."""

_FORMS = frozenset(("convert_element_type", "copy", "reshape", "squeeze"))
"""What gives a value as it is, where shape and dtype stay."""


def frozen_leaves(optimizer: optax.GradientTransformation, parameters: PyTree) -> FrozenLeaves:
    """Find what an optimizer leaves out.

    Args:
        optimizer: an Optax transformation.
        parameters: pytree of arrays or shapes, or a function without arguments that makes it.

    Returns:
        The leaves without a gradient and those without an update, by their place, and how much of
        the optimizer's state the others have.

    Raises:
        InputError: the optimizer's update cannot be traced, or trains nothing.

    Example:
        >>> labels = {"embedding": "frozen", "head": "trained"}
        >>> optimizer = optax.multi_transform(
        ...     {"trained": optax.adam(1e-3), "frozen": optax.set_to_zero()}, labels
        ... )
        >>> found = frozen_leaves(optimizer, {"embedding": jnp.ones(4), "head": jnp.ones(4)})
        >>> found.without_gradient, found.without_update
        (frozenset({0}), frozenset({0}))
    """
    leaves, tree = jax.tree.flatten(parameter_shapes(parameters))

    def unflatten(values: Sequence[Any]) -> PyTree:
        return jax.tree.unflatten(tree, values)

    flat = trace_update(optimizer, leaves, unflatten)
    if flat not in _found:
        _found[flat] = _frozen_leaves(flat, len(leaves))
    return _found[flat]


_found: WeakKeyDictionary[FlatJaxpr, FrozenLeaves] = WeakKeyDictionary()
"""What was found of traces before: planners ask, and then trainers."""


def _frozen_leaves(flat: FlatJaxpr, count: int) -> FrozenLeaves:
    """The same of the trace of an update of so many leaves."""
    parameter_values, gradients = flat.inputs[:count], flat.inputs[count : 2 * count]
    # Outputs are new parameters, new state, and three metrics, which read all gradients.
    new_parameters, new_state = flat.outputs[:count], flat.outputs[count:-3]
    simplified = _Simplified(flat)
    same = {
        leaf
        for leaf, (value, new) in enumerate(zip(parameter_values, new_parameters, strict=True))
        if simplified.value_of(new) == value
    }
    changed = [new for leaf, new in enumerate(new_parameters) if leaf not in same]
    read = simplified.read_by([*changed, *new_state])
    if read.isdisjoint(gradients):
        raise InputError(
            f"the optimizer reads no gradient of the {count} parameter leaves, so nothing would be "
            f"trained; allowed: one that leaves one or more of them to train"
        )
    ungraded = {leaf for leaf, value in enumerate(gradients) if value not in read}
    unread = {leaf for leaf, value in enumerate(parameter_values) if value not in read}
    without_update = frozenset(same & ungraded & unread)
    shares = state_shares(flat, count, without_update)
    return FrozenLeaves(frozenset(ungraded), without_update, shares)


def with_frozen_leaves(
    program: Program, optimizer: optax.GradientTransformation, parameters: PyTree
) -> Program:
    """A program that knows which of its parameters an optimizer leaves as they are.

    It also knows how much of the optimizer's state the others have.

    Args:
        program: the traced loss function.
        optimizer: an Optax transformation.
        parameters: pytree of arrays or shapes, or a function without arguments that makes it.

    Returns:
        The program; it itself where all are trained.

    Raises:
        InputError: the optimizer's update cannot be traced, or trains nothing.
    """
    found, leaves = frozen_leaves(optimizer, parameters), program.leaves
    shares = found.state_shares
    frozen = FrozenLeaves(
        leaves.split_places(found.without_gradient),
        leaves.split_places(found.without_update),
        tuple(shares[leaf] for leaf, _ in leaves.places) if shares else (),
    )
    return program if frozen == program.frozen else replace(program, frozen=frozen)


class _Simplified:
    """A trace in which values that are zeros, or others under another number, are known."""

    def __init__(self, flat: FlatJaxpr):
        self._flat = flat
        self._zeros: set[int] = set()
        self._other: dict[int, int] = {}
        for step in flat.steps:
            if len(step.outputs) == 1:
                self._look(step, step.outputs[0])

    def value_of(self, operand: Operand) -> int | None:
        """The number by which a value was known first; None for a constant."""
        value = operand_value(operand)
        return None if value is None else self._other.get(value, value)

    def read_by(self, outputs: Sequence[Operand]) -> set[int]:
        """The values that outputs depend on."""
        read = {self.value_of(operand) for operand in outputs if not self._is_zero(operand)}
        for step in reversed(self._flat.steps):
            if read.intersection(step.outputs):
                read.update(self.value_of(each) for each in step.inputs if not self._is_zero(each))
        return {value for value in read if value is not None}

    def _is_zero(self, operand: Operand) -> bool:
        if isinstance(operand, Constant):
            return _is_known(operand) and not np.any(np.asarray(operand.value))
        return operand in self._zeros

    def _look(self, step: Step, output: int) -> None:
        if self._makes_zeros(step):
            self._zeros.add(output)
            return
        same = self._passed_on(step)
        value = None if same is None else self.value_of(same)
        if value is not None and self._flat.avals[value] == self._flat.avals[output]:
            self._other[output] = value

    def _makes_zeros(self, step: Step) -> bool:
        zeros = [self._is_zero(operand) for operand in step.inputs]
        if step.name == "select_n":
            return all(zeros[1:])
        if step.name == "mul" and any(zeros):
            other = step.inputs[1 - zeros.index(True)]
            return all(zeros) or _is_finite(other)
        if step.name == "div":
            return zeros[0] and _is_finite(step.inputs[1])
        return step.name in _ZEROS_OF_ZEROS and all(zeros)

    def _passed_on(self, step: Step) -> Operand | None:
        """The operand that a step gives as it is, if its form does not change."""
        if step.name in _FORMS:
            return step.inputs[0]
        if step.name in ("add", "add_any", "sub") and self._is_zero(step.inputs[1]):
            return step.inputs[0]
        if step.name in ("add", "add_any") and self._is_zero(step.inputs[0]):
            return step.inputs[1]
        if step.name == "select_n" and len({self.value_of(o) for o in step.inputs[1:]}) == 1:
            return step.inputs[1]
        return None


def _is_known(operand: Constant) -> bool:
    return not is_extended(operand.value) and jnp.issubdtype(
        np.asarray(operand.value).dtype, jnp.number
    )


def _is_finite(operand: Operand) -> bool:
    """Whether an operand is known, finite and nowhere zero: zeros stay zeros with it."""
    if not isinstance(operand, Constant) or not _is_known(operand):
        return False
    array = np.asarray(operand.value)
    return bool(np.all(np.isfinite(array)) and np.all(array))

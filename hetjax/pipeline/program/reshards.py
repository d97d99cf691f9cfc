"""The reshards of a program: where a user's `hetjax.reshard` stands, and what stands for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from hetjax import _compat
from hetjax.errors import InputError
from hetjax.pipeline.program.traced_program import Program, Step
from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.annotation.constraint import CONSTRAINT
from hetjax.sharding.deduction.reshard import RESHARD


@dataclass(frozen=True)
class FoundReshard:
    """A reshard in a program.

    Args:
        start: the first position of its step.
        stop: the position after its step's last; a scan has many, and reshards in its body.
        annotations: how the value shall lie, one for each strategy; or one for all.
        shape: the value's shape and dtype.
        line: the file and the line of the user's program.
    """

    start: int
    stop: int
    annotations: tuple[HSharding, ...]
    shape: jax.ShapeDtypeStruct
    line: str


Obey = Callable[[FoundReshard], HSharding | NamedSharding | None]
"""From a reshard to how its value lies: among the members of a stage, on the mesh of a stage that
has one, or None where there is but one device."""


def reshards_of(program: Program) -> Iterator[FoundReshard]:
    """The reshards of a program in order, those in bodies too.

    Args:
        program: the traced loss function.

    Yields:
        The reshards.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec
        >>> from hetjax.pipeline.program.tracing import trace
        >>> from hetjax import reshard
        >>> from hetjax.sharding import Subgroup
        >>> third = HSharding((Subgroup((3,), (), PartitionSpec()),))
        >>> loss = lambda w, x: jnp.sum(reshard(x @ w, third))
        >>> program = trace(loss, jnp.ones((4, 2)), jnp.ones((8, 4)))
        >>> [(each.start, each.shape.shape) for each in reshards_of(program)]
        [(1, (8, 2))]
    """
    for position, step in enumerate(program.steps):
        for equation in _equations_of(RESHARD, step.equation):
            yield _found(equation, position)


def with_obeyed_reshards(program: Program, obey: Obey) -> Program:
    """A program in which what a stage does stands for each reshard.

    Args:
        program: the traced loss function.
        obey: how the value of a reshard lies.

    Returns:
        The program.

    Raises:
        InputError: a reshard stands in a function with a derivative of its own.
    """
    steps = (_obeyed(step, position, obey) for position, step in enumerate(program.steps))
    return replace(program, steps=tuple(steps))


def _obeyed(step: Step, position: int, obey: Obey) -> Step:
    if step.equation is None or not any(_equations_of(RESHARD, step.equation)):
        return step

    def rewrite(equation: _compat.JaxprEqn) -> _compat.JaxprEqn:
        found = any(_equations_of(RESHARD, equation))
        if found and equation.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
            raise InputError(
                f"hetjax.reshard at {_compat.source_line(equation)} stands in a function with a "
                f"derivative of its own, where it cannot be obeyed; put it before or behind that"
            )
        if equation.primitive is not RESHARD:
            return equation
        lies = obey(_found(equation, position))
        if lies is None:
            return equation
        if isinstance(lies, NamedSharding):
            return equation.replace(primitive=CONSTRAINT, params={"sharding": lies})
        told = replace(equation.params["resharding"], annotations=(lies,))
        return equation.replace(params={"resharding": told})

    equation = _compat.rewritten(step.equation, rewrite)
    # The step keeps its name: what the model is does not depend on the plan.
    return replace(
        step, equation=equation, evaluate=lambda *operands: _compat.bind(equation, operands)
    )


def is_constrained(steps: Sequence[Step]) -> bool:
    """Whether steps say how a value lies on the mesh of their stage.

    Args:
        steps: the steps.
    """
    return any(any(_equations_of(CONSTRAINT, step.equation)) for step in steps)


def _equations_of(primitive: Any, equation: _compat.JaxprEqn | None) -> Iterator[_compat.JaxprEqn]:
    """The equations of a primitive in an equation: itself, and those of its bodies."""
    if equation is None:
        return
    if equation.primitive is primitive:
        yield equation
    for body in _compat.inner_jaxprs(equation):
        for each in body.eqns:
            yield from _equations_of(primitive, each)


def _found(equation: _compat.JaxprEqn, position: int) -> FoundReshard:
    aval: Any = equation.outvars[0].aval
    return FoundReshard(
        position,
        position + 1,
        equation.params["resharding"].annotations,
        jax.ShapeDtypeStruct(aval.shape, aval.dtype),
        _compat.source_line(equation),
    )

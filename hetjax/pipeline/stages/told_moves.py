"""A trace in which every change of annotation is written down as a reshard.

Deduction over a stage's forward and backward pass together finds where values must come to lie in
another way. Written into the trace, these moves are steps like any other: the passes that divide
it into tasks need not know that a stage has several members.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from hetjax import _compat
from hetjax.pipeline.program.traced_program import (
    Constant,
    FlatJaxpr,
    Operand,
    Step,
    needed_steps,
)
from hetjax.pipeline.stages.recomputing import with_barriers
from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.deduction.annotated_program import AnnotatedProgram, Compute, Move, Node
from hetjax.sharding.deduction.opening import deduce_opened
from hetjax.sharding.deduction.reshard import EARLY, RESHARD, reshard

Flatten = Callable[[_compat.ClosedJaxpr], FlatJaxpr]
"""What makes a flat jaxpr of a trace."""


def with_told_moves(
    annotations: Sequence[HSharding], num_parameters: int = 0, num_cotangents: int = 0
) -> Flatten:
    """What flattens a trace, and writes the moves into it that annotations of its inputs imply.

    What is made again stands behind barriers, as `hetjax.pipeline.stages.recomputing` has them.

    Args:
        annotations: how each input of the trace lies.
        num_parameters: how many inputs are parameters, the first ones.
        num_cotangents: how many are cotangents, the last ones.

    Returns:
        A function as `flatten_jaxpr`; the values of what it gives have annotations.
    """

    def flatten(closed: _compat.ClosedJaxpr) -> FlatJaxpr:
        behind = with_barriers(closed, num_parameters, num_cotangents)
        return told(deduce_opened(behind, annotations))

    return flatten


def told(program: AnnotatedProgram) -> FlatJaxpr:
    """An annotated program as a flat jaxpr, in which its moves are reshards.

    Args:
        program: the program.

    Returns:
        The flat jaxpr, with the annotations of its values.
    """

    def operand(value: int) -> Operand:
        return Constant(program.constants[value]) if value in program.constants else value

    def step(node: Node) -> Step:
        if isinstance(node, Move):
            return _moved(node, operand(node.input))
        assert isinstance(node, Compute), "only specialized programs have additions"
        return _computed(node, [operand(value) for value in node.inputs])

    steps = tuple(map(step, program.nodes))
    outputs = tuple(map(operand, program.outputs))
    needed = needed_steps(steps, outputs)
    return FlatJaxpr(program.shapes, program.inputs, needed, outputs, program.annotations)


def _computed(node: Compute, operands: Sequence[Operand]) -> Step:
    equation = _forgotten(node.equation)
    return Step(
        equation.primitive.name,
        tuple(operands),
        node.outputs,
        lambda *arrays: _compat.bind(equation, arrays),
        equation,
    )


def _forgotten(equation: _compat.JaxprEqn) -> _compat.JaxprEqn:
    """An equation whose bodies do not ask where cotangents came from.

    A body of the backward pass is soon without the forward one. What it has moved inside members is
    found again.
    """
    if not _compat.inner_jaxprs(equation):
        return equation

    def rewrite(inner: _compat.JaxprEqn) -> _compat.JaxprEqn:
        if inner.primitive is not RESHARD or not inner.params["resharding"].is_reverse:
            return inner
        return inner.replace(primitive=jax.lax.copy_p, params={})

    return _compat.rewritten(equation, rewrite)


def _moved(node: Move, operand: Operand) -> Step:
    return Step(
        RESHARD.name,
        (operand,),
        (node.output,),
        lambda x: [reshard(x, node.destination, is_early=node.is_early)],
        None,
        beside=EARLY if node.is_early else (),
    )

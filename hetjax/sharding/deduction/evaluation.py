"""What one submesh computes of an annotated program, traced under the submesh's own mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from hetjax import _compat
from hetjax.sharding.annotation.annotation import DUPLICATE, HSharding
from hetjax.sharding.annotation.subgroup import axes_of, entries_of
from hetjax.sharding.deduction.annotated_program import (
    Addition,
    AnnotatedProgram,
    Compute,
    Move,
    Node,
    Taken,
    is_padded,
    undivided,
)
from hetjax.sharding.deduction.bottom_tier import OperandError, apply, resharded, spec_of
from hetjax.sharding.deduction.summands import added, as_parts, as_sum
from hetjax.sharding.deduction.top_tier import WHOLE, TopTier, take, top_tier_of


def evaluate_program(
    program: AnnotatedProgram, place: int, arrays: Sequence[Any]
) -> tuple[Any, ...]:
    """Evaluate a program without moves between submeshes, on one of them.

    Args:
        program: the program.
        place: which submesh of its union.
        arrays: what the submesh has of the inputs.

    Returns:
        What it has of the outputs.
    """
    held: dict[int, Any] = dict(zip(program.inputs, arrays, strict=True))
    held.update(program.constants)
    for node in program.nodes:
        evaluate_node(node, place, held)
    return tuple(held[value] for value in program.outputs)


def evaluate_node(node: Node, place: int, held: dict[int, Any]) -> None:
    """Evaluate one node on one submesh.

    Args:
        node: the node.
        place: which submesh of its union.
        held: by value, what the submesh has; the node's results are added.
    """
    if isinstance(node, Move):
        held[node.output] = _moved_inside(node, place, held[node.input])
        return
    operands = [held[value] for value in node.inputs]
    if isinstance(node, Addition):
        results = [added(operands)]
    else:
        results = evaluate_equation(node, place, operands)
    held.update(zip(node.outputs, results, strict=True))


def evaluate_equation(node: Compute, place: int, operands: Sequence[Any]) -> list[Any]:
    """Evaluate an equation on what one submesh has.

    Args:
        node: the equation.
        place: which submesh of its union.
        operands: what the submesh has of the operands.

    Returns:
        What it then has of the results.

    Raises:
        OperandError: the operands cannot be taken as they are sharded.
    """
    operands = [
        _taken(array, node.taken[i], place, i) if i in node.taken else array
        for i, array in enumerate(operands)
    ]
    if node.bodies:
        return _CONTROL[node.equation.primitive.name](node, place, operands)
    params = dict(node.equation.params)
    if node.resized:
        params |= node.resized[place]
    return apply(node.equation, params, node.signature, operands, sums_stay=node.sums_stay)


def _moved_inside(node: Move, place: int, array: Any) -> Any:
    assert node.is_inside, "while a submesh computes it gets nothing from others"
    destination = node.destination
    if node.source is None or node.source.hdim == DUPLICATE:
        top = top_tier_of(destination, array.shape)
        if top.ranges:
            array = _in_range(array, destination, place)
        elif top != WHOLE:
            array = _taken(_divisible(array, top), take(top), place, 0)
    elif is_padded(node.source, destination):
        array = _padded(array, node.source, place)
    return resharded(array, destination.subgroups[place].spec)


def _in_range(array: Any, destination: HSharding, place: int) -> Any:
    """What a submesh takes of a whole value, along several dimensions."""
    spec = spec_of(array)
    assert isinstance(destination.hdim, tuple)
    entries = entries_of(spec, array.ndim)
    for dimension in destination.hdim:
        entries[dimension] = None
    array = resharded(array, PartitionSpec(*entries, unreduced=spec.unreduced))
    starts, stops = zip(*destination.regions(array.shape)[place], strict=True)
    return jax.lax.slice(array, starts, stops)


def _divisible(array: Any, top: TopTier) -> Any:
    """An array whose dimension that submeshes share is not divided inside this one."""
    spec = spec_of(array)
    entries = entries_of(spec, array.ndim)
    if not isinstance(top.hdim, int) or entries[top.hdim] is None:
        return array
    entries[top.hdim] = None
    return resharded(array, PartitionSpec(*entries, unreduced=spec.unreduced))


def _padded(array: Any, source: HSharding, place: int) -> Any:
    """What a submesh has of a value that they share, with zeros where the others have theirs."""
    dimension = source.hdim
    assert isinstance(dimension, int)
    array = resharded(array, undivided(spec_of(array), array.ndim, dimension))
    widths = [size for size in source.sizes if isinstance(size, int)] or [array.shape[dimension]]
    assert len(widths) == len(source.subgroups), "what is computed has sizes in numbers"
    zeros = [(0, 0, 0)] * array.ndim
    zeros[dimension] = (sum(widths[:place]), sum(widths[place + 1 :]), 0)
    return jax.lax.pad(array, np.zeros((), array.dtype), zeros)


def _taken(array: Any, taken: Taken, place: int, operand: int) -> Any:
    """What a submesh takes of an operand that it has whole."""
    if taken.dimension is None:
        return array if place == 0 else jnp.zeros_like(array)
    spec = spec_of(array)
    entries = entries_of(spec, array.ndim)
    if entries[taken.dimension] is not None:
        entries[taken.dimension] = None
        raise OperandError(
            operand,
            f"each submesh takes its part of dimension {taken.dimension}, which is divided inside",
            PartitionSpec(*entries, unreduced=spec.unreduced),
        )
    start, stop = taken.parts[place]
    return jax.lax.slice_in_dim(array, start, stop, axis=taken.dimension)


def _like(arrays: Sequence[Any], others: Sequence[Any]) -> tuple[Any, ...]:
    """Arrays with the shardings of others."""
    pairs = zip(arrays, others, strict=True)
    return tuple(resharded(array, spec_of(other)) for array, other in pairs)


def _check_carry(carry: Sequence[Any], first: int) -> None:
    """Check that no partial sum goes round: XLA would add it up again in each iteration."""
    for place, array in enumerate(carry, first):
        spec = spec_of(array)
        if spec.unreduced:
            reason = "an iteration hands it to the next one, and it is a partial sum"
            raise OperandError(place, reason, PartitionSpec(*spec.partitions))


def _scan(node: Compute, place: int, operands: Sequence[Any]) -> list[Any]:
    params, (body,) = node.equation.params, node.bodies
    num_consts, num_carry = _compat.scan_sizes(params)
    consts, carry = operands[:num_consts], operands[num_consts : num_consts + num_carry]
    rows = operands[num_consts + num_carry :]
    for i, array in enumerate(rows):
        spec = spec_of(array)
        if spec.partitions and spec.partitions[0] is not None:
            raise OperandError(
                num_consts + num_carry + i,
                "the scan goes over its dimension 0, which is divided",
                PartitionSpec(None, *spec.partitions[1:], unreduced=spec.unreduced),
            )
    _check_carry(carry, num_consts)
    sums = [spec_of(array).unreduced for array in rows]
    made: list[frozenset[str]] = []

    def step(carry: tuple[Any, ...], row: tuple[Any, ...]) -> tuple[Any, Any]:
        row = tuple(as_sum(array, axes) for array, axes in zip(row, sums, strict=True))
        outputs = evaluate_program(body, place, [*consts, *carry, *row])
        made[:] = [spec_of(array).unreduced for array in outputs[num_carry:]]
        return _like(outputs[:num_carry], carry), tuple(map(as_parts, outputs[num_carry:]))

    end, stacked = jax.lax.scan(
        step,
        tuple(map(_typed, carry)),
        tuple(as_parts(array, rows=1) for array in rows),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    pairs = zip(stacked, made, strict=True)
    return [*end, *(as_sum(array, axes, rows=1) for array, axes in pairs)]


def _while(node: Compute, place: int, operands: Sequence[Any]) -> list[Any]:
    params, (condition, body) = node.equation.params, node.bodies
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    _check_carry(operands[second:], second)

    def goes_on(carry: tuple[Any, ...]) -> Any:
        return evaluate_program(condition, place, [*operands[:first], *carry])[0]

    def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        return _like(evaluate_program(body, place, [*operands[first:second], *carry]), carry)

    # JAX batches a loop so: each example goes on by a condition of its own.
    of_each = range(len(params["cond_jaxpr"].out_avals[0].shape))

    def any_goes_on(carry: tuple[Any, ...]) -> Any:
        return jax.lax.reduce_or(goes_on(carry), of_each)

    def step_of_each(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        going, after = goes_on(carry), step(carry)
        return tuple(_where(going, *pair) for pair in zip(after, carry, strict=True))

    loop = (any_goes_on, step_of_each) if of_each else (goes_on, step)
    return list(jax.lax.while_loop(*loop, tuple(map(_typed, operands[second:]))))


def _where(condition: Any, chosen: Any, other: Any) -> Any:
    """One or the other array, by a condition for each element of its first dimensions."""
    which = jax.lax.broadcast_in_dim(condition, chosen.shape, range(condition.ndim))
    return jax.lax.select(resharded(which, spec_of(chosen)), chosen, other)


def _cond(node: Compute, place: int, operands: Sequence[Any]) -> list[Any]:
    index, *rest = operands
    found = [
        jax.eval_shape(lambda *arrays, body=body: evaluate_program(body, place, arrays), *rest)
        for body in node.bodies
    ]
    # A value that one branch leaves divided or as a partial sum may be so: of a whole one, which
    # another branch may leave, each device takes its part.
    targets = [max(each, key=_num_axes) for each in zip(*found, strict=True)]

    def branch(body: AnnotatedProgram) -> Any:
        return lambda *arrays: _like(evaluate_program(body, place, arrays), targets)

    return list(jax.lax.switch(index, [branch(body) for body in node.bodies], *rest))


def _num_axes(array: Any) -> int:
    """Over how many axes an array is divided or a partial sum."""
    spec = spec_of(array)
    return len(spec.unreduced) + sum(len(axes_of(entry)) for entry in spec.partitions)


def _typed(array: Any) -> Any:
    """An array that is carried: not weakly typed, so that its type stays the same."""
    return jax.lax.convert_element_type(array, array.dtype)


_CONTROL: Mapping[str, Any] = {"scan": _scan, "while": _while, "cond": _cond}
"""How equations that hold jaxprs are evaluated."""


def holds_jaxprs(equation: _compat.JaxprEqn) -> bool:
    """Whether an equation is a scan, a loop or a conditional."""
    return equation.primitive.name in _CONTROL

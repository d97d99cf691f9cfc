"""What one submesh computes of an annotated program, traced under the submesh's own mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from hetjax import _compat
from hetjax.sharding.annotated_program import AnnotatedProgram, Compute, Move, Taken
from hetjax.sharding.annotation import axes_of
from hetjax.sharding.bottom_tier import OperandError, apply, spec_of
from hetjax.sharding.top_tier import WHOLE, take, top_tier_of


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


def evaluate_node(node: Compute | Move, place: int, held: dict[int, Any]) -> None:
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
        _taken(array, node.taken[i], place) if i in node.taken else array
        for i, array in enumerate(operands)
    ]
    if node.bodies:
        return _CONTROL[node.equation.primitive.name](node, place, operands)
    params = dict(node.equation.params)
    if node.resized:
        params |= node.resized[place]
    return apply(node.equation, params, node.signature, operands)


def _moved_inside(node: Move, place: int, array: Any) -> Any:
    assert node.is_inside, "only the sharding inside submeshes changes while they compute"
    destination = node.destination
    if node.source is None:
        top = top_tier_of(destination, array.shape)
        if top != WHOLE:
            array = _taken(array, take(top), place)
    return resharded(array, destination.subgroups[place].spec)


def resharded(array: Any, spec: PartitionSpec) -> Any:
    """An array with another sharding inside its submesh."""
    if _same_spec(spec_of(array), spec):
        return array
    return jax.sharding.reshard(array, NamedSharding(jax.sharding.get_abstract_mesh(), spec))


def _same_spec(a: PartitionSpec, b: PartitionSpec) -> bool:
    def entries(spec: PartitionSpec) -> list[tuple[str, ...]]:
        found = [axes_of(entry) for entry in spec.partitions]
        while found and not found[-1]:
            found.pop()
        return found

    return entries(a) == entries(b) and a.unreduced == b.unreduced


def _taken(array: Any, taken: Taken, place: int) -> Any:
    """What a submesh takes of an operand that it has whole."""
    if taken.dimension is None:
        return array if place == 0 else jnp.zeros_like(array)
    spec = spec_of(array)
    entries = [*spec.partitions, *[None] * (array.ndim - len(spec.partitions))]
    if entries[taken.dimension] is not None:
        entries[taken.dimension] = None
        array = resharded(array, PartitionSpec(*entries, unreduced=spec.unreduced))
    start, stop = taken.parts[place]
    return jax.lax.slice_in_dim(array, start, stop, axis=taken.dimension)


def _like(arrays: Sequence[Any], others: Sequence[Any]) -> tuple[Any, ...]:
    """Arrays with the shardings of others."""
    pairs = zip(arrays, others, strict=True)
    return tuple(resharded(array, spec_of(other)) for array, other in pairs)


def _summed(array: Any) -> Any:
    """An array without partial sums, which JAX cannot stack."""
    return resharded(array, PartitionSpec(*spec_of(array).partitions))


def _scan(node: Compute, place: int, operands: Sequence[Any]) -> list[Any]:
    params, (body,) = node.equation.params, node.bodies
    num_consts, num_carry = params["num_consts"], params["num_carry"]
    consts, carry = operands[:num_consts], operands[num_consts : num_consts + num_carry]
    rows = operands[num_consts + num_carry :]
    for i, array in enumerate(rows):
        spec = spec_of(array)
        if spec.unreduced or (spec.partitions and spec.partitions[0] is not None):
            raise OperandError(
                num_consts + num_carry + i,
                "the scan takes it row by row, and its rows are divided or partial sums",
                PartitionSpec(None, *spec.partitions[1:]),
            )

    def step(carry: tuple[Any, ...], row: tuple[Any, ...]) -> tuple[Any, Any]:
        outputs = evaluate_program(body, place, [*consts, *carry, *row])
        return _like(outputs[:num_carry], carry), tuple(map(_summed, outputs[num_carry:]))

    end, stacked = jax.lax.scan(
        step,
        tuple(map(_typed, carry)),
        tuple(rows),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*end, *stacked]


def _while(node: Compute, place: int, operands: Sequence[Any]) -> list[Any]:
    params, (condition, body) = node.equation.params, node.bodies
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

    def goes_on(carry: tuple[Any, ...]) -> Any:
        return evaluate_program(condition, place, [*operands[:first], *carry])[0]

    def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        return _like(evaluate_program(body, place, [*operands[first:second], *carry]), carry)

    return list(jax.lax.while_loop(goes_on, step, tuple(map(_typed, operands[second:]))))


def _cond(node: Compute, place: int, operands: Sequence[Any]) -> list[Any]:
    index, *rest = operands
    first = jax.eval_shape(lambda *a: evaluate_program(node.bodies[0], place, a), *rest)

    def branch(body: AnnotatedProgram) -> Any:
        return lambda *arrays: _like(evaluate_program(body, place, arrays), first)

    return list(jax.lax.switch(index, [branch(body) for body in node.bodies], *rest))


def _typed(array: Any) -> Any:
    """An array that is carried: not weakly typed, so that its type stays the same."""
    return jax.lax.convert_element_type(array, array.dtype)


_CONTROL: Mapping[str, Any] = {"scan": _scan, "while": _while, "cond": _cond}
"""How equations that hold jaxprs are evaluated."""


def holds_jaxprs(equation: _compat.JaxprEqn) -> bool:
    """Whether an equation is a scan, a loop or a conditional."""
    return equation.primitive.name in _CONTROL

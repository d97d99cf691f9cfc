"""Values of a program that are to lie in a certain way on the mesh that computes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jax.sharding import NamedSharding

from hetjax.pipeline.program.traced_program import Program, Step
from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.annotation.constraint import constrain
from hetjax.sharding.deduction.reshard import reshard


def constrained(program: Program, lies: Mapping[int, NamedSharding | HSharding]) -> Program:
    """A program that tells how some of its values lie.

    Their cotangents lie as they do. The numbers that it computes are the same.

    Args:
        program: the traced loss function.
        lies: by the value's number, how it lies: on one mesh, which may be abstract, or among the
            members of a stage.

    Returns:
        The program, in which the steps that make these values say so.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax.sharding import AbstractMesh, PartitionSpec
        >>> from hetjax.pipeline.program.tracing import trace
        >>> program = trace(lambda w, x: jnp.sum(x @ w), jnp.ones((4, 2)), jnp.ones((8, 4)))
        >>> product = program.steps[0].outputs[0]
        >>> mesh = AbstractMesh((2,), ("tensor",))
        >>> columns = NamedSharding(mesh, PartitionSpec(None, "tensor"))
        >>> [step.name for step in constrained(program, {product: columns}).steps[:1]]
        ['dot_general']
    """
    steps = tuple(
        _constrained(step, lies) if lies.keys() & set(step.outputs) else step
        for step in program.steps
    )
    return replace(program, steps=steps)


def _constrained(step: Step, lies: Mapping[int, NamedSharding | HSharding]) -> Step:
    outputs = [lies.get(output) for output in step.outputs]

    def evaluate(*operands: Any) -> list[Any]:
        results = step.evaluate(*operands)
        return [_told(result, lie) for result, lie in zip(results, outputs, strict=True)]

    return replace(step, evaluate=evaluate, beside=(step.beside, *outputs))


def _told(array: Any, lie: NamedSharding | HSharding | None) -> Any:
    if lie is None:
        return array
    return reshard(array, lie) if isinstance(lie, HSharding) else constrain(array, lie)

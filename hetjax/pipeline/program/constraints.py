"""Values of a program that are to lie in a certain way on the mesh that computes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jax.sharding import NamedSharding

from hetjax.pipeline.program.traced_program import Program, Step
from hetjax.sharding.annotation.constraint import constrain


def constrained(program: Program, shardings: Mapping[int, NamedSharding]) -> Program:
    """A program that tells the compiler how some of its values lie.

    Their cotangents lie as they do. The numbers that it computes are the same.

    Args:
        program: the traced loss function.
        shardings: by the value's number, how it lies, on a mesh that may be abstract.

    Returns:
        The program, in which the steps that make these values say so.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax.sharding import AbstractMesh, PartitionSpec
        >>> from hetjax.pipeline.program.traced_program import trace
        >>> program = trace(lambda w, x: jnp.sum(x @ w), jnp.ones((4, 2)), jnp.ones((8, 4)))
        >>> product = program.steps[0].outputs[0]
        >>> mesh = AbstractMesh((2,), ("tensor",))
        >>> lies = NamedSharding(mesh, PartitionSpec(None, "tensor"))
        >>> [step.name for step in constrained(program, {product: lies}).steps[:1]]
        ['dot_general']
    """
    steps = tuple(
        _constrained(step, shardings) if shardings.keys() & set(step.outputs) else step
        for step in program.steps
    )
    return replace(program, steps=steps)


def _constrained(step: Step, shardings: Mapping[int, NamedSharding]) -> Step:
    lies = [shardings.get(output) for output in step.outputs]

    def evaluate(*operands: Any) -> list[Any]:
        results = step.evaluate(*operands)
        return [
            result if sharding is None else constrain(result, sharding)
            for result, sharding in zip(results, lies, strict=True)
        ]

    return replace(step, evaluate=evaluate)

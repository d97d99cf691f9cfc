"""Segments compiled for the mesh of the member that runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
from jax.sharding import Mesh

from hetjax.runtime.instructions.divided_program import DividedProgram
from hetjax.runtime.instructions.member_instructions import (
    MemberPart,
    arguments_of,
    segment_name,
)
from hetjax.sharding.annotation.annotation import Subgroup
from hetjax.sharding.deduction.annotated_program import AnnotatedProgram, shape_on, union_of
from hetjax.sharding.deduction.evaluation import evaluate_node
from hetjax.sharding.deduction.specialize import Segment


def compile_segments(part: MemberPart, mesh: Mesh, programs: Set[str]) -> dict[str, Any]:
    """Compile the segments of one member.

    Args:
        part: the member's part of a stage's programs.
        mesh: its mesh, of typed axes.
        programs: which of the stage's programs.

    Returns:
        By name programs of two sequences of arrays: those that stay, and those that are donated.
    """
    return {
        segment_name(name, place): _compiled(divided, place, step, mesh)
        for name, divided in part.programs.items()
        if name in programs
        for place, step in enumerate(divided.steps)
        if isinstance(step, Segment) and step.submesh == part.submesh
    }


def _compiled(divided: DividedProgram, place: int, segment: Segment, mesh: Mesh) -> Any:
    program, groups = divided.program, arguments_of(divided, place)
    shapes = [[part_of(program, v, segment.submesh, mesh) for v in group] for group in groups]
    outputs = [part_of(program, v, segment.submesh, mesh).sharding for v in segment.outputs]
    with jax.set_mesh(mesh):
        run = _function(program, segment, groups)
        jitted = jax.jit(run, out_shardings=outputs, donate_argnums=1, keep_unused=True)
        return jitted.lower(*shapes).compile()


def _function(
    program: AnnotatedProgram, segment: Segment, groups: Sequence[Sequence[int]]
) -> Callable[..., Any]:
    def run(*arrays: Sequence[jax.Array]) -> list[jax.Array]:
        held = dict(program.constants)
        for values, given in zip(groups, arrays, strict=True):
            held.update(zip(values, given, strict=True))
        for node, place in segment.nodes:
            evaluate_node(node, place, held)
        return [held[value] for value in segment.outputs]

    return run


def part_of(
    program: AnnotatedProgram, value: int, submesh: Subgroup, mesh: Mesh
) -> jax.ShapeDtypeStruct:
    """What a submesh has of a value.

    Args:
        program: the program.
        value: the value.
        submesh: the submesh, with no sharding inside it.
        mesh: its mesh, of typed axes.

    Returns:
        Shape, dtype and sharding.
    """
    annotation = program.annotations[value]
    place = 0 if annotation is None else union_of(annotation).index(submesh)
    return shape_on(mesh, place, program.shapes[value], annotation)

"""Segments compiled for the mesh of the member that runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hetjax.pipeline.program.fences import evaluate, fenced
from hetjax.pipeline.program.traced_program import flatten_jaxpr
from hetjax.runtime.compilation.fenced_program import PREDICATE, FencedProgram, is_fenced
from hetjax.runtime.instructions.divided_program import DividedProgram
from hetjax.runtime.instructions.member_instructions import (
    MemberPart,
    arguments_of,
    segment_name,
)
from hetjax.sharding.annotation.subgroup import Subgroup
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
        options = {"out_shardings": outputs, "keep_unused": True}
        # Products are turned by merging dimensions, which may be divided over several devices.
        if not is_fenced(mesh) or mesh.size > 1:
            return jax.jit(run, donate_argnums=1, **options).lower(*shapes).compile()
        jitted = jax.jit(_fenced(run, shapes), donate_argnums=2, **options)
        whole = NamedSharding(mesh, PartitionSpec())
        predicate = jax.ShapeDtypeStruct(PREDICATE.shape, PREDICATE.dtype, sharding=whole)
        return FencedProgram(jitted.lower([predicate], *shapes).compile(), mesh)


def _fenced(
    run: Callable[..., Any], shapes: Sequence[Sequence[jax.ShapeDtypeStruct]]
) -> Callable[..., Any]:
    """The same function, as CPUs compute it best: with fences, told by its first argument."""
    flat = flatten_jaxpr(jax.make_jaxpr(run)(*shapes))

    def run_fenced(predicates: Sequence[Any], *arrays: Sequence[Any]) -> list[Any]:
        held = dict(zip(flat.inputs, jax.tree.leaves(arrays), strict=True))
        with fenced(predicates[0]):
            return evaluate(flat.steps, held, flat.outputs, flat.avals)

    return run_fenced


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

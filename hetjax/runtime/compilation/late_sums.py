"""Gradients that stay partial sums along the data axis until all microbatches have been added.

A compiler that divides a program by itself reduces every gradient in the program that makes it:
once a microbatch. Here the program is divided by deduction, in which sums over examples stay
partial and are added to partial sums, and one program at the end of the step reduces them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from hetjax.runtime.compilation.compiling import Argument, donated_places
from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.annotation.subgroup import Subgroup
from hetjax.sharding.deduction.deduce import deduce
from hetjax.sharding.deduction.evaluation import evaluate_program, resharded


def sharding_on(mesh: Mesh, annotation: HSharding) -> NamedSharding:
    """The sharding of an annotation of one submesh, whose arrays may be partial sums.

    Args:
        mesh: the submesh's devices.
        annotation: how an array lies on them.

    Returns:
        The sharding; of partial sums on a mesh with typed axes.
    """
    return annotation.on(typed_mesh(mesh) if annotation.is_partial else mesh)


def typed_mesh(mesh: Any) -> Mesh:
    """A mesh whose axes types of arrays tell of."""
    types = (AxisType.Explicit,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def compile_deduced(
    function: Callable[..., Any], arguments: Sequence[Argument], out_shardings: Any, mesh: Mesh
) -> Any:
    """Compile a function that is divided by deduction, as `compile_program` does by the compiler.

    Args:
        function: takes as many sequences of arrays as there are arguments.
        arguments: what it takes; their shardings may be those of partial sums.
        out_shardings: those of the results: for each part a sequence, or None for any.
        mesh: the mesh.

    Returns:
        The compiled function.
    """
    typed = typed_mesh(mesh)
    shapes, tree = jax.tree.flatten([list(argument.shapes) for argument in arguments])
    given = [sharding.spec for argument in arguments for sharding in argument.shardings]
    axes = tuple((str(name), int(size)) for name, size in typed.shape.items())
    group = Subgroup(tuple(range(typed.devices.size)), axes, PartitionSpec())
    closed, out_shape = jax.make_jaxpr(function, return_shape=True)(
        *jax.tree.unflatten(tree, shapes)
    )
    annotations = [HSharding((group.with_spec(spec),)) for spec in given]
    program = deduce(closed, annotations, mend=True, sums_stay=True)
    wanted = _flat_specs(out_shardings, out_shape)

    def run(*values: Any) -> Any:
        results = evaluate_program(program, 0, jax.tree.leaves(values))
        placed = [
            resharded(array, _without_sums(array) if spec is None else spec)
            for array, spec in zip(results, wanted, strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(out_shape), placed)

    typed_shapes = [
        jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(typed, spec))
        for shape, spec in zip(shapes, given, strict=True)
    ]
    with jax.set_mesh(typed):
        jitted = jax.jit(run, donate_argnums=donated_places(arguments), keep_unused=True)
        return jitted.lower(*jax.tree.unflatten(tree, typed_shapes)).compile()


def _flat_specs(shardings: Any, shapes: Any) -> list[PartitionSpec | None]:
    """The specification of each result; None for any."""
    if shardings is None:
        return [None] * len(jax.tree.leaves(shapes))
    if isinstance(shardings, NamedSharding):
        return [shardings.spec]
    return [
        spec
        for part, of_part in zip(shardings, shapes, strict=True)
        for spec in _flat_specs(part, of_part)
    ]


def _without_sums(array: Any) -> PartitionSpec:
    sharding = jax.typeof(array).sharding
    return PartitionSpec(*sharding.spec.partitions)

"""What makes no sense in the shares of a stage: by itself, or for a program."""

from __future__ import annotations

import itertools
from dataclasses import replace

from jax.sharding import PartitionSpec

from hetjax.errors import InputError, unknown_name
from hetjax.pipeline.program.traced_program import Program
from hetjax.planner.plan.module_shares import OperandShare, Share
from hetjax.planner.plan.parameter_names import parameters_meant, told_of
from hetjax.planner.plan.stage_plan import Spec, StagePlan
from hetjax.sharding.annotation.rules import divides


def check_shares(stage: StagePlan, where: str) -> None:
    """Check that a stage's shares are of its members.

    Args:
        stage: the stage.
        where: what errors name as the place.

    Raises:
        InputError: naming the field, its value and what is allowed.
    """
    shares = stage.shares
    if replace(shares, context=None) and len(stage.members) == 1:
        raise InputError(
            f"{where} is given, and the stage has one member; allowed where it has several"
        )
    if shares.batch:
        _check_sizes(shares.batch, stage, f"{where}.batch")
    for name, share in shares.parameters.items():
        _check_share(share, stage, f"{where}.parameters[{name!r}]")
    for value, share in shares.values.items():
        _check_share(share, stage, f"{where}.values[{value}]")
    for name, share in shares.updates.items():
        if share is not None:
            _check_share(share, stage, f"{where}.updates[{name!r}]")
        if name in shares.parameters:
            raise InputError(
                f"{where}.updates has {name!r}, which is in parameters, too; a parameter that is "
                f"divided is updated as it lies: leave it out"
            )
    _check_modules(stage, where)


def _check_modules(stage: StagePlan, where: str) -> None:
    """Check the modules of a stage by themselves."""
    shares = stage.shares
    if shares.modules and shares.values:
        raise InputError(
            f"{where}.values is given beside modules, which say how operands lie; allowed: one of "
            f"the two"
        )
    if shares.modules and stage.recompute:
        raise InputError(
            f"{where}.modules is given, and the stage recomputes; allowed: recompute false"
        )
    runs = [run for run, _ in shares.module_runs]
    for first, last in runs:
        if first >= last:
            raise InputError(
                f"{where}.modules has the run {[first, last]}; a run is its first position and the "
                f"one after its last"
            )
    for before, after in itertools.pairwise(runs):
        if before[1] != after[0]:
            raise InputError(
                f"{where}.modules has the runs {list(before)} and {list(after)}; each must begin "
                f"where the one before ends"
            )
    for m, module in enumerate(shares.modules):
        told: set[tuple[int, int]] = set()
        for o, each in enumerate(module.operands):
            place = f"{where}.modules[{m}].operands[{o}]"
            if (each.equation, each.operand) in told:
                raise InputError(
                    f"{place} is equation {each.equation}, operand {each.operand}, which another "
                    f"one is, too; an operand lies in one way"
                )
            told.add((each.equation, each.operand))
            if each.share is not None:
                _check_share(each.share, stage, f"{place}.share")
            if each.through is not None:
                _check_through(each, stage, f"{place}.through")


def check_module_runs(stage: StagePlan, positions: tuple[int, int], where: str) -> None:
    """Check that a stage's modules are all of it.

    Args:
        stage: the stage, of which `check_shares` has found nothing.
        positions: its first position in the program, and the one after its last.
        where: what errors name as the place.

    Raises:
        InputError: naming the field, its value and what is allowed.
    """
    edges = stage.shares.module_edges
    if edges and (edges[0], edges[-1]) != positions:
        raise InputError(
            f"{where}.modules are of the positions from {edges[0]} to {edges[-1]}; the stage's "
            f"layers are from {positions[0]} to {positions[1]}"
        )


def check_shared_batch(stage: StagePlan, microbatch_size: int, pipeline: str, place: str) -> None:
    """Check that each member can compute its examples of a microbatch.

    Args:
        stage: the stage, whose shares are of its members.
        microbatch_size: examples in a microbatch.
        pipeline: what errors name as the pipeline.
        place: what they name as the stage in it.

    Raises:
        InputError: naming the field, its value and what is allowed.
    """
    batch = stage.shares.batch
    if batch and sum(batch) != microbatch_size:
        raise InputError(
            f"{pipeline}.{place}.shares.batch is {list(batch)}, {sum(batch)} together; it must add "
            f"up to microbatch_size, {microbatch_size}"
        )
    for m, member in enumerate(stage.members):
        axis = f"mesh_shape {list(member.mesh_shape)} does not divide"
        if batch and batch[m] % member.mesh_shape[0]:
            raise InputError(
                f"{pipeline}.{place}.shares.batch[{m}] is {batch[m]}, which the data axis of "
                f"members[{m}].{axis}"
            )
        if not batch and microbatch_size % member.mesh_shape[0]:
            raise InputError(
                f"{pipeline}.microbatch_size is {microbatch_size}, which the data axis of "
                f"{place}.members[{m}].{axis}"
            )


def check_shares_for(stage: StagePlan, microbatch_size: int, program: Program, where: str) -> None:
    """Check that the shares of a stage fit a program.

    Args:
        stage: the stage, of which `check_shares` has found nothing, and which makes the values that
            its shares name.
        microbatch_size: examples in a microbatch.
        program: the traced loss function.
        where: what errors name as the stage.

    Raises:
        InputError: naming the field, its value and what is allowed.
    """
    parameters = dict(zip(program.parameter_names, program.parameters, strict=True))
    for field, shares in (
        ("parameters", stage.shares.parameters),
        ("updates", stage.shares.updates),
    ):
        for name, share in shares.items():
            meant = parameters_meant(name, parameters)
            if not meant:
                place = f"{where}.shares.{field}: parameter"
                raise InputError(unknown_name(place, name, parameters))
            if share is None:
                continue
            shape = program.avals[parameters[meant[0]]].shape
            place = f"{where}.shares.{field}[{name!r}]"
            check_fits(share, shape, f"the parameter's shape {shape}", place)
            for each in meant:
                spec = told_of(stage.parameters, each) or ()
                _check_inner(share, shape, spec, stage, place, f"parameters[{each!r}]")
    if microbatch_size != program.num_examples:
        return  # Of values of other microbatches the sizes are not known.
    for value, share in stage.shares.values.items():
        shape = program.avals[value].shape
        place = f"{where}.shares.values[{value}]"
        check_fits(share, shape, f"the value's shape {shape}", place)
        spec = stage.values.get(value, ())
        _check_inner(share, shape, spec, stage, place, f"values[{value}]")


def check_fits(share: Share, shape: tuple[int, ...], whose: str, where: str) -> None:
    """Check that an array has the dimension of a share, and that the sizes add up to it.

    Args:
        share: the share.
        shape: the array's shape.
        whose: what errors call the array.
        where: what errors name as the share.

    Raises:
        InputError: naming the field, its value and what is allowed.
    """
    if share.dimension >= len(shape):
        raise InputError(
            f"{where}.dimension is {share.dimension}; {whose} has "
            f"{f'dimensions 0 to {len(shape) - 1}' if shape else 'no dimension'}"
        )
    whole = shape[share.dimension]
    if sum(share.sizes) != whole:
        raise InputError(
            f"{where}.sizes is {list(share.sizes)}, {sum(share.sizes)} together; it must add up to "
            f"{whole}, dimension {share.dimension} of {whose}"
        )


def _check_inner(
    share: Share, shape: tuple[int, ...], spec: Spec, stage: StagePlan, where: str, told: str
) -> None:
    """Check that what each member has can be divided over its devices as the stage is told."""
    for m, (size, member) in enumerate(zip(share.sizes, stage.members, strict=True)):
        mine = (*shape[: share.dimension], size, *shape[share.dimension + 1 :])
        if not divides(PartitionSpec(*spec), mine, member.mesh_shape):
            raise InputError(
                f"{where}.sizes[{m}] is {size}: the stage's {told}, {list(spec)}, does not divide "
                f"the shape {mine} evenly on members[{m}].mesh_shape {list(member.mesh_shape)}"
            )


def _check_share(share: Share, stage: StagePlan, where: str) -> None:
    _check_sizes(share.sizes, stage, f"{where}.sizes")
    if not any(share.sizes):
        raise InputError(f"{where}.sizes is {list(share.sizes)}; some member must have some of it")


def _check_through(operand: OperandShare, stage: StagePlan, where: str) -> None:
    assert operand.through is not None, "it is checked where it is given"
    sizes = operand.through.sizes
    _check_share(operand.through, stage, where)
    if max(sizes) - min(sizes) > 1:
        raise InputError(
            f"{where}.sizes is {list(sizes)}; allowed: even parts, which differ by 1 at most"
        )
    if operand.share is not None and operand.share.dimension != operand.through.dimension:
        raise InputError(
            f"{where}.dimension is {operand.through.dimension}, and that of share is "
            f"{operand.share.dimension}; allowed: the same"
        )


def _check_sizes(sizes: tuple[int, ...], stage: StagePlan, where: str) -> None:
    if len(sizes) != len(stage.members):
        raise InputError(
            f"{where} is {list(sizes)}; it must have one entry for each of the stage's "
            f"{len(stage.members)} members"
        )

"""What makes no sense in the shares of a stage, whatever its file says."""

from __future__ import annotations

from hetjax.errors import InputError
from hetjax.planner.plan.stage_plan import Share, StagePlan


def check_shares(stage: StagePlan, where: str) -> None:
    """Check that a stage's shares are of its members.

    Args:
        stage: the stage.
        where: what errors name as the place.

    Raises:
        InputError: naming the field, its value and what is allowed.
    """
    shares = stage.shares
    if shares and len(stage.members) == 1:
        raise InputError(
            f"{where} is given, and the stage has one member; allowed where it has several"
        )
    if shares.batch:
        _check_sizes(shares.batch, stage, f"{where}.batch")
    for name, share in shares.parameters.items():
        _check_share(share, stage, f"{where}.parameters[{name!r}]")
    for value, share in shares.values.items():
        _check_share(share, stage, f"{where}.values[{value}]")


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


def _check_share(share: Share, stage: StagePlan, where: str) -> None:
    if share.dimension < 0:
        raise InputError(f"{where}.dimension is {share.dimension}; it must be 0 or more")
    _check_sizes(share.sizes, stage, f"{where}.sizes")


def _check_sizes(sizes: tuple[int, ...], stage: StagePlan, where: str) -> None:
    if len(sizes) != len(stage.members):
        raise InputError(
            f"{where} is {list(sizes)}; it must have one entry for each of the stage's "
            f"{len(stage.members)} members"
        )
    if min(sizes) < 0:
        raise InputError(f"{where} is {list(sizes)}; an entry must be 0 or more")

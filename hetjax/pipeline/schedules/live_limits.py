"""Caps of live microbatches, one a stage."""

from __future__ import annotations

from collections.abc import Sequence

from hetjax.errors import InputError


def check_live_limits(
    live_limits: Sequence[int] | None, num_stages: int, num_microbatches: int
) -> tuple[int, ...]:
    """The caps of all stages, none above what a stage could ever hold.

    Args:
        live_limits: one cap a stage, at least 1; None for no caps.
        num_stages: S.
        num_microbatches: M.

    Returns:
        One number a stage, at most M.

    Raises:
        InputError: a cap is below 1, or there is not one for every stage.

    Example:
        >>> check_live_limits([9, 2], num_stages=2, num_microbatches=4)
        (4, 2)
    """
    if live_limits is None:
        return (num_microbatches,) * num_stages
    if len(live_limits) != num_stages:
        raise InputError(f"live_limits has {len(live_limits)} caps; {num_stages} stages need one")
    for stage, limit in enumerate(live_limits):
        if limit < 1:
            raise InputError(f"live_limits of stage {stage} is {limit}; it must be 1 or more")
    return tuple(min(limit, num_microbatches) for limit in live_limits)

"""Whole numbers in given shares: heads by what each takes, tokens by weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetjax.planner.hexiseq.group_layout import Floats


def apportion_heads(head_seconds: Floats, total: int) -> NDArray[np.int64]:
    """Heads for devices so that the slowest takes as little as it can.

    That is Jefferson's method: each head goes where it ends first. No device has less than its
    share rounded down, so these are given at once.

    Args:
        head_seconds: what a head takes on each device, over 0.
        total: how many heads there are.

    Returns:
        Heads of each device, int64.

    Example:
        >>> apportion_heads(np.array([1.0, 1.0, 3.2]), 40).tolist()
        [18, 17, 5]
    """
    weights = 1 / head_seconds
    # A little less, so that rounding gives nobody more than its share.
    given = np.floor(total * (1 - 1e-12) * weights / weights.sum()).astype(np.int64)
    ends = (given + 1) * head_seconds
    for _ in range(total - int(given.sum())):
        place = int(ends.argmin())
        given[place] += 1
        ends[place] += head_seconds[place]
    return given


def apportion_tokens(shares: Floats, total: int) -> NDArray[np.int64]:
    """Tokens by shares, rounded so that they add up.

    Args:
        shares: 0 or more, [rows, places]; not all of a row are 0.
        total: how many tokens there are.

    Returns:
        Tokens, int64 [rows, places].

    Example:
        >>> apportion_tokens(np.array([[1.0, 1.0, 1.0]]), 10).tolist()
        [[3, 4, 3]]
    """
    passed = np.cumsum(shares, axis=1)
    marks = np.rint(passed * (total / passed[:, -1:])).astype(np.int64)
    return np.diff(marks, axis=1, prepend=0)

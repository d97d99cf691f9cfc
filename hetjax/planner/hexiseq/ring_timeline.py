"""The timeline of an asynchronous ring: groups run ahead as far as their two buffers let them.

A group computes on its own keys first, and then on what arrives, in the order of the ring. It hands
on what it has as soon as it has it, whether or not it has computed on it. It has room for two
blocks of others: one arrives while it computes on another, and the next may only come when the one
before both is computed on and handed on. No group waits for all others between steps.
"""

from __future__ import annotations

import numpy as np

from hetjax.planner.hexiseq.group_layout import Floats


def ring_ends(
    starts: Floats,
    token_seconds: Floats,
    hop_seconds: Floats,
    latency: Floats,
    lengths: Floats,
) -> Floats:
    """When each group has computed on all keys.

    Args:
        starts: when each group has its queries, keys and values, [rows, groups].
        token_seconds: what a group computes on a key token of any group, [rows, groups].
        hop_seconds: what a key token takes from the group before to each group, [rows, groups].
        latency: seconds before a block's first byte is there, [rows, groups].
        lengths: tokens of each group, [rows, groups].

    Returns:
        Seconds, [rows, groups].

    Example:
        >>> one = np.ones((1, 2))
        >>> ring_ends(0 * one, one, 3 * one, 0 * one, np.array([[4.0, 2.0]]))
        array([[ 8., 16.]])
    """
    count = lengths.shape[1]
    groups = np.arange(count)
    # Of each group: when it could begin with a block, and when it was done with it.
    arrived = starts
    done = starts + token_seconds * lengths
    before, after = (groups - 1) % count, (groups + 1) % count
    done_before = handed_on = np.full_like(starts, -np.inf)
    for step in range(1, count):
        source = lengths[:, (groups - step) % count]
        began = np.maximum(arrived[:, before], arrived)
        if step > 2:
            began = np.maximum(began, np.maximum(done_before, handed_on))
        came = began + latency + hop_seconds * source
        done_before, done = done, np.maximum(done, came) + token_seconds * source
        handed_on, arrived = came[:, after], came
    return done


def earliest_ends(
    starts: Floats,
    token_seconds: Floats,
    hop_seconds: Floats,
    latency: Floats,
    lengths: Floats,
) -> Floats:
    """What `ring_ends` is not before, without a step by step timeline.

    A group computes on all keys, and its links bring all of them, of which the last is computed on
    when it is there.

    Args:
        starts: when each group has its queries, keys and values, [rows, groups].
        token_seconds: what a group computes on a key token of any group, [rows, groups].
        hop_seconds: what a key token takes from the group before to each group, [rows, groups].
        latency: seconds before a block's first byte is there, [rows, groups].
        lengths: tokens of each group, [rows, groups].

    Returns:
        Seconds, [rows, groups].
    """
    count = lengths.shape[1]
    total = lengths.sum(axis=1, keepdims=True)
    ends = starts + token_seconds * total
    if count == 1:
        return ends
    before = np.concatenate((starts[:, -1:], starts[:, :-1]), axis=1)
    last = np.concatenate((lengths[:, 1:], lengths[:, :1]), axis=1)
    brought = np.maximum(starts, before) + (count - 1) * latency + hop_seconds * (total - lengths)
    return np.maximum(ends, brought + token_seconds * last)

"""The loops of `hetjax.planner.harp.counted_reach`, compiled; only large tables import this."""

from __future__ import annotations

import numpy as np

from hetjax.planner.harp.compiled import compiled
from hetjax.planner.work.arrays import FloatArray, IntArray


@compiled
def most_layers(
    fastest: FloatArray,
    limits: IntArray,
    sizes: IntArray,
    pace: float,
    least_count: int,
    num_counts: int,
) -> IntArray:
    """The most layers of a stage on some slices, by its warm-up count; see `Slice.most_layers`.

    Args:
        fastest: the least seconds of so many layers or more, of one slice after the other by option
            and length.
        limits: the most live microbatches that fit, likewise.
        sizes: how many options each slice has, and how many lengths.
        pace: seconds that a stage may not exceed.
        least_count: the first warm-up count.
        num_counts: how many there are.

    Returns:
        ``[slices, counts]``.
    """
    found = np.zeros((len(sizes), num_counts), np.int64)
    start = 0
    for k in range(len(sizes)):
        options, layers = sizes[k]
        lengths = layers
        for c in range(num_counts):
            while layers > 0:
                held = 0
                for o in range(options):
                    place = start + o * lengths + layers - 1
                    if fastest[place] <= pace:
                        held = max(held, limits[place])
                if held >= least_count + c:
                    break
                layers -= 1
            found[k, c] = layers
        start += options * lengths
    return found


@compiled
def inside_a_node(devices: int, sizes: IntArray, parts: IntArray, none: int) -> IntArray:
    """The most layers of stages that share a node, by their number and the count of the first.

    Args:
        devices: of the node.
        sizes: how many devices stages have.
        parts: the most layers of a stage, ``[sizes, counts]``.
        none: layers where there is no stage.

    Returns:
        ``[numbers, counts]``, from one stage on.
    """
    last = parts.shape[1] - 1
    found = np.empty((devices, last + 1), np.int64)
    # By how many of its devices are used, with one stage less.
    fewer = np.zeros((devices + 1, last + 1), np.int64)
    is_there = np.ones(devices + 1, np.bool_)
    for number in range(devices):
        more, most, widest = np.empty(fewer.shape, np.int64), 0, 0
        is_more = np.zeros(devices + 1, np.bool_)
        for used in range(1, devices + 1):
            for k in range(len(sizes)):
                rest = used - sizes[k]
                if rest < 0 or not is_there[rest]:
                    continue
                for c in range(last + 1):
                    # The last count stands for all above it, so it is behind itself as well.
                    before = c if c == last else c - 1
                    layers = parts[k, c] + (fewer[rest, before] if before >= 0 else none)
                    if not is_more[used] or layers > more[used, c]:
                        more[used, c] = layers
                    most = max(most, layers)
                is_more[used], widest = True, used
        if most <= 0:
            return found[:number]
        for c in range(last + 1):
            found[number, c] = more[widest, c] if more[widest, c] > 0 else none
        fewer, is_there = more, is_more
    return found


@compiled
def with_stages_before(
    one: IntArray, numbers: IntArray, inside: IntArray, nearest: IntArray
) -> IntArray:
    """What lies behind, with the stages of a subcluster before it, by nodes used.

    Args:
        one: the most layers of a stage on so many nodes, ``[nodes + 1, counts]``.
        numbers: numbers of stages inside a node.
        inside: the most layers of so many, ``[numbers, counts]``.
        nearest: what lies behind, by count.

    Returns:
        ``[nodes + 1, counts]``.
    """
    nodes, last = len(one) - 1, one.shape[1] - 1
    most = np.empty(one.shape, np.int64)
    for c in range(last + 1):
        most[0, c] = nearest[c]
    for used in range(1, nodes + 1):
        for c in range(last + 1):
            # The last count stands for all above it, so it is behind itself as well.
            before = c if c == last else c - 1
            best = most[used - 1, c]
            if before >= 0:
                for n in range(1, used + 1):
                    best = max(best, one[n, c] + most[used - n, before])
            for k in range(len(numbers)):
                before = c if c == last else c - numbers[k]
                if before >= 0:
                    best = max(best, inside[k, c] + most[used - 1, before])
            most[used, c] = best if c == 0 else max(best, most[used, c - 1])
    return most


@compiled
def with_stages_behind(
    one: IntArray, numbers: IntArray, inside: IntArray, nearest: IntArray
) -> IntArray:
    """What lies before, with the stages of a subcluster behind it, by nodes left.

    Args:
        one: as for `with_stages_before`.
        numbers: likewise.
        inside: likewise.
        nearest: what lies before, by count.

    Returns:
        ``[nodes + 1, counts]``.
    """
    nodes, last = len(one) - 1, one.shape[1] - 1
    most = np.empty(one.shape, np.int64)
    for c in range(last + 1):
        most[0, c] = nearest[c]
    for left in range(1, nodes + 1):
        for c in range(last + 1):
            best, after = most[left - 1, c], min(c + 1, last)
            for n in range(1, left + 1):
                best = max(best, one[n, after] + most[left - n, after])
            for k in range(len(numbers)):
                after = min(c + numbers[k], last)
                best = max(best, inside[k, after] + most[left - 1, after])
            most[left, c] = best
    return most

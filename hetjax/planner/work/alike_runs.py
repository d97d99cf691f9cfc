"""Which layers and runs of layers are alike, and figures of all runs from those of layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import fields

import numpy as np

from hetjax.pipeline.program.traced_program import Program
from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.planner.work.arrays import FloatArray, IntArray
from hetjax.planner.work.part_kinds import part_kind
from hetjax.planner.work.run_structure import part_shape
from hetjax.planner.work.stage_work import Work


def alike_layers(
    program: Program, works: Sequence[Work], figures: Sequence[FloatArray] = ()
) -> IntArray:
    """Which layers are alike in their work, and in the kinds of parameters that are theirs alone.

    Args:
        program: the traced loss function.
        works: the work of each of L layers.
        figures: what else there is to tell them apart, each one number a layer.

    Returns:
        A number for each kind of layer, ``[L + 1]``; the end is of a kind of its own.
    """
    users = Counter(part for work in works for part in set(work.parts))

    def held(part: ParameterPart) -> Hashable:
        if users[part] > 1:
            return part
        kind = part_kind(part_shape(program, part), part.leaf, program.frozen)
        return kind.shape.shape, kind.shape.dtype, *kind[1:]

    places: dict[Hashable, int] = {}
    kinds = []
    for layer, work in enumerate(works):
        rest = tuple(getattr(work, each.name) for each in fields(work) if each.name != "parts")
        parts = tuple(sorted(Counter(map(held, work.parts)).items(), key=repr))
        told = tuple(float(each[layer]) for each in figures)
        kinds.append(places.setdefault((rest, parts, told), len(places)))
    return np.array([*kinds, len(places)])


def unlike_runs(kinds: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """The runs of layers that differ: of other kinds of layers, or with another layer behind them.

    Args:
        kinds: of the layers, ``[L + 1]``; layers of one number are alike. The last one stands for
            what is behind all layers.

    Returns:
        The first layer of each run and the one after its last, of equal ones those of the first;
        before all of them the run without a layer. And ``[L + 1, L + 1]``: the place among these of
        layers i to j - 1.

    Example:
        >>> firsts, ends, places = unlike_runs(np.array([0, 1, 1, 2]))
        >>> list(zip(firsts.tolist(), ends.tolist()))
        [(0, 0), (0, 1), (1, 2), (2, 3), (0, 2), (1, 3), (0, 3)]
        >>> firsts, ends, places = unlike_runs(np.array([0, 1, 1, 1]))
        >>> list(zip(firsts.tolist(), ends.tolist()))
        [(0, 0), (0, 1), (1, 2), (0, 2), (1, 3), (0, 3)]
        >>> int(places[1, 2]), int(places[2, 3])
        (2, 2)
    """
    size = len(kinds)
    _, alone = np.unique(kinds, return_inverse=True)
    # What a pipeline's first stage does is its own.
    alone = np.concatenate([[size], alone[1:]])
    places = np.zeros((size, size), dtype=np.int32)
    firsts, ends = [np.array([0])], [np.array([0])]
    count, of_run = 1, np.zeros(size, dtype=int)
    for length in range(1, size):
        first = np.arange(size - length)
        same = of_run[: size - length] * (size + 1) + alone[length - 1 : size - 1]
        _, of_run = np.unique(same, return_inverse=True)
        _, found, run = np.unique(
            of_run * (size + 1) + alone[length:], return_index=True, return_inverse=True
        )
        # By their first layers.
        order = np.argsort(found)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        places[first, first + length] = count + rank[run]
        firsts.append(found[order])
        ends.append(found[order] + length)
        count += len(found)
    return np.concatenate(firsts), np.concatenate(ends), places


def sums_of_runs(values: Sequence[float] | FloatArray) -> FloatArray:
    """The sum over each contiguous run.

    Args:
        values: one a layer.

    Returns:
        ``[L + 1, L + 1]``: the entry ``[i, j]`` is for layers i to j - 1.
    """
    before = np.concatenate([[0.0], np.cumsum(values)])
    return before[None, :] - before[:, None]


def largest_of_runs(values: Sequence[float] | FloatArray) -> FloatArray:
    """The largest in each contiguous run.

    Args:
        values: one a layer, none negative.

    Returns:
        ``[L + 1, L + 1]``: the entry ``[i, j]`` is for layers i to j - 1; 0 where there are none.

    Example:
        >>> largest_of_runs([3.0, 1.0])[0].tolist()
        [0.0, 3.0, 3.0]
    """
    count = len(values)
    square = np.zeros((count + 1, count + 1))
    square[:-1, 1:] = np.maximum.accumulate(np.triu(np.tile(values, (count, 1))), axis=1)
    return square

"""What no pipeline goes beyond: the layers that devices hold at a pace, and the least total."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hetjax.planner.harp.stage_table import StageTable
from hetjax.planner.work.arrays import FloatArray, IntArray


def most_layers(table: StageTable, pace: float) -> list[IntArray]:
    """The most layers that stages no slower than a pace have, whichever these are.

    Args:
        table: what stages cost.
        pace: seconds that no stage may exceed.

    Returns:
        For each subcluster, by how many of its devices are used, counted from one end, from none to
        all of them.
    """
    found = []
    for (nodes, per_node), slices, fastest in zip(
        table.nodes, table.slices, table.fastest_by_length, strict=True
    ):
        if not nodes or not slices:
            found.append(np.zeros(nodes * per_node + 1, dtype=int))
            continue
        widths = (fastest <= pace).sum(axis=1)
        inside = np.zeros(per_node + 1, dtype=int)
        across = np.zeros(nodes + 1, dtype=int)
        for cut, width in zip(slices, widths, strict=True):
            if cut.shape[0] > 1:
                across[cut.shape[0]] = max(across[cut.shape[0]], width)
            else:
                inside[cut.shape[1]] = max(inside[cut.shape[1]], width)
        inside = _packed(inside)
        across[1] = max(across[1], inside[-1])
        used = np.arange(nodes * per_node + 1)
        found.append(_packed(across)[used // per_node] + inside[used % per_node])
    return found


def _packed(most: IntArray) -> IntArray:
    """The most of several pieces together, from the most of one piece of each size."""
    packed = most.copy()
    for size in range(1, len(most)):
        packed[size] = max(packed[size], (most[: size + 1] + packed[size::-1]).max())
    return packed


def can_hold_all(table: StageTable, pace: float) -> bool:
    """Whether all layers may be held by the devices at a pace; if not, no pipeline has it.

    Args:
        table: what stages and transfers cost.
        pace: seconds that no stage and no transfer may exceed.
    """
    most = [int(each[-1]) for each in most_layers(table, pace)]
    if table.max_stages is not None:
        widest = max(
            int((each <= pace).sum(axis=1).max(initial=0)) for each in table.fastest_by_length
        )
        if widest * table.max_stages < table.num_layers:
            return False
    left = [place for place, layers in enumerate(most) if layers]
    while left:
        reached, new = 0, [left.pop()]
        while new:
            one = new.pop()
            reached += most[one]
            near = [
                o for o in left if table.quickest[one][o] <= pace or table.quickest[o][one] <= pace
            ]
            left = [o for o in left if o not in near]
            new += near
        if reached >= table.num_layers:
            return True
    return False


def first_that_may_hold(table: StageTable, paces: FloatArray) -> int:
    """The place of the first pace at which the devices may hold all layers.

    Args:
        table: what stages and transfers cost.
        paces: paces, rising.

    Returns:
        The place; that after the last one where there is none.
    """
    first, past = 0, len(paces)
    while first < past:
        middle = (first + past) // 2
        if can_hold_all(table, float(paces[middle])):
            past = middle
        else:
            first = middle + 1
    return first


def least_before(
    fastest: FloatArray, transfers: Sequence[FloatArray], num_layers: int
) -> FloatArray:
    """The least that stages before each layer take, with the transfers to it, on any devices.

    Args:
        fastest: what each run of layers takes at least, ``[L + 1, L + 1]``.
        transfers: both transfers over each boundary, by link.
        num_layers: L.

    Returns:
        Seconds ``[L + 1]``: the entry i is for layers 0 to i - 1.
    """
    crossing = np.min(transfers, axis=0) if len(transfers) else np.zeros(num_layers + 1)
    crossing = np.concatenate([crossing[:-1], [0.0]])
    least = np.full(num_layers + 1, np.inf)
    least[0] = 0.0
    for first in range(num_layers):
        if np.isfinite(least[first]):
            behind = least[first] + fastest[first, first + 1 :] + crossing[first + 1 :]
            np.minimum(least[first + 1 :], behind, out=least[first + 1 :])
    return least


def fastest_runs(table: StageTable, of_slice: Callable[[int, int], FloatArray]) -> FloatArray:
    """What each run of layers takes at least, on any devices, ``[L + 1, L + 1]``.

    Args:
        table: what stages cost.
        of_slice: what runs take on a slice, as the slice lists them, by the places of its
            subcluster and of itself.
    """
    fastest = np.full((table.num_layers + 1,) * 2, np.inf)
    alike: dict[int, tuple[IntArray, list[FloatArray]]] = {}
    for subcluster, slices in enumerate(table.slices):
        for place, cut in enumerate(slices):
            alike.setdefault(id(cut.runs), (cut.runs, []))[1].append(of_slice(subcluster, place))
    for runs, every in alike.values():
        least = np.full(max(map(len, every)), np.inf)
        for each in every:
            np.minimum(least[: len(each)], each, out=least[: len(each)])
        np.minimum(fastest, least.take(runs, mode="clip"), out=fastest)
    return fastest


def least_total(table: StageTable) -> float:
    """What a pipeline takes at least for one microbatch, at any pace and on any devices.

    Args:
        table: what stages and transfers cost.
    """
    fastest = fastest_runs(table, lambda subcluster, place: table.slices[subcluster][place].fastest)
    links = [*table.within, *(each for row in table.between for each in row)]
    moves = [link.forward + link.backward for link in links]
    return float(least_before(fastest, moves, table.num_layers)[-1])

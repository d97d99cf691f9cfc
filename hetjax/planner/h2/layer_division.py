"""HeteroAuto's second half: how groups of chips run, and how many layers their stages have.

For a width of data parallelism every group of chips chooses a way (tensor parallelism, what is made
again, what is offloaded), which says how many stages it is, and a number of layers for each of
them. A step takes

    max_i (b T_i + U_i + alpha sum_{j != i} T_j)  =  alpha sum_j T_j + max_i ((b - alpha) T_i + U_i)

where T_i is what a stage takes for one of b microbatches and U_i its update. (The paper has no term
for what stages hand on. While the pipeline fills and drains, nothing hides it, and it is added to
the sum; what is never hidden is a part of T_i, which is no less than what a link takes.) With a cap
on the last term, what remains is a sum, and a dynamic program over the groups, from the last to the
first, finds the least: its state is how many stages come after, which says how many microbatches a
stage keeps, and how many layers these have. The cap is found by branch and bound over the values
that it can have.

Source: H2, sections 4.3.2 and 4.3.3, where a heuristic divides the layers.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetjax.pipeline.schedules.activation_copies import MOST_THERE, PLACES


@dataclass(frozen=True)
class GroupWay:
    """A way in which a group of chips runs its layers.

    Args:
        tensor: chips that share every layer.
        stages: how many stages the group is.
        repeats: whether layers are made again in the backward pass.
        offloads: whether the optimizer's state, or activations, are in the host's memory.
        layer_seconds: forward and backward pass of a layer for one microbatch, with what is made
            again.
        update_seconds: the update of a layer, as far as nothing hides it.
        handover_seconds: for a stage to get a microbatch and to give back its gradient.
        exposed_seconds: what it loses for each microbatch beside its layers, as to transfers that
            no computation hides.
        pace_seconds: what a stage takes for each microbatch at least, as its link does.
        first_bytes: bytes that a chip holds besides where the group is the first, as of an
            embedding.
        last_bytes: the same where it is the last, as of a language model's head.
        last_layers: how many layers fewer its last stage has where the group is the last: as many
            as take the time that the head takes. It may have no other than the head.
        state_bytes: bytes that a layer holds on a chip.
        kept_bytes: bytes that a layer keeps on a chip of each live microbatch.
        fixed_bytes: bytes that a chip holds whatever its layers.
        offloads_activations: whether activations of live microbatches are in the host's memory, but
            for those that are on their way.
        host_bytes: bytes that a layer holds of its state there.
        host_memory_bytes: a chip's share of that memory.
    """

    tensor: int
    stages: int
    repeats: bool
    offloads: bool
    layer_seconds: float
    update_seconds: float
    handover_seconds: float
    state_bytes: float
    kept_bytes: float
    fixed_bytes: float
    exposed_seconds: float = 0.0
    pace_seconds: float = 0.0
    first_bytes: float = 0.0
    last_bytes: float = 0.0
    last_layers: int = 0
    offloads_activations: bool = False
    host_bytes: float = 0.0
    host_memory_bytes: float = math.inf

    def stage_seconds(self, layers: int) -> float:
        """What a stage of so many layers takes for a microbatch."""
        return max(layers * self.layer_seconds + self.exposed_seconds, self.pace_seconds)


@dataclass(frozen=True)
class ChipGroup:
    """Chips of one kind that run alike.

    Args:
        name: what they are called.
        memory_bytes: what may be used of a chip.
        ways: how they can run.
    """

    name: str
    memory_bytes: float
    ways: tuple[GroupWay, ...]


@dataclass(frozen=True)
class GroupShare:
    """What a group does in a division of the layers.

    Args:
        way: how it runs.
        layers: how many layers each of its stages has, but for a head; some may have less, so
            that all groups together have no more than there are.
    """

    way: GroupWay
    layers: int


@dataclass(frozen=True)
class Division:
    """How groups of chips run, and what layers they have.

    Args:
        step_time: seconds of a step.
        shares: of each group.
    """

    step_time: float
    shares: tuple[GroupShare, ...]


def divide_layers(
    groups: Sequence[ChipGroup],
    num_layers: int,
    microbatches: int,
    alpha: float = 1.0,
    below: float = float("inf"),
) -> Division | None:
    """The fastest ways and division of layers.

    Args:
        groups: in the order of the pipeline.
        num_layers: how many layers there are, all alike.
        microbatches: of a pipeline's step.
        alpha: how much of a microbatch's pass the pipeline stands still: 1 for 1F1B, 0 for
            schedules without a bubble.
        below: only what is faster than this is wanted, in seconds.

    Returns:
        The division; None where nothing fits, or nothing that is wanted.

    Example:
        >>> slow, fast = (
        ...     GroupWay(1, 1, False, False, seconds, 0.0, 0.0, 1.0, 1.0, 0.0)
        ...     for seconds in (2.0, 1.0)
        ... )
        >>> groups = ChipGroup("old", 16.0, (slow,)), ChipGroup("new", 16.0, (fast,))
        >>> [share.layers for share in divide_layers(groups, 6, 4).shares]
        [2, 4]
    """
    search = _Search(groups, num_layers, microbatches, alpha)
    caps = search.caps
    if not len(caps):
        return None
    best: Division | None = None
    # Intervals of caps by what no division in them is faster than.
    pending: list[tuple[float, int, int]] = [(0.0, 0, len(caps) - 1)]
    while pending:
        bound, low, high = heapq.heappop(pending)
        if bound >= below:
            break
        made = search.within(float(caps[high]))
        if made is None:
            continue
        found, least = made
        if found.step_time < below:
            best, below = found, found.step_time
        longest = found.step_time - least
        # With the same sum, a longer longest stage is no better.
        last = int(np.searchsorted(caps, longest * (1 - 1e-12))) - 1
        middle = (low + last) // 2
        for start, end in ((low, middle), (middle + 1, last)):
            if start <= end:
                heapq.heappush(pending, (least + float(caps[start]), start, end))
    return best


@dataclass(frozen=True)
class _Choice:
    """Something that a group can do.

    Args:
        way: how it runs.
        layers: how many layers each of its stages has.
        added: how many layers the group has.
        rows: after how many stages less one it still fits.
        cost: what it adds to the sum.
        term: what its stages take beside the sum.
    """

    way: GroupWay
    layers: int
    added: int
    rows: int
    cost: float
    term: float


class _Search:
    """The least sum of what stages compute, under a cap of what the longest of them takes.

    Attributes:
        caps: the values that the cap can have, in order.
    """

    def __init__(
        self, groups: Sequence[ChipGroup], num_layers: int, microbatches: int, alpha: float
    ):
        self._num_layers, self._microbatches, self._alpha = num_layers, microbatches, alpha
        known: dict[tuple[ChipGroup, bool, bool], list[_Choice]] = {}
        self._choices_of: list[list[_Choice]] = []
        for place, group in enumerate(groups):
            key = group, place == 0, place == len(groups) - 1
            if key not in known:
                known[key] = _undominated(
                    each for way in group.ways for each in self._choices(way, *key)
                )
            self._choices_of.append(known[key])
        self.caps = np.array(sorted({each.term for found in known.values() for each in found}))

    def _choices(
        self, way: GroupWay, group: ChipGroup, is_first: bool, is_last: bool
    ) -> Iterator[_Choice]:
        """What a group can do in one way: as many layers as fit on its first stage."""
        after = np.arange(self._num_layers - way.stages + 1)
        # The more stages come after, the more is kept: fewer layers fit.
        live = np.minimum(self._microbatches, after + way.stages)
        fixed = way.fixed_bytes + is_first * way.first_bytes + is_last * way.last_bytes
        room = max(0.0, group.memory_bytes - fixed)
        there, on_host = live, way.host_bytes + 0.0 * live
        if way.offloads_activations:
            # With a schedule of three microbatches, all of them are there at once.
            there = np.minimum(live, PLACES if self._microbatches > MOST_THERE else MOST_THERE)
            on_host = on_host + way.kept_bytes * live
        most = np.floor(room / (way.state_bytes + way.kept_bytes * there) * (1 + 1e-12))
        most = np.minimum(most, np.floor(way.host_memory_bytes / np.maximum(on_host, 1.0)))
        fewer = way.last_layers * is_last
        # More than all layers are of no use.
        needed = -(-(self._num_layers + fewer) // way.stages)
        for layers in range(max(1, fewer), int(min(most.max(initial=0), needed)) + 1):
            seconds = way.stage_seconds(layers)
            yield _Choice(
                way,
                layers,
                way.stages * layers - fewer,
                int(np.count_nonzero(most >= layers)),
                way.stages * (self._alpha * seconds + way.handover_seconds),
                (self._microbatches - self._alpha) * seconds + layers * way.update_seconds,
            )

    def within(self, cap: float) -> tuple[Division, float] | None:
        """The division of the least sum under a cap, and that sum; None where there is none."""
        size = self._num_layers + 1
        least = np.full((size, size), np.inf)
        least[0, 0] = 0.0
        tables, reached = [least], 0
        allowed = [[each for each in of if each.term <= cap] for of in self._choices_of]
        for choices in reversed(allowed):
            tables.append(_with_group(choices, tables[-1], reached))
            reached += max((each.way.stages for each in choices), default=0)
        ends = tables[-1][:, -1]
        if not np.isfinite(ends.min()):
            return None
        chosen = _chosen(allowed, tables[::-1], int(ends.argmin()))
        total = float(ends.min())
        shares = tuple(GroupShare(each.way, each.layers) for each in chosen)
        return Division(total + max(each.term for each in chosen), shares), total


def _undominated(choices: Iterable[_Choice]) -> list[_Choice]:
    """Choices but for those that others of as many stages and layers are better than."""
    kept: dict[tuple[int, int], list[_Choice]] = {}
    for each in sorted(choices, key=lambda choice: (choice.term, choice.cost)):
        others = kept.setdefault((each.way.stages, each.added), [])
        if all(each.rows > other.rows or each.cost < other.cost for other in others):
            others.append(each)
    return [each for others in kept.values() for each in others]


def _with_group(
    choices: Sequence[_Choice], least: NDArray[np.float64], reached: int
) -> NDArray[np.float64]:
    """The least sums with one group more before those that come after, of so many stages."""
    size = len(least)
    found = np.full_like(least, np.inf)
    for each in choices:
        stages, rows = each.way.stages, min(each.rows, reached + 1, size - each.way.stages)
        if rows <= 0:
            continue
        added = min(each.added, size - 1)
        target, source = found[stages : stages + rows], least[:rows] + each.cost
        np.minimum(target[:, added:], source[:, : size - added], out=target[:, added:])
        # More layers than there are count as all of them.
        over = source[:, size - added :].min(axis=1, initial=np.inf)
        np.minimum(target[:, -1], over, out=target[:, -1])
    return found


def _chosen(
    allowed: Sequence[Sequence[_Choice]], tables: Sequence[NDArray[np.float64]], stages: int
) -> list[_Choice]:
    """What each group does for the least sum, from the first one on."""
    last = tables[0].shape[1] - 1
    row, column, chosen = stages, last, []
    for choices, (here, after) in zip(allowed, itertools.pairwise(tables), strict=True):
        for each in choices:
            before = row - each.way.stages
            if not 0 <= before < each.rows:
                continue
            start = max(0, column - each.added)
            columns = range(start, last + 1) if column == last else range(start, start + 1)
            if column < last and each.added > column:
                continue
            made = after[before, columns] + each.cost == here[row, column]
            if made.any():
                chosen.append(each)
                row, column = before, columns[int(made.argmax())]
                break
        else:
            raise AssertionError("every sum is made of something")
    return chosen

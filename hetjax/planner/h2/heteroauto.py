"""HeteroAuto: how wide data parallelism is, and how each kind of chips runs its stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hetjax.planner.h2.layer_division import ChipGroup, Division, GroupWay, divide_layers


@dataclass(frozen=True, eq=False)
class ChipKind:
    """Chips of one kind.

    Args:
        name: what they are called.
        chips: how many there are.
        memory_bytes: what may be used of a chip.
        group_chips: how many of them run alike in the second stage of the search (128 in the
            paper, section 6.2.2).
        ways: from a width of data parallelism and a number of chips to the ways in which so many
            can run; none where they do not divide.
    """

    name: str
    chips: int
    memory_bytes: float
    group_chips: int
    ways: Callable[[int, int], Sequence[GroupWay]]


@dataclass(frozen=True)
class ChipStrategy:
    """What HeteroAuto finds.

    Args:
        width: how many pipelines run beside each other, on unlike examples.
        groups: the groups of chips, in the order of the pipeline.
        division: how each runs, and how many layers its stages have.
        candidates: how many ways of groups were weighed, for all widths.
    """

    width: int
    groups: tuple[ChipGroup, ...]
    division: Division
    candidates: int

    @property
    def step_time(self) -> float:
        """Seconds of a step, by the paper's cost model."""
        return self.division.step_time


def find_strategy(
    kinds: Sequence[ChipKind],
    num_layers: int,
    microbatches_of: Callable[[int], int],
    widths: Sequence[int],
    alpha: float = 1.0,
    *,
    is_grouped: bool = True,
) -> ChipStrategy | None:
    """Find the fastest strategy that fits.

    Kinds of more memory come first in the pipeline, where more microbatches are kept. In the first
    stage all chips of a kind run alike. In the second one they are divided into groups; the paper
    does that for the width that was the best in the first stage, here it is done for all, the most
    promising first, as far as they can be faster than what is known. So two stages are never worse
    than one.

    Args:
        kinds: the kinds of chips.
        num_layers: how many layers there are, all alike.
        microbatches_of: from a width to the microbatches of a pipeline's step.
        widths: the widths of data parallelism to look at.
        alpha: see `divide_layers`.
        is_grouped: whether there is a second stage.

    Returns:
        The strategy; None where nothing fits.

    Source: H2, section 4.3.3.
    """
    ordered = sorted(kinds, key=lambda kind: -kind.memory_bytes)
    looked = 0
    best: ChipStrategy | None = None
    first: list[tuple[float, int]] = []
    for grouped in (False, True) if is_grouped else (False,):
        for width in _promising(first, widths) if grouped else widths:
            groups = _groups(ordered, width, grouped=grouped)
            if groups is None:
                continue
            looked += sum(len(group.ways) for group in groups)
            below = best.step_time if best is not None and grouped else float("inf")
            found = divide_layers(groups, num_layers, microbatches_of(width), alpha, below)
            if found is None:
                continue
            if not grouped:
                first.append((found.step_time, width))
            if best is None or found.step_time < best.step_time:
                best = ChipStrategy(width, groups, found, 0)
    if best is None:
        return None
    return replace(best, candidates=looked)


def _promising(first: Sequence[tuple[float, int]], widths: Sequence[int]) -> Iterator[int]:
    """Widths by what the first stage took with them; those that did not fit come last."""
    known = [width for _, width in sorted(first)]
    yield from known
    yield from (width for width in widths if width not in known)


def _groups(
    kinds: Sequence[ChipKind], width: int, *, grouped: bool
) -> tuple[ChipGroup, ...] | None:
    """The groups of all kinds; None where a kind's chips are not divided by a width."""
    groups: list[ChipGroup] = []
    for kind in kinds:
        whole = min(kind.group_chips, kind.chips) if grouped else kind.chips
        sizes = [whole] * (kind.chips // whole)
        sizes += [kind.chips % whole] if kind.chips % whole else []
        ways = {chips: tuple(kind.ways(width, chips)) for chips in sizes}
        if not all(ways.values()):
            return None
        groups += [ChipGroup(kind.name, kind.memory_bytes, ways[chips]) for chips in sizes]
    return tuple(groups)

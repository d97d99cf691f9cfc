"""Which devices are the stages of which pipelines, where stages share the context.

Islands, whose devices have fast links among them, are what is laid out. Pipelines have sequences of
their own and exchange gradients once a step; stages of one hand on an activation a token; members
of one exchange keys and values in every layer. The slower links are, the fewer should be crossed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TypeVar

from hetjax.mesh.groupings import set_partitions

Item = TypeVar("Item")

Part = tuple[int, ...]
"""The numbers of the devices of a stage."""

Layout = tuple[tuple[Part, ...], ...]
"""For each pipeline the devices of its stages."""

MOST_ISLANDS = 4
"""Of so many islands all layouts are tried; of more, those of neighbours."""

MOST_NEIGHBOURS = 8
"""Of more islands, neighbours are one island where stages of several are cut."""

FINER = (2, 4, 8)
"""Into how many parts of a size islands are divided, each a pipeline of one stage."""


def layouts(islands: Sequence[Part], most_stages: int, most_pipelines: int) -> Iterator[Layout]:
    """What islands may be, but for one stage of all.

    Args:
        islands: the devices of each.
        most_stages: how many stages a pipeline may have.
        most_pipelines: how many pipelines there may be.

    Yields:
        Layouts, each once: every device is in one stage. Of few islands all pipelines of all
        stages; of many, one pipeline of stages of neighbours, and alike pipelines of one stage. And
        as pipelines of one stage, parts of islands.

    Example:
        >>> for each in layouts([(0, 1), (2, 3)], most_stages=2, most_pipelines=4):
        ...     print(each)
        (((0, 1),), ((2, 3),))
        (((0, 1), (2, 3)),)
        (((2, 3), (0, 1)),)
        (((0,),), ((1,),), ((2,),), ((3,),))
    """
    found: dict[Layout, None] = {}
    if len(islands) <= MOST_ISLANDS:
        for blocks in set_partitions(islands):
            ways = (list(_pipelines(block, most_stages)) for block in blocks)
            found |= dict.fromkeys(itertools.product(*ways))
    else:
        joined = [*map(_joined, _runs(islands, -(-len(islands) // MOST_NEIGHBOURS)))]
        found |= dict.fromkeys((each,) for each in _of_neighbours(joined, most_stages))
        for count in range(2, len(islands) + 1):
            if len(islands) % count == 0:
                runs = _runs(islands, len(islands) // count)
                found[tuple((_joined(run),) for run in runs)] = None
    for count in FINER:
        if all(len(island) % count == 0 for island in islands):
            parts = (part for island in islands for part in _runs(island, len(island) // count))
            found[tuple((part,) for part in parts)] = None
    found.pop(((_joined(islands),),), None)
    yield from (each for each in found if len(each) <= most_pipelines)


def _pipelines(islands: Sequence[Part], most_stages: int) -> Iterator[tuple[Part, ...]]:
    """The pipelines of some islands: stages in all orders."""
    for sets in set_partitions(islands):
        if len(sets) <= most_stages:
            yield from itertools.permutations(_joined(each) for each in sets)


def _of_neighbours(islands: Sequence[Part], most_stages: int) -> Iterator[tuple[Part, ...]]:
    """Pipelines of islands in their order, neighbours of which are one stage."""
    for count in range(2, most_stages + 1):
        for cuts in itertools.combinations(range(1, len(islands)), count - 1):
            edges = itertools.pairwise((0, *cuts, len(islands)))
            yield tuple(_joined(islands[a:b]) for a, b in edges)


def _joined(islands: Sequence[Part]) -> Part:
    return tuple(sorted(itertools.chain(*islands)))


def _runs(items: Sequence[Item], size: int) -> Iterator[tuple[Item, ...]]:
    """Things in their order, as many together each time; the last may be fewer."""
    return (tuple(items[i : i + size]) for i in range(0, len(items), size))

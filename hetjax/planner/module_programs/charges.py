"""What programs are charged for: loads that members compute, and moves among them, in tables."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetjax.planner.module_programs.ways import WayLoad

GATHER, SCATTER, SUM, EXCHANGE, REGROUP = "gather", "scatter", "sum", "exchange", "regroup"
"""The forms of moves: of parts to all; of summands to parts, or to all; from parts along one
dimension to parts along another; from parts to other parts along the same."""


class MoveOf(NamedTuple):
    """A move of a value.

    Args:
        form: what is moved to what.
        num_bytes: of the value, whole.
        source: the class of the dimension that is divided before; -1 for none.
        target: the same of afterwards.
        once: whether it is moved once a step, and not for each microbatch.
        by_even_parts: whether it is brought to even parts in between, as a gather of uneven parts
            may be, or a sum to them; None: if that is faster.
    """

    form: str
    num_bytes: float
    source: int = -1
    target: int = -1
    once: bool = False
    by_even_parts: bool | None = False


class Loads:
    """Loads, with their figures as a table that is made once.

    Args:
        loads: the loads.

    Attributes:
        all: the loads.
    """

    def __init__(self, loads: Iterable[WayLoad]):
        self.all = tuple(loads)

    def __len__(self) -> int:
        return len(self.all)

    @cached_property
    def figures(self) -> NDArray[np.float64]:
        """A row for each load: class, whether by examples, five figures alone and shared."""
        return np.array([_figures(each) for each in self.all])


class Moves:
    """Moves, by sorts that differ in their bytes alone.

    Args:
        moves: the moves.

    Attributes:
        sorts: the sorts, without bytes.
        places: for each move the place of its sort.
        num_bytes: of each move.
        may_go_by_even_parts: whether some go by even parts if that is faster.
    """

    def __init__(self, moves: Iterable[MoveOf]):
        numbers: dict[tuple[object, ...], int] = {}
        found, places, num_bytes = [], [], []
        for each in moves:
            key = each.form, each.source, each.target, each.once, each.by_even_parts
            place = numbers.setdefault(key, len(found))
            if place == len(found):
                found.append(each._replace(num_bytes=0.0))
            places.append(place)
            num_bytes.append(each.num_bytes)
        self.sorts: tuple[MoveOf, ...] = tuple(found)
        self.places = np.array(places, int)
        self.num_bytes = np.array(num_bytes, float)
        self.may_go_by_even_parts = any(each.by_even_parts is None for each in found)

    def __len__(self) -> int:
        return len(self.places)


def _figures(load: WayLoad) -> tuple[float, ...]:
    return (
        load.divided,
        load.by_examples,
        load.flops,
        load.traffic,
        load.updated,
        load.summed,
        load.held,
        load.shared_flops,
        load.shared_traffic,
        load.shared_updated,
        load.shared_summed,
        load.shared_held,
    )

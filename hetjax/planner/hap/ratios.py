"""The best ratios for a program: a linear program over the parts that members have of dimensions.

Between two moves the slowest member counts, and what a move takes follows from the largest part:
both are linear in the ratios, which are the same in all modules of a kind. Where neighbours differ,
what they divide must be moved; that is in the program, so that they differ only where it pays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from hetjax.planner.module_programs.dimensions import Dimensions
from hetjax.planner.module_programs.rates import Rates
from hetjax.planner.work.arrays import FloatArray


@dataclass(frozen=True)
class LinearSpan:
    """What members compute between two moves, as a linear function of their parts.

    Args:
        fixed: seconds of each member, whatever its part.
        shared: seconds that each would take for everything, by the kind of module.
    """

    fixed: tuple[float, ...]
    shared: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class MovedBytes:
    """What moves of one form carry, that are divided in one kind of module.

    Args:
        form: of which form.
        kind: which kind of module; of a regrouping the one before.
        target: of a regrouping the kind of module after.
        by_even_parts: whether they are brought to even parts in between.
    """

    form: str
    kind: int
    target: int
    by_even_parts: bool = False


@dataclass(frozen=True, eq=False)
class RatioProblem:
    """A program, as far as ratios change what it takes.

    Args:
        spans: what is computed between moves, and how often.
        moved: bytes by form and kind.
        num_kinds: how many kinds of modules there are.
        memory: for each member bytes that it holds whatever its part, by kind those of everything,
            and how much it may hold; None for no limit.
    """

    spans: Counter[LinearSpan]
    moved: Mapping[MovedBytes, float]
    num_kinds: int
    memory: tuple[FloatArray, FloatArray, FloatArray] | None = None


def best_ratios(problem: RatioProblem, rates: Rates) -> FloatArray | None:
    """The ratios with which a program takes least.

    Args:
        problem: the program.
        rates: what computing and moving takes.

    Returns:
        Parts by kind of module and member, `[kinds, members]`; None where memory allows none.

    Source: HAP, section 5 (equation 3), with a limit on memory.
    """
    builder = _LinearProgram(problem, rates)
    result = linprog(
        builder.costs,
        A_ub=builder.matrix(),
        b_ub=np.array(builder.most),
        A_eq=builder.sums(),
        b_eq=np.ones(problem.num_kinds),
        bounds=(0, None),
        method="highs",
    )
    if result.x is None:
        return None
    count = problem.num_kinds * len(builder.alike)
    parts = np.clip(result.x[:count].reshape(problem.num_kinds, -1), 0.0, 1.0)
    found = np.empty((problem.num_kinds, rates.count))
    for place, members in enumerate(builder.alike):
        found[:, members] = parts[:, place : place + 1]
    return found


def alike_members(rates: Rates) -> list[list[int]]:
    """Members in groups that are alike, which have the same parts.

    Args:
        rates: the members.
    """
    found: dict[object, list[int]] = {}
    for place, member in enumerate(rates.members):
        found.setdefault((member, float(rates.network.byte_seconds[place])), []).append(place)
    return list(found.values())


class _LinearProgram:
    """Variables: parts by kind and group of alike members; then times of spans and of moves."""

    def __init__(self, problem: RatioProblem, rates: Rates):
        self.problem, self.rates = problem, rates
        self.alike = alike_members(rates)
        self.firsts = [members[0] for members in self.alike]
        self.size = problem.num_kinds * len(self.alike)
        self.costs: list[float] = [0.0] * self.size
        self.rows: list[tuple[dict[int, float], float]] = []
        for span, times in problem.spans.items():
            self._add_span(span, times)
        for moved, num_bytes in problem.moved.items():
            self._add_moved(moved, num_bytes)
        if problem.memory is not None:
            self._add_memory(*problem.memory)

    @property
    def most(self) -> list[float]:
        """The right sides of the rows."""
        return [right for _, right in self.rows]

    def matrix(self) -> Any:
        """The left sides of the rows."""
        entries = [
            (i, j, value) for i, (row, _) in enumerate(self.rows) for j, value in row.items()
        ]
        rows, columns, values = zip(*entries, strict=True)
        return coo_array((values, (rows, columns)), shape=(len(self.rows), len(self.costs))).tocsr()

    def sums(self) -> Any:
        """The parts of each kind add up to 1."""
        kinds, groups = self.problem.num_kinds, len(self.alike)
        rows = np.repeat(np.arange(kinds), groups)
        counts = np.tile([float(len(members)) for members in self.alike], kinds)
        shape = kinds, len(self.costs)
        return coo_array((counts, (rows, np.arange(kinds * groups))), shape=shape).tocsr()

    def _part(self, kind: int, group: int) -> int:
        return kind * len(self.alike) + group

    def _time(self, cost: float) -> int:
        self.costs.append(cost)
        return len(self.costs) - 1

    def _add_span(self, span: LinearSpan, times: int) -> None:
        time = self._time(float(times))
        for group, m in enumerate(self.firsts):
            row = {time: -1.0}
            for kind, seconds in enumerate(span.shared):
                if seconds[m]:
                    row[self._part(kind, group)] = seconds[m]
            self.rows.append((row, -span.fixed[m]))

    def _add_moved(self, moved: MovedBytes, num_bytes: float) -> None:
        """A time that no member's sending or receiving is longer than, by the network's rates."""
        time = self._time(1.0)
        seconds = self.rates.network.byte_seconds * num_bytes
        for group, m in enumerate(self.firsts):
            part = self._part(moved.kind, group)
            if moved.form == "regroup" or moved.by_even_parts:
                # What follows on even parts takes the same in all ratios.
                self._add_shift(moved, m, time, seconds[m])
            elif moved.form == "exchange":
                # Of a part p, p (1 - p) moves; p bounds it.
                self.rows.append(({part: seconds[m], time: -1.0}, 0.0))
            else:
                others = self.rates.count - 1
                self.rows.append(({part: others * seconds[m], time: -1.0}, 0.0))
                self.rows.append(({part: -seconds[m], time: -1.0}, -seconds[m]))

    def _add_shift(self, moved: MovedBytes, member: int, time: int, seconds: float) -> None:
        """Regrouping, to even parts or others: what moves at the edges of a member's part."""
        shifts = []
        for last in (member - 1, member):
            shift = self._time(0.0)
            for sign in (1.0, -1.0):
                row, even = {shift: -1.0}, 0.0
                for group, members in enumerate(self.alike):
                    before = sign * sum(m <= last for m in members)
                    if before:
                        row[self._part(moved.kind, group)] = before
                        if moved.by_even_parts:
                            even += before / self.rates.count
                        else:
                            row[self._part(moved.target, group)] = -before
                self.rows.append((row, even))
            shifts.append(shift)
        self.rows.append(({shifts[0]: seconds, shifts[1]: seconds, time: -1.0}, 0.0))

    def _add_memory(self, fixed: FloatArray, shared: FloatArray, most: FloatArray) -> None:
        for group, m in enumerate(self.firsts):
            if np.isfinite(most[m]):
                unit = max(1.0, float(most[m]))
                row = {
                    self._part(kind, group): float(shared[kind, m]) / unit
                    for kind in range(self.problem.num_kinds)
                    if shared[kind, m]
                }
                if row:
                    self.rows.append((row, float(most[m] - fixed[m]) / unit))


def rounded_shares(
    ratios: FloatArray, dimensions: Dimensions, multiples: Sequence[int]
) -> FloatArray:
    """Ratios in whole units of every class of dimensions.

    Args:
        ratios: of the members, which add up to 1.
        dimensions: the classes.
        multiples: for each member what divides its examples: its devices.

    Returns:
        For each class what part each member has, `[classes, members]`.
    """
    found = np.empty((len(dimensions.units), len(ratios)))
    known: dict[tuple[int, bool], FloatArray] = {}
    for place, units in enumerate(dimensions.units.tolist()):
        key = units, place == dimensions.examples
        if key not in known:
            each = multiples if key[1] else [1] * len(ratios)
            whole = whole_units(units, ratios, each)
            known[key] = np.array(whole) / max(1, units)
        found[place] = known[key]
    return found


def whole_units(total: int, ratios: FloatArray, multiples: Sequence[int]) -> tuple[int, ...]:
    """Whole numbers that add up to a total, near to ratios, each a multiple of something.

    Args:
        total: what they add up to.
        ratios: parts, which add up to 1.
        multiples: what divides each; where they cannot add up so, they are taken as 1.

    Returns:
        The numbers: rounded, and then changed by steps where that adds the least error.

    Source: HAP, section 5.1.

    Example:
        >>> whole_units(10, np.array([0.64, 0.36]), [1, 1])
        (6, 4)
        >>> whole_units(12, np.array([0.64, 0.36]), [4, 2])
        (8, 4)
    """
    wanted = np.asarray(ratios) * total
    steps = np.array(multiples)
    sizes = np.round(wanted / steps).astype(int) * steps
    for _ in range(4 * len(steps) + total):
        off = int(sizes.sum()) - total
        if off == 0:
            return tuple(sizes.tolist())
        changed = sizes - np.sign(off) * steps
        allowed = (changed >= 0) & (np.abs(off) >= steps)
        if not allowed.any():
            break
        errors = np.abs(changed - wanted) - np.abs(sizes - wanted)
        place = int(np.argmin(np.where(allowed, errors, np.inf)))
        sizes[place] = changed[place]
    return whole_units(total, ratios, [1] * len(steps)) if max(multiples) > 1 else tuple(sizes)

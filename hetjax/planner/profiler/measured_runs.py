"""What a profile measures: few runs of layers, of which all others are composed.

Layers of one structure share what is measured, wherever they stand, and so do runs of them. Of a
run's time each layer has its part, but for a start that any program has; so short runs tell of long
ones. The shortest ones themselves, where that is the furthest from the truth, are all measured. Two
long runs are measured for nothing else than to see by how much that is wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.stage_work import structure_keys

_LENGTHS = (1, 2, 4)
"""How many modules one after another are measured as one run."""

_CHECKED = 3
"""How many modules the runs have that check the composition."""


@dataclass(frozen=True)
class Unit:
    """A run of layers that is measured.

    Args:
        layers: first layer, and the one after the last.
        checks: whether it only checks what is composed of the others.
    """

    layers: tuple[int, int]
    checks: bool = False


def layer_classes(problem: PlanningProblem) -> tuple[int, ...]:
    """Which layers are alike in structure.

    Args:
        problem: the planning problem.

    Returns:
        For each layer a number, the same for those that are alike.
    """
    numbers: dict[object, int] = {}
    keys = structure_keys(problem.program, problem.layers, problem.works)
    return tuple(numbers.setdefault(key, len(numbers)) for key in keys)


def num_structures(classes: Sequence[int]) -> int:
    """How many runs of layers there are that differ in structure.

    Args:
        classes: of the layers.

    Returns:
        The number.

    Example:
        >>> num_structures([0, 1, 0, 1])  # 0, 1, 01, 10, 010, 101, 0101
        7
    """
    layers = np.asarray(classes)
    ranks, count = layers, len(np.unique(layers))
    for length in range(2, len(layers) + 1):
        pairs = ranks[:-1] * (len(layers) + 1) + layers[length - 1 :]
        ranks = np.unique(pairs, return_inverse=True)[1]
        count += len(np.unique(ranks))
    return count


def units(problem: PlanningProblem, classes: Sequence[int]) -> tuple[Unit, ...]:
    """The runs that a profile measures, no two of one structure.

    Each layer alone and with the next one, one module and several, the model's beginning and its
    end with the module next to them; and longer ones that check.

    Args:
        problem: the planning problem.
        classes: of the layers, by `layer_classes`.

    Returns:
        The runs, the shortest first.
    """
    total = len(classes)
    short = [
        Unit((first, first + length)) for length in (1, 2) for first in range(total + 1 - length)
    ]
    found = [*short, *_module_runs(problem, total)]
    alike: dict[tuple[int, ...], Unit] = {}
    for unit in sorted(found, key=lambda unit: (unit.checks, unit.layers[1] - unit.layers[0])):
        first, end = unit.layers
        alike.setdefault(tuple(classes[first:end]), unit)
    return tuple(alike.values())


def _module_runs(problem: PlanningProblem, total: int) -> Iterator[Unit]:
    repeats = list(_repeats(problem))
    for first, step, count in repeats:
        for length in _LENGTHS:
            if length <= count:
                yield Unit((first, first + length * step))
    if not repeats:
        # Layers by cost alone: runs of powers of two from the beginning and from the end.
        for power in range(2, (total - 1).bit_length() + 1):
            length = min(2**power, total)
            yield Unit((0, length), checks=2 * length >= total)
            yield Unit((total - length, total), checks=2 * length >= total)
        return
    first, step, _ = repeats[0]
    yield Unit((0, first + step))
    first, step, count = repeats[-1]
    yield Unit((first + (count - 1) * step, total))
    for layers in _checks(repeats, total):
        yield Unit(layers, checks=True)


def _checks(repeats: Sequence[tuple[int, int, int]], total: int) -> Iterator[tuple[int, int]]:
    """Runs of a few modules from the model's beginning and to its end; all of a short model."""
    begins = [first + place * step for first, step, count in repeats for place in range(count)]
    if len(begins) <= _CHECKED:
        yield 0, total
        return
    yield 0, begins[_CHECKED]
    yield begins[-_CHECKED], total


def _repeats(problem: PlanningProblem) -> Iterator[tuple[int, int, int]]:
    """First layer, layers of one occurrence, and occurrences of each repeated module."""
    place = {position: layer for layer, position in enumerate(problem.layers)}
    cut = [section for section in problem.sections if section.starts]
    for module, group in itertools.groupby(cut, key=lambda section: section.section.module):
        occurrences = list(group)
        if module is None:
            continue
        # The first layer begins at 0, whatever light section comes before it.
        first = place.get(occurrences[0].starts[0], 0)
        yield first, len(occurrences[0].starts), len(occurrences)

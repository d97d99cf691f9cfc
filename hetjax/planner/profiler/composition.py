"""Runs' times from those of a few: as measured, or a start and then what each layer adds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from hetjax.planner.work.arrays import FloatArray
from hetjax.planner.work.profile import Composition


@dataclass(frozen=True)
class RunFigure:
    """What was measured of a run of layers.

    Args:
        layers: first layer, and the one after the last.
        value: the figure, above 0.
    """

    layers: tuple[int, int]
    value: float


def compose(
    classes: Sequence[int], runs: Sequence[RunFigure], without: Collection[int] = ()
) -> Composition:
    """Fit what layers add to what was measured of runs of them.

    It is the least-squares fit of relative errors, with no layer below 0, each weighed by the run's
    number of layers: what a run's ends are off for being compiled, and cached, without their
    neighbours is the larger a share the shorter it is. Runs like those that were measured keep what
    was measured.

    Args:
        classes: of the layers; those of one class take the same.
        runs: what was measured; every class is in one of them, but those
        without: the figure, such as layers without a backward pass; they add nothing.

    Returns:
        The composition.

    Example:
        >>> runs = [RunFigure((0, 1), 3.0), RunFigure((1, 2), 2.0), RunFigure((0, 2), 4.0)]
        >>> found = compose([0, 1], runs)
        >>> round(found.start, 3), found.layers.round(3).tolist()
        (1.0, [2.0, 1.0])
    """
    count = max(classes) + 1
    rows = np.zeros((len(runs), 1 + count))
    for row, run in zip(rows, runs, strict=True):
        first, end = run.layers
        row[0] = 1.0
        np.add.at(row, [1 + each for each in classes[first:end] if each not in without], 1.0)
        row *= (end - first) / run.value
    wanted = np.array([float(run.layers[1] - run.layers[0]) for run in runs])
    solution, _ = nnls(rows, wanted)
    layers: FloatArray = solution[1:][np.asarray(classes)]
    return Composition(float(solution[0]), layers, dict(_wherever_alike(classes, runs)))


def _wherever_alike(
    classes: Sequence[int], runs: Sequence[RunFigure]
) -> Iterator[tuple[tuple[int, int], float]]:
    """Every run whose layers are of the same classes as those of a measured run, and its figure."""
    for run in runs:
        first, end = run.layers
        length, wanted = end - first, classes[first:end]
        for begin in range(len(classes) - length + 1):
            if classes[begin : begin + length] == wanted:
                yield (begin, begin + length), run.value


def composition_error(composition: Composition, runs: Sequence[RunFigure]) -> float:
    """By how much runs that were measured whole differ from what they are composed of.

    Args:
        composition: what runs are composed of, made without those that were measured.
        runs: what was measured.

    Returns:
        The largest difference as a share of what was measured; 0 where there is none.
    """
    shares = (abs(float(composition.of(run.layers)) / run.value - 1.0) for run in runs)
    return max(shares, default=0.0)

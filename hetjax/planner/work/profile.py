"""The profile: what layers take on the devices of a cluster, as measured, in plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from hetjax.planner.work.arrays import FloatArray


@dataclass(frozen=True, order=True)
class Way:
    """Devices, and how they share a stage.

    Args:
        subcluster: the subcluster that they are of.
        shape: nodes, and devices in each.
        mesh_shape: sizes of the data and the tensor axis.
        sharding: the sharding rule.
    """

    subcluster: str
    shape: tuple[int, int]
    mesh_shape: tuple[int, int]
    sharding: str


@dataclass(frozen=True, eq=False)
class Composition:
    """A figure of runs of layers: as measured, or a start and then what each layer adds.

    Args:
        start: what any run has before its first layer.
        layers: what each layer adds, ``[L]``.
        measured: the figures of runs that were measured themselves.

    Example:
        >>> composition = Composition(1.0, np.array([2.0, 3.0, 4.0]), {(0, 2): 5.5})
        >>> float(composition.of((1, 3))), float(composition.of((0, 2)))
        (8.0, 5.5)
    """

    start: float
    layers: FloatArray
    measured: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def scaled(self, factor: float) -> Composition:
        """The same of all figures, so many times as large."""
        measured = {run: factor * figure for run, figure in self.measured.items()}
        return Composition(factor * self.start, factor * self.layers, measured)

    def of(self, run: tuple[int, int] | None) -> FloatArray:
        """The figure of runs.

        Args:
            run: first layer, and the one after the last; None for every run.

        Returns:
            The figure; of every run ``[L + 1, L + 1]``, the entry ``[i, j]`` for layers i to j - 1.
        """
        before = np.concatenate([[0.0], np.cumsum(self.layers)])
        if run is not None:
            composed = self.start + before[run[1]] - before[run[0]]
            return np.asarray(self.measured.get(run, composed))
        figures = self.start + before[None, :] - before[:, None]
        for measured, value in self.measured.items():
            figures[measured] = value
        return figures


@dataclass(frozen=True, eq=False)
class WayTimes:
    """What layers take in one way.

    Args:
        forward: seconds of the forward pass of one microbatch.
        backward: seconds of the whole backward pass, without recomputation.
        temporary_bytes: what the compiled backward program, the larger one, needs beside its
            arguments and results, on one device.
        composition_error: by how much runs that were measured whole differ from what they are
            composed of, as a share, at most; None where none was.
    """

    forward: Composition
    backward: Composition
    temporary_bytes: Composition
    composition_error: float | None = None

    def slower(self, factor: float) -> WayTimes:
        """The same where all takes so many times as long."""
        forward, backward = (each.scaled(factor) for each in (self.forward, self.backward))
        return replace(self, forward=forward, backward=backward)


@dataclass(frozen=True)
class Profile:
    """What was measured of a program's layers.

    Args:
        ways: times by the devices and how they share a stage.
        calibration: by subcluster and shape, by what the cost model's seconds of computation are
            multiplied on such devices, by what was measured there: forward and backward passes.
        updates: for subclusters whose update was measured, bytes/s of parameters, gradients and
            optimizer state that one device reads and writes.
        classes: for subclusters where anything was measured, of this program or of another one,
            what a device takes for a FLOP or a byte of each class of work, in seconds.
        measurements: how many measurements it is made of.
        seconds: how long those that were made for it took.
    """

    ways: Mapping[Way, WayTimes] = field(default_factory=dict)
    calibration: Mapping[tuple[str, tuple[int, int]], tuple[float, float]] = field(
        default_factory=dict
    )
    updates: Mapping[str, float] = field(default_factory=dict)
    classes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    measurements: int = 0
    seconds: float = 0.0

    def slowness(self, subcluster: str, shape: tuple[int, int]) -> tuple[float, float]:
        """By what the cost model's seconds of computation are multiplied where none are known.

        Args:
            subcluster: the subcluster.
            shape: nodes of it, and devices in each.

        Returns:
            Factors of forward and backward passes: those of this shape, else of the largest one
            that was measured of the subcluster, else 1.
        """
        measured = [of for name, of in self.calibration if name == subcluster]
        if not measured:
            return 1.0, 1.0
        nearest = shape if shape in measured else max(measured)
        return self.calibration[subcluster, nearest]

    def at_pace(self, pace: Mapping[str, float]) -> Profile:
        """The profile of devices that have become faster or slower.

        Args:
            pace: by subcluster, by what its devices take longer now.
        """
        return replace(
            self,
            ways={way: times.slower(pace[way.subcluster]) for way, times in self.ways.items()},
            calibration={
                key: (pace[key[0]] * forward, pace[key[0]] * backward)
                for key, (forward, backward) in self.calibration.items()
            },
            updates={name: rate / pace[name] for name, rate in self.updates.items()},
            classes={
                name: {kind: pace[name] * seconds for kind, seconds in rates.items()}
                for name, rates in self.classes.items()
            },
        )

    @property
    def corrects_costs(self) -> bool:
        """Whether measurements, of this program or of another one, correct the cost model."""
        return bool(self.measurements or self.calibration)

    @property
    def composition_error(self) -> float | None:
        """The largest error of composition of any way; None where none was measured."""
        errors = [each.composition_error for each in self.ways.values()]
        return max((error for error in errors if error is not None), default=None)

"""One measurement of a run of layers, and what is asked of those who make it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Annotated, Any

import optax
from jaxtyping import PyTree
from pydantic import Field

from hetjax.limits import Name

ROUNDS = 3
"""How often a run of layers is measured, all the others in between: a device that is slow for some
seconds is slow in one of these measurements only."""

_OUTLIER = 2.0
"""Times the median, from which on a repetition is one in which something else ran."""

Seconds = Annotated[float, Field(gt=0)]
Amount = Annotated[float, Field(ge=0)]
Bytes = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, eq=False)
class Measured:
    """What is measured of a program: its loss function and how its layers are cut.

    Args:
        loss_function: the plain JAX loss; see `hetjax.pipeline.trace`.
        parameters: pytree of the parameters' shapes.
        batch: pytree of a microbatch's shapes.
        optimizer: an Optax transformation.
        layers: the positions where layers begin, and the end.
        microbatch_size: examples in a microbatch.
        divides_sequences: whether the layers are those of a program whose sequences may be divided.
    """

    loss_function: Callable[..., Any]
    parameters: PyTree
    batch: PyTree
    optimizer: optax.GradientTransformation
    layers: tuple[int, ...]
    microbatch_size: int
    divides_sequences: bool = False


@dataclass(frozen=True)
class Request:
    """A run of layers to measure on one submesh.

    Args:
        layers: first layer, and the one after the last.
        mesh_shape: sizes of the data and the tensor axis.
        sharding: the sharding rule.
        cotangents: which of the values that the run sends have a cotangent, by place.
        updates: whether to measure the optimizer's update of its parameters, too.
    """

    layers: tuple[int, int]
    mesh_shape: tuple[int, int]
    sharding: str
    cotangents: tuple[int, ...]
    updates: bool = False


@dataclass(frozen=True)
class Measurement:
    """What a run of layers takes.

    Args:
        forward_seconds: the forward pass of one microbatch.
        backward_seconds: its whole backward pass; 0 where it has none, since what is trained comes
            after it.
        update_bytes_per_second: bytes/s of parameters, gradients and optimizer state that the
            optimizer's update gets through on one device; 0 where that was not measured.
        forward_bytes: what the compiled forward program needs beside arguments and results, on one
            device.
        backward_bytes: the same of the backward program.
        repetitions: how many repetitions the times are medians of.
        spread: the middle half of them lies in so wide a band, as a share of the median.
        yardstick_seconds: what a computation that is always the same took on the device meanwhile;
            0 where none was run.
        forward_work: FLOPs and bytes of the forward pass by class, on all devices together; empty
            where they were not counted.
        backward_work: the same of the backward pass.

    Source: `hetjax.pipeline.program.work_classes` of the classes.
    """

    forward_seconds: Seconds
    backward_seconds: Amount
    update_bytes_per_second: Amount
    forward_bytes: Bytes
    backward_bytes: Bytes
    repetitions: Annotated[int, Field(ge=1)]
    spread: Amount
    yardstick_seconds: Amount = 0.0
    forward_work: Mapping[Name, Amount] = field(default_factory=dict)
    backward_work: Mapping[Name, Amount] = field(default_factory=dict)

    def at_yardstick(self, seconds: float) -> Measurement:
        """The measurement as it would be at a moment when the yardstick takes so long.

        Args:
            seconds: what the yardstick takes.

        Returns:
            The measurement; itself where no yardstick was run.
        """
        if not self.yardstick_seconds:
            return self
        factor = seconds / self.yardstick_seconds
        return replace(
            self,
            forward_seconds=factor * self.forward_seconds,
            backward_seconds=factor * self.backward_seconds,
            update_bytes_per_second=self.update_bytes_per_second / factor,
            yardstick_seconds=seconds,
        )


def merged(measurements: Sequence[Measurement]) -> Measurement:
    """One measurement of those of several rounds.

    Args:
        measurements: of one run of layers on one device, one or more.

    Returns:
        Medians of times, as they would be where the yardstick takes its median; the update's rate
        is that of the measurements that have one.

    Example:
        >>> rounds = [Measurement(t, 2 * t, 0.0, 0, 0, 3, 0.1, y) for t, y in ((1, 1), (4, 2))]
        >>> found = merged(rounds)
        >>> found.forward_seconds, found.yardstick_seconds, found.repetitions
        (2.25, 1.5, 6)
    """
    moments = [each.yardstick_seconds for each in measurements if each.yardstick_seconds]
    usual = median(moments) if moments else 0.0
    alike = [each.at_yardstick(usual) for each in measurements]
    rates = [each.update_bytes_per_second for each in alike if each.update_bytes_per_second]
    return replace(
        measurements[0],
        forward_seconds=median(each.forward_seconds for each in alike),
        backward_seconds=median(each.backward_seconds for each in alike),
        update_bytes_per_second=median(rates) if rates else 0.0,
        repetitions=sum(each.repetitions for each in measurements),
        spread=median(each.spread for each in measurements),
        yardstick_seconds=usual,
    )


def typical(seconds: Sequence[float]) -> tuple[float, float]:
    """The median of repetitions without outliers, and their spread.

    Args:
        seconds: of each repetition.

    Returns:
        The median, and the width of the band of the middle half as a share of it.

    Example:
        >>> typical([1.0, 0.9, 1.0, 1.1, 1.0, 1.2, 0.8, 7.0])
        (1.0, 0.2)
    """
    limit = _OUTLIER * median(seconds)
    kept = sorted(each for each in seconds if each <= limit)
    middle = median(kept)
    quarter = len(kept) // 4
    width = kept[-1 - quarter] - kept[quarter]
    return middle, round(width / middle, 3) if middle else 0.0

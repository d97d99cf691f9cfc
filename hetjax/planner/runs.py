"""The work of all runs of layers at once, as arrays."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields, replace

import jax
import numpy as np
from numpy.typing import NDArray

from hetjax.pipeline.program import Program
from hetjax.pipeline.stages import ParameterPart
from hetjax.planner.work import Work, part_shape

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Runs:
    """The work of many runs of layers, each field an array over the runs.

    Args:
        forward_flops: FLOPs of the forward pass's matrix products.
        forward_traffic: bytes that it reads and writes, were nothing fused.
        backward_flops: FLOPs of the backward pass's matrix products.
        backward_traffic: bytes that it reads and writes, were nothing fused.
        product_bytes: bytes that the forward pass's matrix products write.
        residual_bytes: bytes kept between the two passes.
        input_bytes: bytes of inputs, all that is kept with recomputation.
        boundary_bytes: bytes received and sent.
        messages: how many messages bring and take them.
        parts: parameter parts that occur in any run.
        shapes: their shapes.
        used: for each part, the layers that use it, as 1 among 0: ``[len(parts), L]``; None where
            there is one run, which holds all parts.
        layers: where there is one run: its first layer, and the one after its last; None for layers
            that the planning problem does not have.
        parameter_bytes: what was found before of the runs' parameters, by logical mesh, sharding
            rule and bytes of optimizer state; see `hetjax.planner.execution.parameter_bytes`.
    """

    forward_flops: FloatArray
    forward_traffic: FloatArray
    backward_flops: FloatArray
    backward_traffic: FloatArray
    product_bytes: FloatArray
    residual_bytes: FloatArray
    input_bytes: FloatArray
    boundary_bytes: FloatArray
    messages: FloatArray
    parts: tuple[ParameterPart, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    used: FloatArray | None = None
    layers: tuple[int, int] | None = None
    parameter_bytes: dict[Hashable, tuple[FloatArray, FloatArray, FloatArray]] = field(
        default_factory=dict, repr=False
    )

    def held(self, sizes: FloatArray) -> FloatArray:
        """What each run holds of its parts together.

        Args:
            sizes: of each part.

        Returns:
            The sum over the parts that a layer of the run uses.
        """
        if self.used is None:
            return np.asarray(sizes.sum())
        alone, of_one, of_several = self._users
        total = sums_of_runs(sizes[alone] @ of_one)
        for size, is_used in zip(sizes[~alone], of_several, strict=True):
            total = total + size * is_used
        return total

    @functools.cached_property
    def _users(self) -> tuple[NDArray[np.bool_], FloatArray, list[NDArray[np.bool_]]]:
        """Which parts one layer uses alone, which one; and the runs that use each of the others."""
        assert self.used is not None, "this is one run, which holds all parts"
        alone = self.used.sum(axis=1) == 1
        others = [sums_of_runs(layers) > 0 for layers in self.used[~alone]]
        return alone, self.used[alone], others

    @property
    def known_layers(self) -> bool:
        """Whether the runs are of layers of the planning problem."""
        return self.used is not None or self.layers is not None

    def total(self, values: FloatArray) -> FloatArray:
        """The sum of what the layers of each run have.

        Args:
            values: one a layer of the planning problem.
        """
        if self.used is not None:
            return sums_of_runs(values)
        assert self.layers is not None, "the run is not of layers of the problem"
        return np.asarray(values[slice(*self.layers)].sum())

    def of(self, layers: tuple[int, int]) -> Runs:
        """One of the runs, in arrays without dimensions.

        Args:
            layers: its first layer, and the one after its last.

        Returns:
            The run, with the parts that it holds.
        """
        first, end = layers
        assert self.used is not None, "this is one run already"
        places = np.flatnonzero(self.used[:, first:end].any(axis=1))
        sizes = {
            each.name: getattr(self, each.name)[layers]
            for each in fields(self)
            if each.name not in ("parts", "shapes", "used", "layers", "parameter_bytes")
        }
        parts = tuple(self.parts[place] for place in places)
        shapes = tuple(self.shapes[place] for place in places)
        return Runs(**sizes, parts=parts, shapes=shapes, layers=layers)

    def repeating_forward(self) -> Runs:
        """The same runs with a backward pass that computes the forward pass again."""
        return replace(
            self,
            backward_flops=self.backward_flops + self.forward_flops,
            backward_traffic=self.backward_traffic + self.forward_traffic,
        )


def all_runs(program: Program, works: Sequence[Work]) -> Runs:
    """Every contiguous run of layers.

    Args:
        program: the traced loss function.
        works: the work of each of L layers.

    Returns:
        Arrays ``[L + 1, L + 1]``: the entry ``[i, j]`` is for layers i to j - 1. Entries with
        j <= i have no meaning.
    """
    received = np.array([*(work.received_bytes for work in works), 0.0])
    # A run keeps the inputs of its first layer; the batch leaves that later ones read are small.
    first_inputs = np.array([*(work.input_bytes for work in works), 0.0])
    parts = tuple(dict.fromkeys(part for work in works for part in work.parts))
    places = {part: place for place, part in enumerate(parts)}
    # What a run's first layer keeps with the layer before it is not kept twice in the run.
    twice = np.array([*(float(work.kept_twice) for work in works), 0.0])
    inside = np.triu(sums_of_runs(twice[:-1]) - twice[:, None], k=1)
    used = np.zeros((len(parts), len(works)))
    for layer, work in enumerate(works):
        used[[places[part] for part in work.parts], layer] = 1.0
    return Runs(
        forward_flops=sums_of_runs([work.forward.matmul_flops for work in works]),
        forward_traffic=sums_of_runs([work.forward.bytes for work in works]),
        backward_flops=sums_of_runs([work.backward.matmul_flops for work in works]),
        backward_traffic=sums_of_runs([work.backward.bytes for work in works]),
        product_bytes=sums_of_runs([work.product_bytes for work in works]),
        residual_bytes=sums_of_runs([work.residual_bytes for work in works]) - inside,
        input_bytes=np.broadcast_to(first_inputs[:, None], (len(works) + 1,) * 2),
        boundary_bytes=received[:, None] + received[None, :],
        messages=np.add.outer(received > 0, received > 0, dtype=float),
        parts=parts,
        shapes=tuple(part_shape(program, part) for part in parts),
        used=used,
    )


def one_run(
    program: Program, work: Work, sent_bytes: int, layers: tuple[int, int] | None = None
) -> Runs:
    """One run alone, in arrays without dimensions.

    Args:
        program: the traced loss function.
        work: its work.
        sent_bytes: bytes that it sends to the run after.
        layers: its layers in the planning problem, where it begins and ends with such.
    """
    return Runs(
        forward_flops=np.array(work.forward.matmul_flops),
        forward_traffic=np.array(work.forward.bytes),
        backward_flops=np.array(work.backward.matmul_flops),
        backward_traffic=np.array(work.backward.bytes),
        product_bytes=np.array(work.product_bytes),
        residual_bytes=np.array(float(work.residual_bytes)),
        input_bytes=np.array(float(work.input_bytes)),
        boundary_bytes=np.array(float(work.received_bytes + sent_bytes)),
        messages=np.array(float((work.received_bytes > 0) + (sent_bytes > 0))),
        parts=work.parts,
        shapes=tuple(part_shape(program, part) for part in work.parts),
        layers=layers,
    )


def sums_of_runs(values: Sequence[float] | FloatArray) -> FloatArray:
    """The sum over each contiguous run.

    Args:
        values: one a layer.

    Returns:
        ``[L + 1, L + 1]``: the entry ``[i, j]`` is for layers i to j - 1.
    """
    before = np.concatenate([[0.0], np.cumsum(values)])
    return before[None, :] - before[:, None]

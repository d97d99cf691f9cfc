"""The work of all runs of layers at once, as arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

from hetjax.pipeline.program.frozen_leaves import FrozenLeaves
from hetjax.pipeline.program.traced_program import Program
from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.planner.work.alike_runs import largest_of_runs, sums_of_runs, unlike_runs
from hetjax.planner.work.arrays import FloatArray, IntArray
from hetjax.planner.work.part_kinds import PartKind, part_kind
from hetjax.planner.work.run_structure import part_shape
from hetjax.planner.work.stage_work import Work

Found = TypeVar("Found")


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
        again_bytes: the most bytes that layers hold which are made again one after another.
        temporary_bytes: the most bytes that either pass holds beside what goes in and comes out,
            without what is made again; of several layers those of one.
        untiled_bytes: the same without the tiles of attention.
        temporary_bytes_on_cpu: the same with them, of programs that are compiled for CPUs.
        again_share: what share of the forward pass the backward pass repeats for these.
        boundary_bytes: bytes received and sent.
        messages: how many messages bring and take them.
        returned_bytes: bytes of their cotangents, given back and received.
        returned_messages: how many messages take and bring those.
        backward_product_bytes: `product_bytes`, as often as the backward pass goes through the
            products that write them: twice, but for what is frozen.
        has_backward: 1 where there is a backward pass, else 0.
        forward_moves: how often those exchange something in its forward pass that share the
            examples.
        forward_moved: bytes of that.
        backward_moves: how often they do in its backward pass.
        backward_moved: bytes of that.
        given_moves: how often they do of what the run gives to others.
        given_moved: bytes of that.
        parts: parameter parts that occur in any run.
        shapes: their shapes.
        frozen: which parameter leaves have no gradient, which no update, and which more of the
            optimizer's state than others.
        used: for each part, the layers that use it, as 1 among 0: ``[len(parts), L]``; None where
            there is one run, which holds all parts.
        layers: where there is one run: its first layer, and the one after its last; None for layers
            that the planning problem does not have.
        listed: the first layer of each run and the one after its last, where runs are listed one
            after another; see `by_length`.
        places: where runs are listed, which entry of the list a run of layers has,
            ``[L + 1, L + 1]``; 0, the run without a layer, where there is no run.
        known: what was found of the runs before, by whatever it depends on beside them; see `once`.
    """

    forward_flops: FloatArray
    forward_traffic: FloatArray
    backward_flops: FloatArray
    backward_traffic: FloatArray
    product_bytes: FloatArray
    residual_bytes: FloatArray
    input_bytes: FloatArray
    again_bytes: FloatArray
    temporary_bytes: FloatArray
    untiled_bytes: FloatArray
    temporary_bytes_on_cpu: FloatArray
    again_share: FloatArray
    boundary_bytes: FloatArray
    messages: FloatArray
    returned_bytes: FloatArray
    returned_messages: FloatArray
    backward_product_bytes: FloatArray
    has_backward: FloatArray
    forward_moves: FloatArray
    forward_moved: FloatArray
    backward_moves: FloatArray
    backward_moved: FloatArray
    given_moves: FloatArray
    given_moved: FloatArray
    parts: tuple[ParameterPart, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    frozen: FrozenLeaves
    used: FloatArray | None = None
    layers: tuple[int, int] | None = None
    listed: tuple[IntArray, IntArray] | None = None
    places: IntArray | None = None
    known: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def once(self, key: Hashable, find: Callable[[], Found]) -> Found:
        """What is found of the runs a single time, however many ways to run them share it.

        Args:
            key: all that it depends on beside the runs; what their backward pass repeats of the
                forward pass is said there, too.
            find: finds it, in arrays that nobody changes.
        """
        if key not in self.known:
            self.known[key] = find()
        return self.known[key]

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
        total = self._sums(sizes[alone] @ of_one)
        for size, is_used in zip(sizes[~alone], of_several, strict=True):
            total = total + size * is_used
        return total

    def largest(self, sizes: FloatArray) -> FloatArray:
        """The largest of each run's parts.

        Args:
            sizes: of each part.

        Returns:
            The most that a part has which a layer of the run uses; 0 where none uses any.
        """
        if self.used is None:
            return np.asarray(sizes.max(initial=0.0))
        of_layers = (self.used * sizes[:, None]).max(axis=0, initial=0.0)
        return self.in_form(largest_of_runs(of_layers))

    @functools.cached_property
    def _users(self) -> tuple[NDArray[np.bool_], FloatArray, list[NDArray[np.bool_]]]:
        """Which parts one layer uses alone, which one; and the runs that use each of the others."""
        assert self.used is not None, "this is one run, which holds all parts"
        alone = self.used.sum(axis=1) == 1
        others = [self._sums(layers) > 0 for layers in self.used[~alone]]
        return alone, self.used[alone], others

    @functools.cached_property
    def kinds(self) -> tuple[tuple[PartKind, ...], IntArray]:
        """What parts are to a step, each kind once, and which of them each part is."""
        places: dict[Hashable, int] = {}
        found: dict[int, PartKind] = {}
        of_parts = []
        for part, shape in zip(self.parts, self.shapes, strict=True):
            kind = part_kind(shape, part.leaf, self.frozen)
            key = (shape.shape, shape.dtype, *kind[1:])
            place = places.setdefault(key, len(places))
            found.setdefault(place, kind)
            of_parts.append(place)
        return tuple(found.values()), np.array(of_parts, dtype=int)

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
            return self._sums(values)
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
        assert self.listed is None, "a list is of no use where one run is wanted"
        places = np.flatnonzero(self.used[:, first:end].any(axis=1))
        sizes = {
            each.name: getattr(self, each.name)[layers]
            for each in fields(self)
            if each.name in _FIGURES
        }
        parts = tuple(self.parts[place] for place in places)
        shapes = tuple(self.shapes[place] for place in places)
        return Runs(**sizes, parts=parts, shapes=shapes, frozen=self.frozen, layers=layers)

    def in_form(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values of every run in the form of these runs.

        Args:
            values: ``[L + 1, L + 1]``, or of one run where there is one.
        """
        return values if self.listed is None else values[self.listed]

    def by_length(self, kinds: IntArray | None = None) -> Runs:
        """Every run once, in a list: half as much to compute as on a square, and less than that.

        Args:
            kinds: which layers are alike, as `alike_layers` tells: runs of layers that are alike,
                one by one, are one run of the list. None where no two are.

        Returns:
            Arrays over the list: the run without a layer before the first one, which is no stage;
            then the runs of one layer, of two and so on, each by its first layer. Runs from the
            first layer of all on are there, each by itself.
        """
        assert self.used is not None, "this is one run already"
        num_layers = self.used.shape[1]
        firsts, ends, places = unlike_runs(np.arange(num_layers + 1) if kinds is None else kinds)
        return replace(self._in_list(firsts, ends), places=places)

    def of_length(self, length: int) -> Runs:
        """The runs of so many layers, in a list by their first layer.

        Args:
            length: how many.
        """
        assert self.used is not None, "this is one run already"
        firsts = np.arange(self.used.shape[1] + 1 - length)
        return self._in_list(firsts, firsts + length)

    def _in_list(self, firsts: IntArray, ends: IntArray) -> Runs:
        """Some of the runs, in a list."""
        figures = {name: getattr(self, name)[firsts, ends] for name in _FIGURES}
        return replace(self, **figures, listed=(firsts, ends), known={})

    def on_square(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values of a list of runs, each where `all_runs` has its run.

        Args:
            values: those of the list, in the last dimension; the first one stands where there is no
                run.
        """
        assert self.places is not None, "these runs are not in a list"
        return values[..., self.places]

    def _sums(self, values: FloatArray) -> FloatArray:
        """The sums over all runs."""
        if self.listed is None:
            return sums_of_runs(values)
        before = np.concatenate([[0.0], np.cumsum(values)])
        firsts, ends = self.listed
        return before.take(ends) - before.take(firsts)

    def repeating_forward(self) -> Runs:
        """The same runs with a backward pass that computes the forward pass again."""
        again = self.has_backward
        return replace(
            self,
            backward_flops=self.backward_flops + again * self.forward_flops,
            backward_traffic=self.backward_traffic + again * self.forward_traffic,
            backward_moves=self.backward_moves + again * self.forward_moves,
            backward_moved=self.backward_moved + again * self.forward_moved,
        )


_FIGURES = frozenset(each.name for each in fields(Runs)) - frozenset(
    ("parts", "shapes", "frozen", "used", "layers", "listed", "places", "known")
)
"""The fields that are arrays over the runs."""


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
    returned = np.array([*(work.returned_bytes for work in works), 0.0])
    has_backward = sums_of_runs([float(work.backward_passes > 0) for work in works]) > 0
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
        input_bytes=first_inputs[:, None] * has_backward,
        again_bytes=np.zeros((len(works) + 1,) * 2),
        temporary_bytes=_temporary_bytes(works, [work.temporary_bytes for work in works]),
        untiled_bytes=_temporary_bytes(works, [work.untiled_bytes for work in works]),
        temporary_bytes_on_cpu=_temporary_bytes(
            works, [work.temporary_bytes_on_cpu for work in works]
        ),
        again_share=np.zeros((len(works) + 1,) * 2),
        boundary_bytes=received[:, None] + received[None, :],
        messages=np.add.outer(received > 0, received > 0, dtype=float),
        returned_bytes=returned[:, None] + returned[None, :],
        returned_messages=np.add.outer(returned > 0, returned > 0, dtype=float),
        backward_product_bytes=sums_of_runs([work.backward_product_bytes for work in works]),
        has_backward=has_backward.astype(float),
        forward_moves=sums_of_runs([float(work.forward_moves.count) for work in works]),
        forward_moved=sums_of_runs([work.forward_moves.bytes for work in works]),
        backward_moves=sums_of_runs([float(work.backward_moves.count) for work in works]),
        backward_moved=sums_of_runs([work.backward_moves.bytes for work in works]),
        given_moves=sums_of_runs([float(work.given_moves.count) for work in works]),
        given_moved=sums_of_runs([work.given_moves.bytes for work in works]),
        parts=parts,
        shapes=tuple(part_shape(program, part) for part in parts),
        frozen=program.frozen,
        used=used,
    )


def _temporary_bytes(works: Sequence[Work], of_layers: Sequence[int]) -> FloatArray:
    """What the largest layer of each run holds, and a gradient that goes from layer to layer."""
    alone = np.array(of_layers, float)
    returned = np.array([*(float(work.returned_bytes) for work in works), 0.0])
    returned[0] = 0.0
    found = largest_of_runs(alone + np.maximum(returned[:-1], returned[1:]))
    layer = np.arange(len(works))
    found[layer, layer + 1] = alone
    return found


def one_run(
    program: Program,
    work: Work,
    sent_bytes: int,
    layers: tuple[int, int] | None = None,
    cotangent_bytes: int | None = None,
) -> Runs:
    """One run alone, in arrays without dimensions.

    Args:
        program: the traced loss function.
        work: its work.
        sent_bytes: bytes that it sends to the run after.
        layers: its layers in the planning problem, where it begins and ends with such.
        cotangent_bytes: bytes of the cotangents of what it sends; None: as many as it sends.
    """
    coming = sent_bytes if cotangent_bytes is None else cotangent_bytes
    return Runs(
        forward_flops=np.array(work.forward.matmul_flops),
        forward_traffic=np.array(work.forward.bytes),
        backward_flops=np.array(work.backward.matmul_flops),
        backward_traffic=np.array(work.backward.bytes),
        product_bytes=np.array(work.product_bytes),
        residual_bytes=np.array(float(work.residual_bytes)),
        input_bytes=np.array(float(work.input_bytes * (work.backward_passes > 0))),
        again_bytes=np.array(float(work.again_bytes)),
        temporary_bytes=np.array(float(work.temporary_bytes)),
        untiled_bytes=np.array(float(work.untiled_bytes)),
        temporary_bytes_on_cpu=np.array(float(work.temporary_bytes_on_cpu)),
        again_share=np.array(_again_share(work)),
        boundary_bytes=np.array(float(work.received_bytes + sent_bytes)),
        messages=np.array(float((work.received_bytes > 0) + (sent_bytes > 0))),
        returned_bytes=np.array(float(work.returned_bytes + coming)),
        returned_messages=np.array(float((work.returned_bytes > 0) + (coming > 0))),
        backward_product_bytes=np.array(work.backward_product_bytes),
        has_backward=np.array(float(work.backward_passes > 0)),
        forward_moves=np.array(float(work.forward_moves.count)),
        forward_moved=np.array(work.forward_moves.bytes),
        backward_moves=np.array(float(work.backward_moves.count)),
        backward_moved=np.array(work.backward_moves.bytes),
        given_moves=np.array(float(work.given_moves.count)),
        given_moved=np.array(work.given_moves.bytes),
        parts=work.parts,
        shapes=tuple(part_shape(program, part) for part in work.parts),
        frozen=program.frozen,
        layers=layers,
    )


def _again_share(work: Work) -> float:
    """What share of a run's forward pass is made again for layers of it."""
    if not work.again_bytes:
        return 0.0
    if work.forward.matmul_flops:
        return work.recompute.matmul_flops / work.forward.matmul_flops
    return work.recompute.bytes / max(work.forward.bytes, 1.0)

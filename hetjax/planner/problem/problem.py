"""The planning problem: everything that a planner is given, in numbers."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
import optax
from jaxtyping import PyTree

from hetjax.errors import InputError, check_count, shown
from hetjax.mesh.cluster import Cluster
from hetjax.pipeline.layers.cost_layers import cluster_layers, crossing_bytes
from hetjax.pipeline.layers.modules import Section, find_modules
from hetjax.pipeline.layers.structural_layers import (
    LayeredSection,
    StructuralLayers,
    structural_layers,
)
from hetjax.pipeline.program.loss import abstract, check_examples, parameter_shapes
from hetjax.pipeline.program.traced_program import Program, needed_steps, num_bytes, operand_value
from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.update.mixed_rows import mixed_rows
from hetjax.pipeline.update.traced_update import settled_init
from hetjax.pipeline.update.unchanged_leaves import frozen_leaves, with_frozen_leaves
from hetjax.pipeline.update.update_digest import update_digest
from hetjax.pipeline.update.update_products import update_products
from hetjax.planner.intra_op.tensor_axis import TensorAxis, TensorCosts
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.prices import node_prices
from hetjax.planner.problem.known_slices import KnownSlices
from hetjax.planner.problem.options import DEFAULTS, PlanOptions, check_options
from hetjax.planner.work.grouped_stage import Groups
from hetjax.planner.work.layer_runs import Runs, all_runs
from hetjax.planner.work.products import product_dtype
from hetjax.planner.work.profile import Profile
from hetjax.planner.work.repeating_layers import LayerRun, repeatable_layers
from hetjax.planner.work.stage_traces import StageTraces
from hetjax.planner.work.stage_work import Known, Traces, Work, measure_layers


@dataclass(frozen=True, eq=False)
class PlanningProblem:
    """What any planner gets.

    Args:
        program: the loss function, traced at the size of a microbatch.
        layers: the positions where layers begin, and the end.
        works: the work of each layer.
        cluster: the devices.
        num_microbatches: microbatches in a step.
        microbatch_size: examples in each.
        dtype: the dtype that most of the matrix products' FLOPs run in.
        optimizer_bytes: bytes of optimizer state for each element of the parameters that are
            updated, on average; how many times as much some of them have, the program knows.
        update_products: FLOPs of matrix products in the optimizer's update, for each of these
            elements.
        find_update_digest: finds `update_digest` once, for all copies of the problem: only profiles
            ask for it, and it takes a while for hundreds of leaves.
        options: what a plan may be, and what it makes least.
        sections: the structure that the layers follow; empty where they follow cost alone.
        known: the work of what was measured of the program, by structure.
        profile_seconds: how long it took to measure the layers.
        tensor_axis: tells what it takes to divide the program along a tensor axis.
        lost: devices that cannot be used, counted through the cluster.
        profile: what was measured of the layers on the cluster's devices; empty for the analytic
            cost model alone.
        slices: what was found of stages on slices of subclusters; problems that are made from this
            one share it.
        traces: the traces of the layers; None where they are not kept.
        together: groups of parameters that the optimizer mixes, by place; no layer begins between
            them.
    """

    program: Program
    layers: tuple[int, ...]
    works: tuple[Work, ...]
    cluster: Cluster
    num_microbatches: int
    microbatch_size: int
    dtype: str
    optimizer_bytes: float
    find_update_digest: Callable[[], str] = field(repr=False)
    update_products: float = 0.0
    options: PlanOptions = DEFAULTS
    sections: tuple[LayeredSection, ...] = ()
    known: Known = field(default_factory=Known, repr=False)
    profile_seconds: float = 0.0
    profile: Profile = field(default_factory=Profile, repr=False)
    lost: frozenset[int] = frozenset()
    tensor_axis: TensorAxis | None = field(default=None, repr=False)
    slices: KnownSlices = field(default_factory=KnownSlices, repr=False)
    traces: Traces | None = field(default=None, repr=False)
    together: tuple[tuple[int, ...], ...] = ()

    def tensor_costs(self, devices: int) -> TensorCosts | None:
        """What a tensor axis costs in each layer, if that can be told.

        Args:
            devices: how many the axis has.
        """
        costs = None if self.tensor_axis is None else self.tensor_axis.costs(devices)
        return costs and costs.of_layers(self.layers)

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self.works)

    @property
    def update_digest(self) -> str:
        """What the optimizer's update computes for each element, as a digest."""
        return self.find_update_digest()

    @functools.cached_property
    def runs(self) -> Runs:
        """The work of every run of its layers."""
        return all_runs(self.program, self.works)

    @functools.cached_property
    def repeatable_layers(self) -> tuple[LayerRun, ...]:
        """The layers that are worth making again together."""
        return repeatable_layers(self.layers, self.sections)

    @property
    def warm_up_schedule(self) -> str:
        """The schedule of whole backward passes that stages are chosen for.

        It is H-1F1B where its split form or a search is asked for, 1F1B where ZB-H1 is, Eager-1F1B
        where ZB-H2 is, and else the schedule itself.
        """
        return _CHOSEN_FOR.get(self.options.schedule, self.options.schedule)


_CHOSEN_FOR = {
    "h_1f1b_split": "h_1f1b",
    "search": "h_1f1b",
    "zb_h1": "1f1b",
    "zb_h2": "eager_1f1b",
}


class Planner(Protocol):
    """Makes plans."""

    def plan(self, problem: PlanningProblem) -> Plan:
        """A plan for the problem.

        Args:
            problem: what to plan.

        Returns:
            A valid plan.

        Raises:
            InputError: the model fits nowhere.
        """
        ...


def make_problem(
    loss_function: Callable[..., Any],
    parameters: PyTree,
    batch: PyTree,
    *,
    cluster: Cluster | str | os.PathLike[str],
    optimizer: optax.GradientTransformation,
    num_microbatches: int,
    has_aux: bool = False,
    options: PlanOptions = DEFAULTS,
    divides_sequences: bool = False,
) -> PlanningProblem:
    """State what is to be planned: trace, find layers, count their work.

    Args:
        loss_function: ``loss_function(parameters, batch)``; see `hetjax.pipeline.trace`.
        parameters: pytree of arrays or shapes, or a function without arguments that makes it.
        batch: the batch of a whole step, pytree of arrays or shapes; first axes are the examples.
        cluster: the devices, or the path of a cluster file.
        optimizer: the Optax transformation, whose state takes memory.
        num_microbatches: into how many microbatches the batch is divided.
        has_aux: whether the loss function returns a pair of the loss and a pytree of scalars.
        options: what a plan may be, and what it makes least.
        divides_sequences: whether members of a stage may share the context; see
            `hetjax.pipeline.trace`.

    Returns:
        The problem.

    Raises:
        InputError: a count is out of range, the batch does not divide, a price is missing, the
            optimizer or the options are something else, or the loss function cannot be traced.
    """
    cluster = as_cluster(cluster)
    check_options(options)
    if options.objective == "cost":
        node_prices(cluster)
    check_count("num_microbatches", num_microbatches)
    _check_min_stages(options, cluster)
    if not callable(getattr(optimizer, "init", None)):
        raise InputError(f"optimizer is {shown(optimizer)}; it must be an Optax transformation")
    parameters = parameter_shapes(parameters)
    if not jax.tree.leaves(parameters):
        raise InputError("parameters has no leaves; there must be something to train")
    program, microbatch_size = trace_microbatch(
        loss_function,
        parameters,
        batch,
        num_microbatches,
        has_aux=has_aux,
        divides_sequences=divides_sequences,
    )
    program = with_frozen_leaves(program, optimizer, parameters)
    together = mixed_rows(program, optimizer, parameters)
    traces = StageTraces(program)
    figures = model_figures(program, traces, microbatch_size, options.num_layers, together)
    found = len(figures["works"])
    if found < options.min_stages:
        raise InputError(
            f"min_stages is {options.min_stages}; the model has {found} layers, and a stage needs "
            f"one{'; the optimizer mixes rows of scanned parameters' if together else ''}"
        )
    return PlanningProblem(
        **figures,
        cluster=cluster,
        num_microbatches=num_microbatches,
        optimizer_bytes=optimizer_bytes(optimizer, parameters),
        update_products=update_products(optimizer, parameters),
        find_update_digest=functools.cache(lambda: update_digest(optimizer, parameters)),
        options=options,
        together=together,
    )


def trace_microbatch(
    loss_function: Callable[..., Any],
    parameters: PyTree,
    batch: PyTree,
    num_microbatches: int,
    *,
    has_aux: bool = False,
    divides_sequences: bool = False,
) -> tuple[Program, int]:
    """Trace a loss function at the size of a microbatch, and say how many examples that has.

    Args:
        loss_function: ``loss_function(parameters, batch)``; see `hetjax.pipeline.trace`.
        parameters: pytree of arrays or shapes, or a function without arguments that makes it.
        batch: the batch of a whole step, pytree of arrays or shapes; first axes are the examples.
        num_microbatches: into how many microbatches the batch is divided.
        has_aux: whether the loss function returns a pair of the loss and a pytree of scalars.
        divides_sequences: whether members of a stage may share the context.

    Raises:
        InputError: the batch does not divide, the loss function cannot be traced, or no parameter
            reaches the loss.
    """
    shapes, microbatch_size = _microbatch(abstract(batch), num_microbatches)
    program = trace(
        loss_function, parameters, shapes, has_aux=has_aux, divides_sequences=divides_sequences
    )
    _check_reach(program)
    return program, microbatch_size


def _check_reach(program: Program) -> None:
    """Check that the loss has to do with the parameters."""
    steps = needed_steps(program.steps, [program.total])
    reached = {operand_value(program.total)}.union(*(step.values() for step in steps))
    if reached.isdisjoint(program.parameters):
        raise InputError(
            "the loss function returned a loss that depends on no parameter, so nothing would be "
            "trained; it must be computed from parameters"
        )


def num_examples(batch: PyTree) -> int:
    """How many examples a batch has.

    Args:
        batch: pytree of arrays or shapes; first axes are the examples.

    Raises:
        InputError: it has no arrays, or they differ in their number of examples.
    """
    shapes, size = _microbatch(abstract(batch), 1)
    check_examples(shapes)
    return size


def model_figures(
    program: Program,
    traces: Traces,
    microbatch_size: int,
    num_layers: int | None,
    together: Sequence[Sequence[int]] = (),
) -> dict[str, Any]:
    """The fields of a planning problem that say what the model takes.

    Args:
        program: the loss function, traced at the size of a microbatch.
        traces: where the traces of its layers come from.
        microbatch_size: examples in a microbatch.
        num_layers: how many layers of similar cost there are at most; None for layers that follow
            the model's structure.
        together: groups of parameters, by place, between which no layer begins.
    """
    layered = _undivided(_layers(program, num_layers), program, together)
    sections = _sections(program, layered)
    known = Known(groups=groups_of(program, sections))
    began = time.perf_counter()
    works = measure_layers(program, layered.positions, known, traces)
    return {
        "program": program,
        "layers": layered.positions,
        "works": works,
        "microbatch_size": microbatch_size,
        "dtype": product_dtype(program),
        "sections": layered.sections,
        "known": known,
        "profile_seconds": time.perf_counter() - began,
        "tensor_axis": TensorAxis(program, microbatch_size, sections),
        "traces": traces,
    }


def groups_of(program: Program, sections: Sequence[Section]) -> Groups:
    """The groups of a program's steps that are alike.

    Args:
        program: the traced loss function.
        sections: its modules and what stands between them.
    """
    return Groups(program, [section.start for section in sections])


def as_cluster(cluster: Cluster | str | os.PathLike[str]) -> Cluster:
    """A cluster, or the one that a file has.

    Args:
        cluster: the cluster, or the path of its file.

    Returns:
        The cluster.

    Raises:
        InputError: it is neither, or the file has no valid cluster.
    """
    if isinstance(cluster, str | os.PathLike):
        return Cluster.from_file(Path(cluster))
    if not isinstance(cluster, Cluster):
        raise InputError(
            f"cluster is {cluster!r}; it must be a Cluster, or the path of a cluster file"
        )
    return cluster


def optimizer_bytes(optimizer: optax.GradientTransformation, parameters: PyTree) -> float:
    """Bytes of an optimizer's state for each element of the parameters that it updates.

    Args:
        optimizer: an Optax transformation.
        parameters: pytree of arrays or shapes.

    Returns:
        Bytes; scalars such as a step count are left out.

    Example:
        >>> import jax.numpy as jnp
        >>> optimizer_bytes(optax.adamw(1e-3), {"weight": jnp.ones((16, 16))})
        8.0
    """
    parameters = abstract(parameters)
    state = jax.eval_shape(settled_init(optimizer, parameters), parameters)
    held = sum(num_bytes(leaf) for leaf in jax.tree.leaves(state) if leaf.shape)
    frozen = frozen_leaves(optimizer, parameters).without_update
    elements = sum(
        int(np.prod(leaf.shape))
        for place, leaf in enumerate(jax.tree.leaves(parameters))
        if place not in frozen
    )
    return held / max(elements, 1)


def _layers(program: Program, num_layers: int | None) -> StructuralLayers:
    if num_layers is None:
        return structural_layers(program)
    return StructuralLayers(cluster_layers(program, num_layers), ())


def _undivided(
    layered: StructuralLayers, program: Program, together: Sequence[Sequence[int]]
) -> StructuralLayers:
    """The layers without those that begin between the uses of parameters that go together."""
    kept = layered.positions
    for group in together:
        values = {program.parameters[place] for place in group}
        uses = [i for i, step in enumerate(program.steps) if not values.isdisjoint(step.values())]
        kept = tuple(each for each in kept if not uses or not uses[0] < each <= uses[-1])
    return layered if kept == layered.positions else StructuralLayers(kept, ())


def _sections(program: Program, layered: StructuralLayers) -> tuple[Section, ...]:
    """The program's modules and what stands between them, which layers by cost do not follow."""
    if layered.sections:
        return tuple(each.section for each in layered.sections)
    return find_modules(program, crossing_bytes(program))


def _microbatch(batch: PyTree, num_microbatches: int) -> tuple[PyTree, int]:
    """The shapes of a microbatch, and how many examples it has."""
    leaves = jax.tree.leaves(batch)
    if not leaves:
        raise InputError("batch has no arrays; the loss function needs examples to be planned for")
    check_examples(batch)
    sizes = {leaf.shape[0] for leaf in leaves if leaf.shape}
    for batch_size in sizes:
        if batch_size == 0:
            raise InputError("batch has 0 examples; a step needs 1 or more")
        if batch_size % num_microbatches:
            divisors = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
            raise InputError(
                f"batch_size = {batch_size} is not divided by num_microbatches = "
                f"{num_microbatches}; allowed for this batch: {', '.join(map(str, divisors))}"
            )
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            (leaf.shape[0] // num_microbatches, *leaf.shape[1:]) if leaf.shape else (), leaf.dtype
        ),
        batch,
    )
    return shapes, min(sizes, default=num_microbatches) // num_microbatches


def _check_min_stages(options: PlanOptions, cluster: Cluster) -> None:
    min_stages, num_layers = options.min_stages, options.num_layers
    most = min(cluster.num_devices, num_layers or cluster.num_devices)
    if min_stages > most:
        layer = "" if num_layers is None else f" and a layer (num_layers is {num_layers})"
        raise InputError(
            f"min_stages is {min_stages}; it must be from 1 to {most}, since a stage needs a "
            f"device (the cluster has {cluster.num_devices}){layer}"
        )

"""Whether all processes of a run compute the same: each of them traces the job by itself."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from hetjax import _compat
from hetjax.errors import InputError
from hetjax.pipeline.program.loss import makes_parameters, path_names
from hetjax.pipeline.program.trace_record import (
    TraceRecord,
    described,
    flat_program,
    record_of,
    record_of_program,
)
from hetjax.pipeline.program.traced_program import FlatJaxpr, Program, flatten_jaxpr
from hetjax.runtime.instructions.placement import Placement
from hetjax.runtime.moves.peers import Peer, names_of, processes_of
from hetjax.runtime.workers.job import Job

_CAUSES = (
    "Every process must trace the same. It does not where a module's global is changed after the "
    "import, where a constant is drawn without a seed, where the order of a set of strings counts, "
    "or where a host has another version of the program"
)

_KNOWN_NODES = (dict, list, tuple, type(None), OrderedDict, defaultdict)
"""The classes that every process takes for pytrees, beside named tuples."""


@dataclass(frozen=True)
class TreeRecord:
    """A pytree that has nodes of classes which somebody has made pytrees.

    Args:
        leaves: the paths of its leaves, as the driver finds them.
        classes: these classes, for a message.
    """

    leaves: tuple[str, ...]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class JobRecord:
    """What the driver has traced.

    Args:
        trees: of parameters, batch and optimizer's state those with such classes, by their names.
        losses: the loss, by the size of microbatches.
        initial: the optimizer's initial state.
        update: its update.
    """

    trees: Mapping[str, TreeRecord]
    losses: Mapping[int, TraceRecord]
    initial: TraceRecord
    update: TraceRecord


def job_record(job: Job, placement: Placement) -> JobRecord:
    """Put on record what was traced of a job.

    Args:
        job: the job.
        placement: what was built of it.
    """
    losses = {size: record_of_program(program) for size, program in placement.traced.items()}
    pipelines = placement.pipelines
    initial = record_of(flatten_jaxpr(pipelines.initial))
    structures = {
        "parameters": pipelines.parameter_tree,
        "batch": jax.tree.structure(job.batch),
        "state of the optimizer": pipelines.state_tree,
    }
    trees = {
        name: TreeRecord(_leaves(job, name), classes)
        for name, structure in structures.items()
        if (classes := _classes(structure))
    }
    return JobRecord(trees, losses, initial, record_of(pipelines.update))


def _classes(structure: Any) -> tuple[str, ...]:
    """The classes in a pytree's structure of which not every process knows that they are nodes."""
    classes = [
        each
        for each in _compat.node_classes(structure)
        if each not in _KNOWN_NODES and not (issubclass(each, tuple) and hasattr(each, "_fields"))
    ]
    return tuple(sorted(f"{each.__qualname__} of {each.__module__}" for each in classes))


def _leaves(job: Job, name: str) -> tuple[str, ...]:
    """The paths of the leaves of one of a job's pytrees."""
    if name == "batch":
        return path_names(job.batch)
    if name == "parameters":
        made = makes_parameters(job.parameters)
        return path_names(jax.eval_shape(job.parameters) if made else job.parameters)
    return path_names(jax.eval_shape(job.optimizer.init, job.parameter_shapes()))


def check_trees(record: JobRecord, job: Job, name: str) -> None:
    """Check that a worker takes for pytrees what the driver does.

    A class of the driver's script is sent as it is written, without what makes it a pytree.

    Args:
        record: what the driver has traced.
        job: the job, as the worker has it.
        name: the worker.

    Raises:
        InputError: it does not; it names the classes that may be the reason.
    """
    for what, tree in record.trees.items():
        try:
            is_same = _leaves(job, what) == tree.leaves
        except TypeError:  # A function returns what is no array, and for JAX no pytree.
            is_same = False
        if not is_same:
            raise InputError(
                f"{what}: {name} does not take for a pytree what the driver does; put "
                f"{' and '.join(tree.classes)}, with what makes it a pytree, into a module that "
                f"workers can import"
            )


def check_losses(record: JobRecord, traced: Mapping[int, Program], name: str) -> None:
    """Check that a worker has traced the driver's loss.

    Args:
        record: what the driver has traced.
        traced: what the worker has, by the size of microbatches.
        name: the worker.

    Raises:
        InputError: it is another one; it tells the first equation that is.
    """
    for size, program in traced.items():
        own = record_of_program(program)
        _check_same(record.losses[size], own, flat_program(program), "loss", name)


def check_optimizer(record: JobRecord, placement: Placement, name: str) -> None:
    """Check that a worker has traced the driver's optimizer.

    Args:
        record: what the driver has traced.
        placement: what the worker has built.
        name: the worker.

    Raises:
        InputError: it is another one; it tells the first equation that is.
    """
    pipelines = placement.pipelines
    initial, update = flatten_jaxpr(pipelines.initial), pipelines.update
    what = "initial state of the optimizer"
    _check_same(record.initial, record_of(initial), initial, what, name)
    what = "update of the optimizer"
    _check_same(record.update, record_of(update), update, what, name)


def _check_same(
    wanted: TraceRecord, own: TraceRecord, flat: FlatJaxpr, what: str, name: str
) -> None:
    if own != wanted and (places := wanted.differences(own)):
        raise InputError(
            f"the driver and {name} have traced unlike things: the {what} differs first in "
            f"{described(flat, places[0])}: {wanted.difference(own, places[0])}. {_CAUSES}"
        )


def parameters_record(job: Job) -> TraceRecord | None:
    """What the function that makes the parameters computes; None where there is none.

    Args:
        job: the job.
    """
    return record_of(_made(job)) if makes_parameters(job.parameters) else None


def _made(job: Job) -> FlatJaxpr:
    # As it is, so that JAX knows the trace by which the state was made.
    return flatten_jaxpr(jax.make_jaxpr(job.parameters)())


def check_parameters(
    job: Job, placement: Placement, records: Mapping[Peer, TraceRecord | None]
) -> None:
    """Check that workers make the same of the parameters that more than one of them holds.

    What a single worker holds may be drawn without a seed.

    Args:
        job: the job.
        placement: where the parameters lie.
        records: what `parameters_record` returned in each worker.

    Raises:
        InputError: two of them make one otherwise.
    """
    names, program = names_of(job.plan), placement.pipelines.program
    unlike: dict[tuple[Peer, Peer], Collection[int]] = {}
    for leaf, (first, *others) in sorted(_holders(placement).items()):
        for other in others:
            one, another = records[first], records[other]
            if one is None or another is None or one == another:
                continue
            if (first, other) not in unlike:
                unlike[first, other] = _outputs_of(_made(job), one.differences(another))
            if program.leaves.places[leaf][0] in unlike[first, other]:
                raise InputError(
                    f"parameters: the function makes {program.parameter_names[leaf]!r} otherwise "
                    f"in {names[other]} than in {names[first]}, and both hold it; draw with a "
                    f"seed, as by jax.random.key(0), or give arrays"
                )


def _holders(placement: Placement) -> dict[int, list[Peer]]:
    """For each parameter the workers that hold some of it."""
    found: dict[int, list[Peer]] = {}
    for peer, process in processes_of(placement.plan).items():
        parts = [placement.pipelines.stages[stage].parameters for stage in process.stages]
        for leaf in dict.fromkeys(part.leaf for each in parts for part in each):
            found.setdefault(leaf, []).append(peer)
    return found


def _outputs_of(flat: FlatJaxpr, places: Collection[int]) -> set[int]:
    """The outputs of a trace that entries of its record have a part in."""
    changed: set[int] = set()
    for place, step in enumerate(flat.steps, start=1):
        if place in places or not changed.isdisjoint(step.values()):
            changed.update(step.outputs)
    first = len(flat.steps) + 1
    return {
        place
        for place, output in enumerate(flat.outputs)
        if first + place in places or output in changed
    }

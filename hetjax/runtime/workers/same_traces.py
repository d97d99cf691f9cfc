"""Whether all processes of a run compute the same: each of them traces the job by itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import jax

from hetjax.errors import InputError
from hetjax.pipeline.program.loss import makes_parameters
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


@dataclass(frozen=True)
class JobRecord:
    """What the driver has traced.

    Args:
        losses: the loss, by the size of microbatches.
        initial: the optimizer's initial state.
        update: its update.
    """

    losses: Mapping[int, TraceRecord]
    initial: TraceRecord
    update: TraceRecord


def job_record(placement: Placement) -> JobRecord:
    """Put on record what was traced of a job.

    Args:
        placement: what was built of it.
    """
    losses = {size: record_of_program(program) for size, program in placement.traced.items()}
    pipelines = placement.pipelines
    initial = record_of(flatten_jaxpr(pipelines.initial))
    return JobRecord(losses, initial, record_of(pipelines.update))


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

"""The work of a program's stages: what each computes, keeps, sends and holds for one microbatch."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hetjax.pipeline.program.costs import Cost
from hetjax.pipeline.program.temporaries import Temporaries, temporary_bytes_on_cpu
from hetjax.pipeline.program.traced_program import Program, num_bytes
from hetjax.pipeline.stages.backward import StagePrograms, differentiate
from hetjax.pipeline.stages.cutting import ParameterPart, Stage, cut
from hetjax.pipeline.stages.recomputing import Run
from hetjax.pipeline.stages.traced_stage import TracedStage, Tracer, trace_stage
from hetjax.planner.work.grouped_stage import Groups
from hetjax.planner.work.member_moves import MemberMoves, member_moves
from hetjax.planner.work.products import product_bytes
from hetjax.planner.work.run_structure import Inputs, inputs_of, shape_keys, structure_of


@dataclass(frozen=True)
class Work:
    """What a run of layers does and holds for one microbatch, on one device.

    Args:
        forward: the forward pass.
        backward: the backward pass; where the run recomputes, with the repetition.
        recompute: the repetition alone, of all of the run or of layers of it.
        product_bytes: bytes that the forward pass's matrix products write.
        residual_bytes: bytes kept between the forward and the backward pass.
        input_bytes: bytes of its inputs, all that is kept where it recomputes.
        again_bytes: the most bytes that layers hold which are made again one after another.
        temporary_bytes: the most bytes that either pass holds beside what goes in and comes out,
            without what is made again.
        untiled_bytes: the same without the tiles of attention.
        temporary_bytes_on_cpu: the same with them, of programs that are compiled for CPUs.
        received_bytes: bytes it receives from the run before; 0 in the first.
        returned_bytes: bytes of their cotangents, which it gives back.
        returned: which of the values received have such a cotangent, by place.
        parts: the parameter parts that it holds.
        split: the backward pass in two halves, where it was asked for.
        kept_twice: bytes that it and the run before it both keep, and that one run of the two would
            keep once.
        forward_moves: what those have to exchange in its forward pass that share the examples.
        backward_moves: the same of its backward pass; where it recomputes, with the repetition.
        given_moves: the same of what it gives to others, such as the loss.
        backward_passes: how often its backward pass goes through what the forward pass does: for
            what it gives back and for its parameters, once where these are frozen; 0 where there is
            no backward pass.
        backward_product_bytes: `product_bytes`, each product's as often as the backward pass goes
            through the step that it is in: not at all before the first trained parameter.
    """

    forward: Cost
    backward: Cost
    recompute: Cost
    product_bytes: float
    residual_bytes: int
    input_bytes: int
    received_bytes: int
    returned_bytes: int
    returned: tuple[int, ...]
    parts: tuple[ParameterPart, ...]
    split: SplitWork | None = None
    again_bytes: int = 0
    temporary_bytes: int = 0
    untiled_bytes: int = 0
    temporary_bytes_on_cpu: int = 0
    kept_twice: int = 0
    forward_moves: MemberMoves = field(default_factory=MemberMoves)
    backward_moves: MemberMoves = field(default_factory=MemberMoves)
    given_moves: MemberMoves = field(default_factory=MemberMoves)
    backward_passes: int = 2
    backward_product_bytes: float = 0.0


@dataclass(frozen=True)
class SplitWork:
    """What the two halves of a run's backward pass do for one microbatch, without recomputation.

    Args:
        input_gradient: the first half.
        weight_gradient: the second half.
        deferred_bytes: bytes kept between the two.
    """

    input_gradient: Cost
    weight_gradient: Cost
    deferred_bytes: int


@dataclass(frozen=True, eq=False)
class Known:
    """What was found of a program's runs, by their structure.

    Args:
        works: their work, and which of the values they receive have a cotangent.
        traces: their traces, which serve with recomputation and without, whole and in halves.
        groups: how the program's steps are grouped where runs are traced; None for not at all.
    """

    works: dict[Hashable, tuple[Work, tuple[int, ...]]] = field(default_factory=dict)
    traces: dict[Hashable, TracedStage] = field(default_factory=dict)
    groups: Groups | None = None


class Traces(Protocol):
    """Where traces of a program's runs come from."""

    def of(self, boundaries: tuple[int, ...], index: int, seeds: tuple[int, ...]) -> TracedStage:
        """The trace of a run.

        Args:
            boundaries: the positions where runs begin, and the end.
            index: which run.
            seeds: which of its outputs have a cotangent, by place.
        """
        ...


def measure(
    program: Program,
    boundaries: Sequence[int],
    recompute: Sequence[bool] = (),
    *,
    recompute_runs: Sequence[Sequence[Run]] = (),
    split: bool = False,
    known: Known | None = None,
    traces: Traces | None = None,
) -> tuple[Work, ...]:
    """Count the work of a program's runs of positions, each differentiated by itself.

    Runs of the same structure are differentiated once.

    Args:
        program: the traced loss function.
        boundaries: the positions where runs begin, and the end.
        recompute: whether each run recomputes; empty for none.
        recompute_runs: for each run the positions in it that are made again in the backward pass;
            empty for none.
        split: whether to divide the backward passes and count their halves, too.
        known: what was measured before of this program; what is measured now is added.
        traces: where the traces of runs come from; None to trace them.

    Returns:
        The work of each run. Where it recomputes, its backward pass counts the forward steps that
        it repeats; its residual bytes are those that it would keep otherwise.
    """
    runs = cut(program, boundaries)
    again = list(recompute) or [False] * len(runs)
    structures = [structure_of(program, run) for run in runs]
    inputs = inputs_of(program, runs)
    known = known or Known()
    inside = [tuple(each) for each in recompute_runs] or [()] * len(runs)
    repeated = _repeated(program, boundaries, inside, known)
    works: list[Work] = []
    cotangents: tuple[int, ...] = ()
    for run, structure in zip(reversed(runs), reversed(structures), strict=True):
        is_last = run is runs[-1]
        alike = (structure, shape_keys(inputs[run.index]))
        places = tuple(tuple(p - boundaries[run.index] for p in each) for each in inside[run.index])
        key = (alike, cotangents, is_last, again[run.index], split, places)
        if key not in known.works:
            # What its backward pass reads does not depend on whether that is kept.
            other = known.works.get((alike, cotangents, is_last, not again[run.index], split, ()))
            tracer = _tracer(known, alike, traces, tuple(boundaries), is_last=is_last)
            known.works[key] = _measure_run(
                run,
                inputs[run.index],
                cotangents,
                weights=[program.parameters[part.leaf] for part in run.parameters],
                is_last=is_last,
                recompute=again[run.index],
                recompute_runs=inside[run.index],
                halves=other[0].split if other and not places else None,
                split=split,
                tracer=tracer,
                microbatch_size=program.num_examples,
            )
        work, cotangents = known.works[key]
        if places:
            work = replace(work, **repeated[run.index])
            # The program that was looked at makes them again in it.
            beside = max(0, work.temporary_bytes_on_cpu - work.again_bytes)
            work = replace(work, temporary_bytes_on_cpu=beside)
        works.append(replace(work, parts=run.parameters))
    return tuple(reversed(works))


def _repeated(
    program: Program,
    boundaries: Sequence[int],
    inside: Sequence[Sequence[Run]],
    known: Known,
) -> list[dict[str, Any]]:
    """Of each run what is made again in it: its work, and the most that it holds at once."""
    if not any(inside):
        return []
    edges = sorted({*boundaries, *(p for runs in inside for run in runs for p in run)})
    pieces = dict(zip(itertools.pairwise(edges), measure(program, edges, known=known), strict=True))
    found = []
    for (first, end), runs in zip(itertools.pairwise(boundaries), inside, strict=True):
        works = [pieces[run] for run in runs]
        again = max((work.residual_bytes for work in works), default=0)
        parts = [work for (a, b), work in pieces.items() if first <= a and b <= end]
        found.append(
            {
                "recompute": sum((w.forward for w in works), Cost()),
                "again_bytes": again,
                "temporary_bytes": max((work.temporary_bytes for work in parts), default=0),
                "untiled_bytes": max((work.untiled_bytes for work in parts), default=0),
            }
        )
    return found


def _tracer(
    known: Known,
    alike: Hashable,
    traces: Traces | None,
    boundaries: tuple[int, ...],
    *,
    is_last: bool,
) -> Tracer:
    """What traces a run, unless that was done of one that is alike."""

    def tracer(run: Stage, *inputs: Any) -> TracedStage:
        seeds = inputs[-1]
        if (alike, seeds) not in known.traces:
            known.traces[alike, seeds] = trace(run, *inputs)
        return known.traces[alike, seeds]

    def trace(run: Stage, *inputs: Any) -> TracedStage:
        if traces is not None:
            return traces.of(boundaries, run.index, inputs[-1])
        grouped = known.groups and known.groups.grouped(run, is_last=is_last)
        return trace_stage(grouped or run, *inputs)

    return tracer


def measure_layers(
    program: Program,
    layers: Sequence[int],
    known: Known | None = None,
    traces: Traces | None = None,
) -> tuple[Work, ...]:
    """Count the work of layers, and what neighbours among them both keep.

    Args:
        program: the traced loss function.
        layers: the positions where layers begin, and the end.
        known: what was measured before of this program; what is measured now is added.
        traces: where the traces of runs come from; None to trace them.

    Returns:
        The work of each layer.
    """
    known = known or Known()
    works = measure(program, layers, known=known, traces=traces)
    twice = [0] * len(works)
    for first in (1, 2):
        edges = sorted({0, *range(first, len(works), 2), len(works)})
        positions = [layers[edge] for edge in edges]
        pairs = measure(program, positions, known=known, traces=traces)
        for (begin, end), pair in zip(itertools.pairwise(edges), pairs, strict=True):
            if end - begin == 2:
                apart = works[begin].residual_bytes + works[begin + 1].residual_bytes
                twice[begin + 1] = max(0, apart - pair.residual_bytes)
    return tuple(replace(work, kept_twice=both) for work, both in zip(works, twice, strict=True))


def structure_keys(
    program: Program, boundaries: Sequence[int], works: Sequence[Work]
) -> tuple[Hashable, ...]:
    """What tells runs of one work from others.

    Args:
        program: the traced loss function.
        boundaries: the positions where runs begin, and the end.
        works: their works.

    Returns:
        A key for each run, equal for those that do the same on arrays of the same shapes.
    """
    runs = cut(program, boundaries)
    structures = [structure_of(program, run) for run in runs]
    inputs = inputs_of(program, runs)
    after = [*(work.returned for work in works[1:]), None]
    return tuple(
        (structure, shape_keys(shapes), cotangents)
        for structure, shapes, cotangents in zip(structures, inputs, after, strict=True)
    )


def _measure_run(
    run: Stage,
    inputs: Inputs,
    cotangents_in: tuple[int, ...],
    *,
    weights: Sequence[int],
    is_last: bool,
    recompute: bool,
    recompute_runs: Sequence[Run],
    halves: SplitWork | None,
    split: bool,
    tracer: Tracer,
    microbatch_size: int,
) -> tuple[Work, tuple[int, ...]]:
    """A run's work, and which of the values it receives have a cotangent.

    Where halves are asked for and known, they are not found again.
    """
    _, batch, received = inputs
    programs = differentiate(
        run,
        *inputs,
        is_last=is_last,
        cotangents_in=cotangents_in,
        recompute=recompute,
        recompute_runs=recompute_runs,
        # What was traced of runs that are alike makes nothing again.
        tracer=trace_stage if recompute_runs else tracer,
    )
    seeds = (0,) if is_last else cotangents_in
    traced = tracer(run, *inputs, seeds)
    forward_moves, backward_moves, given_moves = member_moves(traced, microbatch_size)
    passes = (programs.forward, *([programs.backward] if programs.has_backward else ()))
    held = list(map(Temporaries, passes))
    work = Work(
        forward=programs.forward_cost,
        backward=programs.backward_cost + programs.recompute_cost,
        recompute=programs.recompute_cost,
        product_bytes=sum(map(product_bytes, run.steps)),
        residual_bytes=programs.residual_bytes,
        input_bytes=sum(num_bytes(shape) for shape in (*batch, *received)),
        temporary_bytes=max(each.most_bytes() for each in held),
        untiled_bytes=max(each.untiled_bytes() for each in held),
        temporary_bytes_on_cpu=max(map(temporary_bytes_on_cpu, passes)),
        received_bytes=sum(num_bytes(shape) for shape in received),
        returned_bytes=sum(num_bytes(received[place]) for place in programs.cotangents_out),
        returned=programs.cotangents_out,
        parts=run.parameters,
        split=(halves or _measure_halves(programs)) if split else None,
        forward_moves=forward_moves,
        backward_moves=backward_moves + forward_moves if recompute else backward_moves,
        given_moves=given_moves,
        backward_passes=_backward_passes(programs),
        backward_product_bytes=_backward_product_bytes(run, weights) * programs.has_backward,
    )
    return work, programs.cotangents_out


def _backward_passes(programs: StagePrograms) -> int:
    if not programs.has_backward:
        return 0
    return 1 if programs.parameters and not programs.trained else 2


def _backward_product_bytes(run: Stage, weights: Sequence[int]) -> float:
    """What products write, as often as a backward pass goes through their steps.

    It goes through those that a trained parameter reaches: for what they are given and for their
    parameters, once where these are frozen.
    """
    moving = {weights[place] for place in run.trained}
    moving |= {run.receives[place] for place in run.moving}
    of_weights, total = set(weights), 0.0
    for step in run.steps:
        read = set(step.values())
        if read and read <= of_weights:
            # A parameter in another form, as a cast.
            of_weights.update(step.outputs)
        if moving.isdisjoint(read):
            continue
        moving.update(step.outputs)
        own = read & of_weights
        passes = 1 if own and own.isdisjoint(moving) else 2
        total += passes * product_bytes(step)
    return total


def _measure_halves(programs: StagePrograms) -> SplitWork:
    split = programs.split
    return SplitWork(split.input_gradient_cost, split.weight_gradient_cost, split.deferred_bytes)

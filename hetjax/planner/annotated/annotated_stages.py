"""Stages found from annotations: a run of the program is a stage of the devices that it names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetjax import _compat
from hetjax.errors import InputError
from hetjax.pipeline.program.reshards import reshards_of
from hetjax.pipeline.program.traced_program import Program, num_bytes
from hetjax.pipeline.stages.cutting import crossing_values, shared_steps
from hetjax.planner.annotated.input_annotations import InputAnnotations
from hetjax.sharding.annotation.annotation import HSharding


@dataclass(frozen=True)
class AnnotatedUse:
    """A place of the program of which an annotation names the devices.

    Args:
        start: the first position.
        stop: the position after the last.
        annotation: the annotation.
        what: what it is of, with the line of the program.
        is_value: whether that is a value, and no parameter.
    """

    start: int
    stop: int
    annotation: HSharding
    what: str
    is_value: bool = False

    @property
    def devices(self) -> frozenset[int]:
        """The devices that it names."""
        return frozenset(self.annotation.devices)


@dataclass(frozen=True)
class AnnotatedStage:
    """A contiguous run of a program, and the devices that compute it.

    Args:
        start: the first position.
        stop: the position after the last.
        uses: what names its devices, in order; one or more.
    """

    start: int
    stop: int
    uses: tuple[AnnotatedUse, ...]

    @property
    def devices(self) -> frozenset[int]:
        """Its devices."""
        return self.uses[0].devices


def find_stages(program: Program, given: InputAnnotations) -> tuple[AnnotatedStage, ...]:
    """Find the stages that annotations say.

    What computes with an annotated parameter, and what `hetjax.reshard` stands at, is of a stage on
    their devices; between two stages the program is cut where least is sent. What is annotated on
    the devices of several stages belongs to all of them, and says of none where it is.

    Args:
        program: the traced loss function.
        given: the annotations of its inputs.

    Returns:
        The stages, in order.

    Raises:
        InputError: nothing names a stage, the program comes back to a stage that it has left, or
            one operation uses what is on two stages.

    Source: Hetu v2, section 5.4.
    """
    uses = sorted(_uses(program, given), key=lambda use: use.start)
    named = {use.devices for use in uses}
    own = [use for use in uses if not any(other < use.devices for other in named)]
    if not own:
        raise InputError(
            "annotations: no parameter that the loss uses is annotated, and no value is resharded, "
            "so nothing says which devices compute what"
        )
    runs = [tuple(run) for _, run in itertools.groupby(own, key=lambda use: use.devices)]
    _check_order(runs)
    _check_devices(uses, runs)
    bounds = [0]
    bounds += [_cut_between(program, a[-1], b[0]) for a, b in itertools.pairwise(runs)]
    bounds.append(program.num_positions)
    return tuple(
        AnnotatedStage(start, stop, run)
        for run, (start, stop) in zip(runs, itertools.pairwise(bounds), strict=True)
    )


def _uses(program: Program, given: InputAnnotations) -> Iterator[AnnotatedUse]:
    """All places that name devices: uses of parameters, and reshards."""
    leaves: dict[int, frozenset[int]] = {
        program.parameters[leaf]: frozenset([leaf]) for leaf in given.parameters
    }
    shared = shared_steps(program)
    for position, step in enumerate(program.steps):
        read = frozenset[int]().union(*(leaves.get(value, frozenset()) for value in step.values()))
        if shared.issuperset(step.outputs):
            # A parameter in another form is computed wherever it is used.
            leaves.update(dict.fromkeys(step.outputs, read))
        else:
            line = (
                "" if step.equation is None else f", used at {_compat.source_line(step.equation)}"
            )
            for leaf in sorted(read):
                what = f"parameter {program.parameter_names[leaf]!r}{line}"
                yield AnnotatedUse(position, position + 1, given.parameters[leaf], what)
    for found in reshards_of(program):
        what = f"hetjax.reshard at {found.line}"
        yield AnnotatedUse(found.start, found.stop, given.meant(found), what, is_value=True)


def _check_order(runs: Sequence[Sequence[AnnotatedUse]]) -> None:
    """Check that each stage is one run."""
    first: dict[frozenset[int], AnnotatedUse] = {}
    for place, run in enumerate(runs):
        use = run[0]
        if use.devices in first:
            between = runs[place - 1][-1]
            raise InputError(
                f"annotations: {use.what}, is on devices {sorted(use.devices)}, as "
                f"{first[use.devices].what}; but between them {between.what}, is on "
                f"{sorted(between.devices)}; allowed: stages one after the other, each on devices "
                f"of its own"
            )
        first[use.devices] = use


def _check_devices(uses: Sequence[AnnotatedUse], runs: Sequence[Sequence[AnnotatedUse]]) -> None:
    """Check that what is of several stages is on their devices alone."""
    known = frozenset[int]().union(*(run[0].devices for run in runs))
    for use in uses:
        if not use.devices <= known:
            smaller = next(run[0] for run in runs if run[0].devices < use.devices)
            raise InputError(
                f"annotations: {use.what}, is on devices {sorted(use.devices)}, and "
                f"{smaller.what}, on {sorted(smaller.devices)}, which makes these a stage; no "
                f"stage is on {sorted(use.devices - known)}"
            )


def _cut_between(program: Program, last: AnnotatedUse, first: AnnotatedUse) -> int:
    """Where the program is cut between two stages: where least is sent, as late as may be."""
    if first.start < last.stop:
        raise InputError(
            f"annotations: {last.what}, is on devices {sorted(last.devices)}, and {first.what}, on "
            f"{sorted(first.devices)}: they are used together, and nothing says in which of two "
            f"stages; allowed: all that one operation uses on the same devices"
        )
    return min(
        range(first.start, last.stop - 1, -1),
        key=lambda position: sum(map(num_bytes, crossing_values(program, position))),
    )

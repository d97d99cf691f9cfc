"""The optimizer's update, divided among stages: any Optax transformation, with exact numbers.

The whole update is traced once, as one device would compute it, and each of its steps is placed
where the parameter lives that it works on. What joins several parameters can only pass through
scalars (a global norm, a token count, a test for infinities): those are sent around between phases,
and every stage then computes the same rest. A leaf that is cut between stages (stacked over a
``scan``) is updated in rows; reductions over all of it become partial ones, joined like any other
scalar.

A step whose loss or gradient is not finite changes nothing. That is decided by scalars which every
stage knows before it updates.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hetjax.pipeline.program.frozen_leaves import NONE_FROZEN, FrozenLeaves
from hetjax.pipeline.program.stacked_leaves import StackedLeaves, whole_leaves
from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.pipeline.update.state_groups import state_groups
from hetjax.pipeline.update.traced_update import divided_trace
from hetjax.pipeline.update.update_analysis import Message, UpdateAnalysis
from hetjax.pipeline.update.update_rows import RowEvaluator, pack, unpack
from hetjax.pipeline.update.whole_update import if_finite, zeros_of

MessagesByPair = Mapping[tuple[int, int], list[Message]]


@dataclass(frozen=True, eq=False)
class UpdateGroup:
    """Parameters that are updated together, while the state of others is not there.

    Args:
        parts: their places among the parts that the stage updates.
        summed: the places of their gradients among the stage's: of those that have any.
        state: the places of their state among the stage's.
        returned: the places of the state that the function returns: in the last group also what
            belongs to no parameter, and all groups read.
        update: takes and returns what the last phase does, of the group: as state what belongs to
            no parameter, then the group's; and no loss, which is among the messages.
    """

    parts: tuple[int, ...]
    summed: tuple[int, ...]
    state: tuple[int, ...]
    returned: tuple[int, ...]
    update: Callable[..., Any]


@dataclass(frozen=True, eq=False)
class StageUpdate:
    """One stage's share of the update.

    Args:
        parts: the parameter parts that the stage updates.
        summed: those of them that have gradients, by place.
        state: the parts of optimizer-state leaves that the stage holds.
        like: for each of them, the parameter leaf that it belongs to, of the same shape, and is
            divided as; None where there is none.
        phases: one function a phase. Each takes ``(parameters, gradients, state, loss, messages)``:
            gradients, of the parts that have any, summed over all tokens; ``loss`` the summed loss
            and the count in the last stage of the first pipeline, empty elsewhere; ``messages`` one
            vector for each entry of ``receives`` of the earlier phases, then the stage's own of
            these, so that it computes with the very bits that it has told the others. All but the
            last return the stage's vector of messages; the last returns
            ``(parameters, state, metrics)``, with the metrics of `update_function`, and with
            ``set_back=True`` also zeros in the place of the
            gradients.
        sends: for each phase but the last, whether the stage has messages then.
        receives: for each phase but the last, the other stages that have.
        groups: the last phase in groups, where the stage's state is not on its devices between
            steps; none where it is. The phases before it then take ``resident`` state alone.
    """

    parts: tuple[ParameterPart, ...]
    summed: tuple[int, ...]
    state: tuple[ParameterPart, ...]
    like: tuple[int | None, ...]
    phases: tuple[Callable[..., Any], ...]
    sends: tuple[bool, ...]
    receives: tuple[tuple[int, ...], ...]
    groups: tuple[UpdateGroup, ...] = ()

    @property
    def away(self) -> tuple[int, ...]:
        """The places of the state that is not on the devices between steps."""
        return tuple(place for group in self.groups for place in group.state)

    @property
    def resident(self) -> tuple[int, ...]:
        """The places of the state that stays on the devices: all that is in no group."""
        away = set(self.away)
        return tuple(place for place in range(len(self.state)) if place not in away)

    def state_of(self, phase: int) -> tuple[int, ...]:
        """The places of the state that a phase takes."""
        is_last = phase == len(self.phases) - 1
        return tuple(range(len(self.state))) if is_last else self.resident


def divide_update(
    optimizer: optax.GradientTransformation,
    parameters: Sequence[jax.ShapeDtypeStruct],
    parts: Sequence[Sequence[ParameterPart]],
    names: Sequence[str],
    unflatten: Callable[[Sequence[Any]], Any],
    loss_dtype: Any = jnp.float32,
    first_pipeline: int | None = None,
    frozen: FrozenLeaves = NONE_FROZEN,
    streamed: Collection[int] = (),
    leaves: StackedLeaves | None = None,
    loss_seed: float = 1.0,
) -> tuple[StageUpdate, ...]:
    """Divide an optimizer's update among stages.

    Args:
        optimizer: any Optax transformation, used as ``update(gradients, state, parameters)``.
        parameters: shapes of all parameter leaves.
        parts: for each stage, the parameter parts it updates; what several stages update is
            updated by each of them, with the same numbers.
        names: the parameters' paths, for errors.
        unflatten: from the leaves to the parameters' pytree.
        loss_dtype: of the summed loss and the count.
        first_pipeline: how many of the stages, the first ones, are those of the first pipeline:
            the last of them knows the loss, and rows that each pipeline updates are reduced over
            by this one. None: all.
        frozen: leaves without a gradient, and without an update; no stage updates these.
        streamed: the stages that update their parameters in groups.
        leaves: which leaves count as a parameter for each row; None: none.
        loss_seed: what the summed gradients are multiplied by.

    Returns:
        Each stage's share.

    Raises:
        InputError: the optimizer mixes the elements of parameters that lie on different stages
            other than through scalars, or makes such scalars of state that a stage streams.
    """
    leaves = leaves or whole_leaves(len(parameters))
    flat = divided_trace(
        optimizer, parameters, unflatten, loss_dtype, frozen, leaves, loss_seed
    ).flat
    shapes, first = leaves.split_shapes(parameters), first_pipeline or len(parts)
    analysis = UpdateAnalysis(flat, shapes, parts, names, first, frozen, streamed)
    every = [message for found in analysis.messages.values() for message in found]
    groups: dict[tuple[int, int], list[Message]] = {}
    for message in sorted(every):
        groups.setdefault((message.phase, message.stage), []).append(message)
    num_phases = 1 + max((message.phase + 1 for message in every), default=0)
    return tuple(_stage_update(analysis, stage, num_phases, groups) for stage in range(len(parts)))


def _stage_update(
    analysis: UpdateAnalysis, stage: int, num_phases: int, groups: MessagesByPair
) -> StageUpdate:
    parts = (analysis.state_part(leaf, stage) for leaf in range(len(analysis.state)))
    state = tuple(part for part in parts if part is not None)
    receives = tuple(
        tuple(s for s in range(analysis.num_stages) if s != stage and (phase, s) in groups)
        for phase in range(num_phases - 1)
    )
    sends = tuple((phase, stage) in groups for phase in range(num_phases - 1))
    like = tuple(analysis.parameter_like(part.leaf) for part in state)
    parts = tuple(analysis.parts[stage])
    summed = tuple(place for place, part in enumerate(parts) if part.leaf in analysis.gradients)
    told = _Told(analysis, stage, receives, groups)
    streams = _groups(told, state, summed) if stage in analysis.streamed else ()
    whole = StageUpdate(parts, summed, state, like, (), sends, receives, streams)
    early, last = [state[place] for place in whole.resident], num_phases - 1
    phases = (
        *(_phase(told, phase, parts, early) for phase in range(last)),
        _phase(told, last, parts, state),
    )
    return replace(whole, phases=phases)


def _groups(
    told: _Told, state: Sequence[ParameterPart], summed: Sequence[int]
) -> tuple[UpdateGroup, ...]:
    """The parameters of a stage in groups: what works on each other stays together."""
    analysis, stage = told.analysis, told.stage
    parts = analysis.parts[stage]
    of_gradients = {place: gradient for gradient, place in enumerate(summed)}
    components: dict[int, list[int]] = {}
    for place, part in enumerate(parts):
        components.setdefault(analysis.component(analysis.parameters[part.leaf]), []).append(place)
    own: dict[int, list[int]] = {component: [] for component in components}
    common = []
    for place, part in enumerate(state):
        value = analysis.state[part.leaf]
        found = own.get(analysis.component(value)) if value in analysis.local else None
        (common if found is None else found).append(place)
    sizes = [sum(analysis.state_bytes(state[place]) for place in each) for each in own.values()]
    pairs = list(zip(components.values(), own.values(), strict=True))
    found = [
        ([p for i in run for p in pairs[i][0]], [p for i in run for p in pairs[i][1]])
        for run in state_groups(sizes)
    ]
    return tuple(
        UpdateGroup(
            tuple(places),
            tuple(of_gradients[place] for place in places if place in of_gradients),
            tuple(held),
            (*(common if i == len(found) - 1 else ()), *held),
            _phase(
                told,
                len(told.receives),
                [parts[place] for place in places],
                [state[place] for place in (*common, *held)],
                0 if i == len(found) - 1 else len(common),
            ),
        )
        for i, (places, held) in enumerate(found)
    )


@dataclass(frozen=True, eq=False)
class _Told:
    """What a stage tells and is told between the phases of its update."""

    analysis: UpdateAnalysis
    stage: int
    receives: Sequence[Sequence[int]]
    groups: MessagesByPair

    def scalars(self, phase: int, vectors: Sequence[Any]) -> dict[Message, Any]:
        """The scalars that are known at a phase, of its vectors of messages.

        After those of the others may come the stage's own.
        """
        others = [(p, sender) for p in range(phase) for sender in self.receives[p]]
        own = [(p, self.stage) for p in range(phase) if (p, self.stage) in self.groups]
        scalars: dict[Message, Any] = {}
        for pair, vector in zip([*others, *own], vectors, strict=False):
            scalars.update(unpack(self.groups[pair], vector, self.analysis.flat))
        return scalars


def _phase(
    told: _Told,
    phase: int,
    parts: Sequence[ParameterPart],
    state: Sequence[ParameterPart],
    read_only: int = 0,
) -> Callable[..., Any]:
    """One phase of an update of some parts, as a traceable function.

    Of the state so many leaves, the first ones, are read and not returned.
    """
    analysis, stage, receives, groups = told.analysis, told.stage, told.receives, told.groups
    summed = [part for part in parts if part.leaf in analysis.gradients]

    def run(
        parameters: Any,
        gradients: Any,
        held: Any,
        loss: Any,
        messages: Any,
        *,
        set_back: bool = False,
    ) -> Any:
        rows = RowEvaluator(analysis, stage, told.scalars(phase, messages))
        values = (
            *zip([analysis.parameters[part.leaf] for part in parts], parameters, strict=True),
            *zip([analysis.gradients[part.leaf] for part in summed], gradients, strict=True),
            *zip([analysis.state[part.leaf] for part in state], held, strict=True),
        )
        rows.known.update(values)
        if loss:
            rows.known.update(zip(analysis.loss, loss, strict=True))
        if phase < len(receives):
            return pack([rows.message(message) for message in groups.get((phase, stage), [])])
        metrics = tuple(rows.read(operand) for operand in analysis.metrics)

        def applied() -> tuple[list[Any], ...]:
            # Of what the metrics needed only scalars: XLA would keep the arrays for the branch.
            inner = rows.with_scalars()
            inner.known.update(values)
            return (
                [inner.output(analysis.new_parameters[part.leaf], part) for part in parts],
                [inner.output(analysis.new_state[part.leaf], part) for part in state[read_only:]],
                *zeros_of(gradients, set_back),
            )

        def kept() -> tuple[list[Any], ...]:
            return list(parameters), list(held)[read_only:], *zeros_of(gradients, set_back)

        updated, new_state, *zeros = if_finite(metrics, applied, kept)
        return updated, new_state, metrics, *zeros

    return run

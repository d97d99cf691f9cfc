"""Where each step of a traced update runs, and which scalars the stages must tell each other.

Arrays that work on each other elementwise form a component, and a component lives where its
parameter does. A scalar made from a component is either its own business (a trust ratio) or, where
anything else depends on it, a message to all stages.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import jax

from hetjax.errors import InputError
from hetjax.pipeline.program.frozen_leaves import NONE_FROZEN, FrozenLeaves
from hetjax.pipeline.program.traced_program import FlatJaxpr, Step, num_bytes, operand_value
from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.pipeline.stages.holders import covering_stages


@dataclass(frozen=True, order=True)
class Message:
    """A scalar that a stage gives to the others between two phases.

    Args:
        phase: the phase at whose end it is known.
        stage: the stage that computes it.
        value: its number in the traced update.
    """

    phase: int
    stage: int
    value: int


@dataclass(frozen=True)
class LeafHolders:
    """Where connected arrays live.

    Args:
        holders: by stage, the part of the parameter leaf that it holds.
        rows: the size of the leaf's first dimension.
    """

    holders: Mapping[int, ParameterPart]
    rows: int

    @property
    def is_cut(self) -> bool:
        """Whether several stages share its rows."""
        return any(part.stop is not None for part in self.holders.values())


class UpdateAnalysis:
    """What is known of a traced update before it is divided.

    Args:
        flat: the update as one device computes it, from parameters, summed gradients, optimizer
            state, summed loss and count to new parameters, new state and metrics.
        parameters: shapes of the parameter leaves.
        parts: for each stage, the parameter parts that it updates.
        names: the leaves' paths, for errors.
        first_pipeline: how many stages, the first ones, are those of the first pipeline.
        frozen: leaves without a gradient, which are no inputs, and without an update, which are no
            outputs.
        streamed: the stages that update in groups, with the state of one at a time.

    Raises:
        InputError: arrays of different stages work on each other, or what a stage tells depends on
            state that it does not have at once.
    """

    def __init__(
        self,
        flat: FlatJaxpr,
        parameters: Sequence[jax.ShapeDtypeStruct],
        parts: Sequence[Sequence[ParameterPart]],
        names: Sequence[str],
        first_pipeline: int,
        frozen: FrozenLeaves = NONE_FROZEN,
        streamed: Collection[int] = (),
    ):
        self.flat, self.parts, self.names, self.streamed = flat, parts, names, streamed
        self.num_stages, self.first_pipeline = len(parts), first_pipeline
        self.shapes = list(parameters)
        values, outputs = iter(flat.inputs), iter(flat.outputs)
        leaves = range(len(self.shapes))
        given = list(itertools.islice(values, len(leaves)))
        updated = [leaf for leaf in leaves if leaf not in frozen.without_update]
        self.parameters = {leaf: given[leaf] for leaf in updated}
        self.gradients = {
            leaf: next(values) for leaf in leaves if leaf not in frozen.without_gradient
        }
        *self.state, total, count = values
        self.loss = [total, count]
        self.new_parameters = {leaf: next(outputs) for leaf in updated}
        self.new_state = [next(outputs) for _ in self.state]
        self.metrics = list(outputs)
        self.producer = {output: step for step in flat.steps for output in step.outputs}
        self.local = self._local_values()
        self.component = self._components()
        if passed_on := self._passed_on():
            self.local |= passed_on
            self.component = self._components()
        self.placements = self._placements()
        self.messages = self._messages()
        self._check_streamed()

    @property
    def _tells(self) -> bool:
        """Whether scalars are told: by stages to each other, or by a stage to its own groups."""
        return self.num_stages > 1 or bool(self.streamed)

    def _is_array(self, value: int) -> bool:
        return bool(self.flat.avals[value].shape)

    def _local_values(self) -> set[int]:
        """The arrays that depend on a parameter or gradient through arrays: they live with it."""
        local = {
            v for v in (*self.parameters.values(), *self.gradients.values()) if self._is_array(v)
        }
        while True:
            found = set(local)
            for step in self.flat.steps:
                if found.intersection(step.values()):
                    found.update(output for output in step.outputs if self._is_array(output))
            for value, output in zip(self.state, self.new_state, strict=True):
                if operand_value(output) in found and self._is_array(value):
                    found.add(value)
            if found == local:
                return local
            local = found

    def _passed_on(self) -> set[int]:
        """State that an update only reads, as the first parameters, of one component alone.

        It lives with the arrays that it is read with, and so does all that is made of it before.
        """
        found: set[int] = set()
        for value, output in zip(self.state, self.new_state, strict=True):
            is_kept = operand_value(output) == value
            if not is_kept or value in self.local or not self._is_array(value):
                continue
            made, read_with = {value}, set[int]()
            for step in self.flat.steps:
                if made.isdisjoint(step.values()):
                    continue
                if local := self.local.intersection(step.values()):
                    read_with.update(map(self.component, local))
                else:
                    made.update(each for each in step.outputs if self._is_array(each))
            if len(read_with) == 1:
                found |= made
        return found

    def _components(self) -> Callable[[int], int]:
        parent: dict[int, int] = {}

        def find(value: int) -> int:
            while parent.setdefault(value, value) != value:
                parent[value] = parent[parent[value]]
                value = parent[value]
            return value

        def join(values: Sequence[int]) -> None:
            for value in values[1:]:
                parent[find(value)] = find(values[0])

        for step in self.flat.steps:
            join([v for v in (*step.values(), *step.outputs) if v in self.local])
        pairs = [
            *((self.parameters[leaf], value) for leaf, value in self.gradients.items()),
            *((self.parameters[leaf], value) for leaf, value in self.new_parameters.items()),
            *zip(self.state, self.new_state, strict=True),
        ]
        for a, operand in pairs:
            b = operand_value(operand)
            if b is not None and a in self.local and b in self.local:
                join([a, b])
        return find

    def _placements(self) -> dict[int, LeafHolders]:
        leaves: dict[int, list[int]] = {}
        for leaf, value in self.parameters.items():
            if not self._is_array(value):
                continue
            leaves.setdefault(self.component(value), []).append(leaf)
        placements = {}
        for component, members in leaves.items():
            holders = [self._holders(leaf) for leaf in members]
            same = all(
                {s: (p.start, p.stop) for s, p in other.items()}
                == {s: (p.start, p.stop) for s, p in holders[0].items()}
                for other in holders
            )
            if not same:
                raise InputError(
                    "the optimizer mixes the elements of parameters that lie on different stages: "
                    + ", ".join(repr(self.names[leaf]) for leaf in members)
                    + "; it can be used where one stage has all of these, such as in a plan of one "
                    "stage, without shard_optimizer_state"
                )
            shape = self.shapes[members[0]].shape
            placements[component] = LeafHolders(holders[0], shape[0] if shape else 0)
        return placements

    def _holders(self, leaf: int) -> dict[int, ParameterPart]:
        return self._holders_of_leaf.get(leaf, {})

    @functools.cached_property
    def _holders_of_leaf(self) -> dict[int, dict[int, ParameterPart]]:
        """For each leaf, by stage, the part of it that the stage updates."""
        found: dict[int, dict[int, ParameterPart]] = {}
        for stage, parts in enumerate(self.parts):
            for part in parts:
                found.setdefault(part.leaf, {})[stage] = part
        return found

    def _placement(self, value: int) -> LeafHolders | None:
        return self.placements[self.component(value)] if value in self.local else None

    def step_placement(self, step: Step) -> LeafHolders | None:
        """Where a step's arrays live; None where it works on what every stage has."""
        for value in (*step.values(), *step.outputs):
            placement = self._placement(value)
            if placement is not None:
                return placement
        return None

    def _messages(self) -> dict[int, list[Message]]:
        """The messages that carry each scalar that stages must be told; several join to one."""
        levels: dict[int, int] = {}
        messages: dict[int, list[Message]] = {}
        if self._tells:
            last = self.first_pipeline - 1
            for value in self.loss:
                levels[value] = 1
                messages[value] = [Message(0, last, value)]
            for leaf, value in (*self.parameters.items(), *self.gradients.items()):
                if not self._is_array(value):
                    levels[value] = 1
                    messages[value] = [Message(0, min(self._holders(leaf)), value)]
        reach = self._reach() if self._tells else {}
        for step in self.flat.steps:
            level = max((levels.get(value, 0) for value in step.values()), default=0)
            placement = self.step_placement(step)
            for output in step.outputs:
                levels[output] = level
                if placement is None or self._is_array(output) or not self._tells:
                    continue
                home = {self.component(v) for v in step.values() if self._placement(v)}
                if reach[output] <= home and not placement.is_cut:
                    continue
                owners = covering_stages(placement.holders, placement.rows)
                messages[output] = [Message(level, owner, output) for owner in owners]
                levels[output] = level + 1
        return messages

    def _check_streamed(self) -> None:
        """Check that what streamed stages tell is made of parameters and gradients."""
        if not self.streamed:
            return
        found = {value for value in self.state if value in self.local}
        for step in self.flat.steps:
            if found.intersection(step.values()):
                found.update(step.outputs)
        for value, messages in self.messages.items():
            if value in found and any(message.stage in self.streamed for message in messages):
                raise InputError(
                    "the optimizer makes a scalar for all parameters of its state's arrays, such "
                    "as the norm of what Adam makes; a stage whose plan offloads 'optimizer_state' "
                    "has them one group at a time; allowed: offload without it, or an optimizer "
                    "that clips gradients"
                )

    def _reach(self) -> dict[int, set[int]]:
        """The components that each value has a part in; -1 stands for what all stages compute."""
        reach: dict[int, set[int]] = {value: set() for value in range(len(self.flat.avals))}
        for operand in (*self.new_parameters.values(), *self.new_state, *self.metrics):
            value = operand_value(operand)
            if value is not None and value not in self.local:
                reach[value].add(-1)
        for step in reversed(self.flat.steps):
            for value in step.values():
                for output in step.outputs:
                    if output in self.local:
                        reach[value].add(self.component(output))
                    else:
                        reach[value] |= reach[output]
        return reach

    def state_part(self, leaf: int, stage: int) -> ParameterPart | None:
        """The part of a leaf of the optimizer's state that a stage holds; None for nothing."""
        value = self.state[leaf]
        placement = self._placement(value)
        if placement is None:
            return ParameterPart(leaf)
        part = placement.holders.get(stage)
        if part is None:
            return None
        rows = self.flat.avals[value].shape
        if part.stop is not None and (not rows or rows[0] != placement.rows):
            raise InputError(self.refusal(stage, placement, "optimizer state"))
        return ParameterPart(leaf, part.start, part.stop)

    def state_bytes(self, part: ParameterPart) -> int:
        """Bytes of a part of a leaf of the optimizer's state."""
        aval = self.flat.avals[self.state[part.leaf]]
        return num_bytes(aval.update(shape=part.shape(aval.shape)))

    def parameter_like(self, leaf: int) -> int | None:
        """The parameter that a leaf of the optimizer's state belongs to, element by element."""
        value = self.state[leaf]
        if value not in self.local:
            return None
        return self._first_parameters.get((self.component(value), self.flat.avals[value].shape))

    @functools.cached_property
    def _first_parameters(self) -> dict[tuple[int, tuple[int, ...]], int]:
        """The first parameter of each component that has a shape."""
        found: dict[tuple[int, tuple[int, ...]], int] = {}
        for parameter, value in self.parameters.items():
            if self._is_array(value):
                key = self.component(value), self.shapes[parameter].shape
                found.setdefault(key, parameter)
        return found

    def refusal(self, stage: int, placement: LeafHolders, what: str) -> str:
        """The message for an optimizer that mixes rows that lie on different stages."""
        leaf = placement.holders[stage].leaf
        return (
            f"the optimizer's {what} mixes the rows of parameter {self.names[leaf]!r}, "
            f"which the plan cuts between stages {sorted(placement.holders)}; where the plan has "
            f"shard_optimizer_state, make it false; else cut outside that scan, or unroll it"
        )

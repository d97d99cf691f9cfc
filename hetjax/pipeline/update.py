"""The optimizer's update, divided among stages: any Optax transformation, with exact numbers.

The whole update is traced once, as one device would compute it, and each of its steps is placed
where the parameter lives that it works on. What joins several parameters can only pass through
scalars (a global norm, a token count, a test for infinities): those are sent around between phases,
and every stage then computes the same rest. A leaf that is cut between stages (stacked over a
``scan``) is updated in rows; reductions over all of it become partial ones, joined like any other
scalar.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hetjax.errors import InputError
from hetjax.pipeline.backward import accumulator_dtype
from hetjax.pipeline.program import (
    FlatJaxpr,
    Operand,
    Step,
    flatten_jaxpr,
    operand_value,
    read_operand,
)
from hetjax.pipeline.stages import ParameterPart

# Work on each element alone, whatever the shape.
_ELEMENTWISE = frozenset(
    """
    abs add and atan2 cbrt ceil clamp convert_element_type copy cos cosh div eq erf erf_inv exp
    exp2 expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul ne
    neg nextafter not or pow real reduce_precision rem round rsqrt select_n sign sin sqrt square
    stop_gradient sub tan tanh xor
    """.split()
)

_JOINS: Mapping[str, Callable[[Any, Any], Any]] = {
    "reduce_sum": jnp.add,
    "reduce_max": jnp.maximum,
    "reduce_min": jnp.minimum,
    "reduce_and": jnp.logical_and,
    "reduce_or": jnp.logical_or,
}


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


@dataclass(frozen=True, eq=False)
class StageUpdate:
    """One stage's share of the update.

    Args:
        state: the parts of optimizer-state leaves that the stage holds.
        phases: one function a phase. Each takes ``(parameters, gradients, state, loss, messages)``:
            gradients summed over all tokens; ``loss`` the summed loss and the count in the last
            stage, empty elsewhere; ``messages`` one vector for each entry of ``receives`` of the
            earlier phases. All but the last return the stage's vector of messages; the last
            returns ``(parameters, state, (loss, gradient norm))``.
        sends: for each phase but the last, whether the stage has messages then.
        receives: for each phase but the last, the other stages that have.
    """

    state: tuple[ParameterPart, ...]
    phases: tuple[Callable[..., Any], ...]
    sends: tuple[bool, ...]
    receives: tuple[tuple[int, ...], ...]


def divide_update(
    optimizer: optax.GradientTransformation,
    parameters: Sequence[jax.ShapeDtypeStruct],
    parts: Sequence[Sequence[ParameterPart]],
    names: Sequence[str],
    unflatten: Callable[[Sequence[Any]], Any],
) -> tuple[StageUpdate, ...]:
    """Divide an optimizer's update among stages.

    Args:
        optimizer: any Optax transformation, used as ``update(gradients, state, parameters)``.
        parameters: shapes of all parameter leaves.
        parts: for each stage, the parameter parts it holds; a leaf held whole by several stages
            is updated by each of them, with the same numbers.
        names: the leaves' paths, for errors.
        unflatten: from the leaves to the parameters' pytree.

    Returns:
        Each stage's share.

    Raises:
        InputError: the optimizer mixes the elements of parameters that lie on different stages
            other than through scalars.
    """
    return _Divider(optimizer, parameters, parts, names, unflatten).divide()


def update_function(
    optimizer: optax.GradientTransformation, unflatten: Callable[[Sequence[Any]], Any]
) -> Callable[..., tuple[list[Any], list[Any], tuple[Any, Any]]]:
    """The whole update, as one device computes it.

    Args:
        optimizer: an Optax transformation.
        unflatten: from leaves to the parameters' pytree.

    Returns:
        A function of (parameter leaves, summed gradient leaves, state, total, count) to (new
        parameter leaves, new state leaves, (loss, norm of the mean gradient)).
    """

    def update(
        parameters: Sequence[Any], gradients: Sequence[Any], state: Any, total: Any, count: Any
    ) -> tuple[list[Any], list[Any], tuple[Any, Any]]:
        means = [
            (g / count.astype(g.dtype)).astype(p.dtype)
            for g, p in zip(gradients, parameters, strict=True)
        ]
        norm = optax.tree.norm([mean.astype(jnp.float32) for mean in means])
        tree = unflatten(parameters)
        updates, state = optimizer.update(unflatten(means), state, tree)
        updated = optax.apply_updates(tree, updates)
        loss = total.astype(jnp.float32) / count
        return jax.tree.leaves(updated), jax.tree.leaves(state), (loss, norm)

    return update


@dataclass(frozen=True)
class _Placement:
    """Where a component of connected values lives: the part that each holder has of its rows."""

    holders: Mapping[int, ParameterPart]
    rows: int

    @property
    def is_cut(self) -> bool:
        return any(part.stop is not None for part in self.holders.values())


class _Divider:
    def __init__(self, optimizer, parameters, parts, names, unflatten):
        self.parts, self.names = parts, names
        self.num_stages = len(parts)
        self.parameter_shapes = list(parameters)
        self.flat, self.state_count = self._trace(optimizer, unflatten)
        values = list(self.flat.inputs)
        count = len(self.parameter_shapes)
        self.parameters, self.gradients = values[:count], values[count : 2 * count]
        self.state, self.loss = values[2 * count : -2], values[-2:]
        outputs = list(self.flat.outputs)
        self.new_parameters, self.new_state = outputs[:count], outputs[count:-2]
        self.metrics = outputs[-2:]
        self.producer = {output: step for step in self.flat.steps for output in step.outputs}
        self.local = self._local_values()
        self.component = self._components()
        self.placements = self._placements()
        self.levels, self.messages = self._messages()

    def _trace(self, optimizer: Any, unflatten: Any) -> tuple[FlatJaxpr, int]:
        state = jax.eval_shape(
            lambda leaves: optimizer.init(unflatten(leaves)), self.parameter_shapes
        )
        gradients = [
            jax.ShapeDtypeStruct(p.shape, accumulator_dtype(p.dtype)) for p in self.parameter_shapes
        ]
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        # Optax mixes dtypes in its own arithmetic, whatever the caller is strict about.
        with jax.numpy_dtype_promotion("standard"):
            closed = jax.make_jaxpr(update_function(optimizer, unflatten))(
                self.parameter_shapes, gradients, state, scalar, scalar
            )
        return flatten_jaxpr(closed, inline_conditionals=True), len(jax.tree.leaves(state))

    def _is_array(self, value: int) -> bool:
        return bool(self.flat.avals[value].shape)

    def _local_values(self) -> set[int]:
        """The arrays that depend on a parameter or gradient through arrays: they live with it."""
        local = {v for v in (*self.parameters, *self.gradients) if self._is_array(v)}
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
            *zip(self.parameters, self.gradients, strict=True),
            *zip(self.parameters, self.new_parameters, strict=True),
            *zip(self.state, self.new_state, strict=True),
        ]
        for a, b in pairs:
            if a in self.local and operand_value(b) in self.local:
                join([a, operand_value(b)])  # type: ignore[list-item]
        return find

    def _placements(self) -> dict[int, _Placement]:
        leaves: dict[int, list[int]] = {}
        for leaf, value in enumerate(self.parameters):
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
                    + "; it can be used with a plan of one stage"
                )
            shape = self.parameter_shapes[members[0]].shape
            placements[component] = _Placement(holders[0], shape[0] if shape else 0)
        return placements

    def _holders(self, leaf: int) -> dict[int, ParameterPart]:
        return {
            stage: part
            for stage, parts in enumerate(self.parts)
            for part in parts
            if part.leaf == leaf
        }

    def _placement(self, value: int) -> _Placement | None:
        return self.placements[self.component(value)] if value in self.local else None

    def _step_placement(self, step: Step) -> _Placement | None:
        for value in (*step.values(), *step.outputs):
            placement = self._placement(value)
            if placement is not None:
                return placement
        return None

    def _messages(self) -> tuple[dict[int, int], dict[int, list[Message]]]:
        """The phase from which each value is known, and the messages that carry scalars."""
        levels: dict[int, int] = {}
        messages: dict[int, list[Message]] = {}
        if self.num_stages > 1:
            last = self.num_stages - 1
            for value in self.loss:
                levels[value] = 1
                messages[value] = [Message(0, last, value)]
            for leaf, pair in enumerate(zip(self.parameters, self.gradients, strict=True)):
                for value in pair:
                    if not self._is_array(value):
                        levels[value] = 1
                        messages[value] = [Message(0, min(self._holders(leaf)), value)]
        reach = self._reach()
        for step in self.flat.steps:
            level = max((levels.get(value, 0) for value in step.values()), default=0)
            placement = self._step_placement(step)
            for output in step.outputs:
                levels[output] = level
                if placement is None or self._is_array(output) or self.num_stages == 1:
                    continue
                home = {self.component(v) for v in step.values() if self._placement(v)}
                if reach[output] <= home and not placement.is_cut:
                    continue
                owners = sorted(placement.holders) if placement.is_cut else [min(placement.holders)]
                messages[output] = [Message(level, owner, output) for owner in owners]
                levels[output] = level + 1
        return levels, messages

    def _reach(self) -> dict[int, set[int]]:
        """The components that each value has a part in; -1 stands for what all stages compute."""
        reach: dict[int, set[int]] = {value: set() for value in range(len(self.flat.avals))}
        for operand in (*self.new_parameters, *self.new_state, *self.metrics):
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

    def divide(self) -> tuple[StageUpdate, ...]:
        every = [message for found in self.messages.values() for message in found]
        num_phases = 1 + max((message.phase + 1 for message in every), default=0)
        groups = {
            (phase, stage): sorted(m for m in every if (m.phase, m.stage) == (phase, stage))
            for phase in range(num_phases - 1)
            for stage in range(self.num_stages)
        }
        groups = {key: found for key, found in groups.items() if found}
        return tuple(
            self._stage_update(stage, num_phases, groups) for stage in range(self.num_stages)
        )

    def _stage_update(
        self, stage: int, num_phases: int, groups: Mapping[tuple[int, int], list[Message]]
    ) -> StageUpdate:
        state = tuple(
            part
            for leaf, value in enumerate(self.state)
            if (part := self._state_part(leaf, value, stage)) is not None
        )
        senders = {
            phase: tuple(s for s in range(self.num_stages) if s != stage and (phase, s) in groups)
            for phase in range(num_phases - 1)
        }
        phases = tuple(
            self._phase(stage, phase, num_phases, state, senders, groups)
            for phase in range(num_phases)
        )
        sends = tuple((phase, stage) in groups for phase in range(num_phases - 1))
        return StageUpdate(state, phases, sends, tuple(senders.values()))

    def _state_part(self, leaf: int, value: int, stage: int) -> ParameterPart | None:
        placement = self._placement(value)
        if placement is None:
            return ParameterPart(leaf)
        part = placement.holders.get(stage)
        if part is None:
            return None
        rows = self.flat.avals[value].shape
        if part.stop is not None and (not rows or rows[0] != placement.rows):
            raise InputError(self._refusal(stage, placement, "optimizer state"))
        return ParameterPart(leaf, part.start, part.stop)

    def _phase(self, stage, phase, num_phases, state, senders, groups) -> Callable[..., Any]:
        final = phase == num_phases - 1
        mine = groups.get((phase, stage), [])
        parts = self.parts[stage]

        def run(parameters: Any, gradients: Any, held: Any, loss: Any, messages: Any) -> Any:
            scalars: dict[Message, Any] = {}
            vectors = iter(messages)
            for earlier in range(phase):
                for sender in senders[earlier]:
                    scalars.update(_unpack(groups[earlier, sender], next(vectors), self.flat))
            rows = _Rows(self, stage, scalars)
            known = rows.known
            known.update(
                (self.parameters[p.leaf], a) for p, a in zip(parts, parameters, strict=True)
            )
            known.update((self.gradients[p.leaf], a) for p, a in zip(parts, gradients, strict=True))
            known.update((self.state[p.leaf], a) for p, a in zip(state, held, strict=True))
            if loss:
                known.update(zip(self.loss, loss, strict=True))
            if not final:
                return _pack([rows.message(message) for message in mine])
            return (
                [rows.output(self.new_parameters[part.leaf], part) for part in parts],
                [rows.output(self.new_state[part.leaf], part) for part in state],
                tuple(rows.read(operand) for operand in self.metrics),
            )

        return run

    def _refusal(self, stage: int, placement: _Placement, what: str) -> str:
        leaf = placement.holders[stage].leaf
        return (
            f"the optimizer's {what} mixes the rows of parameter {self.names[leaf]!r}, "
            f"which the plan cuts between stages {sorted(placement.holders)}; cut outside that scan, or unroll it"
        )


class _Rows:
    """Evaluates a stage's share of the traced update, on demand."""

    def __init__(self, divider: _Divider, stage: int, scalars: dict[Message, Any]):
        self.divider, self.stage, self.scalars = divider, stage, scalars
        self.known: dict[int, Any] = {}
        self.joined: dict[int, Any] = {}

    def read(self, operand: Operand) -> Any:
        value = operand_value(operand)
        if value is None:
            return read_operand({}, operand)
        messages = self.divider.messages.get(value)
        if messages is not None:
            return self._joined(value, messages)
        return self._computed(value)

    def output(self, operand: Operand, part: ParameterPart) -> Any:
        array = self.read(operand)
        local = operand_value(operand) in self.divider.local
        return array if local or part.stop is None else part.take(array)

    def message(self, message: Message) -> Any:
        if message not in self.scalars:
            self.scalars[message] = self._computed(message.value)
        return self.scalars[message]

    def _joined(self, value: int, messages: list[Message]) -> Any:
        if value not in self.joined:
            arrays = [
                self.message(m) if m.stage == self.stage else self.scalars[m] for m in messages
            ]
            step = self.divider.producer.get(value)
            self.joined[value] = (
                arrays[0] if len(arrays) == 1 else reduce(_JOINS[step.name], arrays)  # type: ignore[union-attr]
            )
        return self.joined[value]

    def _computed(self, value: int) -> Any:
        if value not in self.known:
            step = self.divider.producer[value]
            operands = [self.read(operand) for operand in step.inputs]
            self.known.update(zip(step.outputs, self._evaluate(step, operands), strict=True))
        return self.known[value]

    def _evaluate(self, step: Step, operands: list[Any]) -> list[Any]:
        placement = self.divider._step_placement(step)
        if placement is None or not placement.is_cut:
            return step.evaluate(*operands)
        part = placement.holders[self.stage]
        aligned = [
            array
            if operand_value(operand) in self.divider.local
            else _align(array, part, placement.rows, self.divider.flat.avals[step.outputs[0]].shape)
            for operand, array in zip(step.inputs, operands, strict=True)
        ]
        results = _evaluate_rows(step, aligned, part, placement.rows, self.divider.flat)
        if results is None:
            raise InputError(self.divider._refusal(self.stage, placement, step.name))
        return results


def _align(array: Any, part: ParameterPart, rows: int, shape: Sequence[int]) -> Any:
    """The rows of a part, of an array that all stages have whole."""
    whole = jnp.ndim(array) > 0 and jnp.shape(array)[0] == rows and jnp.shape(array) == tuple(shape)
    return part.take(array) if whole else array


def _evaluate_rows(
    step: Step, operands: list[Any], part: ParameterPart, rows: int, flat: FlatJaxpr
) -> list[Any] | None:
    """A step on some of its rows; None where the rows depend on each other."""
    assert part.stop is not None
    count = part.stop - part.start
    shape = flat.avals[step.outputs[0]].shape
    leading = bool(shape) and shape[0] == rows
    if step.name in _ELEMENTWISE:
        return step.evaluate(*operands)
    if step.equation is None:
        return None
    params = step.equation.params
    if step.name in _JOINS:
        keeps_rows = 0 not in params["axes"]
        return step.evaluate(*operands) if keeps_rows or not shape else None
    if step.name == "broadcast_in_dim" and leading and params["broadcast_dimensions"][:1] == (0,):
        dimensions = params["broadcast_dimensions"]
        return [jax.lax.broadcast_in_dim(operands[0], (count, *shape[1:]), dimensions)]
    if step.name == "reshape" and leading:
        return [jax.lax.reshape(operands[0], (count, *shape[1:]))]
    if step.name == "squeeze" and leading and 0 not in params["dimensions"]:
        return step.evaluate(*operands)
    if step.name == "transpose" and params["permutation"][0] == 0:
        return step.evaluate(*operands)
    return None


def _pack(scalars: list[Any]) -> list[Any]:
    """Scalars as one vector for each dtype, so that a message is few arrays."""
    groups: dict[Any, list[Any]] = {}
    for scalar in scalars:
        groups.setdefault(jnp.asarray(scalar).dtype, []).append(scalar)
    return [jnp.stack(group) for _, group in sorted(groups.items(), key=lambda item: str(item[0]))]


def _unpack(messages: list[Message], vectors: Sequence[Any], flat: FlatJaxpr) -> dict[Message, Any]:
    dtypes = [str(flat.avals[message.value].dtype) for message in messages]
    order = sorted(set(dtypes))
    used = dict.fromkeys(order, 0)
    scalars = {}
    for message, dtype in zip(messages, dtypes, strict=True):
        scalars[message] = vectors[order.index(dtype)][used[dtype]]
        used[dtype] += 1
    return scalars

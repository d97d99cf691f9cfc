"""Initial parameters made on the devices that hold them, by programs that alike leaves share.

What makes a model's parameters draws each of them by itself, from a key of its own. As one program
that takes the longer to compile the more blocks there are, though most of it is the same again and
again. So keys are made one by one, and each leaf by a program that takes its keys; leaves of the
same shape and distribution share one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from hetjax.pipeline.program.pieces import key_of, needed_before
from hetjax.pipeline.program.row_steps import StepsByRows
from hetjax.pipeline.program.stacked_leaves import StackedLeaves
from hetjax.pipeline.program.step_program import StepProgram
from hetjax.pipeline.program.traced_program import (
    FlatJaxpr,
    Operand,
    Step,
    flatten_jaxpr,
    needed_steps,
    num_bytes,
    operand_value,
    read_operand,
)
from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.runtime.compilation.compiling import put_whole

_SMALL = 1024
"""Values of so many bytes are made one by one."""


def made_parameters(
    make: Callable[[], PyTree],
    parts: Sequence[ParameterPart],
    shardings: Sequence[NamedSharding],
    leaves: StackedLeaves,
) -> list[jax.Array]:
    """Make parameter parts on their devices.

    Args:
        make: makes all parameters.
        parts: those that are wanted.
        shardings: how they lie.
        leaves: which leaves count as a parameter for each row.

    Returns:
        The parts.
    """
    # As it is, so that JAX knows the trace: its shapes were asked for before.
    flat = flatten_jaxpr(jax.make_jaxpr(make)())
    small = _small_values(flat)
    # Of a leaf all parts are made together.
    together: dict[int, list[int]] = {}
    for place, part in enumerate(parts):
        together.setdefault(leaves.places[part.leaf][0], []).append(place)
    wanted = [flat.outputs[leaf] for leaf in together]
    large = {v: step for step in flat.steps for v in step.outputs if v not in small}
    programs = [_leaf_program(flat, operand, large) for operand in wanted]
    # What several leaves are drawn from together would be drawn for each of them.
    at_once = needed_steps(flat.steps, wanted, [*small])
    if sum(len(program.steps) for program in programs) > len(at_once):
        return _made_at_once(make, parts, shardings, leaves)
    told = {value for program in programs for value in program.arguments[0]}
    known = _one_by_one(needed_steps(flat.steps, [*told]), [*told])
    draws: list[_Draw] = []
    for program, places in zip(programs, together.values(), strict=True):
        draws += _draws_of_leaf(program, known, [(place, parts[place]) for place in places], leaves)
    compiled: dict[Hashable, Any] = {}
    made: dict[int, jax.Array] = {}
    for draw in draws:
        lie = [shardings[place] for place in draw.places]
        key = key_of(draw.program), draw.parts, *lie
        if key not in compiled:
            compiled[key] = _compiled(draw, lie)
        whole = NamedSharding(lie[0].mesh, PartitionSpec())
        arrays = compiled[key]([put_whole(array, whole) for array in map(_on_host, draw.told)])
        made |= zip(draw.places, arrays, strict=True)
    return [made[place] for place in range(len(parts))]


@dataclass(frozen=True, eq=False)
class _Draw:
    """A call that makes some parts of one leaf.

    Args:
        program: from what it is told to the leaf, or to a row of it.
        told: what it is told, of keys one or several.
        places: the places of the parts among those that are wanted.
        parts: for each the row of what the program makes, None for all of it; and what of that.
    """

    program: StepProgram
    told: Sequence[Any]
    places: tuple[int, ...]
    parts: tuple[tuple[int | None, ParameterPart], ...]


def _draws_of_leaf(
    program: StepProgram,
    known: Mapping[int, Any],
    wanted: Sequence[tuple[int, ParameterPart]],
    leaves: StackedLeaves,
) -> Iterator[_Draw]:
    """The calls that make parts of a leaf: row by row where each is drawn by itself."""
    told = [known[value] for value in program.arguments[0]]
    (leaf, _) = leaves.places[wanted[0][1].leaf]
    count = leaves.rows[leaf]
    by_rows = None if count is None else _by_rows(program, count)
    if by_rows is None:
        places, parts = zip(*wanted, strict=True)
        rows = [(leaves.places[part.leaf][1], replace(part, leaf=0)) for part in parts]
        yield _Draw(program, told, places, tuple(rows))
        return
    for place, part in wanted:
        row = leaves.places[part.leaf][1]
        assert row is not None, "the leaf counts as rows"
        of_row = [known[value] if at is None else known[value][at] for value, at in by_rows[row][1]]
        yield _Draw(by_rows[row][0], of_row, (place,), ((None, replace(part, leaf=0)),))


_Told = tuple[tuple[int, int | None], ...]
"""Values, each with its row; None for all of it."""


def _by_rows(program: StepProgram, count: int) -> list[tuple[StepProgram, _Told]] | None:
    """A leaf by rows: programs, each with what it is told; None where they are drawn together."""
    (told,), (leaf,) = program.arguments, program.outputs[0]
    made = StepsByRows(FlatJaxpr(tuple(program.avals), told, program.steps, (leaf,)))
    of: dict[int, tuple[int, int | None]] = {}
    for value in told:
        if program.avals[value].shape[:1] == (count,):
            of |= {each: (value, row) for row, each in enumerate(made.give(value))}
        else:
            of[value] = value, None
    for step in program.steps:
        made.add(step)
    of_leaf, found = _made_bytes(program.steps, program.avals), []
    for row in made.rows(leaf, count):
        steps = needed_steps(made.steps, [row])
        if count * _made_bytes(steps, made.values.avals) > 2 * of_leaf:
            return None
        made_here = {output for step in steps for output in step.outputs}
        reads = [value for step in steps for value in step.values()]
        reads += [row] if isinstance(row, int) else []
        inputs = tuple(dict.fromkeys(value for value in reads if value not in made_here))
        of_row = StepProgram(steps, (inputs,), ((row,),), tuple(made.values.avals))
        found.append((of_row, tuple(of[value] for value in inputs)))
    return found


def _made_bytes(steps: Sequence[Step], avals: Sequence[jax.ShapeDtypeStruct]) -> int:
    return sum(num_bytes(avals[output]) for step in steps for output in step.outputs)


def _small_values(flat: FlatJaxpr) -> set[int]:
    """The values of few bytes that are made of such values alone."""
    small: set[int] = set()
    for step in flat.steps:
        if small.issuperset(step.values()):
            small.update(v for v in step.outputs if num_bytes(flat.avals[v]) <= _SMALL)
    return small


def _leaf_program(flat: FlatJaxpr, leaf: Operand, producer: Mapping[int, Step]) -> StepProgram:
    """From the small values that it is drawn from to a leaf.

    Args:
        flat: what makes all leaves.
        leaf: the leaf.
        producer: for each value that is not small the step that makes it.
    """
    value = operand_value(leaf)
    last = None if value is None else producer.get(value)
    steps = () if last is None else tuple(needed_before(last, producer))
    made = {output for step in steps for output in step.outputs}
    reads = [value for step in steps for value in step.values()]
    reads += [leaf] if isinstance(leaf, int) else []
    told = tuple(dict.fromkeys(value for value in reads if value not in made))
    return StepProgram(steps, (told,), ((leaf,),), flat.avals)


def _one_by_one(steps: Sequence[Step], wanted: Sequence[int]) -> dict[int, Any]:
    """Values, each made by itself on this process's own devices."""
    made: dict[int, Any] = {}
    for step in steps:
        operands = [read_operand(made, operand) for operand in step.inputs]
        made.update(zip(step.outputs, _evaluated(step, operands), strict=True))
    return {value: made[value] for value in wanted}


def _evaluated(step: Step, operands: Sequence[Any]) -> Sequence[Any]:
    """What a step makes; of slices those of one size are one program, wherever they begin."""
    if step.name != "slice" or step.equation is None:
        return step.evaluate(*operands)
    if any(stride != 1 for stride in step.equation.params["strides"] or ()):
        return step.evaluate(*operands)
    starts, ends = (step.equation.params[name] for name in ("start_indices", "limit_indices"))
    sizes = [end - start for start, end in zip(starts, ends, strict=True)]
    return [jax.lax.dynamic_slice(operands[0], [np.int32(each) for each in starts], sizes)]


def _compiled(
    draw: _Draw, shardings: Sequence[NamedSharding]
) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
    """What makes parts of what it is told, of keys the words."""

    def made(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        keys = [
            jax.random.wrap_key_data(array, impl=jax.random.key_impl(key))
            if _is_key(key)
            else array
            for array, key in zip(arrays, draw.told, strict=True)
        ]
        leaf = draw.program(keys)[0][0]
        return [part.take(leaf if row is None else leaf[row]) for row, part in draw.parts]

    return jax.jit(made, out_shardings=list(shardings))


def _on_host(array: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(array) if _is_key(array) else array)


def _is_key(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def _made_at_once(
    make: Callable[[], PyTree],
    parts: Sequence[ParameterPart],
    shardings: Sequence[NamedSharding],
    leaves: StackedLeaves,
) -> list[jax.Array]:
    def made() -> list[jax.Array]:
        parameters = leaves.split(jax.tree.leaves(make()))
        return [part.take(parameters[part.leaf]) for part in parts]

    return jax.jit(made, out_shardings=list(shardings))()

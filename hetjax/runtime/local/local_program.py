"""A specialized program on the devices of this process, as one list of instructions.

One worker has all submeshes: it runs their segments, and between them gives and takes for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from hetjax.errors import InputError
from hetjax.runtime.compilation.segment_programs import compile_segments, part_of
from hetjax.runtime.instructions.buffers import Buffer, Buffers, SubmeshValue
from hetjax.runtime.instructions.divided_program import DividedProgram, MoveGroup
from hetjax.runtime.instructions.instruction import Free, Instruction, Receive, Run, Send
from hetjax.runtime.instructions.member_instructions import MemberPart, move_tag, segment_name
from hetjax.runtime.moves.local_move import LocalMove, LocalMoves
from hetjax.runtime.moves.union_array import HArray, mesh_of
from hetjax.runtime.workers.instruction_run import InstructionRun
from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.annotation.subgroup import Subgroup
from hetjax.sharding.deduction.annotated_program import AnnotatedProgram, Move, union_of
from hetjax.sharding.deduction.evaluation import evaluate_node
from hetjax.sharding.deduction.specialize import Segment, SpecializedProgram, known_everywhere
from hetjax.sharding.deduction.top_tier import sized, without_idle_axes
from hetjax.sharding.resolution.network import Network

_NAME = "function"


class LocalProgram:
    """A specialized program, compiled for devices of this process.

    Args:
        specialized: the program.
        devices: the device behind each number; those of this process unless given.
        network: the links, which decide who sends what several devices have; None: all alike.

    Raises:
        InputError: the program needs a device that is not there.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> from jax.sharding import PartitionSpec
        >>> from hetjax.sharding import deduce, specialize
        >>> one, two = Subgroup((0,), (), PartitionSpec()), Subgroup((1,), (), PartitionSpec())
        >>> rows = HSharding((one, two), hdim=0, sizes=(2, 1))
        >>> closed = jax.make_jaxpr(lambda x: jnp.sum(x * x))(np.ones(3))
        >>> program = LocalProgram(specialize(deduce(closed, [rows])), jax.devices()[:1] * 2)
        >>> (total,) = program(HArray.of(np.array([1.0, 2.0, 3.0]), rows, jax.devices()[:1] * 2))
        >>> total.annotation.hdim, total.numpy()
        ('partial', array(14., dtype=float32))
    """

    def __init__(
        self,
        specialized: SpecializedProgram,
        devices: Sequence[Any] | None = None,
        network: Network | None = None,
    ):
        self._program = specialized.program
        self._devices = dict(enumerate(jax.devices() if devices is None else devices))
        self._numbers: dict[Subgroup, int] = {}
        self._meshes: dict[Subgroup, Mesh] = {}
        steps = specialized.steps
        divided = DividedProgram(
            specialized.program,
            tuple(MoveGroup((step,)) if isinstance(step, Move) else step for step in steps),
            frozenset(),
            None,
        )
        self._programs: dict[str, Any] = {}
        for submesh in dict.fromkeys(s.submesh for s in steps if isinstance(s, Segment)):
            part = MemberPart(submesh, {_NAME: divided})
            self._programs |= compile_segments(part, self._mesh(submesh), {_NAME})
        self._moves = {
            segment_name(_NAME, place): LocalMove(
                self._program.shapes[step.input],
                step.source,
                step.destination,
                self._mesh,
                network,
            )
            for place, step in enumerate(steps)
            if isinstance(step, Move) and step.source is not None
        }
        self._known = {
            self._name(value, step.submesh): (value, self._part(value, step.submesh).sharding)
            for step in steps
            if isinstance(step, Segment)
            for value in step.inputs
            if self._program.annotations[value] is None
        }
        self._outputs = {value: self._names(value) for value in self._program.outputs}
        self._instructions = tuple(self._with_frees([*self._listed(steps)]))

    def __call__(self, *inputs: HArray | Any) -> list[HArray | Any]:
        """Run the program.

        Args:
            *inputs: a `HArray` for each input that has an annotation, else an array.

        Returns:
            A `HArray` for each output; an array for one that needs no submesh.

        Raises:
            InputError: an input lies in another way than its annotation says.
        """
        if len(inputs) != len(self._program.inputs):
            raise InputError(
                f"inputs: {len(inputs)} are given, and the program has {len(self._program.inputs)}"
            )
        known: dict[int, Any] = {}
        buffers: dict[Buffer, Any] = {}
        for place, (value, array) in enumerate(zip(self._program.inputs, inputs, strict=True)):
            self._check(place, value, array)
            if (annotation := self._program.annotations[value]) is None:
                known[value] = array
                continue
            for group, name in zip(annotation.subgroups, self._names(value), strict=True):
                part = self._part(value, group.bare)
                buffers[name] = jax.make_array_from_single_device_arrays(
                    part.shape, part.sharding, [array[device] for device in group.devices]
                )
        for name, (value, sharding) in self._known.items():
            buffers[name] = jax.device_put(known[value], sharding)
        run = InstructionRun(self._programs, LocalMoves(self._moves), buffers)
        for instruction in self._instructions:
            run.do(instruction)
        return [self._output(value, buffers, known) for value in self._program.outputs]

    def _check(self, place: int, value: int, array: HArray | Any) -> None:
        annotation, shape = self._program.annotations[value], self._program.shapes[value]
        if tuple(array.shape) != shape.shape or array.dtype != shape.dtype:
            raise InputError(
                f"inputs[{place}]: it is {array.dtype}{list(array.shape)}, and the program "
                f"takes {shape.dtype}{list(shape.shape)}"
            )
        if annotation is None:
            return
        if not isinstance(array, HArray) or not _is_same(array, annotation):
            raise InputError(f"inputs[{place}]: it must be a HArray that lies as {annotation}")

    def _mesh(self, submesh: Subgroup) -> Mesh:
        if submesh not in self._meshes:
            missing = [number for number in submesh.devices if number not in self._devices]
            if missing:
                raise InputError(f"devices {missing} are not there; there are {len(self._devices)}")
            self._meshes[submesh] = mesh_of(submesh, self._devices)
        return self._meshes[submesh]

    def _part(self, value: int, submesh: Subgroup) -> jax.ShapeDtypeStruct:
        return part_of(self._program, value, submesh, self._mesh(submesh))

    def _name(self, value: int, submesh: Subgroup) -> SubmeshValue:
        return SubmeshValue(self._numbers.setdefault(submesh, len(self._numbers)), value)

    def _names(self, value: int) -> tuple[SubmeshValue, ...]:
        """What each submesh has of a value; nothing of one that is known everywhere."""
        return self._names_on(value, self._program.annotations[value])

    def _names_on(self, value: int, annotation: HSharding | None) -> tuple[SubmeshValue, ...]:
        union = () if annotation is None else union_of(annotation)
        return tuple(self._name(value, submesh) for submesh in union)

    def _listed(self, steps: Sequence[Segment | Move]) -> Iterator[Instruction]:
        for place, step in enumerate(steps):
            if isinstance(step, Move):
                tag = move_tag(0, _NAME, place, -1)
                yield Send(tag, self._names_on(step.input, step.source))
                yield Receive(tag, self._names(step.output))
                continue
            inputs, outputs = (
                tuple(self._name(value, step.submesh) for value in values)
                for values in (step.inputs, step.outputs)
            )
            yield Run(segment_name(_NAME, place), (inputs, ()), outputs)

    def _with_frees(self, instructions: Sequence[Instruction]) -> Iterator[Instruction]:
        """Instructions after each of which is forgotten what none needs any more."""
        needed: set[Buffer] = {name for names in self._outputs.values() for name in names}
        found: list[Instruction] = []
        for instruction in reversed(instructions):
            last = tuple(name for name in _buffers_of(instruction) if name not in needed)
            if last:
                found.append(Free(tuple(dict.fromkeys(last))))
            found.append(instruction)
            needed.update(last)
        yield from reversed(found)

    def _output(self, value: int, buffers: Mapping[Buffer, Any], known: Mapping[int, Any]) -> Any:
        annotation = self._program.annotations[value]
        if annotation is None:
            return _everywhere(self._program, value, known)
        shards = {}
        for group, name in zip(annotation.subgroups, self._outputs[value], strict=True):
            by_device = {each.device: each.data for each in buffers[name].addressable_shards}
            shards |= {number: by_device[self._devices[number]] for number in group.devices}
        return HArray(annotation, self._program.shapes[value].shape, shards, self._devices)


def _buffers_of(instruction: Instruction) -> Buffers:
    """The buffers that an instruction needs or names."""
    if isinstance(instruction, Run):
        return (*(name for group in instruction.inputs for name in group), *instruction.outputs)
    return instruction.buffers if isinstance(instruction, Send | Receive) else ()


def _everywhere(program: AnnotatedProgram, value: int, known: Mapping[int, Any]) -> Any:
    """A value that needs no submesh, computed here."""
    held = {**program.constants, **known}
    for node in known_everywhere({value}, program):
        evaluate_node(node, 0, held)
    # Constants of a program are numbers of JAX's own.
    return jnp.asarray(held[value], program.shapes[value].dtype)


def _is_same(array: HArray, annotation: HSharding) -> bool:
    """Whether an array lies as an annotation of a program says."""
    return without_idle_axes(sized(array.annotation, array.shape)) == annotation

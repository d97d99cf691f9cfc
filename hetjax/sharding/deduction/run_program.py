"""Running a specialized program on the devices of this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

from hetjax.errors import InputError
from hetjax.sharding.annotation.annotation import HSharding, Subgroup
from hetjax.sharding.deduction.annotated_program import AnnotatedProgram, Move, shape_on, union_of
from hetjax.sharding.deduction.evaluation import evaluate_node
from hetjax.sharding.deduction.specialize import Segment, SpecializedProgram, known_everywhere
from hetjax.sharding.deduction.top_tier import sized, without_idle_axes
from hetjax.sharding.resolution.network import Network
from hetjax.sharding.resolution.resolve import resolve
from hetjax.sharding.resolution.run_steps import jax_machine, run_resolution
from hetjax.sharding.resolution.union_array import HArray


class ProgramRunner:
    """A specialized program, compiled for devices of this process.

    Args:
        specialized: the program.
        devices: the device behind each number; those of this process unless given.
        network: the links, which decide between forms of communication; None: all alike.

    Raises:
        InputError: the program needs a device that is not there.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec
        >>> from hetjax.sharding import deduce, specialize
        >>> one, two = Subgroup((0,), (), PartitionSpec()), Subgroup((1,), (), PartitionSpec())
        >>> rows = HSharding((one, two), hdim=0, sizes=(2, 1))
        >>> closed = jax.make_jaxpr(lambda x: jnp.sum(x * x))(np.ones(3))
        >>> runner = ProgramRunner(specialize(deduce(closed, [rows])), jax.devices()[:1] * 2)
        >>> (total,) = runner(HArray.of(np.array([1.0, 2.0, 3.0]), rows, jax.devices()[:1] * 2))
        >>> total.annotation.hdim, total.numpy()
        ('partial', array(14., dtype=float32))
    """

    def __init__(
        self,
        specialized: SpecializedProgram,
        devices: Sequence[Any] | None = None,
        network: Network | None = None,
    ):
        self._specialized, self._program = specialized, specialized.program
        self._devices = dict(enumerate(jax.devices() if devices is None else devices))
        self._meshes: dict[Subgroup, Mesh] = {}
        self._compiled = {
            step: self._compile(step) for step in specialized.steps if isinstance(step, Segment)
        }
        self._resolutions = {
            step: resolve(
                step.source,
                step.destination,
                self._program.shapes[step.input].shape,
                network=network,
                itemsize=self._program.shapes[step.input].dtype.itemsize,
            )
            for step in specialized.steps
            if isinstance(step, Move) and step.source is not None
        }

    def __call__(self, *inputs: HArray | Any) -> list[HArray | Any]:
        """Run the program.

        Args:
            *inputs: a `HArray` for each input that has an annotation, else an array.

        Returns:
            A `HArray` for each output; an array for one that needs no submesh.

        Raises:
            InputError: an input lies in another way than its annotation says.
        """
        held: dict[tuple[int, Subgroup], jax.Array] = {}
        known: dict[int, Any] = {}
        if len(inputs) != len(self._program.inputs):
            raise InputError(
                f"inputs: {len(inputs)} are given, and the program has {len(self._program.inputs)}"
            )
        for place, (value, array) in enumerate(zip(self._program.inputs, inputs, strict=True)):
            annotation, shape = self._program.annotations[value], self._program.shapes[value]
            if tuple(array.shape) != shape.shape or array.dtype != shape.dtype:
                raise InputError(
                    f"inputs[{place}]: it is {array.dtype}{list(array.shape)}, and the program "
                    f"takes {shape.dtype}{list(shape.shape)}"
                )
            if annotation is None:
                known[value] = array
                continue
            if not isinstance(array, HArray) or not _is_same(array, annotation):
                raise InputError(f"inputs[{place}]: it must be a HArray that lies as {annotation}")
            self._put(held, value, annotation, {d: array[d] for d in annotation.devices})
        for step in self._specialized.steps:
            if isinstance(step, Move):
                self._move(step, held)
                continue
            arguments = [
                jax.device_put(known[value], self._shape(value, step.submesh).sharding)
                if value in known
                else held[value, step.submesh]
                for value in step.inputs
            ]
            results = self._compiled[step](arguments)
            for value, array in zip(step.outputs, results, strict=True):
                held[value, step.submesh] = array
        return [self._output(value, held, known) for value in self._program.outputs]

    def _mesh(self, submesh: Subgroup) -> Mesh:
        if submesh not in self._meshes:
            names, sizes = submesh.named_axes
            missing = [number for number in submesh.devices if number not in self._devices]
            if missing:
                raise InputError(f"devices {missing} are not there; there are {len(self._devices)}")
            devices = np.array([self._devices[number] for number in submesh.devices])
            types = (AxisType.Explicit,) * len(names)
            self._meshes[submesh] = Mesh(devices.reshape(sizes), names, axis_types=types)
        return self._meshes[submesh]

    def _shape(self, value: int, submesh: Subgroup) -> jax.ShapeDtypeStruct:
        """What a submesh has of a value."""
        annotation = self._program.annotations[value]
        place = 0 if annotation is None else union_of(annotation).index(submesh)
        return shape_on(self._mesh(submesh), place, self._program.shapes[value], annotation)

    def _compile(self, segment: Segment) -> Any:
        def run(arrays: Sequence[jax.Array]) -> list[jax.Array]:
            held = dict(zip(segment.inputs, arrays, strict=True)) | dict(self._program.constants)
            for node, place in segment.nodes:
                evaluate_node(node, place, held)
            return [held[value] for value in segment.outputs]

        shapes = [self._shape(value, segment.submesh) for value in segment.inputs]
        outputs = [self._shape(value, segment.submesh).sharding for value in segment.outputs]
        with jax.set_mesh(self._mesh(segment.submesh)):
            return jax.jit(run, out_shardings=outputs).lower(shapes).compile()

    def _put(
        self,
        held: dict[tuple[int, Subgroup], jax.Array],
        value: int,
        annotation: HSharding,
        shards: Mapping[int, jax.Array],
    ) -> None:
        """Take the shards of all devices as arrays of their submeshes."""
        for group in annotation.subgroups:
            submesh = group.bare
            shape = self._shape(value, submesh)
            held[value, submesh] = jax.make_array_from_single_device_arrays(
                shape.shape, shape.sharding, [shards[device] for device in group.devices]
            )

    def _shards(
        self, value: int, held: Mapping[tuple[int, Subgroup], jax.Array]
    ) -> dict[int, jax.Array]:
        """The shard of every device."""
        annotation = self._program.annotations[value]
        assert annotation is not None
        found = {}
        for group in annotation.subgroups:
            array = held[value, group.bare]
            by_device = {shard.device: shard.data for shard in array.addressable_shards}
            for number in group.devices:
                # A shard's own type says that it is a summand, and then nothing can be added to it.
                alone = SingleDeviceSharding(self._devices[number])
                shard = by_device[self._devices[number]]
                found[number] = jax.make_array_from_single_device_arrays(
                    shard.shape, alone, [shard]
                )
        return found

    def _move(self, step: Move, held: dict[tuple[int, Subgroup], jax.Array]) -> None:
        shards = run_resolution(
            self._resolutions[step], self._shards(step.input, held), jax_machine(self._devices)
        )
        self._put(held, step.output, step.destination, shards)

    def _output(
        self,
        value: int,
        held: Mapping[tuple[int, Subgroup], jax.Array],
        known: Mapping[int, Any],
    ) -> HArray | Any:
        annotation = self._program.annotations[value]
        if annotation is not None:
            shape = self._program.shapes[value].shape
            return HArray(annotation, shape, self._shards(value, held), self._devices)
        return _everywhere(self._program, value, known)


def _everywhere(program: AnnotatedProgram, value: int, known: Mapping[int, Any]) -> Any:
    """A value that needs no submesh, computed here."""
    held = {**program.constants, **known}
    for node in known_everywhere({value}, program):
        evaluate_node(node, 0, held)
    return held[value]


def _is_same(array: HArray, annotation: HSharding) -> bool:
    """Whether an array lies as an annotation of a program says."""
    return without_idle_axes(sized(array.annotation, array.shape)) == annotation

"""`HArray`: one logical array over a union of unlike meshes; and `reshard`, which moves it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, SingleDeviceSharding
from jaxtyping import Num

from hetjax import _compat
from hetjax.errors import InputError, is_whole, shown
from hetjax.runtime.moves.local_move import LocalMove
from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.annotation.subgroup import Shard, Subgroup, shown_devices
from hetjax.sharding.deduction.reshard import checked_annotations
from hetjax.sharding.deduction.reshard import reshard as traced_reshard
from hetjax.sharding.resolution.network import Network


class HArray:
    """One logical array that lies on the devices of this process as an annotation says.

    Make one with `HArray.of`.

    Args:
        annotation: how it lies.
        shape: its shape.
        shards: for each device of the annotation, by its number, its shard on that device.
        devices: the JAX device behind each number.

    Attributes:
        annotation: how it lies.
        shape: its shape.
        dtype: the type of its elements.

    Source: Hetu v2, section 3.2.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from hetjax.sharding import Subgroup
        >>> two, one = Subgroup((0, 1), (("x", 2),), P("x")), Subgroup((2,), (), P())
        >>> uneven = HSharding((two, one), hdim=0, sizes=(4, 2))
        >>> array = HArray.of(np.arange(6), uneven, devices=jax.devices()[:1] * 3)
        >>> array[1], array[2]
        (Array([2, 3], dtype=int32), Array([4, 5], dtype=int32))
        >>> array.reshard(HSharding((two.with_spec(P()), one)))[2]
        Array([0, 1, 2, 3, 4, 5], dtype=int32)
    """

    def __init__(
        self,
        annotation: HSharding,
        shape: Sequence[int],
        shards: Mapping[int, jax.Array],
        devices: Mapping[int, Any],
    ):
        self.annotation, self.shape = annotation, tuple(shape)
        self._devices = dict(devices)
        self._shards = {number: _alone(shard) for number, shard in shards.items()}
        self._layout = annotation.shards(self.shape)
        for shard in self._layout:
            expected = tuple(stop - start for start, stop in shard.bounds)
            if shard.device not in self._shards or self[shard.device].shape != expected:
                found = self._shards.get(shard.device)
                raise InputError(
                    f"shards: device {shard.device} has "
                    f"{'nothing' if found is None else found.shape}, and the annotation gives it "
                    f"{expected}"
                )

    @classmethod
    def of(
        cls,
        array: Num[np.ndarray, ...] | jax.Array | Sequence[Any] | float,
        annotation: HSharding,
        devices: Sequence[Any] | None = None,
    ) -> HArray:
        """Lay an array out.

        Where the annotation has partial sums, the first summand is the array and the others are 0.

        Args:
            array: the whole array, or numbers in lists.
            annotation: how it shall lie.
            devices: the device behind each number; those of this process unless given.

        Returns:
            The union array.

        Raises:
            InputError: the annotation does not fit the shape, names a device that is not there, or
                has partial sums of random keys; or the array has neither keys nor numbers.
        """
        if not isinstance(annotation, HSharding):
            raise InputError(f"annotation: {shown(annotation)} is not allowed: an HSharding")
        whole = as_array(array)
        if annotation.is_partial and _has_keys(whole):
            raise InputError("annotation: it has partial sums, and random keys are no sums")
        numbered = dict(enumerate(jax.devices() if devices is None else devices))
        for number in annotation.devices:
            if number not in numbered:
                raise InputError(
                    f"annotation: device {number} is not there; there are {len(numbered)}"
                )
        shards = {
            shard.device: jax.device_put(_summand(whole, shard), numbered[shard.device])
            for shard in annotation.shards(whole.shape)
        }
        return cls(annotation, whole.shape, shards, numbered)

    @property
    def dtype(self) -> np.dtype:
        """The type of its elements."""
        return next(iter(self._shards.values())).dtype

    def __getitem__(self, device: int) -> jax.Array:
        """The shard of a device, by the device's number.

        Raises:
            InputError: the array does not lie on it.
        """
        if not is_whole(device) or device not in self._shards:
            raise InputError(
                f"device: {shown(device)} has no shard; allowed: devices "
                f"{shown_devices(sorted(self._shards))}"
            )
        return self._shards[device]

    # Python would take numbers from 0 for an array's rows, and they are devices.
    __iter__ = None

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The whole array, for NumPy and JAX; see `numpy`."""
        if copy is False:
            raise InputError("copy: False is not allowed: the whole is put together of its shards")
        return np.asarray(self.numpy(), dtype)

    def numpy(self) -> Num[np.ndarray, ...]:
        """The whole array, partial sums added up.

        Raises:
            InputError: it has random keys, which NumPy has no type for.
        """
        if _has_keys(self):
            raise InputError(f"array: NumPy has no {self.dtype}; array[device] has a device's keys")
        sums: dict[int | None, np.ndarray] = {}
        covered: dict[int | None, np.ndarray] = {}
        added: set[tuple[Any, Any]] = set()
        for shard in self._layout:
            if (shard.summand, shard.bounds) in added:
                continue
            added.add((shard.summand, shard.bounds))
            group = None if shard.summand is None else shard.summand.group
            index = tuple(slice(*ends) for ends in shard.bounds)
            total = sums.setdefault(group, np.zeros(self.shape, self.dtype))
            total[index] = np.asarray(self[shard.device]) + (0 if group is None else total[index])
            covered.setdefault(group, np.zeros(self.shape, bool))[index] = True
        result = np.zeros(self.shape, self.dtype)
        # What a device has whole counts more than sums of what others have.
        for group in sorted(sums, key=lambda group: (group is None, group or 0)):
            result[covered[group]] = sums[group][covered[group]]
        return result

    def reshard(self, annotation: HSharding, network: Network | None = None) -> HArray:
        """The same array, lying in another way.

        Args:
            annotation: how it shall lie.
            network: the links, which decide between forms; None: all alike.

        Returns:
            The array.

        Raises:
            InputError: the annotation does not fit the shape, names a device that is not there, or
                has partial sums that this one does not have.
        """
        for number in annotation.devices:
            if number not in self._devices:
                raise InputError(f"annotation: device {number} is not there")
        shape = jax.ShapeDtypeStruct(self.shape, self.dtype)
        move = LocalMove(
            shape, self.annotation, annotation, lambda each: mesh_of(each, self._devices), network
        )
        return HArray(annotation, self.shape, move.of_shards(self._shards), self._devices)

    def __repr__(self) -> str:
        return f"HArray({self.dtype}{list(self.shape)}, {self.annotation})"


def mesh_of(submesh: Subgroup, devices: Mapping[int, Any]) -> Mesh:
    """The mesh of a submesh, of typed axes.

    Args:
        submesh: the submesh.
        devices: the device behind each number.
    """
    names, sizes = submesh.named_axes
    grid = np.array([devices[number] for number in submesh.devices]).reshape(sizes)
    return Mesh(grid, names, axis_types=(AxisType.Explicit,) * len(names))


def _alone(shard: jax.Array) -> jax.Array:
    """A shard whose type says nothing of a mesh: to a summand nothing could be added."""
    if isinstance(shard.sharding, SingleDeviceSharding):
        return shard
    (device,) = shard.devices()
    sharding = SingleDeviceSharding(device)
    (data,) = (each.data for each in shard.addressable_shards)
    return jax.make_array_from_single_device_arrays(shard.shape, sharding, [data])


def reshard(x: Any, annotations: HSharding | Sequence[HSharding]) -> Any:
    """Say how a value shall lie from here on.

    Inside a function that is traced, this is the one operation that changes the submeshes of a
    value; `hetjax.sharding.deduce` finds the communication that it implies, and its gradient is
    brought back to where the value came from; where `jax.jit` compiles the function for one device
    it is the identity. In the loss of a `hetjax.Trainer` it is obeyed: it names the devices of the
    stage that computes it, and `hetjax.plan` makes stages of such annotations. Outside, it lays an
    array out, or moves it.

    Args:
        x: a traced value, an array, or a `HArray`.
        annotations: how it shall lie; for a traced value also several, one for each strategy.

    Returns:
        The traced value; or a `HArray`.

    Raises:
        InputError: the annotation does not fit the shape, or names devices that are not there.

    Source: Hetu v2, sections 5.1 and 6.1.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from hetjax.sharding import Subgroup
        >>> halves = HSharding((Subgroup((0,), (), P()), Subgroup((1,), (), P())), hdim=0)
        >>> jax.make_jaxpr(lambda x: reshard(x, halves))(np.ones(4)).eqns[0].primitive
        hetjax_reshard
        >>> reshard(np.arange(4), halves)[1]
        Array([2, 3], dtype=int32)
    """
    if _compat.is_traced(x):
        return traced_reshard(x, annotations)
    x = x if isinstance(x, HArray) else as_array(x)
    annotation, *others = several = checked_annotations(annotations, np.shape(x))
    if others:
        raise InputError(f"annotations: {len(several)} are given; outside of a trace there is one")
    return x.reshard(annotation) if isinstance(x, HArray) else HArray.of(x, annotation)


def as_array(value: Any) -> Any:
    """An array of what a person gave as one.

    Raises:
        InputError: it is none.
    """
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        if not (_has_numbers(value) or _has_keys(value)):
            raise InputError(f"array: {value.dtype} is not allowed: an array of numbers")
        return value
    try:
        found = np.asarray(value)
    except ValueError as error:
        raise InputError(f"array: {shown(value)} is no array: {error}") from None
    if not _has_numbers(found):
        raise InputError(f"array: {shown(value)} is no array of numbers")
    narrow = in_jax_types(found)
    if found.dtype.kind in "iu" and (narrow != found).any():
        raise InputError(f"array: {shown(value)} has numbers beyond those of {narrow.dtype}")
    return narrow


def in_jax_types(array: Any) -> Any:
    """An array whose elements have a type that JAX computes with, in which NumPy's are narrower.

    Example:
        >>> in_jax_types(np.ones(3)).dtype
        dtype('float32')
    """
    if not isinstance(array, np.ndarray | np.generic):
        return array
    return np.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype))


def is_weak(value: Any) -> bool:
    """Whether a value takes on the type of what it is computed with, as Python's numbers do.

    Example:
        >>> is_weak(2.0), is_weak(np.float32(2.0))
        (True, False)
    """
    return bool(getattr(value, "weak_type", type(value) in (int, float, complex)))


def _has_numbers(array: Any) -> bool:
    return any(jnp.issubdtype(array.dtype, kind) for kind in (np.number, np.bool_))


def _has_keys(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def _summand(array: Any, shard: Shard) -> Any:
    part = array[tuple(slice(*ends) for ends in shard.bounds)]
    is_first = shard.summand is None or shard.summand.place == 0
    return part if is_first else jnp.zeros_like(part)

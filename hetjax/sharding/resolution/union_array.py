"""`HArray`: one logical array over a union of unlike meshes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Num

from hetjax.errors import InputError, shown
from hetjax.sharding.annotation.annotation import HSharding, Shard
from hetjax.sharding.resolution.network import Network
from hetjax.sharding.resolution.resolve import resolve
from hetjax.sharding.resolution.run_steps import jax_machine, run_resolution


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
        self._shards, self._devices = dict(shards), dict(devices)
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
            InputError: the annotation does not fit the shape, or names a device that is not there.
        """
        if not isinstance(annotation, HSharding):
            raise InputError(f"annotation: {shown(annotation)} is not allowed: an HSharding")
        whole = as_array(array)
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
        """The shard of a device, by the device's number."""
        return self._shards[device]

    def numpy(self) -> Num[np.ndarray, ...]:
        """The whole array, partial sums added up."""
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
        steps = resolve(
            self.annotation,
            annotation,
            self.shape,
            network=network,
            itemsize=self.dtype.itemsize,
        )
        shards = run_resolution(steps, self._shards, jax_machine(self._devices))
        return HArray(annotation, self.shape, shards, self._devices)

    def __repr__(self) -> str:
        return f"HArray({self.dtype}{list(self.shape)}, {self.annotation})"


def as_array(value: Any) -> Any:
    """An array of what a person gave as one.

    Raises:
        InputError: it is none.
    """
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return value
    try:
        found = np.asarray(value)
    except ValueError as error:
        raise InputError(f"array: {shown(value)} is no array: {error}") from None
    if found.dtype.kind not in "biufc":
        raise InputError(f"array: {shown(value)} is no array of numbers")
    return found


def _summand(array: Any, shard: Shard) -> Any:
    part = array[tuple(slice(*ends) for ends in shard.bounds)]
    is_first = shard.summand is None or shard.summand.place == 0
    return part if is_first else jnp.zeros_like(part)

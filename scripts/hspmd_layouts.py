"""Random HSPMD annotations, drawn from a number, for scripts that measure what is moved."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from random import Random

from hetjax import HSharding, Subgroup
from hetjax.mesh import KINDS, Cluster, Link, Subcluster
from hetjax.sharding import DUPLICATE, PARTIAL, Network
from hetjax.sharding.annotation.annotation import HDim
from hetjax.sharding.annotation.subgroup import spec_from

FAST, SLOW = Link(bandwidth=300e9, latency=1e-6), Link(bandwidth=1.25e9, latency=2e-5)


def network_of(nodes: int, devices_per_node: int) -> Network:
    """Nodes of like devices: 300 GB/s inside one, 10 Gbit/s between two."""
    parts = Subcluster("all", KINDS["V100"], nodes, devices_per_node, FAST, SLOW)
    return Network.of(Cluster("nodes", (parts,), ()))


def random_groups(rng: Random, num_devices: int, most: int = 4) -> list[tuple[int, ...]]:
    """One to four submeshes of some of the devices, neighbours mostly together."""
    numbers = list(range(num_devices))
    if rng.random() < 0.3:
        rng.shuffle(numbers)
    groups = []
    for _ in range(rng.randint(1, most)):
        sizes = [size for size in (1, 2, 3, 4, 6, 8) if size <= len(numbers)]
        if sizes:
            size = rng.choice(sizes)
            groups.append(tuple(numbers[:size]))
            numbers = numbers[size:]
    return groups


def random_subgroup(
    rng: Random, devices: tuple[int, ...], widths: Sequence[int], *, sums: bool
) -> Subgroup:
    """A submesh with one or two axes, each dividing a dimension, summing or repeating."""
    first = rng.choice([n for n in range(1, len(devices) + 1) if len(devices) % n == 0])
    axes = tuple(
        (name, size)
        for name, size in (("data", first), ("tensor", len(devices) // first))
        if size > 1
    )
    entries: list[tuple[str, ...]] = [() for _ in widths]
    left, unreduced = list(widths), set[str]()
    for name, size in axes:
        places = [place for place, width in enumerate(left) if width % size == 0]
        choice = rng.choice([*places, *places, None, *(["sum"] if sums else [])])
        if choice == "sum":
            unreduced.add(name)
        elif isinstance(choice, int):
            entries[choice] = (*entries[choice], name)
            left[choice] //= size
    return Subgroup(devices, axes, spec_from(entries, frozenset(unreduced)))


def random_annotation(
    rng: Random,
    shape: Sequence[int],
    groups: Sequence[tuple[int, ...]],
    *,
    sums: bool,
    unit: int = 1,
) -> HSharding:
    """Any annotation on some submeshes, with sizes of any kind in multiples of a unit."""
    choices: list[HDim] = [DUPLICATE, *range(len(shape)), *([PARTIAL] if sums else [])]
    hdim = rng.choice(choices) if len(groups) > 1 else DUPLICATE
    sizes: tuple[int, ...] = ()
    if isinstance(hdim, int):
        units = shape[hdim] // unit
        ends = [0, *sorted(rng.sample(range(1, units), len(groups) - 1)), units]
        sizes = tuple((b - a) * unit for a, b in itertools.pairwise(ends))
    found = []
    for place, devices in enumerate(groups):
        widths = [sizes[place] if d == hdim else size for d, size in enumerate(shape)]
        found.append(random_subgroup(rng, devices, widths, sums=sums))
    return HSharding(tuple(found), hdim, sizes)

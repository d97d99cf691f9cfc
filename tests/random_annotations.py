"""Random HSPMD annotations, and arrays that lie as they say."""

import itertools
import math

import numpy as np
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from hetjax.sharding import DUPLICATE, PARTIAL, HSharding, Subgroup

AXES = ("a", "b", "c")
DEGREES = (1, 2, 3, 4, 5, 6, 7, 8)


@st.composite
def meshes(draw, devices):
    """Axes whose sizes multiply to a number of devices."""
    left, sizes = devices, []
    for name in AXES[:2]:
        size = draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0]))
        sizes.append((name, size))
        left //= size
    sizes.append((AXES[2], left))
    return tuple(pair for pair in sizes if pair[1] > 1) or ((AXES[0], 1),)


@st.composite
def specs(draw, axes, widths, *, partial):
    """A specification that divides widths evenly."""
    entries, unreduced = [[] for _ in widths], set()
    for name, size in axes:
        places = [
            d
            for d, width in enumerate(widths)
            if width % (size * math.prod(dict(axes)[n] for n in entries[d])) == 0
        ]
        choice = draw(st.sampled_from([None, *places, *(["partial"] if partial else [])]))
        if choice == "partial":
            unreduced.add(name)
        elif choice is not None:
            entries[choice].append(name)
    return PartitionSpec(
        *(None if not e else e[0] if len(e) == 1 else tuple(e) for e in entries),
        unreduced=frozenset(unreduced),
    )


@st.composite
def groups_of_devices(draw, max_groups=4, max_devices=32):
    """Devices of one to four subgroups, in any order."""
    groups = st.lists(st.sampled_from(DEGREES), min_size=1, max_size=max_groups)
    counts = draw(groups.filter(lambda counts: sum(counts) <= max_devices))
    numbers = draw(st.permutations(range(sum(counts))))
    ends = np.cumsum([0, *counts])
    return [tuple(numbers[a:b]) for a, b in itertools.pairwise(ends)]


@st.composite
def sizes_of(draw, total, count):
    """Uneven sizes with a given sum, some of which may be 0."""
    cuts = draw(st.lists(st.integers(0, total), min_size=count - 1, max_size=count - 1))
    ends = [0, *sorted(cuts), total]
    return tuple(b - a for a, b in itertools.pairwise(ends))


@st.composite
def ranges_of(draw, lengths, count):
    """Ranges of two dimensions that together are an array: runs of some share another dimension."""
    first = draw(st.integers(1, count))
    runs = [len(run) for run in np.array_split(range(count), first)]
    found = []
    for run, (start, stop) in zip(runs, _ends(draw(sizes_of(lengths[0], first))), strict=True):
        parts = draw(st.permutations(_ends(draw(sizes_of(lengths[1], run)))))
        found += [((start, stop), part) for part in parts]
    return tuple(found)


def _ends(sizes):
    return list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))


@st.composite
def an_annotation(draw, shape, groups, *, partial, hdims=None, like=None):
    """An annotation for a shape on given groups of devices; with the meshes of another one."""
    choices = [DUPLICATE, *range(len(shape)), *itertools.combinations(range(len(shape)), 2)]
    if partial:
        choices.append(PARTIAL)
    hdim = draw(st.sampled_from(hdims or choices)) if len(groups) > 1 else DUPLICATE
    sizes = draw(sizes_of(shape[hdim], len(groups))) if isinstance(hdim, int) else ()
    ranges = ()
    if isinstance(hdim, tuple):
        ranges = draw(ranges_of([shape[d] for d in hdim], len(groups)))
    found = []
    for i, devices in enumerate(groups):
        widths = [sizes[i] if d == hdim else n for d, n in enumerate(shape)]
        if isinstance(hdim, tuple):
            for d, (start, stop) in zip(hdim, ranges[i], strict=True):
                widths[d] = stop - start
        axes = like.subgroups[i].axes if like else draw(meshes(len(devices)))
        found.append(Subgroup(devices, axes, draw(specs(axes, widths, partial=partial))))
    return HSharding(tuple(found), hdim, sizes, ranges)


@st.composite
def pairs(draw, max_devices=32):
    """A shape, and two annotations of it: source and destination."""
    rank = draw(st.integers(1, 3))
    shape = tuple(draw(st.sampled_from((4, 6, 8, 12, 24))) for _ in range(rank))
    groups = draw(groups_of_devices(max_devices=max_devices))
    source = draw(an_annotation(shape, groups, partial=draw(st.booleans())))
    match draw(st.sampled_from(("same groups", "same top tier", "other devices"))):
        case "same groups":
            destination = draw(an_annotation(shape, groups, partial=False))
        case "same top tier" if source.hdim != PARTIAL and source.sizes == ():
            destination = draw(an_annotation(shape, groups, partial=False, hdims=[source.hdim]))
        case _:
            destination = draw(
                an_annotation(
                    shape, draw(groups_of_devices(max_devices=max_devices)), partial=False
                )
            )
    return shape, source, destination


def summands(annotation, shape, rng):
    """Whole numbers for every device, and the array that they are together."""
    shards = annotation.shards(shape)
    value = rng.integers(-99, 99, shape)
    counts = {}
    for shard in shards:
        if shard.summand:
            key, index = shard.summand
            counts[key] = max(counts.get(key, 0), index + 1)
    wholes: dict[object, np.ndarray] = {None: value}
    for key, count in counts.items():
        noise = rng.integers(-99, 99, (count - 1, *shape))
        wholes |= {(key, i): noise[i] for i in range(count - 1)}
        wholes[key, count - 1] = value - noise.sum(0)
    return value, {
        shard.device: wholes[shard.summand][tuple(slice(a, b) for a, b in shard.bounds)]
        for shard in shards
    }

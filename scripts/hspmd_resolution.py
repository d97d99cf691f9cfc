"""What resolution moves, beside the least that any exchange must move."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from hspmd_layouts import network_of, random_annotation, random_groups

from hetjax import HSharding, Subgroup
from hetjax.sharding import Network, Shard, resolve
from hetjax.sharding.annotation.bounds import contains, finest_slices, volume
from hetjax.sharding.annotation.subgroup import Summand
from hetjax.sharding.resolution.steps import Resolution

ITEMSIZE = 4
Row = Mapping[str, Any]


def bytes_moved(resolution: Resolution, network: Network | None = None) -> int:
    """The bytes between devices; given a network, those between nodes alone."""
    return ITEMSIZE * sum(
        elements
        for steps in resolution.rounds
        for step in steps
        for (a, b), elements in step.elements_sent().items()
        if network is None or network.node(a) != network.node(b)
    )


def bound(shape: Sequence[int], before: Sequence[Shard], after: Sequence[Shard]) -> int:
    """The bytes that any exchange moves at least.

    Of a slice without sums, whoever lacks it must receive it once. Of one with S summands and W
    receivers, every summand but one must leave its devices, and every receiver but one must get the
    sum; one more message where nobody who has a summand wants the sum.
    """
    total = 0
    for part in finest_slices({shard.bounds for shard in (*before, *after)}, shape):
        held = [shard for shard in before if contains(shard.bounds, part)]
        wanted = {shard.device for shard in after if contains(shard.bounds, part)}
        if not wanted:
            continue
        whole = {shard.device for shard in held if shard.summand is None}
        if whole:
            count = len(wanted - whole)
        else:
            count = sum(
                len(group) - 1 + len(takers) - 1 + (not takers & set().union(*group.values()))
                for group, takers in _sums(held, wanted)
            )
        total += count * volume(part)
    return total * ITEMSIZE


def _sums(
    held: Sequence[Shard], wanted: set[int]
) -> list[tuple[dict[Summand, set[int]], set[int]]]:
    """The groups of summands, each with those who add it up: their own, or the first one."""
    groups: dict[int, dict[Summand, set[int]]] = {}
    for shard in held:
        assert shard.summand is not None
        groups.setdefault(shard.summand.group, {}).setdefault(shard.summand, set()).add(
            shard.device
        )
    mine = {
        d: g for g, summands in groups.items() for devices in summands.values() for d in devices
    }
    takers: dict[int, set[int]] = {}
    for device in wanted:
        takers.setdefault(mine.get(device, min(groups)), set()).add(device)
    return [(groups[group], devices) for group, devices in takers.items()]


def random_pairs(cases: int, seed: int) -> list[Row]:
    """Random pairs of annotations of large arrays, half of them with partial sums at first."""
    rng = Random(seed)
    rows = []
    for case in range(cases):
        sums = case % 2 == 1
        shape = rng.choice(((1536, 1536), (3072, 1536), (96 * 8192,)))
        network = Network.alike()
        groups = random_groups(rng, 16)
        others = groups if rng.random() < 0.5 else random_groups(rng, 16)
        source = random_annotation(rng, shape, groups, sums=sums, unit=96)
        destination = random_annotation(rng, shape, others, sums=False, unit=96)
        found = resolve(source, destination, shape, network=network, itemsize=ITEMSIZE)
        rows.append(
            {
                "case": f"pair {case}",
                "partial": source.is_partial,
                "bytes": bytes_moved(found),
                "bound": bound(shape, source.shards(shape), destination.shards(shape)),
                "source": str(source),
                "destination": str(destination),
            }
        )
    return rows


def ratio(row: Row) -> float:
    """Bytes over the bound; 1 where nothing must move and nothing does."""
    if not row["bound"]:
        return 1.0 if not row["bytes"] else float("inf")
    return row["bytes"] / row["bound"]


def two_nodes() -> list[Row]:
    """Eight devices on two nodes add up their summands: what crosses between the nodes."""
    shape, network = (4096, 1024), network_of(2, 4)
    from jax.sharding import PartitionSpec

    eight = Subgroup(tuple(range(8)), (("data", 8),), PartitionSpec(unreduced=frozenset({"data"})))
    destination = HSharding((eight.with_spec(PartitionSpec()),))
    found = resolve(HSharding((eight,)), destination, shape, network=network)
    least = 2 * 4096 * 1024 * ITEMSIZE
    return [
        {
            "case": "all-reduce of eight devices on two nodes, between nodes",
            "bytes": bytes_moved(found, network),
            "bound": least,
        }
    ]


def cheap_rows(cases: int = 2000, seed: int = 0) -> list[Row]:
    """All rows: a summary of the pairs, and the reduction over two nodes."""
    pairs = random_pairs(cases, seed)
    rows: list[Row] = []
    for name, partial in (("without partial sums", False), ("with partial sums", True)):
        chosen = [row for row in pairs if row["partial"] == partial]
        ratios = sorted(ratio(row) for row in chosen)
        rows.append(
            {
                "case": f"random pairs {name}",
                "cases": len(chosen),
                "bytes": sum(row["bytes"] for row in chosen),
                "bound": sum(row["bound"] for row in chosen),
                "mean_ratio": statistics.mean(ratios),
                "ratio_of_99_in_100": ratios[int(len(ratios) * 0.99)],
                "worst_ratio": ratios[-1],
            }
        )
    return [*rows, *two_nodes()]

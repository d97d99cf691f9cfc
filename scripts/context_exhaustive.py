"""The best of all context splits of few devices, tokens and heads: what a scheduler is held to."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from hetjax.mesh import KINDS, Cluster, Link, Subcluster
from hetjax.planner.hexiseq.context_devices import ContextDevices
from hetjax.planner.hexiseq.context_work import ContextWork
from hetjax.planner.hexiseq.costs_of_rows import Candidates, ContextCosts
from hetjax.planner.hexiseq.group_layout import GroupLayout

AT_ONCE = 20_000
"""How many splits are costed at once."""


def best_of_all(model: ContextCosts) -> tuple[float, int]:
    """The seconds of the best split, and how many were costed.

    Every set of groups in every order of the ring, every division of the tokens, and in every group
    every division of the heads. Devices of a node are alike, so of sets that differ only by these
    one is taken.
    """
    best, count = np.inf, 0
    devices, work = model.devices, model.work
    for groups in _ring_orders(devices):
        layout = GroupLayout(devices, groups)
        sizes = [len(group) for group in groups]
        divisions = itertools.product(*(_parts(work.query_heads, size) for size in sizes))
        heads = np.array([list(itertools.chain(*each)) for each in divisions])
        tokens = np.array(list(_parts(work.length, layout.order.size)))
        tokens = tokens[(layout.group_sum(tokens) > 0).all(axis=1)]
        if not len(tokens):
            continue
        pairs = len(tokens) * len(heads)
        for start in range(0, pairs, AT_ONCE):
            token, head = np.divmod(np.arange(start, min(start + AT_ONCE, pairs)), len(heads))
            some, division = np.unique(head, return_inverse=True)
            costs = model.costs(layout, Candidates(tokens[token], heads[some], division))
            best = min(best, float(costs.scores.min()))
        count += pairs
    return best, count


def _parts(total: int, count: int) -> Iterator[tuple[int, ...]]:
    """A total in so many parts, in all ways."""
    for bars in itertools.combinations(range(total + count - 1), count - 1):
        ends = (-1, *bars, total + count - 1)
        yield tuple(b - a - 1 for a, b in itertools.pairwise(ends))


def _ring_orders(devices: ContextDevices) -> Iterator[list[list[int]]]:
    """All sets of groups in all orders of a ring, once where devices are alike."""
    seen = set()
    for groups in _partitions(list(range(devices.num_devices))):
        for rest in itertools.permutations(groups[1:]):
            order = [groups[0], *rest]
            key = tuple(tuple(sorted(devices.node[group].tolist())) for group in order)
            if key not in seen:
                seen.add(key)
                yield order


def _partitions(devices: Sequence[int]) -> Iterator[list[list[int]]]:
    if not devices:
        yield []
        return
    for groups in _partitions(devices[1:]):
        yield [[devices[0]], *groups]
        for place in range(len(groups)):
            yield [[devices[0], *groups[place]], *groups[:place], *groups[place + 1 :]]


def small_case(number: int, num_devices: int, length: int, heads: int) -> tuple:
    """Devices and work of a small case: two or three unlike nodes, links of any speed.

    Args:
        number: which one.
        num_devices: how many devices.
        length: tokens of the sequence.
        heads: query heads.
    """
    rng = np.random.default_rng(number)
    nodes = int(rng.integers(2, 4)) if num_devices > 2 else 2
    sizes = 1 + rng.multinomial(num_devices - nodes, np.full(nodes, 1 / nodes))
    kinds = rng.choice(["H100", "A100-80", "L40S"], nodes)
    parts = [
        Subcluster(
            f"node{place}",
            KINDS[str(kind)],
            1,
            int(size),
            Link(float(rng.choice([1e14, 1e15])), 0.0),
            Link(1e14, 0.0),
        )
        for place, (kind, size) in enumerate(zip(kinds, sizes, strict=True))
    ]
    names = [part.name for part in parts]
    far = Link(float(rng.choice([2e13, 1e14])), 0.0)
    links = tuple((a, b, far) for a, b in itertools.combinations(names, 2))
    devices = ContextDevices(Cluster("small", tuple(parts), links), efficiency=0.5)
    # Tokens are few, so each is heavy and links are fast: all weighs as in a long sequence.
    width, size = int(rng.choice([64, 256])), int(rng.choice([2**9, 2**11]))
    served = int(rng.choice([each for each in (1, 2) if heads % each == 0]))
    work = ContextWork(
        length=length,
        query_heads=heads,
        key_value_heads=heads // served,
        head_size=size,
        width=width,
        layers=2,
        token_flops=24.0 * width**2,
        layer_parameters=0,
    )
    return devices, work

"""The search against every plan there is, on small tables."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.pipeline.schedules.schedule import WARM_UP_SCHEDULES
from hetjax.pipeline.schedules.warm_up import h_1f1b_counts
from hetjax.planner.harp.cost_search import rented_nodes, search_by_cost
from hetjax.planner.harp.fixed_pace import Place
from hetjax.planner.harp.restriction import with_nodes
from hetjax.planner.harp.search import price, search, transfers_between
from hetjax.planner.harp.stage_table import Slice, StageTable, Transfers
from hetjax.planner.harp.table_making import submesh_shapes
from hetjax.planner.plan.prices import price_of_nodes


def random_table(
    seed: int,
    *,
    num_layers: int,
    nodes: tuple[tuple[int, int], ...],
    num_microbatches: int,
    schedule: str = "h_1f1b",
    num_options: int = 2,
    order: tuple[int, ...] | None = None,
    min_stages: int = 1,
    max_stages: int | None = None,
    lost: tuple[tuple[int, ...], ...] = (),
) -> StageTable:
    """Costs that no model would have: any run of layers takes any time and any memory."""
    rng = np.random.default_rng(seed)
    size = num_layers + 1
    empty = np.tri(size, dtype=bool)

    longer = np.maximum(np.arange(size)[None, :] - np.arange(size)[:, None], 1.0)
    growth, speed_up = rng.choice([1.0, 1.5]), rng.choice([0.0, 0.5, 1.0])
    most_live = rng.integers(1, num_microbatches + 1)

    def cut(shape: tuple[int, int]) -> Slice:
        seconds = rng.uniform(0.5, 2, (num_options, size, size)) * longer**growth
        seconds /= (shape[0] * shape[1]) ** speed_up
        seconds[:, empty] = np.inf
        limits = rng.integers(0, most_live + 1, seconds.shape)
        closing = rng.uniform(0, 2, (num_options, size)) if rng.integers(2) else None
        runs = np.arange(size * size).reshape(size, size)
        seconds, limits = seconds.reshape(num_options, -1), limits.reshape(num_options, -1)
        return Slice(shape, runs, seconds, limits, closing=closing)

    def transfers(scale: float) -> Transfers:
        return Transfers(rng.uniform(0, scale, size), rng.uniform(0, scale, size))

    links = {
        (a, b): transfers(rng.choice([0.1, 0.5, 2.0]))
        for a in range(len(nodes))
        for b in range(a, len(nodes))
    }
    return StageTable(
        num_layers=num_layers,
        num_microbatches=num_microbatches,
        schedule=schedule,
        nodes=nodes,
        slices=tuple(tuple(cut(shape) for shape in submesh_shapes(*each)) for each in nodes),
        within=tuple(transfers(0.2) for _ in nodes),
        between=tuple(
            tuple(links[min(a, b), max(a, b)] for b in range(len(nodes))) for a in range(len(nodes))
        ),
        order=order,
        min_stages=min_stages,
        max_stages=max_stages,
        lost=lost,
    )


def placements(table: StageTable) -> Iterator[tuple[Place, ...]]:
    """Every pipeline: any devices for each stage, subclusters and devices in order."""

    def behind(places: tuple[Place, ...]) -> Iterator[tuple[Place, ...]]:
        first = places[-1].layers[1] if places else 0
        if first == table.num_layers:
            yield places
            return
        passed = list(dict.fromkeys(place.subcluster for place in places))
        for subcluster, (nodes, per_node) in enumerate(table.nodes):
            if subcluster in passed[:-1]:
                continue
            if table.order and passed:
                order = table.order
                if order.index(subcluster) < order.index(passed[-1]):
                    continue
            free = 0
            if passed and subcluster == passed[-1]:
                cut = table.slices[subcluster][places[-1].slice]
                free = places[-1].start + cut.num_devices
            for chosen, cut in enumerate(table.slices[subcluster]):
                for start in range(free, nodes * per_node - cut.num_devices + 1):
                    in_node = start % per_node + cut.num_devices <= per_node
                    whole = cut.shape[1] == per_node and start % per_node == 0
                    if not (in_node or whole) or _touches_lost(table, subcluster, start, cut):
                        continue
                    for end in range(first + 1, table.num_layers + 1):
                        yield from behind((*places, Place((first, end), subcluster, chosen, start)))

    for places in behind(()):
        if table.min_stages <= len(places) <= (table.max_stages or len(places)):
            yield places


def _touches_lost(table: StageTable, subcluster: int, start: int, cut: Slice) -> bool:
    _, per_node = table.nodes[subcluster]
    lost = table.lost[subcluster] if table.lost else (0,) * table.nodes[subcluster][0]
    devices = range(start, start + cut.num_devices)
    return any(device % per_node < lost[device // per_node] for device in devices)


def crossed(table: StageTable, places: tuple[Place, ...]) -> list[tuple[float, float]]:
    pairs = []
    for a, b in itertools.pairwise(places):
        _, per_node = table.nodes[b.subcluster]
        same = a.subcluster == b.subcluster
        if (
            same
            and a.start // per_node
            == (b.start + table.slices[b.subcluster][b.slice].num_devices - 1) // per_node
        ):
            link = table.within[a.subcluster]
        else:
            link = table.between[a.subcluster][b.subcluster]
        pairs.append((link.forward[b.layers[0]], link.backward[b.layers[0]]))
    return pairs


def counts_of(table: StageTable, pairs: list[tuple[float, float]], pace: float) -> list[int]:
    stages, most = len(pairs) + 1, table.num_microbatches
    counts = {
        "gpipe": [most] * stages,
        "1f1b": [stages - i for i in range(stages)],
        "eager_1f1b": [2 * (stages - i) - 1 for i in range(stages)],
        "h_1f1b": list(h_1f1b_counts([pace] * stages, [(a + b) / 2 for a, b in pairs])),
    }[table.schedule]
    return [min(count, most) for count in counts]


def latency_by_trying_everything(table: StageTable) -> float:
    best = np.inf
    for places in placements(table):
        pairs = crossed(table, places)
        cuts = [table.slices[place.subcluster][place.slice] for place in places]
        cells = [
            (cut.seconds_of(p.layers), cut.limits_of(p.layers))
            for cut, p in zip(cuts, places, strict=True)
        ]
        closing = [np.zeros(len(seconds)) for seconds, _ in cells]
        if cuts[0].closing is not None:
            closing[0] = cuts[0].closing[:, places[0].layers[1]]
        one_way = [float(t) for pair in pairs for t in pair]
        means = [(a + b) / 2 for a, b in pairs]
        paces = {float(t) for seconds, _ in cells for t in seconds} | set(one_way)
        if table.schedule == "h_1f1b":
            paces |= {2 * mean for mean in means} | {10 * mean * (1 + 1e-12) for mean in means}
        for pace in paces:
            if pace <= 0 or max(one_way, default=0.0) > pace:
                continue
            total = sum(one_way)
            counts = counts_of(table, pairs, pace)
            for count, (seconds, limits), close in zip(counts, cells, closing, strict=True):
                fitting = [
                    t + last
                    for t, limit, last in zip(seconds, limits, close, strict=True)
                    if limit >= count and t <= pace
                ]
                total += min(fitting, default=np.inf)
            best = min(best, total + (table.num_microbatches - 1) * pace)
    return best


CLUSTERS = [((1, 2),), ((2, 2),), ((1, 1), (1, 2)), ((1, 2), (2, 1)), ((1, 1), (1, 1), (1, 1))]


@given(
    seed=st.integers(0, 2**32),
    num_layers=st.integers(1, 4),
    nodes=st.sampled_from(CLUSTERS),
    num_microbatches=st.integers(1, 6),
    schedule=st.sampled_from(WARM_UP_SCHEDULES),
)
def test_nothing_is_faster_than_what_is_found(seed, num_layers, nodes, num_microbatches, schedule):
    table = random_table(
        seed,
        num_layers=num_layers,
        nodes=nodes,
        num_microbatches=num_microbatches,
        schedule=schedule,
    )
    found = search(table)
    best = latency_by_trying_everything(table)
    if not found:
        assert best == np.inf
        return
    assert found[0].latency == pytest.approx(best, rel=1e-9)
    for near in (0.0, found[0].pace, 2 * found[0].pace, 1e9):
        assert search(table, near)[0].latency == pytest.approx(best, rel=1e-9)
        assert search(table, near, tolerance=0.1)[0].latency <= best / 0.9 * (1 + 1e-9)


@given(
    seed=st.integers(0, 2**32),
    num_layers=st.integers(1, 3),
    case=st.sampled_from(
        [
            (((2, 2),), ((1, 0),)),
            (((2, 2),), ((0, 1),)),
            (((3, 1), (1, 2)), ((0, 1, 0), (0,))),
            (((2, 1), (1, 2)), ((0, 0), (1,))),
        ]
    ),
    schedule=st.sampled_from(["h_1f1b", "1f1b"]),
)
def test_devices_that_are_lost_are_not_used(seed, num_layers, case, schedule):
    nodes, lost = case
    table = random_table(
        seed, num_layers=num_layers, nodes=nodes, num_microbatches=4, schedule=schedule, lost=lost
    )
    found = search(table)
    best = latency_by_trying_everything(table)
    if not found:
        assert best == np.inf
        return
    assert found[0].latency == pytest.approx(best, rel=1e-9)
    for candidate in found:
        for place in candidate.places:
            cut = table.slices[place.subcluster][place.slice]
            assert not _touches_lost(table, place.subcluster, place.start, cut)


@given(
    seed=st.integers(0, 2**32),
    stages=st.sampled_from([(1, 1), (1, 2), (2, 2), (2, None), (3, None), (3, 3)]),
    order=st.sampled_from([None, (0, 1), (1, 0)]),
)
def test_limits_on_stages_and_a_fixed_order_are_kept(seed, stages, order):
    table = random_table(
        seed,
        num_layers=4,
        nodes=((1, 2), (1, 2)),
        num_microbatches=4,
        order=order,
        min_stages=stages[0],
        max_stages=stages[1],
    )
    found = search(table)
    best = latency_by_trying_everything(table)
    assert (found[0].latency if found else np.inf) == pytest.approx(best, rel=1e-9)
    for candidate in found:
        assert stages[0] <= len(candidate.places) <= (stages[1] or 4)


@given(
    seed=st.integers(0, 2**32),
    order=st.permutations(range(4)).map(tuple),
    schedule=st.sampled_from(WARM_UP_SCHEDULES),
)
def test_a_fixed_order_leaves_out_any_subclusters(seed, order, schedule):
    table = random_table(
        seed,
        num_layers=4,
        nodes=((1, 1), (1, 2), (1, 1), (1, 1)),
        num_microbatches=4,
        order=order,
        schedule=schedule,
    )
    found = search(table)
    best = latency_by_trying_everything(table)
    assert (found[0].latency if found else np.inf) == pytest.approx(best, rel=1e-9)


@given(seed=st.integers(0, 2**32), schedule=st.sampled_from(WARM_UP_SCHEDULES))
def test_what_is_not_wanted_is_not_found(seed, schedule):
    table = random_table(
        seed, num_layers=4, nodes=((1, 2), (2, 1)), num_microbatches=6, schedule=schedule
    )
    found, prices = search(table), (1.0, 2.0)
    cheapest = search_by_cost(table, prices)
    if not found:
        assert search(table, below=1e9) == search_by_cost(table, prices, 1e9) == ()
        return
    least = found[0].latency
    (nearly, *_) = search(table, below=least * 1.01)
    assert nearly.latency == least
    assert search(table, below=least) == ()
    cost = price_of_nodes(prices, rented_nodes(table, cheapest[0])) * cheapest[0].latency
    (nearly, *_) = search_by_cost(table, prices, cost * 1.01)
    assert price_of_nodes(prices, rented_nodes(table, nearly)) * nearly.latency == cost
    assert search_by_cost(table, prices, cost) == ()


@given(seed=st.integers(0, 2**32))
def test_a_candidate_is_what_its_price_says(seed):
    table = random_table(seed, num_layers=5, nodes=((1, 4), (2, 2)), num_microbatches=5)
    for candidate in search(table):
        assert price(table, candidate.places, candidate.pace) == candidate
        covered = [layer for place in candidate.places for layer in range(*place.layers)]
        assert covered == list(range(5))
        pairs = crossed(table, candidate.places)
        assert counts_of(table, pairs, candidate.pace) == list(candidate.warm_up_counts)
        for a, b in itertools.pairwise(candidate.places):
            assert transfers_between(table, a, b).forward[b.layers[0]] == pairs.pop(0)[0]


def test_used_devices_come_first():
    table = random_table(0, num_layers=1, nodes=((2, 4),), num_microbatches=1, num_options=1)
    only_one_device = table.slices[0][0]
    only_one_device.live_limits[:] = 1
    for cut in table.slices[0][1:]:
        cut.live_limits[:] = 0
    assert search(table)[0].places == (Place((0, 1), 0, 0, 0),)


def cost_by_trying_everything(table: StageTable, prices: tuple[float, ...]) -> float:
    """The least price of used nodes times latency, over all that any numbers of nodes allow."""
    best = np.inf
    for nodes in itertools.product(*(range(n + 1) for n, _ in table.nodes)):
        fewer = with_nodes(table, nodes)
        rate = sum(price * count for price, count in zip(prices, nodes, strict=True))
        if rate > 0:
            best = min(best, rate * latency_by_trying_everything(fewer))
    return best


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    num_layers=st.integers(1, 4),
    nodes=st.sampled_from(
        [((3, 1),), ((1, 2), (2, 1)), ((1, 1), (1, 1), (1, 1)), ((2, 1), (2, 1))]
    ),
    num_microbatches=st.integers(1, 5),
)
def test_nothing_is_cheaper_than_what_is_found(seed, num_layers, nodes, num_microbatches):
    table = random_table(
        seed, num_layers=num_layers, nodes=nodes, num_microbatches=num_microbatches
    )
    rng = np.random.default_rng(seed)
    prices = tuple(float(rng.choice([0.3, 1.0, 5.0])) for _ in nodes)
    found = search_by_cost(table, prices)
    best = cost_by_trying_everything(table, prices)
    if not found:
        assert best == np.inf
        return
    costs = [
        sum(p * n for p, n in zip(prices, rented_nodes(table, each), strict=True)) * each.latency
        for each in found
    ]
    assert costs[0] == pytest.approx(best, rel=1e-9)
    assert costs == sorted(costs)

"""HexiSeq's cost models: the paper's equations, and transfers that are counted one by one."""

from collections import defaultdict
from random import Random

import numpy as np
import pytest
from context_exhaustive import small_case
from hypothesis import given, settings
from hypothesis import strategies as st
from random_contexts import random_parts

from hetjax.errors import InputError
from hetjax.planner.hexiseq.context_devices import ContextDevices
from hetjax.planner.hexiseq.context_links import HeadExchange, RingLinks
from hetjax.planner.hexiseq.context_model import BACKWARD_PRODUCTS, FORWARD_PRODUCTS, ContextModel
from hetjax.planner.hexiseq.context_work import transformer_work
from hetjax.planner.hexiseq.costs_of_rows import Candidates
from hetjax.planner.hexiseq.group_layout import GroupLayout
from hetjax.planner.hexiseq.paper_model import PaperModel
from hetjax.planner.hexiseq.refinement import RefinedSplit
from hetjax.planner.hexiseq.ring_timeline import earliest_ends, ring_ends
from hetjax.planner.hexiseq.scheduler import context_split
from hetjax.planner.hexiseq.split_memory import GRADIENT_BYTES
from hetjax.sharding.context.context_transfers import HeadBytes, ring_step, tokens_to_heads
from hetjax.sharding.context.sub_rings import sub_rings

NUMBERS = st.integers(0, 2**32 - 1)


def random_candidate(rng: Random, devices: ContextDevices, length: int, heads: int):
    members = list(range(devices.num_devices))
    rng.shuffle(members)
    groups = [[members.pop()] for _ in range(rng.randint(1, 3))]
    for each in members:
        rng.choice(groups).append(each)
    layout = GroupLayout(devices, groups)
    lengths = [1 + part for part in random_parts(rng, length - len(groups), len(groups))]
    tokens, own = [], []
    for group, of in zip(layout.groups, lengths, strict=True):
        tokens += random_parts(rng, of, len(group))
        own += random_parts(rng, heads, len(group))
    return layout, np.array(tokens), np.array(own)


def case(number: int):
    rng = Random(number)
    length, heads = rng.randint(4, 12), rng.choice([2, 4, 6])
    devices, work = small_case(number, rng.randint(3, 6), length, heads)
    return devices, work, *random_candidate(rng, devices, length, heads)


def link(devices: ContextDevices, a: int, b: int) -> tuple[float, float]:
    """Latency and seconds of a byte between two devices."""
    if devices.node[a] == devices.node[b]:
        return float(devices.near_latency[a]), float(devices.near_cost[a])
    ends = devices.subcluster[a], devices.subcluster[b]
    return float(devices.far_latency[ends]), float(devices.far_cost[ends])


@given(number=NUMBERS)
def test_the_papers_model_is_the_papers_equations(number: int):
    devices, work, layout, tokens, heads = case(number)
    model = PaperModel(devices, work)
    batch, item, size, width = work.batch, work.item_bytes, work.head_size, work.width
    flops, order = devices.flops, layout.order.tolist()
    s, n = dict(zip(order, tokens, strict=True)), dict(zip(order, heads, strict=True))
    lengths = [sum(s[d] for d in group) for group in layout.groups]
    others = max(
        max(
            72 * batch * s[d] * width**2 / flops[d],
            40 * batch * s[d] * width * item / devices.memory_bandwidth[d],
        )
        for d in order
    )
    exchange = 0.0
    for group in layout.groups:
        for d in group:
            for j in group:
                if d != j:
                    latency, cost = link(devices, d, j)
                    volume = 3 * batch * s[d] * n[j] * size * item
                    exchange = max(exchange, latency + cost * volume)
    split = context_split(model, RefinedSplit(layout, tokens, heads, 0.0))
    count, ring = len(layout.groups), 0.0
    for t in range(count):
        slowest = 0.0
        for k, group in enumerate(layout.groups):
            source = lengths[(k - t) % count]
            for d in group:
                computed = 16 * batch * lengths[k] * source * n[d] * size / flops[d]
                slowest = max(slowest, computed)
                peers = {r.owners[k - 1] for r in sub_rings(split) if r.owners[k] == d}
                for u in peers if t else ():
                    latency, cost = link(devices, u, d)
                    message = 4 * batch * source * n[d] * size * item
                    slowest = max(slowest, latency + cost * message)
        ring += slowest
    found = model.costs(layout, Candidates.one(tokens, heads))
    expected = work.layers * (others + 4 * exchange + ring)
    assert found.seconds[0] == pytest.approx(expected, rel=1e-9)
    kept = [
        2 * s[d] * width + 2 * lengths[k] * n[d] * size
        for k, group in enumerate(layout.groups)
        for d in group
    ]
    assert model.memory(layout, Candidates.one(tokens, heads))[0] == pytest.approx(
        batch * item * np.array(kept), rel=1e-12
    )
    total = model.least_seconds(float(devices.flops[layout.order].sum()))
    assert found.seconds[0] >= total * (1 - 1e-9)


@given(number=NUMBERS)
def test_links_carry_the_bytes_of_the_transfers(number: int):
    """Ports and network cards are busy for what `context_transfers` counts to the byte."""
    devices, work, layout, tokens, heads = case(number)
    model = ContextModel(devices, work)
    split = context_split(model, RefinedSplit(layout, tokens, heads, 0.0))
    head = HeadBytes(work.head_size, work.item_bytes)
    busy = defaultdict(float)
    for each in tokens_to_heads(split, head):
        a, b = each.sender, each.receiver
        seconds = each.num_bytes * link(devices, a, b)[1]
        is_near = devices.node[a] == devices.node[b]
        busy["out", is_near, a if is_near else int(devices.card[a])] += seconds
        busy["in", is_near, b if is_near else int(devices.card[b])] += seconds
    ring = RingLinks(devices, work, layout, heads[None])
    columns = heads[None] + 2 * ring.copies
    exchange = HeadExchange(devices, work, layout, tokens[None], columns)
    assert exchange.busy[0] == pytest.approx(max(busy.values(), default=0.0), rel=1e-9)
    if len(layout.groups) == 1:
        return
    # Of a step in which every group hands on as many tokens: what one token takes to each group.
    lengths = split.group_lengths
    busy.clear()
    for each in ring_step(split, head, 1):
        a, b = each.sender, each.receiver
        source = next(k for k, group in enumerate(layout.groups) if a in group)
        seconds = each.num_bytes / lengths[source] * link(devices, a, b)[1]
        is_near = devices.node[a] == devices.node[b]
        busy["out", is_near, a if is_near else int(devices.card[a])] += seconds
        busy["in", is_near, b if is_near else int(devices.card[b])] += seconds
    assert ring.token_seconds.max() == pytest.approx(max(busy.values()), rel=1e-9)


def lockstep_free_ends(starts, token_seconds, hop_seconds, latency, lengths) -> list[float]:
    """The ring's timeline event by event, for one row."""
    count = len(lengths)
    came, done = {}, {}

    def arrival(k: int, t: int) -> float:
        if t == 0:
            return starts[k]
        if (k, t) not in came:
            before = [arrival((k - 1) % count, t - 1), arrival(k, t - 1)]
            if t > 2:
                before += [end(k, t - 2), arrival((k + 1) % count, t - 1)]
            source = lengths[(k - t) % count]
            came[k, t] = max(before) + latency[k] + hop_seconds[k] * source
        return came[k, t]

    def end(k: int, t: int) -> float:
        if (k, t) not in done:
            own = token_seconds[k] * lengths[(k - t) % count]
            ready = starts[k] if t == 0 else max(end(k, t - 1), arrival(k, t))
            done[k, t] = ready + own
        return done[k, t]

    return [end(k, count - 1) for k in range(count)]


@given(number=NUMBERS, count=st.integers(1, 6))
def test_the_ring_is_simulated_event_by_event(number: int, count: int):
    rng = np.random.default_rng(number)
    figures = [rng.uniform(0, 1, (2, count)) for _ in range(4)] + [
        rng.integers(1, 9, (2, count)).astype(float)
    ]
    ends = ring_ends(*figures)
    for row in range(2):
        expected = lockstep_free_ends(*(each[row] for each in figures))
        assert ends[row] == pytest.approx(expected, rel=1e-9)
    assert (earliest_ends(*figures) <= ends * (1 + 1e-9)).all()


@settings(max_examples=30)
@given(number=NUMBERS)
def test_many_candidates_cost_what_each_costs_alone(number: int):
    devices, work, layout, tokens, heads = case(number)
    rng = Random(number)
    rows = [(tokens, heads)]
    for _ in range(5):
        own, of = [], []
        for group, start in zip(layout.groups, layout.starts, strict=True):
            length = int(tokens[start : start + len(group)].sum())
            own += random_parts(rng, length, len(group))
            of += random_parts(rng, work.query_heads, len(group))
        rows.append((np.array(own), np.array(of)))
    own, of = (np.array(each) for each in zip(*rows, strict=True))
    together = Candidates(own, of, np.arange(len(rows)))
    for model in (PaperModel(devices, work), ContextModel(devices, work)):
        found = model.costs(layout, together).scores
        alone = [model.costs(layout, Candidates.one(*each)).scores[0] for each in rows]
        assert found == pytest.approx(alone, rel=1e-12)
        best, score = model.best(layout, together)
        assert score == pytest.approx(found.min(), rel=1e-12)
        assert found[best] == pytest.approx(found.min(), rel=1e-12)
        below = float(found.min()) * (1 - 1e-6)
        assert model.best(layout, together, below)[1] >= below


def test_one_device_takes_what_it_computes():
    devices, _ = small_case(0, 3, 8, 4)
    work = transformer_work(2**14, width=512, layers=3, query_heads=4, vocabulary=1000)
    model = ContextModel(devices, work)
    layout = GroupLayout(devices, [(0,)])
    one = Candidates.one(np.array([work.length]), np.array([4]))
    times = model.layer_times(layout, one)
    pairs = work.length**2 / 2 * 4
    attended = (FORWARD_PRODUCTS + BACKWARD_PRODUCTS) * 2 * work.head_size * pairs
    assert times.attention[0] == pytest.approx(attended / devices.flops[0], rel=1e-12)
    assert times.exchange[0] == times.cards[0] == 0
    least = model.least_seconds(float(devices.flops[0]))
    assert model.costs(layout, one).seconds[0] == pytest.approx(least, rel=1e-3)


def test_memory_counts_each_part():
    devices, _ = small_case(0, 3, 8, 4)
    work = transformer_work(
        1000, width=64, layers=3, query_heads=4, key_value_heads=2, vocabulary=50
    )
    model = ContextModel(devices, work)
    layout = GroupLayout(devices, [(0, 1), (2,)])
    parts = model.memory_parts(
        layout, Candidates.one(np.array([500, 100, 400]), np.array([3, 1, 4]))
    )
    assert parts.state[0, 0] == work.parameters * 16 / 3 + 3 * work.layer_parameters * 2
    assert parts.kept[0] == pytest.approx(
        np.array([500, 100, 400]) * (3 * 64 * 2 + work.working_bytes)
    )
    # Sub-rings are heads 0 to 2 and head 3: the third device gets the second head twice.
    copies = np.array([2, 1, 3])
    heads, length = np.array([3, 1, 4]), np.array([600, 600, 400])
    item = 16 * ((3 * heads + 2 * copies) * 2 + (heads + 2 * copies) * GRADIENT_BYTES)
    assert parts.exchanged[0] == pytest.approx(length * (item + 8 * heads))
    assert parts.ring[0] == pytest.approx(2 * 600 * 2 * 16 * copies * (2 + GRADIENT_BYTES))
    assert parts.logits[0] == pytest.approx(np.array([500, 100, 400]) * 50 * 8)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"query_heads": 0}, "query_heads: 0 is not allowed"),
        ({"query_heads": 3}, "query_heads: 3 is not allowed: it must divide the width, 64"),
        ({"key_value_heads": 3}, "key_value_heads: 3 is not allowed: it must divide the 4"),
        ({"length": 0}, "length: 0 is not allowed"),
        ({"sequences": 8, "batch": 3}, "batch: 3 is not allowed: it must divide the 8 sequences"),
    ],
)
def test_wrong_work_is_named(fields, said: str):
    good = {"length": 64, "width": 64, "layers": 2, "query_heads": 4}
    with pytest.raises(InputError, match=said):
        transformer_work(**(good | fields))

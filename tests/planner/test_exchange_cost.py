"""What stages take that exchange what several of them hold, over links, cards and processors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetjax.mesh import Cluster, Link, Subcluster, SubMesh, kind
from hetjax.pipeline.stages.holders import Holders
from hetjax.planner.costs.exchange_cost import ExchangedBytes, exchange_seconds

NEAR, FAR = Link(1e10, 1e-5), Link(1e8, 1e-3)
NODES = Subcluster("nodes", kind("A100-40"), 2, 4, NEAR, FAR)
GRADIENT, VALUE = 2_000_000, 1_000_000
PIECE = ExchangedBytes(GRADIENT, VALUE)


def on(*starts: int, devices: int = 2) -> list[list[SubMesh]]:
    """Stages of so many devices of a node each."""
    return [[SubMesh("nodes", start, (1, devices))] for start in starts]


def both(*stages: int) -> Holders:
    """Stages of which the first updates what all hold."""
    return Holders(stages, (stages[0],))


def seconds(part: Subcluster, where: list[list[SubMesh]], *held: Holders) -> tuple[float, ...]:
    return exchange_seconds(Cluster("c", (part,), ()), where, [(each, PIECE) for each in held])


def test_a_message_each_way_pays_for_its_way():
    alone = (GRADIENT + VALUE) / FAR.bandwidth + 2 * FAR.latency
    assert seconds(NODES, on(0, 4), both(0, 1)) == pytest.approx((alone, alone))
    # Within a node both devices give their parts side by side.
    near = (GRADIENT + VALUE) / (2 * NEAR.bandwidth) + 2 * NEAR.latency
    assert seconds(NODES, on(0, 2), both(0, 1)) == pytest.approx((near, near))
    assert seconds(NODES, on(0, 4)) == (0.0, 0.0)


def test_stages_of_one_node_share_its_card_but_not_cards_of_their_own():
    """Two pipelines over the same two nodes, each stage of which has a copy on the other."""
    pairs = both(0, 1), both(2, 3)
    alone = (GRADIENT + VALUE) / FAR.bandwidth
    latency = 2 * FAR.latency
    shared = seconds(NODES, on(0, 4, 2, 6), *pairs)
    assert shared == pytest.approx((2 * alone + latency,) * 4)
    cards = replace(NODES, network_cards=((0, 1), (2, 3)))
    assert seconds(cards, on(0, 4, 2, 6), *pairs) == pytest.approx((alone + latency,) * 4)


def test_what_goes_the_other_way_is_no_burden():
    pairs = both(0, 1), both(3, 2)
    alone = (GRADIENT + VALUE) / FAR.bandwidth + 2 * FAR.latency
    assert seconds(NODES, on(0, 4, 2, 6), *pairs) == pytest.approx((alone,) * 4)


def test_processors_that_see_to_transfers_pay_for_bytes_and_messages():
    loaded = replace(NODES, transfer_load=1e-9, message_load=1e-4)
    free = seconds(NODES, on(0, 4), both(0, 1))
    # Of each of two messages a stage has one end; two devices share the bytes.
    more = (GRADIENT + VALUE) / 2 * 1e-9 + 2 * 1e-4
    paid = seconds(loaded, on(0, 4), both(0, 1))
    assert paid == pytest.approx([each + more for each in free])

"""What transfers take where a node exchanges values with both of its neighbours."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster, SubMesh
from hetjax.pipeline.timeline.times import StepTimes
from hetjax.planner import PlanOptions
from hetjax.planner.costs.crossing_ends import (
    crossing_parts,
    end_of,
    joined_link,
    transfer_link,
)
from hetjax.planner.costs.network_cards import (
    PipelineTimes,
    with_cards_of_all,
    with_shared_cards,
)
from hetjax.planner.foreign.foreign_costs import ForeignCosts
from hetjax.planner.foreign.foreign_profile import checked_foreign_profile
from hetjax.planner.harp.candidate_clock import CandidateClock
from hetjax.planner.harp.candidate_plans import candidate_ends
from hetjax.planner.harp.fixed_pace import Place
from hetjax.planner.harp.search import price
from hetjax.planner.plan.module_shares import ModuleShares
from hetjax.planner.plan.stage_plan import Member, Shares, StagePlan

KIND = DeviceKind("any", {"float32": 1e12}, 10**9, 1e11, source="made up")
INSIDE = Link(1e10, 0.0)


def switch(*bandwidths: float, latency: float = 0.0) -> Cluster:
    """Hosts at a switch, each with a link of its own to it; named by their number."""
    hosts = [Subcluster(str(n), KIND, 1, 2, INSIDE, INSIDE) for n in range(len(bandwidths))]
    links = [
        (a.name, b.name, Link(min(bandwidths[i], bandwidths[j]), latency))
        for j, b in enumerate(hosts)
        for i, a in enumerate(hosts[:j])
    ]
    return Cluster("switch", tuple(hosts), tuple(links))


def submesh(host: int, start: int = 0, devices: int = 2) -> SubMesh:
    return SubMesh(str(host), start, (1, devices))


def times_of(
    cluster: Cluster, stages: list[SubMesh], computing: float, sent: list[float]
) -> StepTimes:
    """Stages that compute alike, and links that carry as many bytes there as back."""
    links = [cluster.link_between(a, b) for a, b in itertools.pairwise(stages)]
    moving = [link.seconds(size) for link, size in zip(links, sent, strict=True)]
    count = len(stages)
    return StepTimes([computing / 3] * count, [computing * 2 / 3] * count, moving, moving)


CHAIN = [submesh(0), submesh(1), submesh(2)]


def beside(cluster: Cluster, computing: float, sent: float) -> list[float]:
    """What a transfer of each of two pipelines takes, over halves of the same two hosts."""
    pipelines = []
    for start in (0, 1):
        stages = [submesh(0, start, 1), submesh(1, start, 1)]
        pipelines.append(PipelineTimes(times_of(cluster, stages, computing, [sent]), stages))
    return [each.sends[0] for each in with_cards_of_all(pipelines, cluster)]


def test_pipelines_side_by_side_share_the_cards_of_their_hosts():
    cluster = switch(1.0, 1.0)
    # Of a pace of 8 s the other has 2, then 4: what is left is enough, and nothing is left over.
    assert beside(cluster, 8.0, 2.0) == pytest.approx([2 / (1 - 2 / 8)] * 2)
    assert beside(cluster, 8.0, 4.0) == pytest.approx([8.0] * 2)
    # Both want all of it: the pace is twice as slow.
    assert beside(cluster, 8.0, 8.0) == pytest.approx([16.0] * 2)
    # Each has a card of its own.
    cards = [replace(each, network_cards=((0,), (1,))) for each in cluster.subclusters]
    assert beside(replace(cluster, subclusters=tuple(cards)), 8.0, 8.0) == pytest.approx([8.0] * 2)


def test_part_of_a_node_has_part_of_its_host_and_card():
    whole = Subcluster("0", KIND, 1, 4, INSIDE, INSIDE, host_memory_bytes=10**9)
    assert whole.reduced(1, 3).host_memory_bytes == 750_000_000
    assert whole.card_share(3) == 0.75
    cards = replace(whole, network_cards=((0, 1), (2, 3)))
    assert (cards.card_share(1), cards.card_share(2), cards.card_share(3)) == (0.5, 1.0, 0.75)


def test_two_hosts_share_nothing():
    cluster = switch(1.0, 1.0)
    times = times_of(cluster, CHAIN[:2], 3.0, [2.0])
    assert with_shared_cards(times, cluster, CHAIN[:2]) == times


def nodes_of(*counts: int) -> tuple[Cluster, list[SubMesh]]:
    """Stages of several nodes each, of one device, one after the other."""
    link = Link(1e9, 0.5)
    cluster = Cluster("nodes", (Subcluster("all", KIND, sum(counts), 1, INSIDE, link),))
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    return cluster, [
        SubMesh("all", *each) for each in zip(starts, [(n, 1) for n in counts], strict=True)
    ]


@pytest.mark.parametrize(("counts", "seconds"), [((2, 2), 2.5), ((4, 2), 2.5), ((1, 4), 4.5)])
def test_nodes_send_their_parts_side_by_side(counts: tuple[int, int], seconds: float):
    cluster, (sender, receiver) = nodes_of(*counts)
    for there in (
        transfer_link(cluster, sender, receiver),
        transfer_link(cluster, receiver, sender),
    ):
        assert there.seconds(4e9) == pytest.approx(seconds)


def test_each_card_of_several_nodes_carries_its_part():
    """Two transfers of 2 s meet at the middle stage, whichever nodes that has."""
    cluster, stages = nodes_of(2, 2, 2)
    links = [transfer_link(cluster, a, b) for a, b in itertools.pairwise(stages)]
    moving = [link.seconds(4e9) for link in links]
    times = StepTimes([3.0] * 3, [5.0] * 3, moving, moving)
    found = with_shared_cards(times, cluster, stages)
    # Of a pace of 8 s the other one fills each card for 2.
    assert found.sends == pytest.approx([0.5 + 2 / (1 - 2 / 8)] * 2)


def test_a_card_that_is_never_idle_gives_each_transfer_all_of_the_pace():
    cluster = switch(1.0, 1.0, 1.0)
    found = with_shared_cards(times_of(cluster, CHAIN, 0.3, [2.0, 1.0]), cluster, CHAIN)
    # Out of the middle host go 2 back and 1 on; into it come 2 and 1.
    assert found.sends == pytest.approx([3.0, 3.0])
    assert found.returns == pytest.approx([3.0, 3.0])


def test_a_transfer_has_what_the_others_leave_of_a_card():
    cluster = switch(1.0, 1.0, 1.0, latency=0.5)
    found = with_shared_cards(times_of(cluster, CHAIN, 10.0, [2.0, 1.0]), cluster, CHAIN)
    assert found.sends == pytest.approx([0.5 + 2 / 0.9, 0.5 + 1 / 0.8])


def test_a_slow_neighbour_leaves_most_of_a_fast_card():
    cluster = switch(4.0, 4.0, 1.0)
    found = with_shared_cards(times_of(cluster, CHAIN, 10.0, [8.0, 4.0]), cluster, CHAIN)
    # The last host's own link is what its transfers wait for: 4 seconds, of the card's 1.
    assert found.sends == pytest.approx([2 / (1 - 1 / 10), 4.0])


def test_stages_of_one_node_exchange_inside_it_and_share_its_card():
    cluster = switch(1.0, 1.0, 1.0)
    stages = [submesh(0), submesh(1, 0, 1), submesh(1, 1, 1), submesh(2)]
    times = times_of(cluster, stages, 10.0, [2.0, 5.0, 1.0])
    found = with_shared_cards(times, cluster, stages)
    # The activations that come in share nothing with those that go out, but with gradients.
    assert found.sends == pytest.approx([2 / 0.9, times.sends[1], 1 / 0.8])


@given(
    bandwidths=st.lists(st.floats(0.5, 8.0), min_size=3, max_size=5),
    computing=st.floats(0.1, 20.0),
    sent=st.lists(st.floats(0.0, 8.0), min_size=4, max_size=4),
)
def test_transfers_only_become_longer_and_never_longer_than_the_pace(
    bandwidths: list[float], computing: float, sent: list[float]
):
    cluster = switch(*bandwidths)
    stages = [submesh(host) for host in range(len(bandwidths))]
    times = times_of(cluster, stages, computing, sent[: len(stages) - 1])
    found = with_shared_cards(times, cluster, stages)
    assert replace(found, sends=times.sends, returns=times.returns) == times
    before, after = [*times.sends, *times.returns], [*found.sends, *found.returns]
    assert all(a <= b for a, b in zip(before, after, strict=True))
    # What each card carries in all is less than the slowest of its links would.
    longest = max(computing, 2 * max(size / min(bandwidths) for size in sent))
    assert max(after) <= longest * (1 + 1e-9)


def two_cards(*devices: tuple[int, ...]) -> Cluster:
    """Three hosts of four devices at a switch; the cards of the middle one have these devices."""
    cluster = switch(1.0, 1.0, 1.0)
    first, middle, last = (replace(each, devices_per_node=4) for each in cluster.subclusters)
    return replace(cluster, subclusters=(first, replace(middle, network_cards=devices), last))


def test_stages_with_cards_of_their_own_do_not_share_one():
    stages = [submesh(0), submesh(1, 0, 2), submesh(1, 2, 2), submesh(2)]
    shared, apart = two_cards((0, 1, 2, 3)), two_cards((0, 1), (2, 3))
    times = times_of(shared, stages, 10.0, [2.0, 5.0, 1.0])
    assert with_shared_cards(times, apart, stages) == times
    assert with_shared_cards(times, shared, stages) != times
    # Each stage on both cards: a neighbour's one card is what they wait for.
    assert with_shared_cards(times, two_cards((0, 2), (1, 3)), stages) == times


def test_a_stage_sends_over_all_cards_of_its_devices():
    part = Subcluster("one", KIND, 3, 4, INSIDE, Link(1.0, 0.5), network_cards=((0, 1), (2, 3)))
    cluster = Cluster("rack", (part,))
    nodes = [SubMesh("one", 4 * node, (1, 4)) for node in range(3)]
    halves = [SubMesh("one", 4 * node, (1, 2)) for node in range(3)]
    assert cluster.link_between(nodes[0], nodes[1]) == Link(2.0, 0.5)
    assert cluster.link_between(nodes[0], halves[1]) == Link(1.0, 0.5)
    assert cluster.link_between(nodes[0], nodes[0]) == INSIDE
    both = SubMesh("one", 0, (2, 4))
    assert cluster.link_between(both, both) == Link(2.0, 0.5)
    found = with_shared_cards(times_of(cluster, nodes, 10.0, [4.0, 2.0]), cluster, nodes)
    # As with one card of twice the speed.
    assert found.sends == pytest.approx([0.5 + 2 / 0.9, 0.5 + 1 / 0.8])


def test_the_clock_of_a_search_counts_the_cards_that_stages_have():
    """By a plan of half nodes: the table tells what whole nodes take, the clock what these do."""
    link = Link(1e8, 0.0)
    cards = ((0, 1), (2, 3))
    parts = tuple(
        Subcluster(name, replace(KIND, name=name), 1, 4, INSIDE, link, network_cards=cards)
        for name in ("a", "b")
    )
    cluster = Cluster("two", parts, (("a", "b", link),))
    content = {
        "version": 1,
        "model": "two",
        "source": "made up",
        "layers": [
            {"name": "x", "count": 2, "parameter_bytes": 1, "optimizer_bytes": 1, "sent_bytes": 1e7}
        ],
        "times": [
            {
                "layer": "x",
                "kind": kind,
                "mesh": [1, 1],
                "microbatch_size": size,
                "forward_seconds": 1.0,
                "backward_seconds": 1.0,
                "kept_bytes": 1,
            }
            for kind in ("a", "b")
            for size in (1, 2)
        ],
    }
    costs = ForeignCosts(checked_foreign_profile(content, ""), cluster, 2)
    table = costs.table(1, "1f1b", PlanOptions())
    clock = CandidateClock(table, cluster, (), costs.stage_seconds, ())
    # There are no times for two examples on four devices.
    assert [cut.shape for cut in table.slices[0]] == [(1, 1), (1, 2)]
    for slice_place in (0, 1):
        places = [Place((s, s + 1), s, slice_place, 0) for s in (0, 1)]
        candidate = price(table, places, 1e9)
        assert candidate is not None
        ends = candidate_ends(table, cluster, (), candidate)
        assert clock.times(candidate, ends).sends == pytest.approx([link.seconds(2e7)])
    assert table.between[0][1].forward[1] == pytest.approx(link.seconds(2e7) / 2)


def test_members_that_take_their_input_whole_receive_all_of_it_each():
    """And of what they send back, which all of them have, each sends as much."""
    cluster = switch(1e9, 1e9, 1e9)
    first, *others = (Member(SubMesh(str(n), 0, (1, 1)), (1, 1)) for n in range(3))
    told = Shares(modules=(ModuleShares(((1, 2),)),))
    before, program = StagePlan((0, 1), (first,)), StagePlan((1, 2), tuple(others), shares=told)
    divided = replace(program, shares=Shares(batch=(1, 1)))

    def seconds(sender: StagePlan, receiver: StagePlan) -> float:
        link = joined_link(crossing_parts(cluster, end_of(sender), end_of(receiver)))
        return link.latency + 1e9 / link.bandwidth

    assert seconds(before, divided) == pytest.approx(1.0)
    assert seconds(divided, before) == pytest.approx(1.0)
    assert seconds(before, program) == pytest.approx(2.0)
    assert seconds(program, before) == pytest.approx(1.0)

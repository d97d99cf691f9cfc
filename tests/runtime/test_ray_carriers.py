"""Carriers on Ray: measured once and within a time, chosen, forced, and as good as each other."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from ray_jobs import SHARES, loss_by_half_products, make_plan, make_trainer, union_plan

from hetjax import RayOptions, Trainer, WorkerLostError
from hetjax.mesh import Link, Subcluster
from hetjax.planner import Plan
from hetjax.runtime import CarrierCurves
from hetjax.runtime.moves.carrier_curves import LinkEnd, MeasuredLink
from hetjax.runtime.moves.carriers import BETWEEN_PROCESSES, CarrierName, Curve
from hetjax.runtime.ray import ray_carriers
from hetjax.runtime.ray.ray_carriers import (
    MEASURING_SECONDS,
    SIZES,
    LinkWorkers,
    measured_links,
)
from hetjax.runtime.ray.ray_cluster import worker_options
from hetjax.runtime.ray.ray_executor import RayExecutor

WIRE, STREAM, HOST = BETWEEN_PROCESSES
CALL_SECONDS = 0.005
"""What it takes to have workers measure, beside what they measure."""


class Network:
    """Links on which messages take what is said of them, and a clock that goes on by that.

    Args:
        links: by carrier what messages take on each link.
    """

    def __init__(self, links: Mapping[LinkWorkers, Mapping[CarrierName, Link]]):
        self.links, self.now = links, 100.0
        self.asked: list[tuple[Sequence[LinkWorkers], CarrierName, int]] = []

    def exchange(
        self, going: Sequence[LinkWorkers], carrier: CarrierName, size: int
    ) -> dict[LinkWorkers, float]:
        self.asked.append((tuple(going), carrier, size))
        found = {link: self.links[link][carrier].seconds(size) for link in going}
        self.now += CALL_SECONDS + 2 * 4 * max(found.values())
        return found

    def measured(self) -> dict[tuple[LinkEnd, LinkEnd], Mapping[CarrierName, Curve]]:
        links = measured_links([*self.links], self.exchange, lambda: self.now)
        return {each.between: each.carriers for each in links}


def link_between(one: int, other: int) -> LinkWorkers:
    ends = [LinkEnd(f"s{host}", f"10.0.0.{host}") for host in (one, other)]
    return LinkWorkers((ends[0], ends[1]), ((one, 0), (other, 1)))


CURVES = {WIRE: Link(1e9, 1e-4), STREAM: Link(2e9, 2e-4), HOST: Link(5e8, 1e-3)}


def check_curves(found: Mapping[CarrierName, Curve], expected: Mapping[CarrierName, Link]) -> None:
    assert found.keys() == expected.keys()
    for name, link in expected.items():
        for size in (*SIZES, SIZES[-1] * 3):
            assert found[name].at(size) == pytest.approx(link.seconds(size))


def test_every_size_is_measured_by_every_carrier_on_a_fast_link():
    link = link_between(0, 1)
    network = Network({link: CURVES})
    check_curves(network.measured()[link.ends], CURVES)
    once = [*itertools.product(SIZES, BETWEEN_PROCESSES)]
    asked = [(size, name) for _, name, size in network.asked]
    assert asked[: len(once)] == once
    assert min(asked.count(each) for each in once[:12]) >= 2, "again while there is time"
    assert network.now - 100.0 < 1.2 * MEASURING_SECONDS


def test_what_does_not_join_two_workers_is_not_measured_between_them():
    one, other = link_between(0, 1), link_between(2, 3)._replace(carriers=(STREAM, HOST))
    network = Network({one: CURVES, other: CURVES})
    found = network.measured()
    check_curves(found[one.ends], CURVES)
    check_curves(found[other.ends], {name: CURVES[name] for name in (STREAM, HOST)})
    assert all(other not in going for going, name, _ in network.asked if name == WIRE)


def test_links_with_no_host_in_common_are_measured_at_the_same_time():
    pairs = [link_between(*hosts) for hosts in ((0, 1), (2, 3), (1, 2), (0, 0))]
    network = Network(dict.fromkeys(pairs, CURVES))
    assert len(network.measured()) == 4
    turns = dict.fromkeys(going for going, _, _ in network.asked)
    assert [*turns] == [(pairs[0], pairs[1]), (pairs[2], pairs[3])]


@pytest.mark.parametrize("bandwidth", [1e5, 1.25e6, 25e6, 1e9])
@pytest.mark.parametrize("hosts", [2, 8])
def test_measuring_ends_in_time_whatever_the_links(bandwidth: float, hosts: int):
    """A slow link is measured with small messages, or not at all."""
    slow = {name: Link(bandwidth, 1e-3) for name in BETWEEN_PROCESSES}
    pairs = [link_between(*pair) for pair in itertools.combinations(range(hosts), 2)]
    network = Network(dict.fromkeys(pairs, slow))
    found = network.measured()
    assert network.now - 100.0 < 1.2 * MEASURING_SECONDS
    for each in found.values():
        check_curves(each, slow)
    if hosts == 2 and bandwidth > 1e5:
        assert found


def test_a_slow_link_does_not_shorten_the_measurement_of_one_beside_it():
    fast, slow = link_between(0, 1), link_between(2, 3)
    network = Network({fast: CURVES, slow: dict.fromkeys(CURVES, Link(2e5, 1e-2))})
    found = network.measured()
    check_curves(found[fast.ends], CURVES)


def check_host_carrier(trainer: Trainer, plan: Plan) -> None:
    """A trainer has the host carrier alone, and computes what one process does."""
    with make_trainer("local", plan) as alone:
        losses = [alone.train_step().loss for _ in range(4)]
        evaluated = alone.evaluate()
    assert [trainer.train_step(timed=step == 2).loss for step in range(4)] == losses
    assert trainer.evaluate() == evaluated
    uses = trainer.link_uses()
    assert {use.carriers for use in uses} == {(HOST,)}
    assert all(use.num_bytes and use.transfers for use in uses)
    assert trainer.carrier_curves == CarrierCurves(), "there is nothing to choose"


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_pipeline_trains_by_the_host_carrier_alone():
    plan = make_plan()
    with make_trainer(RayOptions(carrier="host"), plan) as trainer:
        check_host_carrier(trainer, plan)


def train_for_ever(trainer: Trainer) -> Any:
    while True:
        trainer.train_step()


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_union_trains_by_the_host_carrier_alone_and_its_killed_member_is_named_in_time():
    plan = union_plan(SHARES["both"])
    with make_trainer(RayOptions(carrier="host"), plan) as trainer:
        check_host_carrier(trainer, plan)
        assert trainer.timeline().tracks == ("stage 0", "stage 0, member 1", "link 0->0")
        executor = trainer._executor
        assert isinstance(executor, RayExecutor)
        threading.Timer(0.3, os.kill, (executor.processes[0, 1], signal.SIGKILL)).start()
        began = time.monotonic()
        with pytest.raises(WorkerLostError) as caught:
            train_for_ever(trainer)
        assert caught.value.worker == "stage 0, member 1"
        assert time.monotonic() - began < 15.0


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_links_are_measured_once_and_messages_go_by_what_was_measured(
    monkeypatch: pytest.MonkeyPatch,
):
    # What there is no time for is left out, as everything may be on a machine that is busy.
    monkeypatch.setattr(ray_carriers, "MEASURING_SECONDS", 60.0)
    plan = make_plan()
    with make_trainer("ray", plan) as trainer:
        losses = [trainer.train_step().loss for _ in range(3)]
        curves = trainer.carrier_curves
    (link,) = curves.links
    assert {end.subcluster for end in link.between} == {"first", "second"}
    assert list(link.carriers) == list(BETWEEN_PROCESSES)
    # Messages of up to 100 bytes by wire, larger ones through hosts.
    told = {
        WIRE: Curve((1, 101), (1e-6, 1.01e-4)),
        STREAM: Curve((1, 101), (1.0, 1.0)),
        HOST: Curve((1, 101), (1e-4, 1.0001e-4)),
    }
    kept = CarrierCurves((MeasuredLink(link.between, told),))
    with make_trainer(RayOptions(curves=kept), plan) as trainer:
        assert trainer.carrier_curves == kept
        assert [trainer.train_step(timed=step == 2).loss for step in range(3)] == losses
        uses = trainer.link_uses()
        assert [(use.source, use.target, use.carriers) for use in uses] == [
            (0, 1, (HOST,)),
            (0, 1, (WIRE,)),
            (1, 0, (HOST,)),
            (1, 0, (WIRE,)),
        ]
        for use in uses:
            assert (use.num_bytes <= 100 * use.transfers) == (use.carriers == (WIRE,))


def worker_options_of_unlike_settings(subcluster: Subcluster, devices: int) -> dict[str, Any]:
    """Those of the runtime, with other settings of XLA for the second stage."""
    options = worker_options(subcluster, devices)
    if subcluster.name == "second":
        options["runtime_env"]["env_vars"]["XLA_FLAGS"] += (
            " --xla_cpu_enable_fast_math=true --xla_backend_optimization_level=1"
        )
    return options


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_workers_of_unlike_settings_and_dtypes_have_the_same_bits_by_every_carrier(
    monkeypatch: pytest.MonkeyPatch,
):
    """Two vendors' devices, as far as one machine goes: one fast and loose, with half products."""
    function = loss_by_half_products
    plan = make_plan(function=function)
    with make_trainer("local", plan, loss_function=function) as alone:
        expected = [alone.train_step().loss for _ in range(3)]
    module = "hetjax.runtime.ray.ray_executor.worker_options"
    monkeypatch.setattr(module, worker_options_of_unlike_settings)
    with make_trainer("ray", plan, loss_function=function) as trainer:
        executor = trainer._executor
        assert isinstance(executor, RayExecutor)

        def go_by(name: CarrierName) -> None:
            calls = {}
            for peer, partner in (((0, 0), (1, 0)), ((1, 0), (0, 0))):
                calls[peer] = executor._workers.actor(peer).choose_by.remote({}, {partner: (name,)})
            executor._workers.wait(calls)

        evaluated, losses = {}, []
        for name in BETWEEN_PROCESSES:
            go_by(name)
            evaluated[name] = trainer.evaluate()
        assert evaluated[WIRE] == evaluated[STREAM] == evaluated[HOST]
        for name in BETWEEN_PROCESSES:
            go_by(name)
            losses.append(trainer.train_step(timed=True).loss)
            assert {use.carriers for use in trainer.link_uses()} == {(name,)}
    assert losses == pytest.approx(expected, rel=1e-3)

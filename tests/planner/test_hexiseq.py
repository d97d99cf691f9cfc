"""HexiSeq's scheduler: near the best of all splits, never behind even ones, refusals with bytes."""

import re
from dataclasses import replace

import numpy as np
import pytest
from context_exhaustive import best_of_all, small_case
from context_simulations import MODELS, simulated
from hypothesis import given
from hypothesis import strategies as st

from hetjax.errors import DoesNotFitError
from hetjax.mesh import KINDS, Cluster, Link, Subcluster
from hetjax.planner.hexiseq.apportion import apportion_heads, apportion_tokens
from hetjax.planner.hexiseq.context_devices import ContextDevices
from hetjax.planner.hexiseq.context_model import ContextModel
from hetjax.planner.hexiseq.context_work import transformer_work
from hetjax.planner.hexiseq.costs_of_rows import Candidates
from hetjax.planner.hexiseq.even_contexts import even_contexts
from hetjax.planner.hexiseq.group_layout import GroupLayout
from hetjax.planner.hexiseq.paper_model import PaperModel
from hetjax.planner.hexiseq.partitions import choices_of_devices, partitions
from hetjax.planner.hexiseq.scheduler import schedule_context, schedule_even, schedule_groups

NUMBERS = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("make", [PaperModel, ContextModel])
@pytest.mark.parametrize(
    ("number", "devices", "length", "heads"),
    [(4, 3, 8, 4), (24, 3, 8, 4), (1, 4, 6, 4), (0, 6, 3, 2)],
)
def test_few_devices_are_scheduled_as_well_as_by_trying_all(
    make, number: int, devices: int, length: int, heads: int
):
    model = make(*small_case(number, devices, length, heads))
    best, count = best_of_all(model)
    assert count > 500  # Splits that were costed.
    assert schedule_context(model).seconds <= 1.02 * best


@pytest.mark.parametrize("make", [PaperModel, ContextModel])
@pytest.mark.parametrize("size", MODELS)
def test_a_schedule_is_what_its_model_says_and_beats_even_ones(make, size: str):
    devices = ContextDevices(simulated(1), efficiency=0.5)
    work = transformer_work(2**17, **MODELS[size])
    model = make(devices, work)
    found = schedule_context(model)
    assert sum(found.split.group_lengths) == work.length
    layout = GroupLayout(devices, [group.devices for group in found.split.groups])
    tokens = np.array([n for group in found.split.groups for n in group.tokens])
    heads = np.array([n for group in found.split.groups for n in group.head_counts])
    costs = model.costs(layout, Candidates.one(tokens, heads))
    assert costs.seconds[0] == pytest.approx(found.seconds, rel=1e-12)
    assert costs.filled[0] <= 1
    assert (np.array(found.memory) <= devices.memory[layout.order]).all()
    for members in choices_of_devices(devices):
        for even in even_contexts(devices, work, members):
            layout = GroupLayout(devices, even.partition)
            one = Candidates.one(even.tokens(work.length), even.heads(work.query_heads))
            assert found.seconds <= model.costs(layout, one).scores[0]


def test_given_groups_have_tokens_and_heads_nearly_as_good_as_those_of_the_search():
    devices = ContextDevices(simulated(1), efficiency=0.5)
    model = ContextModel(devices, transformer_work(2**17, **MODELS["13B"]))
    found = schedule_context(model)
    groups = [group.devices for group in found.split.groups]
    forced = schedule_groups(model, groups)
    assert [group.devices for group in forced.split.groups] == groups
    assert found.seconds <= 1.000001 * forced.seconds <= 1.05 * found.seconds
    fewer = schedule_groups(model, groups[1:])
    assert sum(fewer.split.group_lengths) == 2**17
    assert not set(groups[0]) & set(fewer.split.devices)


def test_even_systems_are_legal_and_told_apart():
    devices = ContextDevices(simulated(1), efficiency=0.5)
    model = PaperModel(devices, transformer_work(2**17, **MODELS["70B"]))
    assert len(schedule_even(model, "ring").split.groups) == 32
    assert len(schedule_even(model, "ulysses").split.groups) == 1
    assert 1 < len(schedule_even(model, "usp").split.groups) < 32
    # 40 heads are not to be divided among 32 devices, but among the 8 H100.
    model = PaperModel(devices, transformer_work(2**17, **MODELS["13B"]))
    assert len(schedule_even(model, "ulysses").split.groups[0].devices) == 8
    everyone = choices_of_devices(devices)[0]
    assert {each.exchange for each in even_contexts(devices, model.work, everyone)} == {1, 2, 4, 8}


def test_a_device_alone_is_rings_and_ulysses():
    link = Link(300e9, 5e-6)
    alone = Cluster("alone", (Subcluster("one", KINDS["H100"], 1, 1, link, link),))
    work = transformer_work(2**12, width=512, layers=4, query_heads=8)
    model = ContextModel(ContextDevices(alone), work)
    ring, ulysses = (schedule_even(model, system) for system in ("ring", "ulysses"))
    assert (ring.system, ulysses.system) == ("ring", "ulysses")
    assert ring.split == ulysses.split
    with pytest.raises(DoesNotFitError, match="usp: there is no legal even split"):
        schedule_even(model, "usp")


def test_what_does_not_fit_is_refused_with_the_device_and_its_bytes():
    devices = ContextDevices(simulated(1), efficiency=0.5)
    model = ContextModel(devices, transformer_work(2**20, **MODELS["70B"]))
    said = (
        r"hexiseq: 1048576 tokens do not fit .* (h100|a100|a800)\[\d\] needs [\d.]+ GB of 72 GB "
        r"\([\d.]+ GB of parameters.*\), all devices together [\d.]+ TB of 2.3 TB"
    )
    with pytest.raises(DoesNotFitError, match=said):
        schedule_context(model)
    with pytest.raises(DoesNotFitError, match="ring: 1048576 tokens do not fit"):
        schedule_even(model, "ring")


def test_memory_moves_tokens_and_heads_where_there_is_room():
    """A fast device with little memory has fewer tokens than its speed, on capped hosts."""
    near, far = Link(300e9, 5e-6), Link(100e9, 1e-5)
    small = replace(KINDS["H100"], name="small H100", memory_bytes=7 * 10**9)
    cluster = Cluster(
        "capped",
        (
            Subcluster("fast", small, 1, 4, near, far),
            Subcluster("slow", KINDS["A100-80"], 1, 4, near, far),
        ),
        (("fast", "slow", far),),
    )
    devices = ContextDevices(cluster, efficiency=0.5)
    work = transformer_work(2**17, width=2048, layers=24, query_heads=16)
    found = schedule_context(ContextModel(devices, work))
    tokens = {d: n for g in found.split.groups for d, n in zip(g.devices, g.tokens, strict=True)}
    assert max(tokens.get(d, 0) for d in range(4)) < max(tokens.get(d, 0) for d in range(4, 8))
    with pytest.raises(DoesNotFitError):
        schedule_even(ContextModel(devices, work), "ring")


@given(number=NUMBERS)
def test_heads_are_apportioned_so_that_the_slowest_takes_least(number: int):
    rng = np.random.default_rng(number)
    seconds, total = rng.choice([1.0, 1.5, 2.0, 3.17], rng.integers(1, 5)), int(rng.integers(1, 9))
    found = apportion_heads(seconds, total)
    assert found.sum() == total
    counts = np.stack(np.meshgrid(*[np.arange(total + 1)] * len(seconds)), -1)
    counts = counts.reshape(-1, len(seconds))
    least = (counts[counts.sum(axis=1) == total] * seconds).max(axis=1).min()
    assert (found * seconds).max() == pytest.approx(least, rel=1e-12)


@given(number=NUMBERS)
def test_tokens_are_apportioned_to_within_one(number: int):
    rng = np.random.default_rng(number)
    shares = rng.uniform(0, 1, (3, rng.integers(1, 9))) + 1e-9
    total = int(rng.integers(0, 1000))
    found = apportion_tokens(shares, total)
    assert (found.sum(axis=1) == total).all()
    exact = shares * total / shares.sum(axis=1, keepdims=True)
    assert (abs(found - exact) <= 1 + 1e-6).all()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_partitions_have_each_device_once(number: int):
    devices = ContextDevices(simulated(number))
    for members in choices_of_devices(devices):
        everyone = sorted(device for of in members for device in of)
        made = partitions(devices, members, 2**16)
        assert len(set(made)) == len(made) > 10
        for each in made:
            assert sorted(device for group in each for device in group) == everyone
        assert all(len(each) <= 3 for each in partitions(devices, members, 3))


def test_devices_have_names_and_network_cards():
    near = Link(300e9, 5e-6)
    part = Subcluster("a", KINDS["H100"], 2, 4, near, near, network_cards=((0, 1), (2, 3)))
    devices = ContextDevices(Cluster("cards", (part,)))
    assert devices.card.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert devices.name(5) == "a[5]"
    with pytest.raises(ValueError, match=re.escape("efficiency: 1.5 is not allowed")):
        ContextDevices(Cluster("cards", (part,)), efficiency=1.5)

"""Cards of two kinds in one machine: each stage gets its own, or says what it got instead.

No such machine is at hand: devices stand in that say they are such cards.
"""

from dataclasses import dataclass
from typing import Any

import jax
import pytest
from ray_jobs import make_plan, make_trainer

from hetjax.commands import profiling as profiling_command
from hetjax.errors import InputError
from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster, kind
from hetjax.runtime import LocalOptions
from hetjax.runtime.local import local_executor as local
from hetjax.runtime.local import profiling
from hetjax.runtime.moves.peers import processes_of
from hetjax.runtime.ray import ray_profiling
from hetjax.runtime.ray.ray_worker import member_mesh

LINK = Link(1e10, 1e-5)
OLD, NEW = "NVIDIA GeForce RTX 3080", "NVIDIA GeForce RTX 4090"


@dataclass(frozen=True)
class Card:
    """What JAX says of a card."""

    id: int
    device_kind: str
    process_index: int = 0
    platform: str = "gpu"


def cluster_of(first: DeviceKind, second: DeviceKind) -> Cluster:
    """The cluster of `ray_jobs`, of other kinds."""
    parts = (
        Subcluster("first", first, 1, 2, LINK, LINK),
        Subcluster("second", second, 1, 1, LINK, LINK),
    )
    return Cluster("test", parts, (("first", "second", LINK),))


MIXED = cluster_of(kind("RTX4090"), kind("RTX3080"))


def mesh_of(stage: int) -> jax.sharding.Mesh:
    """The mesh that a Ray worker makes for a stage of the mixed cluster."""
    plan = make_plan(cluster=MIXED)
    return member_mesh(plan, processes_of(plan)[stage, 0])


def test_local_stages_get_their_own_cards(monkeypatch: pytest.MonkeyPatch):
    """JAX counts by turns what the cluster counts by kind."""
    given: dict[int, Any] = {}

    class Recorded:
        def __init__(self, placement: Any, stage: int, mesh: Any, transport: Any, *, member: int):
            assert member == 0
            self.stage = stage
            given[stage] = [device.id for device in mesh.devices.flat]

    def enough(*_: Any) -> None:
        raise InputError("that is enough")

    monkeypatch.setattr(local, "StageWorker", Recorded)
    monkeypatch.setattr(local, "StageSaver", enough)
    cards = [Card(0, NEW), Card(1, OLD), Card(2, NEW)]
    with pytest.raises(InputError, match="that is enough"):
        make_trainer(LocalOptions(cards), make_plan(cluster=MIXED))
    assert given == {0: [0, 2], 1: [1]}


def test_local_devices_of_another_kind_are_refused():
    cards = [Card(0, OLD), Card(1, OLD), Card(2, NEW)]
    wanted = r"wants 2 RTX4090 and 1 RTX3080, and 2 RTX3080 and 1 RTX4090 are given; plan for"
    with pytest.raises(InputError, match=wanted):
        make_trainer(LocalOptions(cards), make_plan(cluster=MIXED))


def test_local_measurements_are_made_on_the_subclusters_own_cards(monkeypatch: pytest.MonkeyPatch):
    used: list[list[int]] = []

    class Recorded:
        def __init__(self, measured: Any, devices: Any):
            used.append([device.id for device in devices])

    monkeypatch.setattr(profiling, "StageMeasurer", Recorded)
    cards = [Card(0, OLD), Card(1, NEW), Card(2, NEW)]
    monkeypatch.setattr(profiling_command.jax, "devices", lambda: cards)
    measured: Any = None
    assert not list(profiling_command._measure_here(MIXED, measured, ()))
    assert used == [[1, 2], [0]]


@pytest.mark.parametrize(
    ("stage", "cards", "part"),
    [
        (
            0,
            [Card(0, NEW), Card(1, OLD)],
            r"^stage 0, host 0: the plan wants devices of kind 'RTX4090' for subcluster 'first', "
            r"and Ray gave it one of kind 'RTX3080' \(NVIDIA GeForce RTX 3080\): .*ray_resource"
            r".*CUDA_VISIBLE_DEVICES",
        ),
        (0, [Card(1, OLD, 1), Card(0, NEW)], r"^stage 0, host 1: .* 'RTX4090' .* 'RTX3080'"),
        (1, [Card(0, NEW)], r"^stage 1, host 0: .* 'RTX3080' .* 'RTX4090'"),
        (0, [Card(0, NEW)], "wants 2 gpu devices of subcluster 'first', .* JAX sees 1 gpu devices"),
        (1, [Card(0, "cpu", platform="cpu")], "wants 1 gpu devices .* JAX sees 1 cpu devices"),
    ],
)
def test_a_ray_worker_refuses_cards_of_another_kind(
    monkeypatch: pytest.MonkeyPatch, stage: int, cards: list[Card], part: str
):
    monkeypatch.setattr(jax, "devices", lambda: cards)
    with pytest.raises(InputError, match=part):
        mesh_of(stage)


def test_a_ray_worker_takes_cards_of_its_kind(monkeypatch: pytest.MonkeyPatch):
    cards = [Card(1, NEW), Card(0, NEW)]
    monkeypatch.setattr(jax, "devices", lambda: cards)
    mesh = mesh_of(0)
    assert [device.id for device in mesh.devices.flat] == [0, 1]


def test_a_profiling_worker_refuses_cards_of_another_kind(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "devices", lambda: [Card(0, OLD)])
    worker = ray_profiling.ProfilingWorker(Subcluster("new", kind("RTX4090"), 1, 1, LINK, LINK))
    measured: Any = None
    with pytest.raises(InputError, match=r"^the profiling worker on new: .*'RTX4090'.*'RTX3080'"):
        worker.prepare({}, measured)

"""Training in real labs: its losses, its files, and what happens when a host or a link goes."""

import json
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from bench_lab import SMALL, lab_losses, one_device_losses
from bench_switch import RATES, measure
from chromium import open_page
from lab_faults import Fault, run_into
from lab_trainer import CLUSTERS, Hosts, LabTrainers, trainers
from labs import MARKS, NOTHING, ROOT, command, named_lab, traces

pytestmark = [*MARKS, pytest.mark.ray]

STEPS = 3


@pytest.fixture(autouse=True, scope="module")
def nothing_left() -> Iterator[None]:
    yield
    assert traces() == NOTHING


@pytest.fixture(scope="module")
def expected() -> list[float]:
    with jax.numpy_dtype_promotion("standard"):  # Optax needs it.
        return one_device_losses(SMALL, STEPS)


@pytest.mark.parametrize("name", ["three_hosts", "two_islands"])
def test_many_hosts_have_the_losses_of_one_device(name: str, expected: list[float]):
    specification = named_lab(name)
    result = lab_losses(specification, SMALL, expected, CLUSTERS / f"{name}.yaml")
    assert result["largest_loss_difference"] < 1e-5
    assert sorted(stage["host"] for stage in result["stages"]) == [
        host.name for host in specification.hosts
    ]


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[tuple[Hosts, LabTrainers]]:
    with trainers(named_lab("two_hosts"), SMALL) as found:
        found[1]("measure_cluster")
        yield found


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Fault("stop", "b", 0.3), id="a stopped host"),
        pytest.param(Fault("cut", "a-b", 0.2), id="a cut link"),
    ],
)
def test_a_host_out_of_reach_ends_the_run_and_is_named(
    two_hosts: tuple[Hosts, LabTrainers], fault: Fault
):
    lost = run_into(fault, *two_hosts, fault.what)
    assert lost["named"], lost["message"]
    assert lost["gone"], "the worker that was lost is still there"


@pytest.mark.usefixtures("two_hosts")
def test_a_run_from_the_command_line_leaves_a_page_of_its_timeline(tmp_path: Path):
    workdir = tmp_path / "run"
    words = ["--config", ROOT / "configs/lab/two_hosts.gin", "--workdir", workdir]
    few = ["--gin", "train.steps = 5", "--gin", "train.evaluate_every = 5"]
    done = command("train", "--lab", "test_lab", *words, *few, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]
    page = open_page(tmp_path / "browser", workdir / "timeline.html")
    rows = [section["data-rows"] for section in page["sections"]]
    assert rows == ["4", "4"], "predicted and measured: two stages, and two directions of the link"


def test_a_state_switches_between_hosts_and_through_a_checkpoint():
    """Back and forth, by every way, over a slow link: the losses of one device."""
    with jax.numpy_dtype_promotion("standard"):
        found = measure(named_lab("two_hosts"), SMALL, 1, RATES[1:])
    assert found["largest_loss_difference"] <= 1e-5
    (row,) = found["rows"]
    assert row["bytes"] > 0
    assert row["link_use"] > 0

"""The figures of the lab's benchmark of three unlike hosts, of times that are made up."""

import pytest
from h2_lab import LAB, SMALL_HOST, hetero_speedup_ratio, ratio_row
from lab import read_specification


def test_a_ratio_is_that_of_rounds_whatever_slows_down_a_round():
    alone = {"a": "a alone", "b": "b alone"}
    steps = {"mix": [2.0, 4.0, 2.2], "a alone": [3.0, 6.0, 3.0], "b alone": [6.0, 12.0, 6.0]}
    paced = {name: [1.1 * seconds for seconds in each] for name, each in steps.items()}
    least = {name: min(each) for name, each in steps.items()}
    row = ratio_row("mix", alone, 0.95, steps, least, paced)
    assert row["measured_by_fastest"] == pytest.approx(1.0)
    assert hetero_speedup_ratio(2.0, [3.0, 6.0]) == pytest.approx(1.0)
    assert row["measured"] == row["at_pace"] == pytest.approx(1.0)
    assert row["error"] == pytest.approx(-0.05)
    assert row["error_at_pace"] == pytest.approx(0.0)


def test_three_hosts_are_unlike_in_speed_link_and_memory():
    lab = read_specification(LAB)
    assert len({host.speed for host in lab.hosts}) == 3
    assert {host.name for host in lab.hosts if host.memory} == {SMALL_HOST}
    assert len({link.bandwidth for link in lab.links}) == 2

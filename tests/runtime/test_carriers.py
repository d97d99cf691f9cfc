"""Which carrier takes a message, and what keeps the measurements."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax import InputError
from hetjax.commands.run import _kept_curves
from hetjax.commands.work_folder import CARRIERS_FILE, Resumption
from hetjax.mesh import Link
from hetjax.runtime import CarrierCurves, RayOptions
from hetjax.runtime.moves.carrier_curves import LinkEnd, MeasuredLink
from hetjax.runtime.moves.carriers import (
    BETWEEN_PROCESSES,
    CarrierLinks,
    CarrierName,
    best_carrier,
    taken_sizes,
)

WIRE, HOST = BETWEEN_PROCESSES
SIZES = st.integers(0, 2**40)
LINKS = st.builds(Link, st.floats(1e3, 1e12), st.floats(0, 1.0))
CURVES = st.dictionaries(st.sampled_from(BETWEEN_PROCESSES), LINKS, min_size=1)


@given(links=CURVES, sizes=st.lists(SIZES))
def test_what_is_chosen_takes_no_longer_than_the_best_fixed_carrier(
    links: dict[CarrierName, Link], sizes: list[int]
):
    def seconds(name: CarrierName, size: int) -> float:
        return links[name].seconds(size)

    chosen = [best_carrier(links, size) for size in sizes]
    for name, size in zip(chosen, sizes, strict=True):
        assert all(seconds(name, size) <= seconds(other, size) for other in links)
    whole = sum(map(seconds, chosen, sizes))
    assert all(whole <= sum(seconds(name, size) for size in sizes) for name in links)


@given(links=CURVES, size=SIZES)
def test_the_order_of_what_was_measured_chooses_nothing(links: CarrierLinks, size: int):
    backwards = {name: links[name] for name in reversed([*links])}
    assert best_carrier(backwards, size) == best_carrier(links, size)


def test_of_carriers_that_take_the_same_the_wire_is_chosen():
    same = Link(1e9, 1e-4)
    assert best_carrier({HOST: same, WIRE: same}, 1000) == WIRE


@given(links=CURVES, size=SIZES)
def test_what_is_told_of_sizes_is_what_is_chosen(links: CarrierLinks, size: int):
    taken = taken_sizes(links)
    assert taken[0][1] == 0.0
    names = [name for name, _ in taken]
    assert len(set(names)) == len(names)
    told = [name for name, start in taken if start <= size][-1]
    best = links[best_carrier(links, size)].seconds(size)
    assert links[told].seconds(size) == pytest.approx(best, rel=1e-9)


NEAR, FAR = LinkEnd("near", "10.0.0.1"), LinkEnd("far", "10.0.0.2")
MEASURED = {WIRE: Link(1e9, 1e-4), HOST: Link(4e9, 1e-3)}


def test_curves_are_of_a_link_whichever_way_and_newer_ones_take_their_place():
    curves = CarrierCurves((MeasuredLink((NEAR, FAR), MEASURED),))
    assert curves.of(NEAR, FAR) == curves.of(FAR, NEAR) == MEASURED
    assert curves.of(NEAR, NEAR) == {}
    elsewhere = LinkEnd("far", "10.0.0.3")
    assert curves.of(NEAR, elsewhere) == {}
    newer = {WIRE: Link(1e8, 1e-4)}
    more = curves.with_links(
        [MeasuredLink((FAR, NEAR), newer), MeasuredLink((NEAR, NEAR), MEASURED)]
    )
    assert len(more.links) == 2
    assert (more.of(NEAR, FAR), more.of(NEAR, NEAR)) == (newer, MEASURED)


def test_a_file_keeps_curves(tmp_path: Path):
    links = MeasuredLink((NEAR, FAR), MEASURED), MeasuredLink((NEAR, NEAR), MEASURED)
    CarrierCurves(links).save(tmp_path / "carriers.json")
    assert CarrierCurves.load(tmp_path / "carriers.json") == CarrierCurves(links)


def with_change(path: str, value: Any) -> Any:
    """The content of a file, with another value in one place."""
    wire = {"bandwidth": 1e9, "latency": 1e-4}
    ends = [{"subcluster": name, "address": "10.0.0.1"} for name in ("near", "far")]
    content: Any = {"version": 1, "links": [{"between": ends, "carriers": {"wire": wire}}]}
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place = content
    for part in parents:
        place = place[part]
    place[last] = value
    return content


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("version", 2, r"version: 2 is not allowed: it must be 1"),
        ("links.0.between", [], r"links\[0\].between\[0\]: the field is missing"),
        ("links.0.carriers.pigeon", {}, r"carriers.pigeon.* should be 'in process', 'wire' or 'h"),
        ("links.0.carriers.wire.bandwidth", -1, r"carriers.wire: bandwidth: -1.0 is not allowed"),
        ("links.0.carriers.wire.load", 1, r"carriers.wire: unknown field 'load'"),
    ],
)
def test_a_wrong_field_of_a_file_is_named(path: str, value: Any, problem: str, tmp_path: Path):
    file = tmp_path / "carriers.json"
    file.write_text(json.dumps(with_change(path, value)))
    with pytest.raises(InputError, match=rf"^carriers file {file}: .*{problem}"):
        CarrierCurves.load(file)


def test_an_unknown_carrier_is_refused_with_those_that_there_are():
    assert [RayOptions(carrier=name).carriers for name in (None, "host")] == [(WIRE, HOST), (HOST,)]
    with pytest.raises(InputError, match=r"^unknown carrier 'in process'. Allowed: host, wire$"):
        RayOptions(carrier="in process")


def test_a_run_that_goes_on_has_the_curves_of_its_folder(tmp_path: Path):
    curves = CarrierCurves((MeasuredLink((NEAR, FAR), MEASURED),))
    afresh, resumed = Resumption(), Resumption(wanted=True)
    assert _kept_curves(None, resumed) == _kept_curves(tmp_path, resumed) == CarrierCurves()
    curves.save(tmp_path / CARRIERS_FILE)
    assert _kept_curves(tmp_path, resumed) == curves
    assert _kept_curves(tmp_path, afresh) == CarrierCurves()

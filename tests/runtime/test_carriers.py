"""Which carrier takes a message, and what keeps the measurements."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax import InputError
from hetjax.commands.run import _kept_curves
from hetjax.commands.work_folder import CARRIERS_FILE, Resumption
from hetjax.runtime import CarrierCurves, RayOptions
from hetjax.runtime.moves.carrier_curves import LinkEnd, MeasuredLink
from hetjax.runtime.moves.carriers import (
    BETWEEN_PROCESSES,
    CarrierLinks,
    CarrierName,
    Curve,
    best_carrier,
    taken_sizes,
)

WIRE, STREAM, HOST = BETWEEN_PROCESSES
SIZES = st.integers(0, 2**40)
CURVES = st.dictionaries(
    st.sampled_from(BETWEEN_PROCESSES),
    st.dictionaries(st.integers(1, 2**30), st.floats(1e-6, 10.0), min_size=2, max_size=5).map(
        lambda times: Curve(tuple(sorted(times)), tuple(times.values()))
    ),
    min_size=1,
)


@given(links=CURVES, size=SIZES)
def test_a_curve_goes_through_what_was_measured_and_lies_between(links: CarrierLinks, size: int):
    for curve in links.values():
        assert [curve.at(each) for each in curve.sizes] == pytest.approx([*curve.seconds])
        larger = [t for each, t in zip(curve.sizes, curve.seconds, strict=True) if each >= size]
        smaller = [t for each, t in zip(curve.sizes, curve.seconds, strict=True) if each <= size]
        if not larger:
            assert curve.at(size) >= smaller[-1]
        elif smaller:
            assert min(smaller[-1], larger[0]) <= curve.at(size) * (1 + 1e-9)
            assert curve.at(size) <= max(smaller[-1], larger[0]) * (1 + 1e-9)


@given(links=CURVES, sizes=st.lists(SIZES))
def test_what_is_chosen_takes_no_longer_than_the_best_fixed_carrier(
    links: dict[CarrierName, Curve], sizes: list[int]
):
    def seconds(name: CarrierName, size: int) -> float:
        return links[name].at(size)

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
    same = Curve((1, 2), (1e-4, 2e-4))
    assert best_carrier({HOST: same, WIRE: same}, 1000) == WIRE


@given(links=CURVES, size=SIZES)
def test_what_is_told_of_sizes_is_what_is_chosen(links: CarrierLinks, size: int):
    taken = taken_sizes(links)
    assert taken[0][1] == 0.0
    assert all(a[0] != b[0] and a[1] < b[1] for a, b in itertools.pairwise(taken))
    told = [name for name, start in taken if start <= size][-1]
    best = links[best_carrier(links, size)].at(size)
    assert links[told].at(size) == pytest.approx(best, rel=1e-6)


NEAR, FAR = LinkEnd("near", "10.0.0.1"), LinkEnd("far", "10.0.0.2")
MEASURED = {WIRE: Curve((1000, 2000), (1e-4, 2e-4)), HOST: Curve((1000, 2000), (1e-3, 1.1e-3))}


def test_curves_are_of_a_link_whichever_way_and_newer_ones_take_their_place():
    curves = CarrierCurves((MeasuredLink((NEAR, FAR), MEASURED),))
    assert curves.of(NEAR, FAR) == curves.of(FAR, NEAR) == MEASURED
    assert curves.of(NEAR, NEAR) == {}
    elsewhere = LinkEnd("far", "10.0.0.3")
    assert curves.of(NEAR, elsewhere) == {}
    newer = {WIRE: Curve((1000, 2000), (1e-5, 2e-4))}
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
    wire = {"sizes": [1000, 2000], "seconds": [1e-4, 2e-4]}
    ends = [{"subcluster": name, "address": "10.0.0.1"} for name in ("near", "far")]
    content: Any = {"version": 2, "links": [{"between": ends, "carriers": {"wire": wire}}]}
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place = content
    for part in parents:
        place = place[part]
    place[last] = value
    return content


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("version", 3, r"version: 3 is not allowed: it must be 2"),
        ("links.0.between", [], r"links\[0\].between\[0\]: the field is missing"),
        ("links.0.carriers.pigeon", {}, r"carriers.pigeon.* should be 'in process', 'wire', 's"),
        ("links.0.carriers.wire.sizes", [2, 1], r"carriers.wire: sizes: \[2, 1\] is not allowed"),
        ("links.0.carriers.wire.sizes", [1, 2, 3], r"carriers.wire: seconds: there are 2, and siz"),
        ("links.0.carriers.wire.seconds", [-1, 1], r"carriers.wire: seconds: -1.0 is not allowed"),
        ("links.0.carriers.wire.load", 1, r"carriers.wire: unknown field 'load'"),
    ],
)
def test_a_wrong_field_of_a_file_is_named(path: str, value: Any, problem: str, tmp_path: Path):
    file = tmp_path / "carriers.json"
    file.write_text(json.dumps(with_change(path, value)))
    with pytest.raises(InputError, match=rf"^carriers file {file}: .*{problem}"):
        CarrierCurves.load(file)


def test_an_unknown_carrier_is_refused_with_those_that_there_are():
    assert RayOptions().carriers == BETWEEN_PROCESSES
    assert RayOptions(carrier="host").carriers == (HOST,)
    allowed = r"^unknown carrier 'in process'. Allowed: host, stream, wire$"
    with pytest.raises(InputError, match=allowed):
        RayOptions(carrier="in process")


def test_a_run_that_goes_on_has_the_curves_of_its_folder(tmp_path: Path):
    curves = CarrierCurves((MeasuredLink((NEAR, FAR), MEASURED),))
    afresh, resumed = Resumption(), Resumption(wanted=True)
    said: list[str] = []
    for workdir in (None, tmp_path):
        assert _kept_curves(workdir, resumed, said.append) == CarrierCurves()
    curves.save(tmp_path / CARRIERS_FILE)
    assert _kept_curves(tmp_path, resumed, said.append) == curves
    assert _kept_curves(tmp_path, afresh, said.append) == CarrierCurves()
    assert not said
    (tmp_path / CARRIERS_FILE).write_text('{"version": 1}')
    assert _kept_curves(tmp_path, resumed, said.append) == CarrierCurves()
    (line,) = said
    assert line.startswith(f"carriers file {tmp_path / CARRIERS_FILE}: ")
    assert line.endswith("; carriers are measured anew")

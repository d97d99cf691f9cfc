"""Quantities read as people expect, at the edges of the prefixes too."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.mesh.quantities import format_bytes, format_rate, format_seconds


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.6, "1 kB"),
        (1_000_000, "1 MB"),
        (80e9, "80 GB"),
        (1.555e12, "1.56 TB"),
        (3e21, "3e+03 EB"),
        (-2_500, "-2.5 kB"),
        (float("inf"), "inf B"),
    ],
)
def test_bytes(value: float, text: str):
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (2e-10, "0.2 ns"),
        (9.999e-4, "1 ms"),
        (0.0005, "500 us"),
        (59.9, "59.9 s"),
        (59.96, "1 min 00 s"),
        (3599.7, "1 h 00 min"),
        (90_000, "25 h 00 min"),
        (-0.5, "-500 ms"),
        (float("nan"), "nan s"),
    ],
)
def test_seconds(value: float, text: str):
    assert format_seconds(value) == text


@given(st.floats(1e-3, 1e18))
def test_a_rate_keeps_three_digits(value: float):
    number, unit = format_rate(value, "FLOP/s").split(" ")
    factor = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
    assert float(number) * factor[unit.removesuffix("FLOP/s")] == pytest.approx(value, rel=5.1e-3)
    assert len(number.replace(".", "").lstrip("0")) <= 3


@given(st.floats(1e-8, 1e7))
def test_seconds_have_a_unit_and_no_exponent(value: float):
    text = format_seconds(value)
    assert text.split(" ")[-1] in ("s", "ms", "us", "ns", "min")
    assert "e" not in text

import pytest

from hetjax.errors import InputError
from hetjax.mesh import units


@pytest.mark.parametrize(
    ("text", "allowed", "expected"),
    [
        ("200 Mbit/s", units.BYTES_PER_SECOND, 25e6),
        ("10Gbps", units.BYTES_PER_SECOND, 1.25e9),
        ("25 GB/s", units.BYTES_PER_SECOND, 25e9),
        ("1 GiB/s", units.BYTES_PER_SECOND, 2.0**30),
        ("1e9", units.BYTES_PER_SECOND, 1e9),
        (7, units.BYTES_PER_SECOND, 7.0),
        ("24 GB", units.BYTES, 24e9),
        ("0.5 GiB", units.BYTES, 2.0**29),
        ("5 us", units.SECONDS, 5e-6),
        ("5 µs", units.SECONDS, 5e-6),
        ("0.5 ms", units.SECONDS, 5e-4),
        ("312 TFLOP/s", units.FLOPS_PER_SECOND, 312e12),
        ("312 TFLOPS", units.FLOPS_PER_SECOND, 312e12),
    ],
)
def test_reads_quantities_into_si(text, allowed, expected):
    assert units.parse_quantity(text, allowed) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("fast", "not a number with a unit"),
        ("", "not a number with a unit"),
        (True, "not a number with a unit"),
        (None, "not a number with a unit"),
        ("10 Gb/s", "unknown unit 'Gb/s'"),
        ("10 GB", "unknown unit 'GB'"),
        ("0 GB/s", "must be more than 0"),
        (-1, "must be more than 0"),
        (float("nan"), "must be more than 0 and finite"),
        (float("inf"), "must be more than 0 and finite"),
        (10**400, "must be more than 0 and finite"),
    ],
)
def test_refuses_what_is_no_bandwidth(value, part):
    with pytest.raises(InputError, match=part):
        units.parse_quantity(value, units.BYTES_PER_SECOND)


def test_zero_is_a_latency():
    assert units.parse_quantity("0 us", units.SECONDS, allow_zero=True) == 0
    with pytest.raises(InputError, match="0 or more"):
        units.parse_quantity("-1 us", units.SECONDS, allow_zero=True)

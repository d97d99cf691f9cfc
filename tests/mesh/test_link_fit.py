"""A fit gives back the link whose times it is shown, whatever bursts the link lets through."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.errors import InputError
from hetjax.mesh import Link
from hetjax.mesh.link_fit import fit_link

SIZES = [4.0, 16384.0, 65536.0, 262144.0]

links = st.builds(
    Link, bandwidth=st.floats(1e5, 1e9), latency=st.floats(1e-5, 0.1, exclude_min=True)
)


@given(links)
def test_the_times_of_a_link_give_it_back(link: Link):
    fitted = fit_link(SIZES, [link.seconds(size) for size in SIZES])
    assert fitted.bandwidth == pytest.approx(link.bandwidth, rel=2e-3)
    assert fitted.latency == pytest.approx(link.latency, rel=2e-3, abs=1e-7)


slow_links = st.builds(Link, bandwidth=st.floats(1e5, 1e8), latency=st.floats(1e-5, 1e-3))


@given(slow_links, st.lists(st.floats(1.0, 1.05), min_size=4, max_size=4))
def test_noise_moves_it_little(link: Link, noise: list[float]):
    seconds = [link.seconds(size) * extra for size, extra in zip(SIZES, noise, strict=True)]
    fitted = fit_link(SIZES, seconds)
    assert fitted.seconds(SIZES[-1]) == pytest.approx(link.seconds(SIZES[-1]), rel=0.1)


def test_a_burst_that_passes_quickly_does_not_count():
    fitted = fit_link(SIZES, [1e-4, 2e-4, 0.052, 0.210])
    assert fitted.bandwidth == pytest.approx(1.25e6, rel=0.01)
    assert fitted.latency == pytest.approx(1e-4, rel=0.05)


def test_a_link_too_fast_to_measure_has_a_bandwidth():
    assert fit_link([4, 1e6], [1e-3, 1e-3]) == Link(bandwidth=1e9, latency=1e-3)


def test_messages_of_one_size_are_refused():
    with pytest.raises(InputError, match="unlike sizes"):
        fit_link([5, 5], [1, 2])

"""The project's main test: any plan gives the loss and the gradients of plain `jax.jit`."""

from random import Random

from cases import Case, cases, examples, random_case
from hypothesis import given
from hypothesis import strategies as st
from one_device import check_gradients, check_steps, float64


@examples(usual=7)
@given(case=cases())
def test_loss_and_gradients_equal_those_of_one_device(case: Case):
    check_gradients(case)


@examples(usual=4)
@given(case=cases(max_pipelines=3))
def test_several_unlike_pipelines_equal_one_device(case: Case):
    """Of unlike depth and width, each with its own number and size of microbatches."""
    check_gradients(case)


@examples(usual=4, full=50)
@given(number=st.integers(0, 2**32 - 1))
def test_in_float64_they_do_to_twelve_digits(number: int):
    """Losses, counts and norms are summed in float64, too."""
    with float64():
        check_gradients(random_case(Random(number), 3, 4, 2, double=True), evaluates=True)


@examples(usual=3, full=30)
@given(case=cases().filter(lambda case: case.model.exact))
def test_ten_steps_equal_those_of_one_device(case: Case):
    check_steps(case)


@examples(usual=2, full=30)
@given(case=cases(max_pipelines=3).filter(lambda case: case.model.exact))
def test_ten_steps_of_several_pipelines_equal_those_of_one_device(case: Case):
    check_steps(case)

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.data.packing import PackedTokens


@given(size=st.integers(0, 60), sequence=st.integers(1, 10))
def test_every_token_is_predicted_once(size, sequence):
    packed = PackedTokens(np.arange(size, dtype=np.uint8), sequence)
    examples = [packed[index] for index in range(len(packed))]
    assert all(example.shape == (sequence + 1,) for example in examples)
    predicted = [int(token) for example in examples for token in example[1:]]
    assert predicted == list(range(1, len(predicted) + 1))
    assert max(0, size - 1) - len(predicted) < sequence


def test_tokens_are_int32():
    assert PackedTokens(np.arange(9, dtype=np.uint8), 4)[1].dtype == np.int32


@pytest.mark.parametrize("index", [-1, 2])
def test_an_example_that_is_not_there(index):
    with pytest.raises(IndexError, match="of 2"):
        PackedTokens(np.arange(9), 4)[index]

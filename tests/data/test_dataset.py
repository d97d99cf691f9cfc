import dataclasses
import itertools
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.data import mixture, standard_library_text, synthetic, text
from hetjax.errors import InputError

DATA = synthetic(vocabulary=11, sequence=4, size=400, seed=1)
KEYED = dataclasses.replace(DATA, keys=True)


@pytest.fixture
def numbered(tmp_path):
    """A text whose bytes are all different: 100 to train on, 25 held out."""
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(1, 126)))
    return text(str(path), sequence=4, held_out_fraction=0.2)


def test_shapes_and_types():
    batch = KEYED.batch(step=2, batch_size=3)
    assert batch["tokens"].shape == (3, 5)
    assert batch["tokens"].dtype == np.int32
    assert batch["keys"].shape == (3, 2)
    assert batch["keys"].dtype == np.uint32
    assert set(DATA.batch(step=2, batch_size=3)) == {"tokens"}
    assert DATA.vocabulary == 11


@given(
    step=st.integers(0, 2**40),
    size=st.integers(1, 8),
    cuts=st.lists(st.integers(0, 8), max_size=3),
)
def test_the_rows_of_a_batch_are_the_same_however_asked_for(step, size, cuts):
    whole = KEYED.batch(step, size)
    edges = [0, *sorted(min(cut, size) for cut in cuts), size]
    parts = [KEYED.batch(step, size, slice(low, high)) for low, high in itertools.pairwise(edges)]
    for name, leaf in whole.items():
        np.testing.assert_array_equal(leaf, np.concatenate([part[name] for part in parts]))


def test_another_process_reads_the_same_batches():
    program = (
        "import sys, pickle; keyed = pickle.loads(bytes.fromhex(sys.argv[1])); "
        "print(keyed.batch(7, 3)['tokens'].tolist(), "
        "keyed.batch(7, 3)['keys'].tolist())"
    )
    KEYED.batch(0, 1)  # What is open here is not sent along.
    sent = pickle.dumps(KEYED)
    assert len(sent) < 1000
    printed = subprocess.run(
        [sys.executable, "-c", program, sent.hex()], capture_output=True, text=True, check=True
    ).stdout
    batch = KEYED.batch(7, 3)
    assert printed.strip() == f"{batch['tokens'].tolist()} {batch['keys'].tolist()}"


def test_keys_differ_between_steps_rows_and_seeds():
    keys = [KEYED.batch(step, 5)["keys"] for step in range(4)]
    keys.append(dataclasses.replace(synthetic(11, 4, 400, seed=2), keys=True).batch(0, 5)["keys"])
    assert len({tuple(key) for key in np.concatenate(keys).tolist()}) == 25


def test_an_epoch_predicts_every_token_once(numbered):
    assert numbered.num_examples == 24
    for epoch in range(2):
        batches = [numbered.batch(step, 6) for step in range(4 * epoch, 4 * epoch + 4)]
        predicted = np.concatenate([batch["tokens"][:, 1:].ravel() for batch in batches])
        assert sorted(predicted.tolist()) == list(range(2, 98))


def test_epochs_come_in_different_orders(numbered):
    first, second = (numbered.batch(epoch, 24)["tokens"] for epoch in range(2))
    assert (first != second).any()


def test_held_out_tokens_are_never_trained_on(numbered):
    trained = set(numbered.batch(0, 24)["tokens"].ravel().tolist())
    held_out = [batch["tokens"] for batch in numbered.held_out_batches(2)]
    evaluated = set(np.concatenate(held_out).ravel().tolist())
    assert numbered.num_held_out_examples == 6
    assert len(held_out) == 3
    assert evaluated == set(range(101, 126))
    assert not trained & evaluated


def test_held_out_batches_are_whole_and_the_same_each_time(numbered):
    for size, batches in [(4, 1), (6, 1), (10, 1), (1, 6)]:
        once, again = (list(numbered.held_out_batches(size)) for _ in range(2))
        assert [batch["tokens"].shape for batch in once] == [(size, 5)] * batches
        for one, other in zip(once, again, strict=True):
            np.testing.assert_array_equal(one["tokens"], other["tokens"])


def test_held_out_batches_have_keys_that_drop_nothing():
    (held_out, *_), (plain, *_) = (data.held_out_batches(3) for data in (KEYED, DATA))
    np.testing.assert_array_equal(held_out["keys"], np.zeros((3, 2), np.uint32), strict=True)
    np.testing.assert_array_equal(held_out["tokens"], plain["tokens"])
    assert set(plain) == {"tokens"}


def test_nothing_held_out_cannot_be_evaluated():
    data = synthetic(11, sequence=4, size=100, held_out_fraction=0.0)
    assert data.num_held_out_examples == 0
    with pytest.raises(InputError, match=r"held_out_fraction is 0; .* one example of 5 tokens"):
        data.held_out_batches(2)


@pytest.mark.parametrize("size", [0, -1, 2.0])
def test_a_batch_of_no_examples_cannot_be_evaluated(size):
    with pytest.raises(InputError, match=f"batch_size is {size}; it must be a whole number"):
        DATA.held_out_batches(size)


def test_paths_may_be_of_any_kind(numbered, tmp_path):
    path = tmp_path / "text.txt"
    for paths in (path, [path], (str(path),)):
        assert text(paths, sequence=4, held_out_fraction=0.2) == numbered
    for paths in (5, [None], {"a": 1}.values()):
        with pytest.raises(InputError, match=r"paths is (5|None|1); it must be a path"):
            text(paths, sequence=4)  # type: ignore[arg-type]


def test_a_text_shorter_than_one_example(tmp_path):
    (tmp_path / "short.txt").write_text("abc")
    data = text([str(tmp_path / "short.txt")], sequence=128)
    with pytest.raises(InputError, match=r"short\.txt has 3 tokens .* needs at least 129"):
        data.batch(0, 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sequence": 0}, "sequence is 0"),
        ({"sequence": 8.0}, r"sequence is 8\.0; it must be a whole number from 1"),
        ({"sequence": "8"}, "sequence is '8'"),
        ({"seed": -1}, "seed is -1; it must be a whole number from 0 to 4294967295"),
        ({"seed": 2**32}, "seed is 4294967296"),
        ({"seed": 1.5}, r"seed is 1\.5"),
        ({"held_out_fraction": 1.0}, r"held_out_fraction is 1\.0"),
        ({"held_out_fraction": "0.1"}, r"held_out_fraction is '0\.1'; it must be at least 0"),
        ({"tokenizer": 5}, "tokenizer is 5; it must be a path"),
    ],
)
def test_a_bad_field_is_refused(fields, message):
    with pytest.raises(InputError, match=message):
        standard_library_text(**({"sequence": 8} | fields))


def test_describing_a_data_set_imports_neither_grain_nor_jax():
    program = (
        "import sys; from hetjax.data import standard_library_text; standard_library_text(8); "
        "print([name for name in ('grain', 'jax', 'tokenizers') if name in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert printed.stdout.strip() == "[]"


def test_a_mixture_takes_its_shares():
    low, high = synthetic(5, 4, 400), synthetic(50, 4, 4000, seed=2)
    mixed = mixture({low: 3.0, high: 1.0})
    assert mixed.vocabulary == 50
    tokens = mixed.batch(0, 400)["tokens"]
    from_high = (tokens >= 5).any(axis=1).sum()
    assert 85 <= from_high <= 100
    np.testing.assert_array_equal(tokens[100:200], mixed.batch(1, 100)["tokens"])
    held_out = np.concatenate([batch["tokens"] for batch in mixed.held_out_batches(2)])
    assert (held_out >= 5).any()
    assert not (held_out >= 5).all()


@pytest.mark.parametrize(
    ("weights", "first"),
    [((1.0, 1.0), [6, 6]), ((3.0, 1.0), [9, 3]), ((0.999, 0.001), [12, 0])],
)
def test_all_that_parts_hold_out_is_evaluated_by_weight(tmp_path, weights, first):
    for name, size in (("a", 1000), ("b", 100)):
        (tmp_path / name).write_bytes(name.encode() * size)
    parts = (text(tmp_path / name, 4, held_out_fraction=0.25) for name in ("a", "b"))
    mixed = mixture(dict(zip(parts, weights, strict=True)))
    assert mixed.num_held_out_examples == 62 + 6
    batches = mixed.held_out_batches(4)
    order = bytes(token for batch in batches for token in batch["tokens"][:, 0].tolist()).decode()
    assert [order.count(name) for name in "ab"] == [62, 6]
    assert [order[:12].count(name) for name in "ab"] == first


def test_a_part_too_short_to_evaluate_is_named(tmp_path):
    for name, size in (("a", 1000), ("b", 40)):
        (tmp_path / name).write_bytes(name.encode() * size)
    long, short = (text(tmp_path / name, 4) for name in ("a", "b"))
    with pytest.raises(InputError, match=r"is 0\.05; of .*/b that is less than one example of 5"):
        mixture({long: 1.0, short: 1.0}).held_out_batches(4)
    left_out = text(tmp_path / "b", 4, held_out_fraction=0.0)
    mixed = mixture({left_out: 1.0, long: 1.0})
    assert mixed.num_held_out_examples == 12
    assert {token for batch in mixed.held_out_batches(4) for token in batch["tokens"].flat} == {97}


def test_a_mixture_of_mixtures_keeps_the_shares():
    a, b, c = (synthetic(5, 4, 400, seed=seed) for seed in range(3))
    mixed = mixture({mixture({a: 1.0, b: 3.0}): 0.5, c: 0.5})
    assert [part.weight for part in mixed.parts] == [0.125, 0.375, 0.5]


def test_a_bad_mixture_is_refused():
    with pytest.raises(InputError, match="one or more data sets"):
        mixture({})
    with pytest.raises(InputError, match=r"got sequences \[4, 8\]"):
        mixture({DATA: 1.0, synthetic(5, 8, 400): 1.0})
    for weight in (0.0, -1, float("nan"), 1e-320, 1e308, "1"):
        named = f"the weight of a synthetic stream of 400 tokens is {weight!r}; it must be a number"
        with pytest.raises(InputError, match=re.escape(named)):
            mixture({DATA: weight})  # type: ignore[dict-item]


def test_parts_of_a_mixture_share_no_file(tmp_path):
    (tmp_path / "a.txt").write_text("some words " * 20)
    (tmp_path / "b.txt").write_text("others here " * 20)
    whole, part = text(str(tmp_path), 4), text(str(tmp_path / "a.txt"), 4)
    with pytest.raises(InputError, match=r"a\.txt is in two parts of the mixture"):
        mixture({whole: 1.0, part: 1.0})
    assert len(mixture({part: 1.0, text(str(tmp_path / "b.txt"), 4): 1.0}).parts) == 2

import dataclasses
import itertools
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.data import images, shapes
from hetjax.data.image_set import _held_out_places
from hetjax.data.image_sources import Shapes
from hetjax.errors import InputError

DATA = shapes(size=200, image_size=8, seed=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twenty images, every pixel of which is the image's number; the label is its last digit."""
    numbers = np.arange(20, dtype=np.uint8)
    np.save(tmp_path / "images.npy", np.broadcast_to(numbers[:, None, None, None], (20, 4, 4, 3)))
    np.save(tmp_path / "labels.npy", numbers % 10)
    return tmp_path


def test_shapes_and_types():
    batch = DATA.batch(step=2, batch_size=3)
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in batch.items()} == {
        "images": ((3, 8, 8, 3), np.uint8),
        "labels": ((3,), np.int32),
    }


@given(
    step=st.integers(0, 2**40),
    size=st.integers(1, 8),
    cuts=st.lists(st.integers(0, 8), max_size=3),
)
def test_the_rows_of_a_batch_are_the_same_however_asked_for(step, size, cuts):
    whole = DATA.batch(step, size)
    edges = [0, *sorted(min(cut, size) for cut in cuts), size]
    parts = [DATA.batch(step, size, slice(low, high)) for low, high in itertools.pairwise(edges)]
    for name, leaf in whole.items():
        np.testing.assert_array_equal(leaf, np.concatenate([part[name] for part in parts]))


def test_another_process_reads_the_same_batches():
    program = (
        "import sys, pickle; data = pickle.loads(bytes.fromhex(sys.argv[1])); "
        "batch = data.batch(7, 3); print(batch['labels'].tolist(), batch['images'].sum())"
    )
    DATA.batch(0, 1)  # What is open here is not sent along.
    sent = pickle.dumps(DATA)
    assert len(sent) < 1000
    printed = subprocess.run(
        [sys.executable, "-c", program, sent.hex()], capture_output=True, text=True, check=True
    ).stdout
    batch = DATA.batch(7, 3)
    assert printed.strip() == f"{batch['labels'].tolist()} {batch['images'].sum()}"


def test_an_epoch_has_every_image_once_and_no_held_out_one(folder: Path):
    data = images(str(folder), image_size=4, classes=10, held_out_fraction=0.2)
    assert (data.num_examples, data.num_held_out_examples) == (16, 4)
    epochs = [data.batch(epoch, 16) for epoch in range(2)]
    first, second = (epoch["images"][:, 0, 0, 0].tolist() for epoch in epochs)
    held_out = {
        int(image[0, 0, 0]) for batch in data.held_out_batches(4) for image in batch["images"]
    }
    assert first != second
    assert sorted(first) == sorted(second) == sorted(set(range(20)) - held_out)
    for epoch in epochs:
        np.testing.assert_array_equal(epoch["images"][:, 0, 0, 0] % 10, epoch["labels"])


def test_what_is_held_out_does_not_depend_on_the_seed(folder: Path):
    one, other = (images(str(folder), 4, 10, seed, 0.5) for seed in (0, 1))
    for a, b in zip(one.held_out_batches(5), other.held_out_batches(5), strict=True):
        np.testing.assert_array_equal(a["images"], b["images"])
    assert (one.batch(0, 10)["labels"] != other.batch(0, 10)["labels"]).any()


def test_held_out_batches_are_whole_and_read_one_by_one():
    data = dataclasses.replace(DATA, held_out_fraction=0.05)
    assert data.num_held_out_examples == 10
    for size, batches in [(4, 2), (10, 1), (15, 1), (1, 10)]:
        found = data.held_out_batches(size)
        assert [batch["labels"].shape for batch in found] == [(size,)] * batches
        assert len(found) == batches
        np.testing.assert_array_equal(found[batches - 1]["images"], [*found][-1]["images"])


def test_every_class_of_shapes_is_as_frequent():
    source = Shapes(size=4000, image_size=8)
    found = source.open()
    counts = np.bincount([found[index][1] for index in range(len(found))])
    assert len(counts) == source.classes
    assert counts.min() > 420
    assert (found[5][0] != Shapes(4000, 8, seed=1).open()[5][0]).any()


def write(folder: Path, name: str, content: Any) -> None:
    if isinstance(content, bytes):
        (folder / name).write_bytes(content)
    elif content is None:
        (folder / name).unlink()
    else:
        np.save(folder / name, content)


PIXELS = np.zeros((20, 4, 4, 3), np.uint8)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("images.npy", None, r"images\.npy cannot be read: No such file"),
        ("labels.npy", None, r"labels\.npy cannot be read: No such file"),
        ("images.npy", b"", r"images\.npy is no array"),
        ("images.npy", b"no array at all", r"images\.npy is no array"),
        ("images.npy", b"\x93NUMPY", r"images\.npy is no array"),
        (
            "images.npy",
            PIXELS.astype(np.float32),
            r"images\.npy is float32\[20, 4, 4, 3\]; .*uint8",
        ),
        ("images.npy", PIXELS[..., :1], r"uint8\[20, 4, 4, 1\]; .* \[images, 4, 4, 3\]"),
        ("images.npy", PIXELS[:, :3], r"uint8\[20, 3, 4, 3\]; .* 4 x 4 pixels"),
        ("labels.npy", np.zeros(19, np.int64), r"labels\.npy is int64\[19\]; .* \[20\]"),
        ("labels.npy", np.zeros(20), r"labels\.npy is float64\[20\]; it must be integers"),
        ("labels.npy", np.arange(20) - 1, r"has -1 for image 0; .* at least 0"),
        ("labels.npy", np.arange(20), r"has 10 for image 10; .* below the number of classes, 10"),
        ("labels.npy", np.array([None] * 20), r"labels\.npy is no array"),
        ("images.npy", np.asfortranarray(PIXELS), r"images\.npy is in Fortran's order"),
        ("images.npy", np.uint8(3), r"images\.npy is uint8\[\]"),
        ("images.npy", PIXELS[:0], r"labels\.npy is uint8\[20\]; it must be integers \[0\]"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*allow_pickle.*")
def test_bad_files_are_named(folder: Path, name: str, content: Any, message: str):
    write(folder, name, content)
    with pytest.raises(InputError, match=message):
        _ = images(str(folder), image_size=4, classes=10).num_examples


def test_a_file_that_was_cut_off_is_named(folder: Path):
    whole = (folder / "images.npy").read_bytes()
    (folder / "images.npy").write_bytes(whole[:-100])
    with pytest.raises(InputError, match=r"images\.npy is no array"):
        _ = images(str(folder), image_size=4, classes=10).num_examples


def shortened(file: Path) -> None:
    os.truncate(file, 200)


def overwritten(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:-1] + b"\xff")
    os.utime(file, ns=(0, 0))  # As if the clock had gone on since.


@pytest.mark.parametrize("change", [shortened, overwritten])
def test_images_that_change_while_they_are_read_are_refused(folder: Path, change: Any):
    data = images(str(folder), image_size=4, classes=10)
    data.batch(0, 4)
    change(folder / "images.npy")
    for use in (lambda: data.batch(1, 4), data.fingerprint, lambda: data.held_out_batches(1)[0]):
        with pytest.raises(InputError, match=r"images\.npy cannot be read: it changed"):
            use()


def test_a_folder_may_be_a_path(folder: Path):
    assert images(folder, 4, 10) == images(str(folder), 4, 10)
    with pytest.raises(InputError, match="path is 5; it must be a path"):
        images(5, 4, 10)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="classes is '10'; it must be a whole number"):
        images(folder, 4, "10")  # type: ignore[arg-type]


def test_labels_are_those_that_were_checked(folder: Path):
    data = images(str(folder), image_size=4, classes=10)
    before = data.batch(3, 16)
    os.truncate(folder / "labels.npy", 0)
    np.testing.assert_array_equal(data.batch(3, 16)["labels"], before["labels"])


def test_images_that_are_replaced_are_read_on_as_they_were(folder: Path):
    data = images(str(folder), image_size=4, classes=10)
    before = data.batch(3, 16)
    np.save(folder / "new.npy", np.zeros((20, 4, 4, 3), np.uint8))
    (folder / "new.npy").rename(folder / "images.npy")
    np.testing.assert_array_equal(data.batch(3, 16)["images"], before["images"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": 0}, "size is 0"),
        ({"image_size": 7}, "image_size is 7; it must be a whole number from 8"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 0.5}, r"seed is 0\.5"),
        ({"held_out_fraction": 1.0}, r"held_out_fraction is 1\.0"),
    ],
)
def test_a_bad_field_is_refused(fields: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        shapes(**({"size": 10, "image_size": 8} | fields))


def test_nothing_to_train_on_or_to_evaluate_on():
    with pytest.raises(InputError, match=r"held_out_fraction is 0\.05; of 10 drawn shapes"):
        shapes(10, 8).held_out_batches(2)
    with pytest.raises(InputError, match="no image to train on"):
        _ = dataclasses.replace(DATA, source=Empty()).num_examples


@dataclasses.dataclass(frozen=True)
class Empty:
    name: str = "an empty source"
    image_size: int = 8
    classes: int = 8

    def open(self) -> Any:
        return []


def test_describing_images_imports_neither_grain_nor_jax():
    program = (
        "import sys; from hetjax.data import shapes; shapes(10, 8); "
        "print([name for name in ('grain', 'jax') if name in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert printed.stdout.strip() == "[]"


@given(
    count=st.integers(1, 500),
    more=st.integers(0, 500),
    fraction=st.floats(0, 0.999) | st.sampled_from([0.05, 0.1, 0.5, 0.9]),
)
def test_images_that_grow_leave_held_out_what_was(count: int, more: int, fraction: float):
    few, many = (_held_out_places(size, fraction) for size in (count, count + more))
    np.testing.assert_array_equal(few, many[many < count])
    assert abs(len(few) - count * fraction) <= 1

"""Options of a run that make no sense are refused before anything is made."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from ray_jobs import BATCH, LENGTH, VOCABULARY, make_plan, make_trainer

from hetjax import InputError, LocalOptions, Play, RayOptions
from hetjax.data import synthetic
from hetjax.runtime.checkpoints.saving import CheckpointOptions, fingerprint_of

DATA = synthetic(VOCABULARY, LENGTH, size=2000)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CheckpointOptions(keep_last=0), "keep_last is 0; it must be a whole number"),
        (lambda: CheckpointOptions(keep_last=1.5), "keep_last is 1.5"),  # type: ignore[arg-type]
        (lambda: CheckpointOptions(keep_every="a"), "keep_every is 'a'"),  # type: ignore[arg-type]
        (lambda: LocalOptions(deadline=float("nan")), "deadline is nan; it must be seconds, more"),
        (lambda: LocalOptions(deadline="5"), "deadline is '5'"),  # type: ignore[arg-type]
        (lambda: RayOptions(deadline=0), "deadline is 0"),
        (lambda: LocalOptions(play=1.0), "play is 1.0; give"),  # type: ignore[arg-type]
        (lambda: LocalOptions(devices=jax.devices()[0]), "devices is .*; give a sequence"),
        (lambda: Play(scale="2"), "play: scale is '2'; it must be more"),  # type: ignore[arg-type]
        (lambda: RayOptions(carrier=5), "unknown carrier 5. Allowed"),  # type: ignore[arg-type]
        (
            lambda: RayOptions(carrier="Wire"),
            "carrier 'Wire'; did you mean 'wire'[?] Allowed",
        ),
        (lambda: RayOptions(cores=1), "cores is 1; it must be a coll"),  # type: ignore[arg-type]
        (lambda: RayOptions(cores=("a",)), r"cores is \('a',\)"),  # type: ignore[arg-type]
        (lambda: RayOptions(address=5), "address is 5; give"),  # type: ignore[arg-type]
        (lambda: RayOptions(curves={}), "curves is {}; give"),  # type: ignore[arg-type]
        (lambda: LocalOptions(devices=[]), "devices has none; give some, or None"),
        (lambda: LocalOptions(devices=["x"]), "devices: 'x' is no device of JAX"),
        (lambda: LocalOptions(devices=jax.devices()[:1] * 2), "allowed: each once"),
    ],
)
def test_they_are_named(make: Any, message: str):
    with pytest.raises(InputError, match=message):
        make()


def test_what_makes_sense_is_taken():
    assert LocalOptions(devices=jax.devices(), play=Play(), deadline=1).deadline == 1
    array: Any = np.array(jax.devices())
    assert LocalOptions(devices=array).devices == jax.devices()
    assert RayOptions(cores=range(2)).cores == (0, 1)  # type: ignore[arg-type]
    assert CheckpointOptions(np.int64(2)).keep_last == 2  # type: ignore[arg-type]


def make(**others: Any) -> Any:
    arguments = {"source": DATA, "batch": DATA.batch(0, BATCH), **others}
    return make_trainer("local", make_plan(), **arguments)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("run[1]", r"'\[' or '\]'"),
        ("my\\run", "a backslash"),
        ("gs:", "a name that ends in 'gs:'"),
        ("tags:/run", "a name that ends in 'gs:'"),
        ("r\udce9seau", "a name that is not UTF-8"),
    ],
)
def test_a_folder_whose_checkpoints_could_not_be_read_is_refused(
    name: str, why: str, tmp_path: Path
):
    with pytest.raises(InputError, match=f"a folder with {why} in its path; name another"):
        make(workdir=tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_an_impossible_name_is_refused():
    with pytest.raises(InputError, match="workdir is no possible path"):
        make(workdir="a\0b")


class Telling:
    """A source that tells something of its data."""

    def __init__(self, told: Any) -> None:
        self.told = told

    def fingerprint(self) -> Any:
        return self.told

    def batch(self, step: int, batch_size: int, rows: slice | None = None) -> Any:
        return DATA.batch(step, batch_size, rows)

    def held_out_batches(self, batch_size: int) -> Any:
        return DATA.held_out_batches(batch_size)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (3, "the source's fingerprint is 3; a mapping is wanted"),
        ({"hash": 2**256}, r"fingerprint has 'hash': \d+\.\.\.; allowed are texts"),
        ({"seed": np.int64(1)}, "fingerprint has 'seed'"),
        ({"rate": float("nan")}, "fingerprint has 'rate': nan"),
        ({"sizes": (1, 2)}, "fingerprint has 'sizes'"),
        ({1: "one"}, "fingerprint has 1"),
    ],
)
def test_a_fingerprint_that_no_checkpoint_gives_back_is_refused(
    told: Any, message: str, tmp_path: Path
):
    with pytest.raises(InputError, match=message):
        make(source=Telling(told), workdir=tmp_path)
    right = {"text": "a", "seed": 1, "rate": 0.5, "is": True}
    assert fingerprint_of(Telling(right)) == right


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer": optax.adam}, "optimizer is <function adam .*; it must be an Optax"),
        ({"optimizer": None}, "optimizer is None; it must be an Optax transformation"),
        ({"loss_function": None}, "loss_function is None; give a function"),
        ({"loss_function": Play}, "loss_function is the class Play; give a function"),
        ({"batch": {"tokens": np.float32(3)}}, "batch leaf 'tokens' is a scalar"),
        ({"checkpoints": 5}, "checkpoints is 5; give hetjax.runtime.CheckpointOptions"),
        ({"source": 5}, "source is 5; it must have the methods batch and held_out_batches"),
        ({"source": SimpleNamespace(batch=DATA.batch)}, "must have the methods batch and held"),
    ],
)
def test_what_a_trainer_cannot_use_is_named(given: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        make(**given)


def test_counts_are_counts():
    with make() as trainer:
        with pytest.raises(InputError, match="lost is 2; it must be a collection of whole"):
            trainer.switch(make_plan(), lost=2)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="max_batches is 0; it must be a whole number, 1"):
            trainer.evaluate(0)
        with pytest.raises(InputError, match="rounds is 0; it must be a whole number, 1 or more"):
            trainer.measure(rounds=0)
        assert trainer.steps_done == 0


def test_nothing_is_no_batch():
    with pytest.raises(InputError, match=r"batch is \{\}, which has no arrays"):
        make(batch={})


def test_shapes_are_no_parameters():
    shapes = {"w": jax.ShapeDtypeStruct((2, 2), "float32")}
    with pytest.raises(InputError, match=r"parameters: 'w' is ShapeDtypeStruct.*, a shape; a tra"):
        make(parameters=shapes)

"""Captures: what is replayed is what was captured, and nothing else is taken for it."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetjax.alignment import (
    Injection,
    OperatorProgram,
    bind_kind,
    capture_values,
    parse_kinds,
    trace_operators,
)
from hetjax.alignment.capture_file import (
    CAPTURE_FILE,
    DTYPES,
    captured_training,
    check_same_model,
    check_same_training,
    read_capture,
)
from hetjax.alignment.captures import replay, write_capture
from hetjax.alignment.comparison import compare_kinds
from hetjax.alignment.operators import occurrences, output_bytes
from hetjax.alignment.training import KindTraining, Overflow
from hetjax.errors import InputError

BATCH = {"x": np.ones((2, 3), np.float32), "keys": np.arange(4, dtype=np.uint32).reshape(2, 2)}
W = {"w": np.linspace(-1, 1, 9, dtype=np.float32).reshape(3, 3)}
SAME, HALF = map(bind_kind, parse_kinds(["cpu", "cpu:bfloat16"]))


def loss(parameters: Any, batch: Any) -> Any:
    """Random keys, a scan, and values of two bytes."""
    keys = jax.vmap(jax.random.wrap_key_data)(batch["keys"])
    noise = jax.vmap(lambda key: jax.random.uniform(key, (3,)))(keys)

    def body(carry: Any, _: None) -> Any:
        return jnp.tanh(carry @ parameters["w"]), None

    x = jax.lax.scan(body, batch["x"] + noise, length=2)[0]
    return jnp.mean((x.astype(jnp.bfloat16) * jnp.bfloat16(2)).astype(jnp.float32))


PROGRAM = trace_operators(loss, W, BATCH)
INPUTS = [*jax.tree.leaves(W), *jax.tree.leaves(BATCH)]


def captured(folder: Path, program: OperatorProgram = PROGRAM, **options: Any) -> Path:
    write_capture(folder, program, INPUTS, SAME, **options)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return captured(
        tmp_path_factory.mktemp("capture"),
        train=lambda: KindTraining("cpu", (2.5, 2.25)),
        training={"seed": "0"},
    )


def test_a_replay_on_the_same_kind_is_clean_and_names_what_is_off(whole: Path):
    capture = read_capture(whole)
    check_same_model(capture, PROGRAM)
    assert capture.losses == (2.5, 2.25)
    assert {each.dtype for each in capture.values} >= {"bfloat16", "uint32", "float32"}
    number = next(each.number for each in PROGRAM.operators if each.name == "tanh")
    wrong = replace(
        SAME,
        kind=replace(SAME.kind, name="wrong"),
        replacements={number: Injection(number, 1e-2).replacement()},
    )
    found = replay(whole, capture, PROGRAM, [SAME, HALF, wrong])
    assert found.named("cpu") == []
    assert [each.operator.number for each in found.named("wrong")] == [number]
    assert {each.operator.name for each in found.named("cpu:bfloat16")} == {"dot_general"}
    ran = {each.operator.number for each in found.differences}
    assert ran == set(range(len(PROGRAM.operators)))


def test_a_replay_takes_what_is_rounding_by_the_tolerance_it_is_told(tmp_path: Path):
    """Terms of a sum that add up to much more than it are rounded at most as it is told."""

    def loss(w: jax.Array, batch: Any) -> jax.Array:
        return jnp.mean(jnp.sum(batch["x"] * w, 1)) ** 2

    inputs = [np.ones(4000, np.float32), np.ones((3, 4000), np.float32)]
    program = trace_operators(loss, inputs[0], {"x": inputs[1]})
    number = next(each.number for each in program.operators if each.name == "reduce_sum")
    other = replace(SAME, replacements={number: Injection(number, 2e-6).replacement()})
    write_capture(tmp_path, program, inputs, SAME)
    compared = compare_kinds(program, inputs, SAME, [other], tolerance=1e-6)
    replayed = replay(tmp_path, read_capture(tmp_path), program, [other], tolerance=1e-6)
    named = [[each.operator.number for each in found.named()] for found in (compared, replayed)]
    assert named[0] == named[1]


def test_one_operator_is_captured_with_what_it_takes_and_gives(tmp_path: Path):
    number = next(each.number for each in PROGRAM.operators if each.name == "dot_general")
    capture = read_capture(captured(tmp_path, wanted={number}))
    assert [(each.number, each.place) for each in capture.operators] == [
        (number, (0,)),
        (number, (1,)),
    ]
    # The weights, the same in both iterations, are there once.
    assert len(capture.values) == 5
    found = replay(tmp_path, capture, PROGRAM, [HALF])
    assert [each.operator.number for each in found.differences] == [number]


@pytest.mark.parametrize("dtype", ["float8_e8m0fnu", "float4_e2m1fn", "uint2"])
def test_values_of_few_bits_are_captured(dtype: str, tmp_path: Path):
    def loss(w: jax.Array, batch: jax.Array) -> jax.Array:
        return jnp.mean(jnp.abs(batch).astype(jnp.dtype(dtype)).astype(jnp.float32) * w)

    inputs = [np.float32(1), np.linspace(-1, 1, 6, dtype=np.float32)]
    program = trace_operators(loss, *inputs)
    write_capture(tmp_path, program, inputs, SAME)
    capture = read_capture(tmp_path)
    assert dtype in {each.dtype for each in capture.values}
    assert all(each.error == 0.0 for each in replay(tmp_path, capture, program, [SAME]).differences)


def test_a_value_of_a_dtype_that_cannot_be_read_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(capture_values, "DTYPES", DTYPES - {"bfloat16"})
    with pytest.raises(InputError, match="unknown dtype of a value for --capture: 'bfloat16'"):
        captured(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_capture_over_its_limit_is_refused_and_writes_nothing(tmp_path: Path):
    with pytest.raises(
        InputError, match=r"--limit is 100 B, and the operators to capture have .* or more"
    ):
        captured(tmp_path / "new", limit=100)
    assert not (tmp_path / "new").exists()


def test_a_capture_of_another_model_is_refused(whole: Path):
    capture = read_capture(whole)
    wider = {"w": np.ones((3, 4), np.float32)}
    named = trace_operators(lambda w, x: jnp.sum(x["x"] @ w["v"]), {"v": W["w"]}, BATCH)
    other = trace_operators(lambda w, x: jnp.sum(x["x"] @ w["w"]), W, BATCH)
    shaped = trace_operators(lambda w, x: jnp.sum(x["x"] @ w["w"]), wider, BATCH)
    for program, message in (
        (shaped, "parameter 'w' is float32[3,3] in the capture, and float32[3,4] in the"),
        (named, "parameter 'w' is float32[3,3] in the capture, and missing in the"),
        (other, "operator 0 is 'random_wrap"),
    ):
        with pytest.raises(InputError) as error:
            check_same_model(capture, program)
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("one", "other", "details"),
    [
        (
            lambda x: x**3,
            lambda x: x**4,
            "'integer_pow(float32[3,3]) -> float32[3,3]', has 'y=3' in",
        ),
        (lambda x: jnp.sum(x, 0), lambda x: jnp.sum(x, 1), "has 'axes=(0)' in the capture, and"),
        (
            lambda x: jax.lax.cumsum(x, 0),
            lambda x: jax.lax.cumsum(x, 0, reverse=True),
            "has 'axis=0, reverse=False' in the capture, and 'axis=0, reverse=True' in the model",
        ),
        (
            lambda x: jnp.einsum("ab,bc", x, x),
            lambda x: jnp.einsum("ab,cb", x, x),
            "has 'dimension_numbers=(((1),(0)),((),()))",
        ),
    ],
)
def test_a_capture_of_operators_with_other_parameters_is_refused(
    one: Any, other: Any, details: str, tmp_path: Path
):
    inputs = [W["w"], BATCH["x"]]
    first = trace_operators(lambda w, _: jnp.mean(jnp.sin(one(w))), *inputs)
    second = trace_operators(lambda w, _: jnp.mean(jnp.sin(other(w))), *inputs)
    write_capture(tmp_path, first, inputs, SAME, wanted={0})
    capture = read_capture(tmp_path)
    check_same_model(capture, first)
    with pytest.raises(InputError) as error:
        check_same_model(capture, second)
    assert details in str(error.value)


@pytest.mark.parametrize("operator", [PROGRAM.operators[3], None])
def test_a_training_that_overflowed_at_once_is_captured(operator: Any, tmp_path: Path):
    trained = KindTraining("cpu", (), Overflow(1, operator, (1,), "the loss"))
    capture = read_capture(captured(tmp_path, wanted={0}, train=lambda: trained))
    assert capture.steps == 1
    assert captured_training(capture, PROGRAM, "cpu", 1) == trained
    assert captured_training(capture, PROGRAM, "cpu", 0) == KindTraining("cpu", ())


def test_losses_of_another_training_are_refused(whole: Path):
    check_same_training(read_capture(whole), {"seed": "0"})
    with pytest.raises(InputError, match="seed is '0' in the capture, and '1' here; --steps 0"):
        check_same_training(read_capture(whole), {"seed": "1"})


def rewritten(folder: Path, change: Any) -> Path:
    """A copy whose file says something else."""
    content = json.loads((folder / CAPTURE_FILE).read_text())
    change(content)
    (folder / CAPTURE_FILE).write_text(json.dumps(content))
    return folder


OVERFLOW = {"step": 1, "operator": 0, "place": [], "what": "the loss"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(version=1), "version: 1 is not allowed: it must be 2"),
        (lambda c: c.pop("values"), "values: the field is missing"),
        (lambda c: c["details"].pop(), "details: there are "),
        (lambda c: c["operators"][0].update(number=10**6), "operators[0].number: 1000000"),
        (lambda c: c["operators"][0].update(inputs=[-1]), "operators[0]: value -1 is not allowed"),
        (lambda c: c["values"][0].update(dtype="object"), "unknown values[0].dtype"),
        (lambda c: c["values"][0].update(shape=[-1]), "values[0]: "),
        (lambda c: c["values"][0].update(archive=-1), "values[0]: "),
        (
            lambda c: c.update(overflow={**OVERFLOW, "operator": 10**6}),
            "overflow.operator: 1000000 is not allowed: there are 0 to",
        ),
        (lambda c: c.update(overflow={**OVERFLOW, "step": 0}), "overflow.step: 0 is not allowed"),
        (lambda c: c.update(losses=["a"]), "losses[0]: 'a' is not allowed"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, change: Any, message: str):
    folder = rewritten(captured(tmp_path, wanted={0, 1}), change)
    with pytest.raises(InputError) as error:
        read_capture(folder)
    assert message in str(error.value)


def test_damaged_values_are_refused(tmp_path: Path):
    folder = captured(tmp_path, wanted={0, 1})
    archive = folder / "values-0000.npz"
    good = archive.read_bytes()
    capture = read_capture(folder)
    flipped = bytearray(good)
    flipped[150] ^= 255
    with zipfile.ZipFile(tmp_path / "packed.npz", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("0.npy", b"0" * 1000)
    damaged = (bytes(flipped), good[:100], b"", (tmp_path / "packed.npz").read_bytes())
    for content in damaged:
        archive.write_bytes(content)
        with pytest.raises(InputError, match=r"values-0000.npz.*value \d+ cannot be read"):
            replay(folder, capture, PROGRAM, [SAME])
    archive.unlink()
    with pytest.raises(InputError, match="cannot be read: No such file"):
        replay(folder, capture, PROGRAM, [SAME])


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"'shape'", b"'shapo'"), (b"{'descr'", b"\0\0\0\0\0\0\0\0"), (b"False, ", b"False, (")],
    ids=["another name", "zeros", "an open bracket"],
)
def test_damaged_headers_are_refused(before: bytes, after: bytes, tmp_path: Path):
    folder = captured(tmp_path, wanted={0, 1})
    archive = folder / "values-0000.npz"
    with zipfile.ZipFile(archive) as file:
        members = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(archive, "w") as file:
        for name, content in members.items():
            file.writestr(name, content.replace(before, after)[: len(content)])
    with pytest.raises(InputError, match=r"values-0000.npz.*value \d+ cannot be read"):
        replay(folder, read_capture(folder), PROGRAM, [SAME])


def test_values_of_another_shape_are_refused(tmp_path: Path):
    folder = rewritten(
        captured(tmp_path, wanted={0, 1}), lambda c: c["values"][0].update(shape=[1, 4])
    )
    with pytest.raises(InputError, match=r"value 0 is uint32\[1, 4\], and the model has"):
        replay(folder, read_capture(folder), PROGRAM, [SAME])


def test_nothing_is_trained_for_a_capture_that_is_over_its_limit(tmp_path: Path):
    def train() -> KindTraining:
        raise AssertionError("it trained")

    given = sum(times * output_bytes(each) for each, times in occurrences(PROGRAM.block))
    with pytest.raises(InputError, match="--limit is"):
        captured(tmp_path / "capture", train=train, limit=given)
    assert not (tmp_path / "capture").exists()

"""Whatever is in a file, reading it gives a value or a sentence, and soon."""

from __future__ import annotations

import functools
import json
import signal
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import tokenizers
import yaml
from cases import examples
from hypothesis import given
from hypothesis import strategies as st
from lab import read_specification
from lab.specification import SPECIFICATIONS
from malformed import damaged_bytes, damaged_json, damaged_values, put
from plan_versions import version_1

from hetjax.alignment.capture_file import (
    CAPTURE_FILE,
    CAPTURE_VERSION,
    Capture,
    SavedOperator,
    SavedValue,
    read_capture,
)
from hetjax.alignment.result import NamedKind
from hetjax.configuration import read_configuration
from hetjax.configuration.make import make_model, make_optimizer
from hetjax.data import images
from hetjax.data.corpus import TextFiles
from hetjax.errors import CheckpointError, InputError
from hetjax.file_content import to_content
from hetjax.mesh import Cluster, Link, Subcluster, kind
from hetjax.planner import Plan, PlanOptions
from hetjax.planner.foreign.foreign_planner import ForeignPlanner
from hetjax.planner.foreign.foreign_profile import read_foreign_profile
from hetjax.planner.profiler import ProfileDatabase
from hetjax.runtime.checkpoints.checkpoint_files import read_manifest, verify_files
from hetjax.runtime.checkpoints.manifest import (
    MANIFEST,
    DataPosition,
    Manifest,
    SavedFile,
    SavedPart,
)
from hetjax.sharding import HSharding

CONFIGS = Path(__file__).parents[1] / "configs"
PLANS = sorted((CONFIGS / "papers").glob("*/*.json"), key=lambda path: path.stat().st_size)[:4]
SECONDS = 2.0
NUMBERS = st.integers(0, 2**64 - 1)

cases = examples(usual=300, full=5000)


@contextmanager
def soon() -> Iterator[None]:
    """Fails what takes two seconds of the processor, or hangs."""

    def hang(*_: object) -> None:
        raise AssertionError("it hangs")

    before, began = signal.signal(signal.SIGALRM, hang), time.process_time()
    signal.alarm(60)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert time.process_time() - began < SECONDS


@contextmanager
def one_sentence() -> Iterator[None]:
    """Lets a sentence pass, and nothing else."""
    said = "nothing is wrong"
    try:
        yield
    except InputError as error:
        said = str(error)
    assert 0 < len(said) < 10_000
    assert said.isprintable(), repr(said)  # It is one line, and no terminal obeys it.


def check(content: bytes, name: str, random: Random, read: Callable[[Path], object]) -> None:
    """Reads a malformed file, which gives a value or one sentence."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        put(path, content, random)
        with soon(), one_sentence():
            read(path)


def good_gin(random: Random) -> bytes:
    return random.choice(sorted(CONFIGS.glob("*.gin"))).read_bytes()


@cases
@given(NUMBERS)
def test_configurations(number: int) -> None:
    random = Random(number)

    def read(path: Path) -> None:
        configuration = read_configuration(path, ["train.steps = 3"])
        make_model(configuration.model)
        make_optimizer(configuration.optimizer, configuration.train.steps)

    check(damaged_bytes(good_gin(random), random), "a.gin", random, read)


def damaged_yaml(path: Path, random: Random) -> bytes:
    good = path.read_bytes()
    if random.random() < 0.5:
        return damaged_bytes(good, random)
    values = damaged_values(yaml.safe_load(good), random)
    return yaml.safe_dump(values).encode("utf-8", "surrogatepass")


@cases
@given(NUMBERS)
def test_clusters(number: int) -> None:
    random = Random(number)
    good = random.choice(sorted((CONFIGS / "clusters").glob("*.yaml")))
    check(damaged_yaml(good, random), "a.yaml", random, Cluster.from_file)


@cases
@given(NUMBERS)
def test_labs(number: int) -> None:
    random = Random(number)
    good = random.choice(sorted(SPECIFICATIONS.glob("*.yaml")))
    check(damaged_yaml(good, random), "a.yaml", random, read_specification)


@functools.cache
def good_plans() -> list[Any]:
    """What files of both versions say, and one whose first stage has two members."""
    stored = [json.loads(path.read_bytes()) for path in PLANS]
    union = Plan.from_json_dict(stored[0]).to_json_dict()
    stage = union["pipelines"][0]["stages"][0]
    (member,) = stage["members"]
    submesh = {**member["submesh"], "shape": [1, 1]}
    second = {**submesh, "start": submesh["start"] + 1}
    stage["members"] = [{"submesh": each, "mesh_shape": [1, 1]} for each in (submesh, second)]
    half = union["pipelines"][0]["microbatch_size"] // 2
    share = {"dimension": 0, "sizes": [3, 0]}
    stage["shares"] = {"batch": [half, half], "parameters": {"w": share}, "values": {"7": share}}
    before = version_1(Plan.from_json_dict(stored[0]))
    return [*stored, before, json.loads(json.dumps(union))]


@pytest.mark.parametrize("good", good_plans())
def test_the_plans_that_are_damaged_are_good_ones(good: Any) -> None:
    Plan.from_json_dict(good)


@cases
@given(NUMBERS)
def test_plans(number: int) -> None:
    random = Random(number)
    check(damaged_json(random.choice(good_plans()), random), "a.json", random, Plan.load)


WRITTEN = Manifest(
    step=3,
    model="0123",
    parts=(
        SavedPart("optimizer", "0/mu/w", 0, 2, (4, 2), "float32", "stage_0"),
        SavedPart("optimizer", "0/mu/w", 2, 4, (4, 2), "float32", "stage_1"),
        SavedPart("optimizer", "0/nu/w", 0, None, (4, 2), "float32", "stage_0", ((0, 1),)),
        SavedPart("optimizer", "0/nu/w", 0, None, (4, 2), "float32", "stage_1", ((1, 2),)),
        SavedPart("parameters", "v", 0, 1, (2, 3), "float32", "stage_0", (), True),
        SavedPart("parameters", "v", 1, 2, (2, 3), "float32", "stage_1", ((0, 2),), True),
        SavedPart("parameters", "v", 1, 2, (2, 3), "float32", "stage_0", ((2, 3),), True),
        SavedPart("parameters", "w", 0, None, (4, 2), "float32", "stage_0"),
    ),
    files=(SavedFile("stage_0/a", 3, 7), SavedFile("stage_1/d/0", 0, 0)),
    data=DataPosition(24, 8, {"kind": "text", "size": 4000, "crc32": [1, 2]}),
    metadata={"a": [1]},
    model_examples=2,
)


def is_of_format(part: SavedPart, version: int) -> bool:
    """Whether a format could say what a part holds."""
    return version >= 4 or not (part.is_row or (part.across and version < 3))


def manifest_bodies() -> list[dict[str, Any]]:
    """A manifest as it is written now, and as formats before, all without their checksum."""
    now = json.loads(WRITTEN.to_json())
    del now["crc32"]
    bodies = [now]
    changes = ((4, set()), (3, {"is_row"}), (2, {"is_row", "across"}), (1, {"is_row", "across"}))
    for version, later in changes:
        parts = [
            {name: value for name, value in told.items() if name not in later}
            for part, told in zip(WRITTEN.parts, now["parts"], strict=True)
            if is_of_format(part, version)
        ]
        bodies.append({**now, "format": version, "parts": parts})
        del bodies[-1]["model_examples"]
    del bodies[-1]["data"]
    return bodies


def with_checksum(body: Any) -> Any:
    if not isinstance(body, dict):
        return body
    return {**body, "crc32": zlib.crc32(json.dumps(body, sort_keys=True).encode())}


def read_checkpoint(path: Path) -> None:
    """Do with a manifest what a run does that goes on: look for each file that it names."""
    manifest = read_manifest(path.parent)
    manifest.to_json()
    verify_files(path.parent, manifest)


@pytest.mark.parametrize("body", manifest_bodies(), ids=lambda body: f"format {body['format']}")
def test_the_manifests_that_are_damaged_are_good_ones(body: dict[str, Any]) -> None:
    found = Manifest.from_json(json.dumps(with_checksum(body)))
    version = body["format"]
    parts = tuple(part for part in WRITTEN.parts if is_of_format(part, version))
    examples = WRITTEN.model_examples if version > 4 else None
    data = WRITTEN.data if version > 1 else None
    assert found == replace(WRITTEN, parts=parts, data=data, model_examples=examples)


@pytest.mark.parametrize("change", [{"stop": 2}, {"stop": None}, {"shape": [], "stop": None}])
def test_a_row_that_is_none_is_refused(change: dict[str, Any]) -> None:
    body = manifest_bodies()[0]
    (row,) = [part for part in body["parts"] if part["is_row"] and not part["across"]]
    row.update(change)
    with pytest.raises(CheckpointError, match=r"parameters/v is said to be one row"):
        Manifest.from_json(json.dumps(with_checksum(body)))


@cases
@given(NUMBERS)
def test_manifests(number: int) -> None:
    random = Random(number)
    body = random.choice(manifest_bodies())
    if random.random() < 0.5:
        content = damaged_json(with_checksum(body), random)
    else:
        content = json.dumps(with_checksum(damaged_values(body, random))).encode()
    check(content, MANIFEST, random, read_checkpoint)


def good_tokenizer() -> Any:
    words = tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "words": 2}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_tokens(["added"])
    return json.loads(tokenizer.to_str())


@cases
@given(NUMBERS)
def test_tokenizers(number: int) -> None:
    random = Random(number)

    def read(path: Path) -> None:
        text = path.parent / "a.txt"
        text.write_text("a words added b")
        corpus = TextFiles((str(text),), str(path))
        tokens = corpus.tokens()
        assert not len(tokens) or 0 <= tokens.min() <= tokens.max() < corpus.vocabulary

    check(damaged_json(good_tokenizer(), random), "tokenizer.json", random, read)


@cases
@given(NUMBERS)
def test_texts(number: int) -> None:
    random = Random(number)
    paths = random.choice((["{}"], ["{}", "{}"], ["{}\0"], ["{}/"], ["{}/../a.txt"], ["", "{}"]))

    def read(path: Path) -> None:
        TextFiles(tuple(each.format(path) for each in paths)).tokens()

    check(damaged_bytes("Some words, some of them é.\n".encode(), random), "a.txt", random, read)


@cases
@given(NUMBERS)
def test_images(number: int) -> None:
    random = Random(number)
    with tempfile.TemporaryFile() as file:
        dtype = random.choice(("u1", "u1", "i8", "f4", "?", "c8", "U3", "M8[s]"))
        shape = random.choice(((5, 8, 8, 3), (0, 8, 8, 3), (5,), ()))
        np.save(file, np.zeros(shape, dtype))
        file.seek(0)
        good = file.read()

    def read(path: Path) -> None:
        np.save(path.parent / "labels.npy", np.zeros(5, np.int64))
        assert images(str(path.parent), 8, 10).batch(0, 2)["images"].shape == (2, 8, 8, 3)

    check(damaged_bytes(good, random), "images.npy", random, read)


@cases
@given(NUMBERS)
def test_annotations(number: int) -> None:
    random = Random(number)
    group = {"devices": [0, 1], "axes": {"t": 2}, "spec": [None, "t"], "unreduced": []}
    good = {"subgroups": [group, {**group, "devices": [2, 3]}], "hdim": 0, "sizes": [3, "2*b"]}
    values = damaged_values(good, random)
    with soon(), one_sentence():
        HSharding.from_json_dict(values, "a.json")


PROFILE: dict[str, Any] = {
    "version": 1,
    "key": {
        "structure": "a",
        "kind": "T4",
        "dtype": "float32",
        "shape": [1, 2],
        "mesh_shape": [2, 1],
        "sharding": "data",
        "jax": "0.10",
    },
    "measurement": {
        "forward_seconds": 0.1,
        "backward_seconds": 0.2,
        "update_bytes_per_second": 1e9,
        "forward_bytes": 10,
        "backward_bytes": 10,
        "repetitions": 3,
        "spread": 0.1,
    },
}


@cases
@given(NUMBERS)
def test_profiles(number: int) -> None:
    random = Random(number)

    def read(path: Path) -> None:
        folder = path.parent / "kind"
        folder.mkdir()
        if path.is_symlink() or path.exists():
            path.rename(folder / path.name)
        ProfileDatabase(path.parent / "other").merge(ProfileDatabase(path.parent))

    check(damaged_json(PROFILE, random), "a.json", random, read)


FOREIGN: dict[str, Any] = {
    "version": 1,
    "model": "small",
    "source": "made up",
    "layers": [
        {
            "name": "block",
            "count": 2,
            "parameter_bytes": 1e6,
            "gradient_bytes": 1e6,
            "optimizer_bytes": 6e6,
            "sent_bytes": 1e5,
            "returned_bytes": 1e5,
        },
        {"name": "more", "like": "block"},
        {
            "name": "head",
            "tied_to": "block",
            "parameter_bytes": 1e6,
            "optimizer_bytes": 6e6,
            "sent_bytes": 0,
        },
    ],
    "times": [
        {
            "layer": layer,
            "kind": "T4",
            "mesh": [1, 1],
            "microbatch_size": size,
            "forward_seconds": 0.1,
            "backward_seconds": 0.2,
            "kept_bytes": 10,
            "working_bytes": 5,
        }
        for layer in ("block", "head")
        for size in (1, 4)
    ],
}
CAPTURED = Capture(
    jax="0.10",
    reference=NamedKind("cpu", "host-cpu", "float32"),
    parameters={"w": "float32[2]"},
    signatures=("neg(float32[2]) -> float32[2]",),
    details=("",),
    losses=(2.5,),
    overflow=None,
    training={"train.seed": "0"},
    values=(SavedValue(0, (2,), "float32"), SavedValue(0, (), "bfloat16")),
    operators=(SavedOperator(0, (1,), "a.py:3", (0,), (1,)),),
)


@cases
@given(NUMBERS)
def test_foreign_profiles(number: int) -> None:
    random = Random(number)
    t4 = Subcluster("old", kind("T4"), 1, 2, Link(1e9, 0.0), Link(1e9, 0.0))

    def read(path: Path) -> None:
        planner = ForeignPlanner(read_foreign_profile(path), Cluster("small", (t4,)), PlanOptions())
        planner.find(4, (1, 2, 4))

    check(damaged_json(FOREIGN, random), "a.json", random, read)


@cases
@given(NUMBERS)
def test_captures(number: int) -> None:
    good = {"version": CAPTURE_VERSION, **to_content(CAPTURED)}
    random = Random(number)
    check(
        damaged_json(good, random),
        CAPTURE_FILE,
        random,
        lambda path: read_capture(path.parent).size,
    )

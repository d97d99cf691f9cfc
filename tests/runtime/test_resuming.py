"""A run that goes on has seen each example once, and says when its data are others."""

import json
import re
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ray_jobs import BATCH, LENGTH, MICROBATCHES, VOCABULARY, make_plan, make_trainer

import hetjax
from hetjax import CheckpointError, Cluster, InputError, Trainer
from hetjax.data import synthetic
from hetjax.mesh import Link, Subcluster, kind
from hetjax.planner.plan.plan import Plan
from hetjax.runtime.checkpoints.checkpoint_files import read_manifest
from hetjax.runtime.checkpoints.manifest import MANIFEST, Manifest

DATA = synthetic(VOCABULARY, LENGTH, size=2000)
LINK = Link(1e9, 1e-5)


def make(workdir: Path, plan: Plan | None = None, data: Any = DATA) -> Trainer:
    plan = plan or make_plan()
    batch = DATA.batch(0, plan.batch_size)
    return make_trainer("local", plan, source=data, batch=batch, workdir=workdir)


def of_size(num_examples: int) -> Plan:
    """The plan for another number of examples in a step."""
    plan = make_plan()
    pipeline = replace(plan.pipeline, microbatch_size=num_examples // MICROBATCHES)
    return replace(plan, pipelines=(pipeline,))


def save_at(workdir: Path, steps: int) -> Manifest:
    with make(workdir) as trainer:
        for _ in range(steps):
            trainer.train_step()
        trainer.save(wait=True)
    return read_manifest(workdir / "checkpoints" / f"{steps:08d}")


def test_a_manifest_tells_the_place_in_the_data(tmp_path: Path):
    data = save_at(tmp_path, 2).data
    assert data is not None
    assert (data.examples, data.batch_size) == (2 * BATCH, BATCH)
    assert data.fingerprint == DATA.fingerprint()
    assert data.fingerprint is not None
    assert data.fingerprint["seed"] == 0


@pytest.mark.parametrize("size", [2 * BATCH, BATCH // 2, BATCH + 18])
def test_with_another_batch_size_no_example_is_skipped_or_repeated(tmp_path: Path, size: int):
    save_at(tmp_path, 3)
    plan = of_size(size)
    with make(tmp_path, plan) as trainer:
        assert (
            f"the batch size is {size} (was {BATCH}): the data go on at example 36"
            in (trainer.resume()[-1])
        )
        reader = trainer._executor._reader  # pyright: ignore[reportAttributeAccessIssue]
        expected = DATA.batch(0, 36 + size)["tokens"][36:]
        (found,) = reader.training(trainer.examples_done)(0, size)
        np.testing.assert_array_equal(found, expected)
        trainer.train_step()
        assert trainer.examples_done == 36 + size
        trainer.save(wait=True)
    data = read_manifest(tmp_path / "checkpoints" / "00000004").data
    assert data is not None
    assert (data.examples, data.batch_size) == (36 + size, size)


def of_loops(weights: Any, batch: Any) -> jax.Array:
    """As many turns as examples."""
    return jnp.mean(jax.lax.map(lambda x: jnp.sum((jnp.tanh(x @ weights) - x) ** 2), batch["x"]))


def of_labels(weights: Any, batch: Any) -> jax.Array:
    """Where there is one example, JAX traces other equations."""
    logits = jax.nn.log_softmax(jnp.tanh(batch["x"] @ weights))
    return -jnp.mean(jnp.take_along_axis(logits, batch["y"][:, None], 1))


@pytest.mark.parametrize("loss", [of_loops, of_labels])
def test_with_another_number_of_microbatches_other_equations_are_the_same_model(
    tmp_path: Path, loss: Any
):
    batch = {"x": np.ones((4, 2), np.float32), "y": np.zeros(4, np.int32)}
    weights, optimizer = np.eye(2, dtype=np.float32), optax.sgd(0.1)
    device = Subcluster("one", kind("T4"), 1, 1, LINK, LINK)
    plans = [
        hetjax.plan(
            loss,
            weights,
            batch,
            cluster=Cluster("home", (device,)),
            optimizer=optimizer,
            num_microbatches=count,
        )
        for count in (2, 4)
    ]
    assert plans[0].model != plans[1].model
    for place, plan in enumerate(plans):
        with Trainer(plan, loss, weights, optimizer, batch, workdir=tmp_path) as trainer:
            if place:
                trainer.resume()
                assert trainer.steps_done == 1
            trainer.train_step(batch)
            trainer.save(wait=True)

    def other(weights: Any, batch: Any) -> jax.Array:
        return loss(weights, batch) + jnp.sum(weights**2)

    plan = hetjax.plan(
        other, weights, batch, cluster=plans[0].cluster, optimizer=optimizer, num_microbatches=1
    )
    with (
        Trainer(plan, other, weights, optimizer, batch, workdir=tmp_path) as trainer,
        pytest.raises(CheckpointError, match="is of another model"),
    ):
        trainer.resume()


def one_byte_changed() -> Any:
    tokens = DATA.parts[0].corpus.tokens().copy()
    tokens[1234] ^= 1

    @dataclass(frozen=True)
    class Changed:
        name = "changed"
        vocabulary = VOCABULARY

        def tokens(self) -> np.ndarray:
            return tokens

    return replace(DATA, parts=(replace(DATA.parts[0], corpus=Changed()),))


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (one_byte_changed(), r"text contents is \w+ \w+ \(was"),
        (synthetic(VOCABULARY, LENGTH, size=2001), r"text tokens is 2001 \(was 2000\)"),
        (replace(DATA, seed=5), r"checkpoint 2: seed is 5 \(was 0\);"),
        (
            replace(DATA, parts=(replace(DATA.parts[0], held_out_fraction=0.1),)),
            r"held_out_fraction is 0.1 \(was 0.05\)",
        ),
    ],
)
def test_other_data_are_refused_unless_they_are_allowed(tmp_path: Path, data: Any, what: str):
    save_at(tmp_path, 2)
    with make(tmp_path, data=data) as trainer:
        with pytest.raises(CheckpointError, match=what) as caught:
            trainer.resume()
        assert "allow_changed_data" in str(caught.value)
        messages = trainer.resume(allow_changed_data=True)
        assert any("the data have changed since checkpoint 2" in message for message in messages)
        assert trainer.examples_done == 2 * BATCH


def test_data_that_cannot_be_told_apart_are_said(tmp_path: Path):
    with make_trainer("local", workdir=tmp_path) as trainer:
        trainer.train_step()
        trainer.save(wait=True)
    with make_trainer("local", workdir=tmp_path) as trainer:
        assert any("has no fingerprint" in message for message in trainer.resume())


def test_a_checkpoint_of_the_first_format_is_read_and_said(tmp_path: Path):
    save_at(tmp_path, 2)
    file = tmp_path / "checkpoints" / "00000002" / MANIFEST
    body = json.loads(file.read_text())
    del body["crc32"], body["data"], body["model_examples"]
    body["format"] = 1
    file.write_text(json.dumps(with_checksum(body)))
    with make(tmp_path) as trainer:
        assert "of an earlier version, which did not write down the data" in trainer.resume()[0]
        assert trainer.examples_done == 2 * BATCH


def with_checksum(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "crc32": zlib.crc32(json.dumps(body, sort_keys=True).encode())}


def renamed(workdir: Path) -> str:
    (workdir / "checkpoints" / "00000002").rename(workdir / "checkpoints" / "00000009")
    return "is that of step 2: the folder was renamed"


def cut_part(body: dict[str, Any]) -> Any:
    return next(part for part in body["parts"] if part["start"] > 0)


def edit(workdir: Path, change: Any) -> None:
    file = workdir / "checkpoints" / "00000002" / MANIFEST
    body = json.loads(file.read_text())
    del body["crc32"]
    change(body)
    file.write_text(json.dumps(with_checksum(body)))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda body: body.pop("step"), "step: the field is missing"),
        (lambda body: body["parts"][0].pop("item"), r"parts\[0\].item: the field is missing"),
        (lambda body: body["data"].pop("examples"), "data.examples: the field is missing"),
        (lambda body: body.update(step="2"), "step: '2' is not allowed"),
        (
            lambda body: [part.update(item="../00000001/stage_0") for part in body["parts"]],
            "must be the name of a folder in it",
        ),
        (
            lambda body: body["files"][0].update(path="stage_0/../../00000001/x"),
            "is in none of the items' folders",
        ),
        *(
            (
                lambda body, name=name: body["files"][0].update(path=f"stage_0/{name}"),
                "has a name that none of a checkpoint's files has",
            )
            for name in ("\x1b[2J", "\ud800", "x" * 300)
        ),
        (lambda body: body.update(files=[]), "there are no files of the item"),
        (lambda body: body["parts"].remove(cut_part(body)), "rows .* are missing|does not begin"),
    ],
)
def test_a_manifest_that_is_not_as_it_must_be_is_passed_over(
    tmp_path: Path, change: Any, what: str
):
    with make(tmp_path) as trainer:
        trainer.train_step()
        trainer.save(wait=True)
        trainer.train_step()
        trainer.save(wait=True)
    edit(tmp_path, change)
    with make(tmp_path) as trainer:
        messages = trainer.resume()
    assert messages[0].startswith("checkpoint 2 is not whole: ")
    assert messages[0].endswith("; using 1")
    assert re.search(what, messages[0]), messages[0]


def test_a_renamed_folder_is_not_believed(tmp_path: Path):
    save_at(tmp_path, 2)
    what = renamed(tmp_path)
    with make(tmp_path) as trainer, pytest.raises(CheckpointError, match=what):
        trainer.resume()


def test_a_link_out_of_a_checkpoint_is_not_followed(tmp_path: Path):
    save_at(tmp_path, 2)
    item = tmp_path / "checkpoints" / "00000002" / "stage_0"
    item.rename(tmp_path / "elsewhere")
    item.symlink_to(tmp_path / "elsewhere")
    with make(tmp_path) as trainer, pytest.raises(CheckpointError, match="is a link out of"):
        trainer.resume()


def test_checkpoints_of_an_earlier_run_are_not_overwritten(tmp_path: Path):
    save_at(tmp_path, 2)
    with make(tmp_path) as trainer:
        for call in (trainer.train_step, trainer.save):
            with pytest.raises(
                InputError, match="holds checkpoints of an earlier run, up to step 2"
            ):
                call()
        trainer.resume()
        trainer.train_step()


def test_two_trainers_do_not_share_a_folder(tmp_path: Path):
    with (
        make(tmp_path),
        pytest.raises(InputError, match=r"workdir .* is in use by this very process, since"),
    ):
        make(tmp_path)
    make(tmp_path).close()

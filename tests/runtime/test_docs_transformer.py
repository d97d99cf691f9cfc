"""The Transformer of the page on annotations, as it stands there, on either runtime."""

from __future__ import annotations

import doctest
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from one_device import TOLERANCE

from hetjax import LocalOptions, RayOptions, Trainer

PAGE = Path(__file__).parents[2] / "docs" / "hspmd.md"
STEPS = 50


@pytest.fixture(scope="module")
def page() -> Mapping[str, Any]:
    """What the page's code defines, up to the training itself."""
    found: dict[str, Any] = {"__name__": "page_on_hspmd"}
    for example in doctest.DocTestParser().get_examples(PAGE.read_text()):
        if "hetjax.Trainer" in example.source:
            break
        if example.exc_msg is None:
            exec(compile(example.source, "page", "single"), found)
    return found


def losses_of_one_device(page: Mapping[str, Any]) -> list[float]:
    """By plain `jax.jit`."""
    step = jax.jit(jax.value_and_grad(page["transformer_loss"]))
    weights, found = page["initial"], []
    with jax.numpy_dtype_promotion("standard"):
        state = page["optimizer"].init(weights)
        for number in range(STEPS):
            loss, gradients = step(weights, page["batches"][number % 4])
            updates, state = page["optimizer"].update(gradients, state, weights)
            weights = optax.apply_updates(weights, updates)
            found.append(float(loss))
    return found


def check_trains(page: Mapping[str, Any], runtime: LocalOptions | RayOptions) -> None:
    with Trainer(
        page["plan"],
        page["transformer_loss"],
        page["initial"],
        page["optimizer"],
        page["batches"][0],
        runtime=runtime,
    ) as trainer:
        found = [trainer.train_step(page["batches"][step % 4]).loss for step in range(STEPS)]
    np.testing.assert_allclose(found, losses_of_one_device(page), rtol=TOLERANCE)


def test_it_trains_in_one_process_as_on_one_device(page: Mapping[str, Any]):
    check_trains(page, LocalOptions())


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_it_trains_on_ray_as_on_one_device(page: Mapping[str, Any]):
    check_trains(page, RayOptions())

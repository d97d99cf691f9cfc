"""A small ResNet whose examples unlike hosts share, by the plan that is made by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import hetjax
from hetjax.errors import WorkerLostError
from hetjax.mesh import Cluster
from hetjax.models import ImageModel, ResNetConfig, image_model
from hetjax.planner import Shares, make_problem, predict


@dataclass(frozen=True)
class ImageSize:
    """The size of the ResNet and of its batch.

    Args:
        batch: images in a step.
        image_size: their height and width, in pixels.
        width: channels of the first group.
        groups: blocks of each group.
    """

    batch: int = 512
    image_size: int = 64
    width: int = 32
    groups: tuple[int, ...] = (1, 1)

    def model(self) -> ImageModel:
        """The ResNet."""
        return image_model(ResNetConfig(10, self.image_size, tuple(self.groups), self.width))

    def images(self) -> dict[str, np.ndarray]:
        """A batch of random images, always the same."""
        rng = np.random.default_rng(0)
        shape = (self.batch, self.image_size, self.image_size, 3)
        return {
            "images": rng.integers(0, 256, shape, dtype=np.uint8),
            "labels": rng.integers(0, 10, self.batch, dtype=np.int32),
        }


class ImagesTrainer:
    """The ResNet in training in one stage over all hosts.

    Args:
        size: its size.
        cluster: the cluster.
        even: whether all hosts have equally many examples, in the place of the planner's shares.

    Attributes:
        plan: the plan.
    """

    def __init__(self, size: ImageSize, cluster: Cluster, *, even: bool):
        model, self.batch = size.model(), size.images()
        parameters = _parameters(model)
        asked: dict[str, Any] = {"cluster": cluster, "optimizer": _optimizer()}
        plan = hetjax.plan(model.loss, parameters, self.batch, **asked)
        (stage,) = plan.stages
        assert len(stage.members) == len(cluster.subclusters), f"{plan}\nis of some hosts alone"
        if even:
            shares = Shares(batch=(size.batch // len(stage.members),) * len(stage.members))
            pipeline = replace(plan.pipeline, stages=(replace(stage, shares=shares),))
            count = pipeline.num_microbatches
            problem = make_problem(
                model.loss, parameters, self.batch, num_microbatches=count, **asked
            )
            plan = predict(replace(plan, pipelines=(pipeline,)), problem)
        self.plan = plan
        self.trainer = hetjax.Trainer(
            plan, model.loss, parameters, _optimizer(), self.batch, runtime=hetjax.RayOptions()
        )

    def told(self) -> dict[str, Any]:
        """The plan in a few words."""
        (stage,), prediction = self.plan.stages, self.plan.predicted
        (predicted,) = prediction.stages
        return {
            "hosts": [member.submesh.subcluster for member in stage.members],
            "shares": list(stage.shares.batch),
            "microbatches": self.plan.pipeline.num_microbatches,
            "notes": list(self.plan.notes),
            "step_time": prediction.step_time,
            "memory_bytes": [member.memory_bytes for member in predicted.members],
            "fits": predicted.fits,
        }

    def do_steps(self, count: int) -> list[float]:
        """Run steps; their losses."""
        return [self.trainer.train_step(self.batch).loss for _ in range(count)]

    def do_step(self) -> float:
        """Run one step; its seconds."""
        return self.trainer.train_step(self.batch).seconds

    def do_steps_or_lost(self, count: int) -> dict[str, Any]:
        """Run steps; their losses, or the message of the worker that was lost."""
        try:
            return {"losses": self.do_steps(count)}
        except WorkerLostError as error:
            return {"lost": error.worker, "message": str(error)}


def with_memory(cluster: Cluster, memory: Mapping[str, float]) -> Cluster:
    """A cluster some of whose subclusters have so much memory a device.

    Args:
        cluster: the cluster.
        memory: bytes by subcluster.
    """
    subclusters = tuple(
        replace(each, kind=replace(each.kind, memory_bytes=int(memory[each.name])))
        if each.name in memory
        else each
        for each in cluster.subclusters
    )
    return replace(cluster, subclusters=subclusters)


def one_device(size: ImageSize, steps: int) -> list[float]:
    """The losses of plain JAX on one device."""
    model, optimizer = size.model(), _optimizer()
    batch = jax.tree.map(jnp.asarray, size.images())

    def loss(parameters: Any, batch: Any) -> jax.Array:
        total, count = model.loss(parameters, batch)
        return total / count

    parameters = _parameters(model)
    state, found = optimizer.init(parameters), []
    gradient = jax.jit(jax.value_and_grad(loss))
    for _ in range(steps):
        value, gradients = gradient(parameters, batch)
        updates, state = optimizer.update(gradients, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        found.append(float(value))
    return found


def _parameters(model: ImageModel) -> Any:
    return jax.jit(model.init)(jax.random.key(0))


def _optimizer() -> optax.GradientTransformation:
    return optax.sgd(0.05)

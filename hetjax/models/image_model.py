"""An image model as the plain JAX program that the trainer takes: an ``init`` and a ``loss``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from hetjax.errors import InputError
from hetjax.models.layers import cross_entropies
from hetjax.models.pure import (
    counted_rngs,
    num_parameters,
    parameters_of,
    structure_of,
    with_parameters,
)
from hetjax.models.resnet import ResNet, ResNetConfig
from hetjax.models.vgg import VGG, VGGConfig
from hetjax.models.vit import ViT, ViTConfig

ImageConfig = ViTConfig | VGGConfig | ResNetConfig
"""The shape of any image model."""

Batch = Mapping[str, jax.Array]


@dataclass(frozen=True)
class ImageModel:
    """A single-device JAX program that tells an image's class, pure and traceable.

    A batch holds ``"images"``, uint8 [B, H, W, 3], and ``"labels"``, int32 [B]. It may hold
    ``"weights"``, float32 [B], a weight for each image.

    Nothing drops out, so that a batch needs no keys. Of a ResNet the loss depends on which images
    share a microbatch; see `hetjax.models.vision_layers.BatchNorm`.

    Args:
        init: key -> float32 parameters, a nested dict with string keys.
        parameter_shapes: () -> their shapes; nothing is allocated.
        loss: (parameters, batch) -> the weighted sum of the images' losses in nats and the sum of
            their weights (their number, where there are none), both float32 scalars. Sums, so that
            microbatches add up.
        image_size: height and width of the images, in pixels.
        classes: number of classes.
        name: for people, e.g. ``"resnet-50"``.

    Example:
        >>> config = VGGConfig(classes=5, image_size=4, groups=(1, 1), width=2, dense_width=8)
        >>> model = image_model(config)
        >>> params = model.init(jax.random.key(0))
        >>> shapes = model.batch_shapes(3)
        >>> total, count = model.loss(params, jax.tree.map(jnp.zeros_like, shapes))
        >>> float(count)
        3.0
    """

    init: Callable[[jax.Array], PyTree]
    parameter_shapes: Callable[[], PyTree]
    loss: Callable[[PyTree, Batch], tuple[jax.Array, jax.Array]]
    image_size: int
    classes: int
    name: str

    unit = "images"
    """What a step counts."""

    units_per_example = 1
    """An example is an image."""

    def batch_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a training batch: ``"images"`` and ``"labels"``."""
        shape = (batch_size, self.image_size, self.image_size, 3)
        return {
            "images": jax.ShapeDtypeStruct(shape, np.uint8),
            "labels": jax.ShapeDtypeStruct((batch_size,), np.int32),
        }

    def num_parameters(self) -> int:
        """How many numbers the parameters hold; nothing is allocated to count them."""
        return num_parameters(self.parameter_shapes())


def image_model(config: ImageConfig) -> ImageModel:
    """The program of a configured model.

    Args:
        config: of a ViT, a VGG or a ResNet.

    Returns:
        The model's program. It can be sent to other processes.
    """
    return ImageModel(
        init=functools.partial(_init, config),
        parameter_shapes=functools.partial(_parameter_shapes, config),
        loss=functools.partial(_loss, config),
        image_size=config.image_size,
        classes=config.classes,
        name=config.name,
    )


def _init(config: ImageConfig, key: jax.Array) -> PyTree:
    return parameters_of(_make(config, counted_rngs(key)))


def _parameter_shapes(config: ImageConfig) -> PyTree:
    return _structure(config)[1]


def _loss(config: ImageConfig, params: PyTree, batch: Batch) -> tuple[jax.Array, jax.Array]:
    images, size = batch["images"], config.image_size
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != (size, size, 3):
        raise InputError(
            f"batch['images'] is {images.dtype}{list(images.shape)}; it must be uint8 [batch, "
            f"{size}, {size}, 3]"
        )
    losses = cross_entropies(
        with_parameters(_structure(config)[0], params)(images), batch["labels"]
    )
    weights = batch.get("weights")
    if weights is None:
        weights = jnp.ones_like(losses)
    return jnp.sum(losses * weights), jnp.sum(weights)


def _make(config: ImageConfig, rngs: nnx.Rngs) -> ViT | VGG | ResNet:
    if isinstance(config, ViTConfig):
        return ViT(config, rngs=rngs)
    if isinstance(config, VGGConfig):
        return VGG(config, rngs=rngs)
    return ResNet(config, rngs=rngs)


@functools.lru_cache(maxsize=32)
def _structure(config: ImageConfig) -> tuple[nnx.GraphDef[Any], PyTree]:
    """The module's structure and its parameters' shapes; made abstractly, once a configuration."""
    return structure_of(lambda: _make(config, counted_rngs(jax.random.key(0))))
